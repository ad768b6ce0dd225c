"""What a run looks like in a terminal: a line a step, and a live bar.

`ConsoleView` takes plain event dicts, so it can stand in another process than the loop; it needs no torch.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Mapping
from typing import IO, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from ostinato.ppo.closing import Closing

Event = Mapping[str, Any]

SHOWN: tuple[tuple[str, tuple[str, ...], str], ...] = (
    ("reward", ("critic/score/mean",), ".4g"),
    ("kl", ("actor/kl_loss", "actor/reward_kl_penalty"), ".3g"),
    ("ppo_kl", ("actor/ppo_kl",), ".3g"),
    ("entropy", ("actor/entropy",), ".3g"),
    ("pg_loss", ("actor/pg_loss",), ".3g"),
    ("vf_loss", ("critic/vf_loss",), ".3g"),
    ("grad_norm", ("actor/grad_norm",), ".3g"),
    ("length", ("response_length/mean",), ".0f"),
    ("cut", ("response_length/clip_ratio",), ".1%"),
    ("reward_errors", ("reward/errors",), ".0f"),
    ("tokens/s", ("perf/throughput",), ",.0f"),
    ("s", ("timing_s/step",), ".1f"),
)
"""Label, the metrics it may stand for (the first that is there), format. All metrics go to the other loggers."""

_HIDE_ZERO = {"reward_errors", "cut"}
_IN_BAR = ("reward", "kl", "ppo_kl", "length", "tokens/s")


def coloured(*streams: IO[str]) -> bool:
    """Whether colours belong on all of these streams.

    `NO_COLOR` (no-color.org) says no, then `FORCE_COLOR` says yes, each where it is set and not empty; else terminals
    have colours, and files and pipes have none.
    """
    if os.environ.get("NO_COLOR"):
        return False
    return bool(os.environ.get("FORCE_COLOR")) or all(stream.isatty() for stream in streams)


def shown_values(metrics: Mapping[str, Any]) -> dict[str, str]:
    """Return the values that a line shows, by label, as text.

    Without a reference there is no `kl`; `ppo_kl`, to the policy that sampled, stands in its place.
    """
    values: dict[str, str] = {}
    for label, names, form in SHOWN:
        value = next((metrics[name] for name in names if name in metrics), None)
        if label == "ppo_kl" and "kl" in values:
            continue
        if not isinstance(value, int | float) or (label in _HIDE_ZERO and value == 0):
            continue
        values[label] = format(value, form) if math.isfinite(value) else str(value)
    return values


def step_line(event: Event) -> str:
    """Return the line of a step."""
    total = event.get("total_steps")
    head = f"step {event['step']}" + (f"/{total}" if total else "")
    return "  ".join([head, *(f"{label} {value}" for label, value in shown_values(event["metrics"]).items())])


def validation_lines(event: Event) -> list[str]:
    """Return the lines of a validation: its core values, or all where there are none."""
    values = {name: value for name, value in event["metrics"].items() if name.startswith("val-")}
    core = {name: value for name, value in values.items() if name.startswith("val-core/")} or values
    return [f"step {event['step']}  {name} {value:.4g}" for name, value in core.items()]


class ConsoleView(Closing):
    """Draws a run from its events.

    Events have a `kind`: `start` (run, total_steps), `step` (step, total_steps, metrics), `validation` (step, metrics),
    `note` (text), `end` (text). Others are passed over. On a terminal a live bar stays below the lines; elsewhere there
    are only lines.

    Args:
        stream: where to; the process's standard output by default.
        live: draw the bar; by default where the stream is a terminal.
    """

    def __init__(self, stream: IO[str] | None = None, *, live: bool | None = None) -> None:
        out: IO[str] = stream or sys.stdout
        self._live = out.isatty() if live is None else live  # FORCE_COLOR makes no terminal of a file
        self._console = Console(file=out, highlight=False, soft_wrap=True, force_terminal=self._live)
        self._progress: Progress | None = None
        self._task: TaskID | None = None

    def __call__(self, event: Event) -> None:
        """Show one event."""
        kind = event.get("kind")
        if kind == "start":
            total = event.get("total_steps")
            self._line(f"{event.get('run', 'run')}: {total or 'all'} step{'' if total == 1 else 's'}")
            self._advance(0, event.get("total_steps"), {})
        elif kind == "step":
            self._line(step_line(event))
            self._advance(event["step"], event.get("total_steps"), shown_values(event["metrics"]))
        elif kind == "validation":
            for line in validation_lines(event):
                self._line(line)
        elif kind == "note":
            self._line(str(event["text"]))
        elif kind == "end":
            self.close()
            if event.get("text"):
                self._line(str(event["text"]))

    def _line(self, text: str) -> None:
        console = self._progress.console if self._progress is not None else self._console
        console.print(text, markup=False)

    def _advance(self, step: int, total: int | None, values: Mapping[str, str]) -> None:
        if not self._live:
            return
        if self._progress is None:
            self._progress = Progress(
                TextColumn("step"),
                MofNCompleteColumn(),
                BarColumn(),
                TimeRemainingColumn(compact=True),
                TextColumn("{task.fields[values]}", markup=False),
                console=self._console,
            )
            self._progress.start()
            self._task = self._progress.add_task("", total=total, values="")
        assert self._task is not None
        text = "  ".join(f"{label} {values[label]}" for label in _IN_BAR if label in values)
        self._progress.update(self._task, completed=step, total=total, values=text)

    def close(self) -> None:
        """Take the bar away."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = self._task = None
