"""Draw how much memory is in use at the end of each phase of a step, from a run's metrics.

    python -m ostinato.ppo ... trainer.logger=jsonl trainer.default_local_dir=RUN
    python examples/memory_timeline.py RUN/metrics.jsonl [--first 2] [--out memory_timeline.png]

On a GPU the readings are the device's, training and rollout engines together, on the fullest rank; on a CPU they are
the worker process's own (an engine in processes of its own is not in them). The phases of a step, in their order:

    wake_weights    memory for the engine's weights is there
    sync            the new weights are in; two buckets on their way may still count
    park            the copy is gone, and so is training state that is offloaded
    wake_kv_cache   memory for keys and values is there
    generate        the answers are there
    sleep           the engine has given its memory back
    update_actor    training state is on the device, the last mini-batch is done
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

PREFIX = "perf/memory_used_gb/"
PHASES = ("wake_weights", "sync", "park", "wake_kv_cache", "generate", "sleep", "update_actor")


def read_steps(path: Path) -> list[dict[str, float]]:
    """The readings of each step that has any, by phase."""
    steps = []
    for line in path.read_text(encoding="utf-8").splitlines():
        metrics = json.loads(line)
        used = {phase: float(metrics[PREFIX + phase]) for phase in PHASES if PREFIX + phase in metrics}
        if used:
            steps.append(used)
    return steps


def print_table(steps: list[dict[str, float]]) -> None:
    """One line a phase: smallest, mean and largest reading over the steps, and the change from the phase before."""
    print(f"{'phase':16s}{'least':>10s}{'mean':>10s}{'most':>10s}{'change':>10s}   GiB, {len(steps)} steps")
    before = None
    for phase in PHASES:
        values = [step[phase] for step in steps if phase in step]
        if not values:
            continue
        mean = sum(values) / len(values)
        change = "" if before is None else f"{mean - before:+.3f}"
        print(f"{phase:16s}{min(values):10.3f}{mean:10.3f}{max(values):10.3f}{change:>10s}")
        before = mean


def draw(path: Path, steps: list[dict[str, float]]) -> None:
    """A staircase over the phases of all steps, one behind the other."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    readings = [(phase, step[phase]) for step in steps for phase in PHASES if phase in step]
    figure = Figure(figsize=(max(6.0, 0.45 * len(readings)), 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    values = [value for _, value in readings]
    axes.stairs(values, fill=True, alpha=0.3)
    axes.stairs(values)
    axes.set_xticks([place + 0.5 for place in range(len(readings))], [phase for phase, _ in readings], rotation=90)
    edge = 0
    for number, step in enumerate(steps):
        axes.axvline(edge, color="0.7", linewidth=0.8)
        axes.text(edge + 0.1, max(values), f"step {number + 1}", va="bottom", fontsize="small")
        edge += len(step)
    axes.set(ylabel="memory in use, GiB", ylim=(0, max(values) * 1.1), xlim=(0, len(readings)))
    figure.savefig(path, dpi=120)


def main() -> None:
    """Read, print, draw."""
    parser = argparse.ArgumentParser(description="Draw how much memory is in use at the end of each phase of a step.")
    parser.add_argument("metrics", type=Path, help="metrics.jsonl of a run")
    parser.add_argument("--first", type=int, default=2, help="how many steps to draw")
    parser.add_argument("--out", type=Path, default=Path("memory_timeline.png"))
    options = parser.parse_args()
    steps = read_steps(options.metrics)
    if not steps:
        sys.exit(f"{options.metrics}: no line has {PREFIX}*; was it a run that generates, with trainer.logger=jsonl?")
    print_table(steps)
    draw(options.out, steps[: options.first])
    print(f"\nplot: {options.out}")


if __name__ == "__main__":
    main()
