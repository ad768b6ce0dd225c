"""Waiting for a group call so that the first failure ends it, whichever rank it comes from."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ostinato.controller.colocate import Status, restore
from ostinato.controller.errors import CallTimedOut, WorkerDied, WorkerFailed

if TYPE_CHECKING:
    from ray import ObjectRef


@dataclass(frozen=True)
class Reply:
    """What a call on one rank will leave: its status, and its value where it is wanted."""

    rank: int
    status: ObjectRef
    value: ObjectRef


@dataclass(frozen=True)
class Patience:
    """How long to wait.

    Attributes:
        grace_s: seconds that the other ranks get to end, once one has raised. A rank whose peer died often raises
            before the death is known; and ranks that wait in a collective for one that raised never end.
        call_s: deadline of a call in seconds; None waits without end for ranks that are alive.
    """

    grace_s: float = 5.0
    call_s: float | None = None


@dataclass
class Ending:
    """How a group call ended.

    Attributes:
        revisions: rank -> mesh revision, of the ranks that ended.
        error: what to raise; None where all ranks returned.
        broken: whether the processes can no longer be used: one died, or some still sit in the call.
    """

    revisions: dict[int, int] = field(default_factory=dict)
    error: BaseException | None = None
    broken: bool = False


Locate = Callable[[int], tuple[str, int, str]]
"""rank -> (role, rank, node)."""


def wait_for_replies(replies: Sequence[Reply], method: str, locate: Locate, patience: Patience) -> Ending:
    """Wait until every rank has ended, one has died, or one has raised and the grace is over.

    Args:
        replies: one for each rank that was called.
        method: the method, for error texts.
        locate: rank -> role, rank and node, for error texts.
        patience: how long to wait.

    Returns:
        How it ended. A death comes before an exception, an earlier failure before a later one.
    """
    import ray

    ending = Ending()
    failures: list[BaseException] = []
    pending = {reply.status: reply for reply in replies}
    call_ends = None if patience.call_s is None else time.monotonic() + patience.call_s
    grace_ends: float | None = None
    while pending:
        ends = grace_ends if grace_ends is not None else call_ends
        timeout = None if ends is None else max(0.0, ends - time.monotonic())
        some, _ = ray.wait(list(pending), num_returns=1, timeout=timeout, fetch_local=False)
        if not some:
            break
        # One more look takes all that have ended by now, so that the cost grows with the ranks and not their square.
        ended, _ = ray.wait(list(pending), num_returns=len(pending), timeout=0, fetch_local=False)
        for reply in sorted((pending.pop(status) for status in ended), key=lambda reply: reply.rank):
            error = _read(reply, method, locate, ending)
            if error is not None:
                failures.append(error)
        if any(isinstance(error, WorkerDied) for error in failures):
            break
        if failures and grace_ends is None:
            grace_ends = time.monotonic() + patience.grace_s
    stuck = sorted(reply.rank for reply in pending.values())
    ending.broken = bool(stuck) or any(isinstance(error, WorkerDied) for error in failures)
    ending.error = _chosen(failures, stuck, method, locate, patience)
    return ending


def _read(reply: Reply, method: str, locate: Locate, ending: Ending) -> BaseException | None:
    import ray
    from ray import cloudpickle
    from ray.exceptions import RayError, RayTaskError

    role, rank, node = locate(reply.rank)
    try:
        status: Status = ray.get(reply.status)
    except RayTaskError as error:
        # Raised outside the method, e.g. by an argument that does not unpickle on the worker.
        return WorkerFailed(role, rank, node, method, str(error), "the call could not be run")
    except RayError as error:
        return WorkerDied(role, rank, node, method, str(error), f"its process ended ({type(error).__name__})")
    ending.revisions[reply.rank] = status.revision
    if status.failure is None:
        return None
    return restore(status.failure, role, rank, node, method, cloudpickle.loads)


def _chosen(
    failures: list[BaseException], stuck: list[int], method: str, locate: Locate, patience: Patience
) -> BaseException | None:
    if not failures:
        if not stuck:
            return None
        role, _, _ = locate(stuck[0])
        where = ", ".join(f"{rank} on {locate(rank)[2]}" for rank in stuck)
        return CallTimedOut(
            f"role {role!r}, method {method!r}: no answer within {patience.call_s:g} s from rank(s) {where}"
        )
    chosen = next((error for error in failures if isinstance(error, WorkerDied)), failures[0])
    for other in failures:
        if other is not chosen:
            chosen.add_note(f"also failed: {_line(other)}")
    if stuck:
        chosen.add_note(f"stopped in the call: rank(s) {stuck}")
    return chosen


def _line(error: BaseException) -> str:
    cause: Any = error if isinstance(error, WorkerFailed) else error.__cause__
    if isinstance(cause, WorkerFailed):
        return f"rank {cause.rank}: {cause.reason}"
    return f"{type(error).__name__}: {error}"
