"""A group of workers: one bound method for each registered method, on whatever carries the calls."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, Protocol, TypeVar, cast

from ostinato.controller.dispatch import Call, Plan, plan_call
from ostinato.controller.errors import CollectError, RegistrationError
from ostinato.controller.register import Execute, Registration, registered_methods
from ostinato.controller.topology import Mesh, RankPlace
from ostinato.controller.worker import Worker, WorkerSpec

T = TypeVar("T")
W = TypeVar("W", bound=Worker)


class Transport(Protocol):
    """What carries calls to the workers of one role and their results back. The one place that knows processes."""

    @property
    def places(self) -> Sequence[RankPlace]:
        """Each rank's place, in rank order."""
        ...

    def start(self, method: str, calls: Sequence[Call | None], answering: Sequence[int]) -> Any:
        """Send one call a rank and return a ticket; arguments that are one object are stored once.

        Results of ranks that do not answer are dropped where they arise.
        """
        ...

    def finish(self, ticket: Any) -> Mapping[int, int]:
        """Wait until all calls of a ticket have ended; return rank -> mesh revision, or raise the first failure."""
        ...

    def fetch(self, ticket: Any, ranks: Sequence[int]) -> list[Any]:
        """Bring the results of these ranks here, after `finish`."""
        ...


class PendingCall(Generic[T]):
    """A group call under way. Here, and nowhere else, results become values on the driver."""

    def __init__(self, group: WorkerGroup, method: str, plan: Plan, ticket: Any) -> None:
        self._group = group
        self._method = method
        self._plan = plan
        self._ticket = ticket
        self._ended = False
        self._result: Any = None
        self._error: BaseException | None = None

    def get(self) -> T:
        """Wait for the call and return its result; a second `get` returns the same.

        Raises:
            Exception: what a worker raised, as its own type where it pickles.
            WorkerFailed: a worker's exception that does not pickle, or (WorkerDied) a process that ended.
            CollectError: the results do not go together.
        """
        if not self._ended:
            try:
                self._result = self._collect()
            except Exception as error:
                self._error = error
            self._ended, self._ticket = True, None  # drops the references to arguments and results
        if self._error is not None:
            raise self._error
        return self._result

    def _collect(self) -> Any:
        transport = self._group._transport
        self._group._note_revisions(transport.finish(self._ticket))
        results = transport.fetch(self._ticket, self._plan.answering)
        try:
            return self._plan.collect(results)
        except CollectError as error:
            raise CollectError(f"role {self._group.role!r}, method {self._method!r}: {error}") from None


class WorkerGroup:
    """The driver's side of a role: call a registered method here and it runs on the workers.

    Args:
        role: role of the workers.
        worker_class: their class; each of its registered methods becomes a method of the group.
        transport: what carries the calls.

    Raises:
        RegistrationError: a registered method has the name of something that every group has.
    """

    def __init__(self, role: str, worker_class: type[Worker], transport: Transport) -> None:
        self._role = role
        self._worker_class = worker_class
        self._transport = transport
        self._meshes: dict[str, Mesh] = {}
        self._revisions: dict[int, int] = {}
        for name, function, record in registered_methods(worker_class):
            if hasattr(WorkerGroup, name):
                raise RegistrationError(
                    f"{worker_class.__name__}.{name} is registered, but every group has its own {name!r}; rename it"
                )
            setattr(self, name, self._bind(name, function, record))

    @property
    def role(self) -> str:
        """Role of the workers."""
        return self._role

    @property
    def world_size(self) -> int:
        """Number of workers."""
        return len(self._transport.places)

    @property
    def places(self) -> tuple[RankPlace, ...]:
        """Rank, local rank, local world size and node of each worker, in rank order."""
        return tuple(self._transport.places)

    def coordinates(self, mesh: str = "train") -> Mesh:
        """Return the coordinates of all ranks in a mesh, in rank order.

        The workers are asked the first time and again after one of them registered a mesh.

        Raises:
            MeshError: the ranks' coordinates do not form a mesh.
        """
        if mesh not in self._meshes:
            ranks = range(self.world_size)
            ticket = self._transport.start("coordinates", [Call((mesh,))] * len(ranks), ranks)
            self._note_revisions(self._transport.finish(ticket))
            self._meshes[mesh] = Mesh(tuple(self._transport.fetch(ticket, ranks)))
        return self._meshes[mesh]

    def dp_size(self, mesh: str = "train") -> int:
        """Return the number of data-parallel ranks of a mesh."""
        return self.coordinates(mesh).dp_size

    def typed(self, cls: type[W]) -> W:
        """Return this group as its worker class, for editors and type checkers; nothing changes at run time.

        Raises:
            TypeError: the workers are of another class.
        """
        if not issubclass(self._worker_class, cls):
            raise TypeError(f"role {self._role!r} has workers of {self._worker_class.__name__}, not of {cls.__name__}")
        return cast("W", self)

    def __repr__(self) -> str:
        return f"WorkerGroup({self._role!r}, {self._worker_class.__name__}, world_size={self.world_size})"

    def _note_revisions(self, revisions: Mapping[int, int]) -> None:
        if any(self._revisions.get(rank, 0) != revision for rank, revision in revisions.items()):
            self._meshes.clear()
        self._revisions.update(revisions)

    def _bind(self, name: str, function: Callable[..., Any], record: Registration) -> Callable[..., Any]:
        signature = inspect.signature(function)

        @functools.wraps(function)
        def group_call(*args: Any, **kwargs: Any) -> Any:
            # A wrong argument is the caller's error: it is raised here and not once a rank.
            signature.bind(None, *args, **kwargs)
            pending = self._start(name, record, Call(args, kwargs))
            return pending.get() if record.blocking else pending

        return group_call

    def _start(self, name: str, record: Registration, call: Call) -> PendingCall[Any]:
        mode = record.dispatch_mode
        mesh = self.coordinates(record.mesh) if mode.uses_mesh else Mesh.of_every_rank(self.world_size)
        plan = plan_call(mode, mesh, call, reads=record.reads, rank_zero=record.execute_mode is Execute.RANK_ZERO)
        return PendingCall(self, name, plan, self._transport.start(name, plan.calls, plan.answering))


class Backend(Protocol):
    """What starts groups. `LocalBackend` and `RayBackend` are the two."""

    def launch(
        self, roles: Mapping[str, WorkerSpec[Any]], placement: Mapping[str, str] | None = None
    ) -> dict[str, WorkerGroup]:
        """Start workers and return role -> group.

        Args:
            roles: role -> recipe of its worker.
            placement: role -> pool name; None where there is one pool. Roles of one pool share its processes.
        """
        ...

    def launch_one(self, role: str, spec: WorkerSpec[W], pool: str | None = None) -> W:
        """Start one role; the group is typed as its worker class."""
        ...

    def shutdown(self) -> None:
        """Close the workers and give back what they hold; a second call does nothing."""
        ...
