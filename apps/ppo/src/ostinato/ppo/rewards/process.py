"""One scoring process, seen from the side that supervises it."""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Sequence
from multiprocessing.connection import Pipe
from typing import Any

from ostinato.ppo.rewards.recipe import Recipe, Row, RowBatch
from ostinato.ppo.rewards.worker import MESSAGES

MAX_MESSAGE_BYTES = 1 << 30

_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
"""Many small processes: a thread pool in each of them only gets in the way."""


class ScorerProcess:
    """A child that scores lists of rows, one list at a time.

    Args:
        recipe: what it scores with.
        memory_limit_mb: memory that it may write to, in MiB; 0 for no limit.
        start_timeout: seconds that loading the scorers may take.

    Attributes:
        connection: readable when there is something to receive, or the child is gone.
        ready: it has loaded its recipe.
        begun: it has loaded the scorers of the rows that it was given, and scores.
        pending: the numbers of the rows it was given and has not answered; the first is the one under way.
        deadline: monotonic time at which what it is doing counts as stuck; None while it is idle.
    """

    def __init__(self, recipe: Recipe, memory_limit_mb: int, start_timeout: float) -> None:
        self.connection, theirs = Pipe(duplex=True)
        self.ready = self.begun = self.garbled = False
        self.pending: deque[int] = deque()
        self.start_timeout = start_timeout
        self.deadline: float | None = time.monotonic() + start_timeout
        with theirs:
            self._process = _spawn(theirs, memory_limit_mb)
        with contextlib.suppress(ConnectionError):  # a child that is gone at once is found by `receive`
            self.connection.send(recipe)

    @property
    def idle(self) -> bool:
        """It is ready and has nothing to do."""
        return self.ready and not self.pending

    def give(self, numbers: Sequence[int], rows: Sequence[Row | RowBatch]) -> None:
        """Hand over rows to score.

        Args:
            numbers: what the caller calls them.
            rows: the rows.

        Raises:
            ConnectionError: the child is gone; it has taken no row.
        """
        self.connection.send(list(rows))
        self.begun = False
        self.pending.extend(numbers)
        self.deadline = time.monotonic() + self.start_timeout

    def receive(self) -> tuple[Any, ...] | None:
        """Take one message.

        Returns:
            The message, or None where the child is gone or speaks no sense.
        """
        try:
            data = self.connection.recv_bytes(MAX_MESSAGE_BYTES)
        except (EOFError, OSError):  # the end, the end within a message, or a message of an impossible length
            return None
        try:
            message = pickle.loads(data)
        except Exception:
            message = None
        if isinstance(message, tuple) and message and message[0] in MESSAGES:
            return message
        self.garbled = True
        return None

    def exit_text(self) -> str:
        """Say how a child that is gone ended."""
        if self.garbled:
            return (
                "the scoring process sent what is no result; the reward function writes to a file that is not its own"
            )
        try:
            code = self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            return "the scoring process closed its connection"
        if code < 0:
            with contextlib.suppress(ValueError):
                return f"the scoring process was ended by {signal.Signals(-code).name}"
        return f"the scoring process exited with code {code}"

    def kill(self) -> None:
        """End the child, and what it has started itself, now."""
        self.connection.close()
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def close(self, patience: float) -> None:
        """Let the child end by itself; end it after `patience` seconds."""
        self.connection.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=patience)
        self.kill()


def _spawn(theirs: Any, memory_limit_mb: int) -> subprocess.Popen[bytes]:
    """Start the program of `worker` with one end of the pipe, in a session of its own: a kill takes all of it."""
    path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "ostinato.ppo.rewards.worker", str(theirs.fileno()), str(memory_limit_mb)],
        stdin=subprocess.DEVNULL,
        pass_fds=[theirs.fileno()],
        start_new_session=True,
        env={**_ENVIRONMENT, **os.environ, "PYTHONPATH": path},
    )
