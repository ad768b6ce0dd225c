"""How a run ends that does not come to its end: on Ctrl-C or SIGTERM, and after a failure."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any, NoReturn, Self

if TYPE_CHECKING:
    from ostinato.ppo.config import PpoConfig

PATIENCE_S = 30
"""Seconds that an interrupted run gets to close what it has opened (it takes a few), before the kernel ends it."""

_HEEDED = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}
"""What ends a run in order, and its handler where nobody has changed it."""


class Interrupts:
    """A `with` block that Ctrl-C, or the SIGTERM of a scheduler, ends in order.

    The first one raises `KeyboardInterrupt` in the block; those that come while it unwinds change nothing, so that what
    the block has started is closed. A signal that is ignored (`nohup`) or handled otherwise stays so; on other threads
    than the main one nothing is changed.

    Args:
        exits: the process ends after the block: once interrupted, it ignores further signals until it is gone.

    Attributes:
        text: says how an interrupted command goes on; replaced once there is a run.
        code: exit code of an interrupted command: 128 + the signal's number.
    """

    def __init__(self, *, exits: bool = False) -> None:
        self._exits = exits
        self._before: dict[signal.Signals, Any] = {}
        self.text: Callable[[], str] = lambda: "nothing was started"
        self.code = 0

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            heeded = [number for number, default in _HEEDED.items() if signal.getsignal(number) is default]
            self._before = {number: signal.signal(number, self._interrupt) for number in heeded}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.code and self._exits:
            return
        if self.code:
            signal.alarm(0)
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def say(self, program: str) -> int:
        """Write what was interrupted to standard error; returns the exit code."""
        how = "terminated (SIGTERM)" if self.code == 128 + signal.SIGTERM else "interrupted"
        sys.stderr.write(f"\n{program}: {how}; {self.text()}\n")  # the terminal's ^C stands on the line before
        sys.stderr.flush()
        return self.code or 128 + signal.SIGINT

    def _interrupt(self, number: int, frame: FrameType | None) -> NoReturn:
        for each in self._before:
            signal.signal(each, signal.SIG_IGN)
        self.code = 128 + number
        signal.alarm(PATIENCE_S)
        raise KeyboardInterrupt


def outlook(config: PpoConfig) -> str:
    """How a run that ended before its time goes on: the checkpoint in force, and the command that continues from it.

    Args:
        config: the run's configuration.
    """
    from ostinato.ppo.run_folder import complete_steps

    trainer = config.trainer
    folder = Path(trainer.default_local_dir)
    steps = complete_steps(folder)
    if not steps:
        why = f" (trainer.save_freq={trainer.save_freq} saves none)" if trainer.save_freq <= 0 else ""
        start = trainer.resume_from_path if trainer.resume_mode == "resume_path" else "step 1"
        return f"there is no checkpoint in {folder} yet{why}; the same command starts again from {start}"
    how = "" if trainer.resume_mode == "auto" else " with trainer.resume_mode=auto"
    return f"the checkpoint in force is {folder / f'global_step_{steps[-1]}'}; the same command{how} continues from it"


def failure_text(error: Exception, program: str, config: PpoConfig) -> str | None:
    """What to print of an error of a run.

    Args:
        error: what `run` raised.
        program: the program's name, before the error's own text.
        config: the run's configuration.

    Returns:
        The error's own text where it says all that is needed. After a failure in a worker or in the driver's process on
        the cluster: its traceback, where it was, and how the run goes on. None for what only a traceback tells.
    """
    from ostinato.controller import CallTimedOut, RayNotRunning, ResourcesUnavailable, WorkerFailed
    from ostinato.ppo.errors import PpoError
    from ostinato.rollout import RolloutError
    from ostinato.workers.core.errors import WorkersError
    from ostinato.workers.fsdp.errors import FsdpError

    notes = getattr(error, "__notes__", [])
    refusals = (PpoError, RayNotRunning, ResourcesUnavailable, RolloutError, WorkersError, FsdpError)
    if isinstance(error, refusals):
        return "\n".join([f"{program}: {error}", *notes, ""])
    if isinstance(error, CallTimedOut):
        return "\n".join([f"{program}: {error}", *notes, outlook(config), ""])
    failed = error if isinstance(error, WorkerFailed) else error.__cause__
    if not isinstance(failed, WorkerFailed):
        return None
    further = [note for note in notes if failed.where not in note]
    last = f"{program}: {failed.where}: {failed.reason}"
    return "\n".join([failed.traceback.rstrip(), "", last, *further, outlook(config), ""])
