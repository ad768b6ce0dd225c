"""Several roles in one process: the host that builds them, calls them and reports what happened."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any

from ostinato.controller.errors import PlacementError, WorkerDied, WorkerFailed
from ostinato.controller.rendezvous import leave_process_group
from ostinato.controller.worker import Worker, WorkerContext, WorkerSpec

if TYPE_CHECKING:
    from ostinato.controller.arrival import Left

_MACHINERY = tuple(
    f"ostinato.controller.{name}" for name in ("arrival", "colocate", "worker", "ray.actor", "ray.driver")
)


class RoleHost:
    """The workers of one process, by role."""

    def __init__(self) -> None:
        self._workers: dict[str, Worker] = {}

    def build(self, role: str, spec: WorkerSpec[Any], context: WorkerContext) -> None:
        """Build a role's worker here.

        Raises:
            PlacementError: the role is here already.
        """
        if role in self._workers:
            raise PlacementError(f"role {role!r} is in this process already")
        self._workers[role] = spec.build(context)

    def call(self, role: str, method: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Call a method of a role's worker and return its value."""
        return getattr(self._workers[role], method)(*args, **kwargs)

    def classes(self) -> dict[str, type[Worker]]:
        """Return role -> class of its worker."""
        return {role: type(worker) for role, worker in self._workers.items()}

    def place(self, role: str) -> tuple[int, str]:
        """Return rank and node of a role's worker."""
        context = self._workers[role].context
        return context.rank, context.node

    def revision(self, role: str) -> int:
        """Return how often the role's worker registered a mesh; 0 where it is not built."""
        worker = self._workers.get(role)
        return worker.mesh_revision if worker else 0

    def close(self) -> None:
        """Close every worker, last built first, then leave the process group; the first error is raised at the end."""
        errors: list[Exception] = []
        while self._workers:
            try:
                self._workers.popitem()[1].close()
            except Exception as error:
                errors.append(error)
        leave_process_group()
        if errors:
            raise errors[0]


@dataclass(frozen=True)
class Failure:
    """What a worker raised, in a form that always travels.

    Attributes:
        pickled: the exception; None where it does not survive pickling.
        reason: its type and text in one line.
        traceback: its traceback as text.
        exits: whether it asked the process to end (`sys.exit`).
        origin: role, rank, node and method that raised, where that is not the call itself but one that it needs.
        call: number of the call that raised.
    """

    pickled: bytes | None
    reason: str
    traceback: str
    exits: bool = False
    origin: tuple[str, int, str, str] | None = None
    call: int = -1


@dataclass(frozen=True)
class Status:
    """How a call on one worker ended.

    Attributes:
        failure: what it raised, if anything.
        revision: the worker's mesh revision.
        left: what a method that gives rows left, besides the rows.
    """

    failure: Failure | None = None
    revision: int = 0
    left: Left | None = None


class NeededCallFailed(Exception):  # noqa: N818  (names what happened)
    """Raised on a worker whose argument another call should have left; its failure is handed on."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.reason)
        self.failure = failure


def capture(error: BaseException, dumps: Callable[[Any], bytes], loads: Callable[[bytes], Any]) -> Failure:
    """Record an exception on the worker.

    Whether it pickles is tried here, both ways: an exception with an `__init__` of its own often fails on the way back.
    """
    if isinstance(error, NeededCallFailed):
        return error.failure
    text = "".join(traceback.format_exception(type(error), error, _own_frames(error.__traceback__)))
    if isinstance(error, SystemExit):
        return Failure(None, f"called sys.exit({error.code!r})", text, exits=True)
    reason = f"{type(error).__name__}: {error}".rstrip(": ")
    try:
        pickled = dumps(error)
        twin = loads(pickled)
        whole = type(twin) is type(error) and str(twin) == str(error)
    except Exception:
        whole = False
    return Failure(pickled if whole else None, reason, text)  # pyright: ignore[reportPossiblyUnboundVariable]


def _own_frames(frames: TracebackType | None) -> TracebackType | None:
    """Skip the frames of the machinery that leads to the worker's method; keep all if there is nothing else."""
    inner = frames
    while inner is not None and inner.tb_frame.f_globals.get("__name__") in _MACHINERY:
        inner = inner.tb_next
    return inner or frames


def restore(
    failure: Failure, role: str, rank: int, node: str, method: str, loads: Callable[[bytes], Any]
) -> BaseException:
    """Turn a recorded failure into what the driver raises.

    Returns:
        The worker's exception with its place added as a note and a `WorkerFailed` with the worker's traceback as its
        cause; the `WorkerFailed` itself where the exception does not unpickle here; a `WorkerDied` for `sys.exit`.
    """
    role, rank, node, method = failure.origin or (role, rank, node, method)
    if failure.exits:
        return WorkerDied(role, rank, node, method, failure.traceback, failure.reason)
    stand_in = WorkerFailed(role, rank, node, method, failure.traceback, failure.reason)
    if failure.pickled is None:
        return stand_in
    try:
        error = loads(failure.pickled)
    except Exception:
        return stand_in
    if not isinstance(error, Exception):
        return stand_in
    error.add_note(f"raised by {stand_in.where}")
    error.__cause__ = stand_in
    return error
