"""The reward curve of a run, drawn from its metrics file."""

from __future__ import annotations

from pathlib import Path

import pytest

from ostinato.ppo import curve, loggers
from ostinato.ppo.tracking import Tracker
from ostinato.protocol import Metric


def write_run(folder: Path, steps: int) -> None:
    with Tracker(["jsonl"], folder) as tracker:
        for step in range(1, steps + 1):
            metrics = {"critic/score/mean": Metric.mean(step / steps)}
            if step % 5 == 0:
                metrics["val-core/s/reward/mean@1"] = Metric.mean(0.5)
            tracker.report(step, metrics)


@pytest.mark.parametrize("steps", [1, 10, 60])
def test_curve_is_drawn_from_the_file(tmp_path: Path, steps: int):
    write_run(tmp_path, steps)
    picture = curve.draw(tmp_path)
    assert picture == tmp_path / "reward.png"
    assert picture.read_bytes().startswith(b"\x89PNG")
    other = curve.draw(tmp_path / loggers.JSONL, tmp_path / "other.png", ["critic/score/mean"])
    assert other.stat().st_size > 5000


def test_curve_of_a_resumed_run_takes_the_later_value(tmp_path: Path):
    lines = ['{"step": 1, "a": 1}', '{"step": 2, "a": 2, "b": "nan"}', '{"step": 2, "a": 3}', '{"step": 3, "a"']
    (tmp_path / loggers.JSONL).write_text("\n".join(lines))
    steps = curve.read_metrics(tmp_path)
    assert list(steps) == [1, 2]
    assert steps[2]["a"] == 3
    assert curve.series(steps, "a")[1].tolist() == [1, 3]
    assert curve.series(steps, "b")[0].tolist() == [2]


def test_curve_says_what_is_missing(tmp_path: Path):
    with pytest.raises(FileNotFoundError, match=r"trainer\.logger=\[console,jsonl\]"):
        curve.draw(tmp_path)
    (tmp_path / loggers.JSONL).write_text('{"step": 1, "a": 1}\n')
    with pytest.raises(ValueError, match="has none of these metrics; it has a"):
        curve.draw(tmp_path)


def test_smooth_is_the_mean_of_the_last_values():
    import numpy as np

    assert curve.smooth(np.asarray([1.0, 2, 3, 4]), 2).tolist() == [1, 1.5, 2.5, 3.5]
