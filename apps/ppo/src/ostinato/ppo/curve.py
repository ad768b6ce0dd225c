"""The reward curve of a run as a picture, from its `metrics.jsonl`.

python -m ostinato.ppo.curve RUN_DIR [--out FILE.png]
"""

from __future__ import annotations

import argparse
import json
import logging
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ostinato.ppo.loggers import JSONL

logger = logging.getLogger(__name__)

REWARD = "critic/score/mean"


def read_metrics(path: str | Path) -> dict[int, dict[str, float]]:
    """Read a `metrics.jsonl`.

    Values of lines with the same step are put together; of a value that is there twice the later one counts (a run that
    went on after a checkpoint repeats steps). A last line that was cut off is left out.

    Args:
        path: the file, or the folder that holds it.

    Returns:
        step -> name -> value, in the order of steps; lists are left out.

    Raises:
        FileNotFoundError: there is no such file; the text says how a run writes one.
    """
    file = Path(path).expanduser()
    file = file / JSONL if file.is_dir() else file
    if not file.is_file():
        raise FileNotFoundError(f"there is no {file}: a run writes it with trainer.logger=[console,jsonl]")
    steps: dict[int, dict[str, float]] = {}
    for line in file.read_text(encoding="utf-8").splitlines():
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            continue
        values = steps.setdefault(int(record.pop("step")), {})
        values |= {name: float(value) for name, value in record.items() if not isinstance(value, list)}
    return dict(sorted(steps.items()))


def series(steps: dict[int, dict[str, float]], name: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the steps at which a metric was logged, and its values."""
    found = [(step, values[name]) for step, values in steps.items() if name in values]
    return np.asarray([step for step, _ in found]), np.asarray([value for _, value in found])


def smooth(values: np.ndarray, window: int) -> np.ndarray:
    """Return the mean of each value and up to `window - 1` before it."""
    total = np.cumsum(np.insert(values, 0, 0.0))
    ends = np.arange(1, len(values) + 1)
    starts = np.maximum(ends - window, 0)
    return (total[ends] - total[starts]) / (ends - starts)


def draw(path: str | Path, out: str | Path | None = None, names: Iterable[str] | None = None) -> Path:
    """Draw metrics of a run over its steps.

    Args:
        path: a `metrics.jsonl`, or the folder that holds it.
        out: the PNG to write; `reward.png` beside the file by default.
        names: metrics, one line each; by default the mean score and the core means of validation.

    Returns:
        The picture's path.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file has none of the metrics.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    steps = read_metrics(path)
    logged = sorted({name for values in steps.values() for name in values})
    chosen = [REWARD, *(name for name in logged if name.startswith("val-core/") and "/mean@" in name)]
    chosen = [name for name in (names if names is not None else chosen) if name in logged]
    if not chosen:
        raise ValueError(f"{path} has none of these metrics; it has {', '.join(logged) or 'no metrics'}")
    figure = Figure(figsize=(8, 4.5), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for name in chosen:
        _plot(axes, *series(steps, name), name)
    axes.set_xlabel("step")
    axes.set_ylabel("reward" if names is None else "value")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    folder = Path(path).expanduser()
    target = Path(out).expanduser() if out else (folder if folder.is_dir() else folder.parent) / "reward.png"
    figure.savefig(target)
    return target


def _plot(axes: Any, at: np.ndarray, values: np.ndarray, name: str) -> None:
    """A line; one with many points is drawn smoothed over its faint self."""
    window = max(1, len(values) // 20)
    if window == 1:
        axes.plot(at, values, marker="o", markersize=3, label=name)
        return
    (line,) = axes.plot(at, smooth(values, window), label=f"{name} (mean of {window})")
    axes.plot(at, values, color=line.get_color(), alpha=0.25, linewidth=0.8)


def main(argv: Sequence[str] | None = None) -> None:
    """Run the program."""
    parser = argparse.ArgumentParser(prog="ostinato.ppo.curve", description="the reward curve of a run as a picture")
    parser.add_argument("run", help="the run's folder, or its metrics.jsonl")
    parser.add_argument("--out", help="the PNG to write; reward.png in the run's folder by default")
    parser.add_argument("--metric", action="append", help="a metric to draw in place of the reward; may be repeated")
    options = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    try:
        logger.info("%s", draw(options.run, options.out, options.metric))
    except (OSError, ValueError) as error:
        parser.exit(1, f"{parser.prog}: {error}\n")


if __name__ == "__main__":
    main()
