"""Scores rows in a pool of processes, with a hard time limit for each call.

Rows go out in lists (long ones first, single rows at the end, so that slow rows do not pile up behind one process);
answers come back one by one, so the row that is under way in each process is always known. A call that exceeds its
limit is ended by killing its process: neither a signal nor a thread inside it has to cooperate.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from typing import Any, Literal

from ostinato.ppo.closing import Closing
from ostinato.ppo.rewards.errors import RowFailedError, ScorerError
from ostinato.ppo.rewards.process import ScorerProcess
from ostinato.ppo.rewards.recipe import Recipe, Result, Row, RowBatch
from ostinato.ppo.rewards.worker import BEGUN, INVALID, READY, SCORED, SCORED_WHOLE

logger = logging.getLogger(__name__)

MAX_LIST = 256
FAILED_STARTS = 3
"""A pool gives up after this many processes in a row that ended before they were ready."""


@dataclass(frozen=True)
class Outcome:
    """What became of one row.

    Attributes:
        score: the scorer's, or the default.
        extra: the other entries that the scorer returned.
        failure: None, `error` or `timeout`.
        parts: of a whole batch that was scored in one call: what became of its rows.
    """

    score: float
    extra: dict[str, float | str] = field(default_factory=dict)
    failure: Literal["error", "timeout"] | None = None
    parts: tuple[Outcome, ...] = ()


class ScorerPool(Closing):
    """Processes that score rows.

    Args:
        recipe: what to score with.
        num_workers: processes at most; None for one a core, up to 16. They start with the first rows.
        timeout: seconds that one call may take.
        default: the score of a row that could not be scored.
        on_error: `default` gives such a row the default score and goes on, `raise` ends the call.
        memory_limit_mb: memory that a process may write to, in MiB; 0 for no limit.
        start_timeout: seconds that loading the scorers may take.

    Raises:
        ScorerError: the recipe names a file or function that is not there, or an option is out of range.
    """

    def __init__(
        self,
        recipe: Recipe,
        *,
        num_workers: int | None = None,
        timeout: float = 10.0,
        default: float = 0.0,
        on_error: Literal["default", "raise"] = "default",
        memory_limit_mb: int = 4096,
        start_timeout: float = 120.0,
    ) -> None:
        if on_error not in ("default", "raise"):
            raise ScorerError(f"rewards: on_error must be 'default' or 'raise'; got {on_error!r}")
        if timeout <= 0:
            raise ScorerError(f"rewards: the time limit of a call must be above 0 seconds; got {timeout}")
        recipe.check()
        self.num_workers = num_workers or min(16, os.cpu_count() or 1)
        self.timeout, self.default, self.on_error = timeout, default, on_error
        self._start = recipe, memory_limit_mb, start_timeout
        self._recipe = recipe
        self._processes: list[ScorerProcess] = []
        self._lock = threading.Lock()
        self._logged: set[str] = set()
        self._closer = weakref.finalize(self, _close_all, self._processes, os.getpid())

    def score(self, rows: Sequence[Row | RowBatch]) -> list[Outcome]:
        """Score rows.

        Args:
            rows: what to score; a whole batch is one call, with one limit.

        Returns:
            One outcome a row, in the rows' order.

        Raises:
            UnknownDataSourceError: a row's data source has no scorer; nothing has been scored.
            ScorerError: the scorers cannot be loaded.
            RowFailedError: `on_error="raise"` and a row failed.
        """
        for data_source in {row.data_source for row in rows}:
            self._recipe.check_data_source(data_source)
        with self._lock:
            try:
                return _Run(self, rows).outcomes()
            except BaseException:
                # What is under way belongs to a call that has ended; the next one starts with fresh processes.
                self._stop_busy()
                raise

    def processes(self, count: int) -> list[ScorerProcess]:
        """Return the processes, after starting what is missing of `count`."""
        while len(self._processes) < min(count, self.num_workers):
            self._processes.append(self.new_process())
        return self._processes

    def new_process(self) -> ScorerProcess:
        """Start a process."""
        return ScorerProcess(*self._start)

    def report(self, kind: Literal["error", "timeout"], row: Row | RowBatch, text: str) -> None:
        """Take note of a row that failed: raise, or log the first of its kind.

        Raises:
            RowFailedError: `on_error="raise"`.
        """
        message = f"a reward call failed ({kind}; data_source {row.data_source!r}): {text}"
        if self.on_error == "raise":
            raise RowFailedError(message)
        if kind not in self._logged:
            self._logged.add(kind)
            logger.warning(
                "%s\nThe row's score is %s. Further ones are only counted (reward/errors, reward/timeouts).",
                message,
                self.default,
            )

    def _stop_busy(self) -> None:
        for process in [process for process in self._processes if not process.idle]:
            self._processes.remove(process)
            process.kill()

    def close(self) -> None:
        """End the processes; the pool may be used again and would start new ones."""
        _close_all(self._processes, os.getpid())


def _close_all(processes: list[ScorerProcess], owner: int) -> None:
    if os.getpid() != owner:  # a fork of the owner ends; the processes are not its own
        return
    for process in processes:
        process.connection.close()  # all of them see the end before the first is waited for
    while processes:
        processes.pop().close(patience=1.0)


class _Run:
    """One call of `ScorerPool.score`."""

    def __init__(self, pool: ScorerPool, rows: Sequence[Row | RowBatch]) -> None:
        self.pool, self.rows = pool, rows
        self.found: list[Outcome | None] = [None] * len(rows)
        self.waiting = deque(range(len(rows)))
        self.open = len(rows)
        self.failed_starts = 0

    def outcomes(self) -> list[Outcome]:
        """Score all rows."""
        while self.open:
            processes = self.pool.processes(self.open)
            for process in [process for process in processes if process.idle]:
                self.feed(process)
            working = {process.connection: process for process in processes if process.deadline is not None}
            nearest = min((process.deadline for process in working.values() if process.deadline), default=0.0)
            for connection in wait(list(working), timeout=max(0.0, nearest - time.monotonic())):
                self.listen(working[connection])  # pyright: ignore[reportArgumentType]
            for process in [process for process in processes if process in working.values()]:
                # An answer that came in meanwhile is in time; only then is the deadline looked at.
                if process.deadline is not None and time.monotonic() > process.deadline and process in processes:
                    self.listen(process)
                    if process.deadline is not None and time.monotonic() > process.deadline and process in processes:
                        self.overdue(process)
        return [outcome for outcome in self.found if outcome is not None]

    def feed(self, process: ScorerProcess) -> None:
        """Give an idle process its next rows: a share of what is left, so that the lists shrink towards the end."""
        if not self.waiting:
            return
        share = max(1, min(MAX_LIST, len(self.waiting) // (2 * self.pool.num_workers)))
        numbers = [self.waiting.popleft() for _ in range(share)]
        try:
            process.give(numbers, [self.rows[number] for number in numbers])
        except ConnectionError:
            self.waiting.extendleft(reversed(numbers))
            self.remove(process)

    def listen(self, process: ScorerProcess) -> None:
        """Take all messages that are there."""
        with contextlib.suppress(OSError):
            while process.connection.poll():
                message = process.receive()
                if message is None:
                    self.gone(process)
                    return
                self.take(process, message)

    def take(self, process: ScorerProcess, message: tuple[Any, ...]) -> None:
        """Act on one message."""
        kind = message[0]
        if kind == INVALID:
            raise ScorerError(f"the reward function cannot be loaded: {message[1]}")
        if kind == READY:
            process.ready, process.deadline = True, None
            return
        if kind == BEGUN:
            process.begun, self.failed_starts = True, 0
        elif process.pending:  # an answer to nothing is a second one to what has been answered
            number = process.pending.popleft()
            if kind == SCORED:
                self.settle(number, Outcome(message[1], message[2]))
            elif kind == SCORED_WHOLE:
                self.settle_whole(number, message[1])
            else:
                self.fail(number, "error", message[1])
        process.deadline = time.monotonic() + self.pool.timeout if process.pending else None

    def settle(self, number: int, outcome: Outcome) -> None:
        """Keep a row's outcome."""
        self.found[number] = outcome
        self.open -= 1

    def settle_whole(self, number: int, results: Sequence[Result | str]) -> None:
        """Keep the outcomes of a whole batch's rows; a text is why a row has no result."""
        batch, default = self.rows[number], Outcome(self.pool.default, failure="error")
        parts = tuple(default if isinstance(result, str) else Outcome(*result) for result in results)
        self.settle(number, Outcome(self.pool.default, parts=parts))
        for row, result in zip(batch.rows if isinstance(batch, RowBatch) else [], results, strict=True):
            if isinstance(result, str):
                self.pool.report("error", row, result)

    def fail(self, number: int, kind: Literal["error", "timeout"], text: str) -> None:
        """Give a row the default score."""
        self.settle(number, Outcome(self.pool.default, failure=kind))
        self.pool.report(kind, self.rows[number], text)

    def overdue(self, process: ScorerProcess) -> None:
        """End a process whose call, or start, takes too long."""
        if not process.begun:
            raise ScorerError(f"the reward function did not load within {process.start_timeout:g} s")
        self.lose(process, "timeout", f"no result within {self.pool.timeout:g} s")

    def gone(self, process: ScorerProcess) -> None:
        """Take note of a process that has ended by itself."""
        text = process.exit_text()
        if process.begun:
            self.lose(process, "error", text)
            return
        self.failed_starts += 1
        self.waiting.extendleft(reversed(process.pending))
        self.remove(process)
        if self.failed_starts >= FAILED_STARTS:
            raise ScorerError(f"scoring processes end before they are ready: {text}; see the error output above")

    def lose(self, process: ScorerProcess, kind: Literal["error", "timeout"], text: str) -> None:
        """The row under way has failed; the process's other rows wait again."""
        pending = list(process.pending)
        self.remove(process)
        if pending:
            self.waiting.extendleft(reversed(pending[1:]))
            self.fail(pending[0], kind, text)

    def remove(self, process: ScorerProcess) -> None:
        """Take a process out of the pool; the next round starts another."""
        self.pool.processes(0).remove(process)
        process.kill()
