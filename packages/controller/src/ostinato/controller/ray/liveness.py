"""Waiting for a group call so that the first failure ends it, whichever rank it comes from."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from ostinato.controller.colocate import Status, restore
from ostinato.controller.errors import CallTimedOut, WorkerDied, WorkerFailed, WorkerHung

if TYPE_CHECKING:
    from ray import ObjectRef


@dataclass(frozen=True)
class Reply:
    """What a call on one rank will leave: its status first, then what it returns."""

    rank: int
    status: ObjectRef
    value: ObjectRef


@dataclass(frozen=True)
class Patience:
    """How long to wait.

    Attributes:
        grace_s: seconds that the other ranks get to end, once one has raised. A rank whose peer died often raises
            before the death is known; and ranks that wait in a collective for one that raised never end.
        call_s: deadline of a call in seconds; None waits without end for ranks that are alive and not stopped.
        look_s: seconds between two looks at the processes of a call that takes longer than that. One that is stopped at
            two looks counts as hung. None never looks.
    """

    grace_s: float = 5.0
    call_s: float | None = 3600.0
    look_s: float | None = 10.0


class Watchers(Protocol):
    """Whoever can look at the ranks' processes from outside."""

    def standing(self, ranks: Sequence[int]) -> list[int]:
        """Ranks whose processes are stopped."""
        ...

    def stacks(self, ranks: Sequence[int]) -> dict[int, str]:
        """Rank -> where its threads are, of those that can say."""
        ...


Maker = Callable[[], BaseException]
"""Makes an error anew each time: one that is kept would keep the frames that it went through, and their batches."""


@dataclass
class Ending:
    """How a group call ended.

    Attributes:
        statuses: rank -> status, of the ranks that ended.
        make: makes what is to be raised; None where all ranks returned.
        broken: whether the processes can no longer be used: one died, or some still sit in the call.
        stopped: ranks whose processes are stopped, so that only their node can end them.
        lost: whether a rank could not run because what it needs was lost with another process.
    """

    statuses: dict[int, Status] = field(default_factory=dict)
    make: Maker | None = None
    broken: bool = False
    stopped: list[int] = field(default_factory=list)
    lost: bool = False

    @property
    def error(self) -> BaseException | None:
        """What is to be raised, made anew."""
        return self.make() if self.make is not None else None

    @property
    def failed_calls(self) -> set[int]:
        """Numbers of the calls that raised: this one, or ones that it needs."""
        return {status.failure.call for status in self.statuses.values() if status.failure is not None}


Locate = Callable[[int], tuple[str, int, str]]
"""rank -> (role, rank, node)."""


def wait_for_replies(
    replies: Sequence[Reply], method: str, locate: Locate, patience: Patience, watchers: Watchers | None = None
) -> Ending:
    """Wait until every rank has ended, one has died or hangs, or one has raised and the grace is over.

    Args:
        replies: one for each rank that was called.
        method: the method, for error texts.
        locate: rank -> role, rank and node, for error texts.
        patience: how long to wait.
        watchers: look at the processes; None for nobody.

    Returns:
        How it ended. A death comes before an exception, an earlier failure before a later one.
    """
    waiting = _Waiting(replies, method, locate, patience, watchers)
    waiting.run()
    return waiting.ending()


class _Waiting:
    def __init__(
        self, replies: Sequence[Reply], method: str, locate: Locate, patience: Patience, watchers: Watchers | None
    ) -> None:
        self.method, self.locate, self.patience, self.watchers = method, locate, patience, watchers
        self.pending = {reply.status: reply for reply in replies}
        self.made = Ending()
        self.failures: list[Maker] = []
        self.deaths: list[Maker] = []
        self.grace_ends: float | None = None
        self.suspects: set[int] = set()

    def run(self) -> None:
        """Wait."""
        import ray

        begun = time.monotonic()
        call_ends = None if self.patience.call_s is None else begun + self.patience.call_s
        look_s = self.patience.look_s if self.watchers is not None else None
        next_look = None if look_s is None else begun + look_s
        while self.pending and not self.deaths:
            ends = self.grace_ends if self.grace_ends is not None else call_ends
            until = min((at for at in (ends, next_look) if at is not None), default=None)
            timeout = None if until is None else max(0.0, until - time.monotonic())
            some, _ = ray.wait(list(self.pending), num_returns=1, timeout=timeout, fetch_local=False)
            if some:
                self._take_ended()
                continue
            if ends is not None and time.monotonic() >= ends:
                return
            if look_s is not None:
                self._look()
                next_look = time.monotonic() + look_s

    def _take_ended(self) -> None:
        import ray

        # One more look takes all that have ended by now, so that the cost grows with the ranks and not their square.
        ended, _ = ray.wait(list(self.pending), num_returns=len(self.pending), timeout=0, fetch_local=False)
        for reply in sorted((self.pending.pop(status) for status in ended), key=lambda reply: reply.rank):
            self._read(reply)
        if self.failures and self.grace_ends is None:
            self.grace_ends = time.monotonic() + self.patience.grace_s

    def _look(self) -> None:
        """A process that is stopped now and was at the last look hangs; a look alone may meet one that just pauses."""
        assert self.watchers is not None
        standing = set(self.watchers.standing(sorted(reply.rank for reply in self.pending.values())))
        for rank in sorted(standing & self.suspects):
            reason = "its process is stopped (state T; SIGSTOP or a frozen container) and does not go on"
            self.deaths.append(partial(WorkerHung, *self.locate(rank), self.method, "", reason))
            self.made.stopped.append(rank)
        self.suspects = standing

    def _read(self, reply: Reply) -> None:
        import ray
        from ray import cloudpickle
        from ray.exceptions import ObjectLostError, RayActorError, RayError, RayTaskError

        where = (*self.locate(reply.rank), self.method)
        try:
            status: Status = ray.get(reply.status)
        except RayTaskError as error:
            # Raised outside the method, e.g. by an argument that does not unpickle on the worker.
            self.made.lost = self.made.lost or isinstance(error.cause, RayActorError | ObjectLostError)
            self.failures.append(partial(WorkerFailed, *where, str(error), "the call could not be run"))
            return
        except RayError as error:
            reason = f"its process ended ({type(error).__name__})"
            self.deaths.append(partial(WorkerDied, *where, str(error), reason))
            return
        self.made.statuses[reply.rank] = status
        if status.failure is not None:
            make = partial(restore, status.failure, *where, cloudpickle.loads)
            (self.deaths if status.failure.exits else self.failures).append(make)

    def ending(self) -> Ending:
        """How it ended."""
        stuck = sorted(reply.rank for reply in self.pending.values() if reply.rank not in self.made.stopped)
        self.made.broken = bool(self.pending) or bool(self.deaths)
        stacks = self.watchers.stacks(stuck) if self.watchers is not None and stuck and not self.deaths else {}
        failures = [*self.deaths, *self.failures]
        if failures:
            self.made.make = partial(_chosen, failures, stuck, stacks)
        elif stuck:
            self.made.make = partial(CallTimedOut, self._timeout_text(stuck, stacks))
        return self.made

    def _timeout_text(self, stuck: Sequence[int], stacks: dict[int, str]) -> str:
        where = ", ".join(f"{rank} on {self.locate(rank)[2]}" for rank in stuck)
        role = self.locate(stuck[0])[0]
        text = (
            f"role {role!r}, method {self.method!r}: no answer within {self.patience.call_s:g} s from rank(s) {where}"
        )
        return "\n\n".join([text, *(_stack_text(rank, stack) for rank, stack in stacks.items())])


def _chosen(failures: Sequence[Maker], stuck: Sequence[int], stacks: dict[int, str]) -> BaseException:
    chosen = failures[0]()
    for other in failures[1:]:
        chosen.add_note(f"also failed: {_line(other())}")
    if stuck:
        chosen.add_note(f"stopped in the call: rank(s) {list(stuck)}")
    for rank, stack in stacks.items():
        chosen.add_note(_stack_text(rank, stack))
    return chosen


def _stack_text(rank: int, stack: str) -> str:
    return f"Where rank {rank} stood:\n{stack.rstrip()}"


def _line(error: Any) -> str:
    cause = error if isinstance(error, WorkerFailed) else error.__cause__
    if isinstance(cause, WorkerFailed):
        return f"rank {cause.rank}: {cause.reason}"
    return f"{type(error).__name__}: {error}"
