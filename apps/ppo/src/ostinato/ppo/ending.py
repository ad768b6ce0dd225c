"""How a run ends that does not come to its end: on Ctrl-C, and after a failure."""

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

INTERRUPTED = 130
"""Exit code of a run that Ctrl-C ended: 128 + SIGINT."""

PATIENCE_S = 30
"""Seconds that an interrupted run gets to close what it has opened (it takes a few), before the kernel ends it."""


class CtrlC:
    """A `with` block that Ctrl-C ends in order.

    The first Ctrl-C raises `KeyboardInterrupt` in the block; those that come while it unwinds change nothing, so that
    what the block has started is closed. Where SIGINT is ignored (`nohup`), or this is not the main thread, nothing is
    changed.

    Args:
        exits: the process ends after the block: once interrupted, it ignores Ctrl-C until it is gone.

    Attributes:
        text: says what was interrupted and how it goes on; replaced once there is a run.
    """

    def __init__(self, *, exits: bool = False) -> None:
        self._exits = exits
        self.text: Callable[[], str] = lambda: "ostinato-ppo: interrupted; nothing was started"
        self._before: Any = None

    def __enter__(self) -> Self:
        main = threading.current_thread() is threading.main_thread()
        if main and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            self._before = signal.signal(signal.SIGINT, self._interrupt)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        interrupted = signal.getsignal(signal.SIGINT) is signal.SIG_IGN
        if self._before is not None and not (interrupted and self._exits):
            signal.alarm(0)
            signal.signal(signal.SIGINT, self._before)

    def say(self) -> int:
        """Write the text to standard error; returns the exit code."""
        sys.stderr.write(f"\n{self.text()}\n")  # the terminal's ^C stands on the line before
        sys.stderr.flush()
        return INTERRUPTED

    def _interrupt(self, number: int, frame: FrameType | None) -> NoReturn:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.alarm(PATIENCE_S)
        raise KeyboardInterrupt


def outlook(config: PpoConfig) -> str:
    """How a run that ended before its time goes on: the checkpoint in force, and the command that continues from it.

    Args:
        config: the run's configuration.
    """
    from ostinato.ppo.checkpoint import complete_steps

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
