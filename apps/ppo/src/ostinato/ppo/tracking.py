"""The step log: what the stages of a step report and how long they take, merged once and sent to the loggers.

with tracker.step(step) as log:
    with log.time("gen"):
        ...
    log.add(self.actor.update_actor(batch))
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ostinato.controller.watch import Watch, watch
from ostinato.ppo.closing import Closing
from ostinato.ppo.console import ConsoleView
from ostinato.ppo.loggers import CONSOLE, LOGGERS, SafeLogger, TrackingError, Value, check_installed, check_names
from ostinato.ppo.metrics import timing_metrics
from ostinato.protocol import DataProto, Metric, merge_metrics

__all__ = ["LOGGERS", "ConsoleView", "StepLog", "Tracker", "TrackingError", "check_installed", "check_names"]

logger = logging.getLogger(__name__)

Event = dict[str, Any]
Reported = DataProto | Mapping[str, Metric]


class StepLog:
    """What one step reports.

    Attributes:
        metrics: what was added, merged by each value's reduction.
    """

    def __init__(self) -> None:
        self.metrics: dict[str, Metric] = {}
        self._watches: list[tuple[str, Watch]] = []

    def add(self, *reported: Reported) -> None:
        """Add metrics.

        Args:
            *reported: metrics by name, or batches that hold them in their `meta_info`. A name that is there already is
                merged, never overwritten.
        """
        for part in reported:
            self.metrics = merge_metrics(self.metrics, part if isinstance(part, Mapping) else part.metrics)

    @contextmanager
    def time(self, name: str) -> Iterator[None]:
        """Measure a stage; the times of a stage that comes several times add up. One that fails is not counted.

        Calls on workers may end after their stage: a wait for one of them counts for the stage that sent it.
        """
        with watch() as stage:
            yield
        self._watches.append((name, stage))

    @property
    def timings(self) -> dict[str, float]:
        """Seconds by stage; complete once the calls of all stages have ended."""
        seconds: dict[str, float] = {}
        for name, stage in self._watches:
            seconds[name] = seconds.get(name, 0.0) + stage.seconds
        return seconds


def guarded(emit: Callable[[Event], None]) -> Callable[[Event], None]:
    """The same function, but where it fails the run goes on: with one warning, and unwatched."""
    failed = False

    def send(event: Event) -> None:
        nonlocal failed
        try:
            emit(event)
        except Exception as error:
            if not failed:
                failed = True
                logger.warning("the run's events cannot be shown; the run goes on: %r", error)

    return send


class Tracker(Closing):
    """Sends the values of each step to the loggers, and events to whoever shows the run.

    Args:
        names: loggers: `console`, `jsonl`, `tensorboard`, `wandb`, `mlflow`.
        run_dir: the run's folder; files of loggers go there.
        config: the run's configuration: `trainer.project_name`, `trainer.experiment_name`, `world_size`; is kept by
            loggers that keep one.
        emit: receives the run's events (see `ConsoleView`); None shows them here where `console` is among the names.
        total_steps: the run's last step, where it is known.

    Raises:
        TrackingError: a logger is unknown, or not installed.
    """

    def __init__(
        self,
        names: Sequence[str],
        run_dir: str | Path,
        config: Any = None,
        emit: Callable[[Event], None] | None = None,
        *,
        total_steps: int | None = None,
    ) -> None:
        check_names(names)
        check_installed(names)
        trainer = getattr(config, "trainer", None)
        run = getattr(trainer, "project_name", "ostinato"), getattr(trainer, "experiment_name", "run")
        self.total_steps = total_steps
        self._num_processes = int(getattr(config, "world_size", 1))
        self._on_console = CONSOLE in names
        emit = emit or (ConsoleView() if self._on_console else None)
        self._emit = guarded(emit) if emit else None
        self._closed = False
        self._loggers = [
            SafeLogger(name, Path(run_dir), run, config) for name in dict.fromkeys(names) if name != CONSOLE
        ]
        self._send({"kind": "start", "run": "/".join(run), "run_dir": str(run_dir), "total_steps": total_steps})

    @contextmanager
    def step(self, step: int) -> Iterator[StepLog]:
        """Collect what a step reports, and send it out when the block ends; a step that fails sends nothing.

        Args:
            step: its number.
        """
        log, start = StepLog(), time.perf_counter()
        yield log
        timings = {**log.timings, "step": time.perf_counter() - start}
        tokens = log.metrics.get("perf/total_num_tokens", Metric.sum(0.0))
        responses = log.metrics.get("response_length/mean", Metric.mean(0.0, weight=0))
        log.add(
            timing_metrics(
                timings,
                num_tokens=_number(tokens),
                num_response_tokens=_number(responses) * responses.weight,
                num_processes=self._num_processes,
            ),
            {"training/global_step": Metric.max(step)},
        )
        self.report(step, log.metrics)

    def report(self, step: int, metrics: Mapping[str, Metric]) -> None:
        """Send metrics to all loggers; a validation that stands outside a step comes here directly.

        Args:
            step: the step that they belong to.
            metrics: by name.
        """
        values: dict[str, Value] = {name: metrics[name].value for name in sorted(metrics)}
        for each in self._loggers:
            each.log(step, values)
        if not self._on_console:
            return
        if "training/global_step" in values:
            self._send({"kind": "step", "step": step, "total_steps": self.total_steps, "metrics": values})
        if any(name.startswith("val-") for name in values):
            self._send({"kind": "validation", "step": step, "metrics": values})

    def note(self, text: str) -> None:
        """Tell the one who watches the run something in a line."""
        self._send({"kind": "note", "text": text})

    def close(self, text: str = "") -> None:
        """End the tracking; further calls do nothing.

        Args:
            text: the run's last line.
        """
        if self._closed:
            return
        self._closed = True
        for each in self._loggers:
            each.close()
        self._send({"kind": "end", "text": text})

    def _send(self, event: Event) -> None:
        if self._emit is not None:
            self._emit(event)


def _number(metric: Metric) -> float:
    return metric.value if isinstance(metric.value, float) else 0.0
