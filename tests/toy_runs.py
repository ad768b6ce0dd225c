"""Runs of the app on the toy task: the smallest configuration that goes through every layer."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def toy_overrides(toy: Path, run: Path, **more: Any) -> dict[str, Any]:
    """The smallest run that goes through every layer, as dotted key -> value."""
    return {
        "algorithm.adv_estimator": "grpo",
        "data.train_files": str(toy / "train.parquet"),
        "data.val_files": str(toy / "val.parquet"),
        "data.train_batch_size": 8,
        "data.max_prompt_length": 8,
        "data.max_response_length": 4,
        "data.val_max_samples": 16,
        "actor_rollout_ref.model.path": str(toy / "model"),
        "actor_rollout_ref.actor.ppo_mini_batch_size": 4,
        "actor_rollout_ref.actor.optim.lr": 1e-3,
        "actor_rollout_ref.rollout.name": "hf",
        "actor_rollout_ref.rollout.n": 4,
        "actor_rollout_ref.rollout.dtype": "float32",
        "critic.optim.lr": 1e-3,
        "trainer.device": "cpu",
        "trainer.total_training_steps": 2,
        "trainer.logger": "jsonl",
        "trainer.default_local_dir": str(run),
        **more,
    }


def batches_seen(monkeypatch: Any) -> list[Any]:
    """A list that fills with the batch of each step, with all its columns, as the loops of this process run."""
    from ostinato.ppo import trainer

    seen, original = [], trainer.batch_metrics

    def spy(batch: Any, *args: Any, **kwargs: Any) -> Any:
        seen.append(batch.get())
        return original(batch, *args, **kwargs)

    monkeypatch.setattr(trainer, "batch_metrics", spy)
    return seen


def nested(values: Mapping[str, Any]) -> dict[str, Any]:
    """Dotted keys as nested mappings."""
    out: dict[str, Any] = {}
    for key, value in values.items():
        *path, name = key.split(".")
        section = out
        for part in path:
            section = section.setdefault(part, {})
        section[name] = value
    return out


def arguments(values: Mapping[str, Any]) -> list[str]:
    """Dotted keys as command-line arguments."""
    return [f"{key}={value}" for key, value in values.items()]


def metrics_of(run: Path) -> list[dict[str, Any]]:
    """The lines of a run's metrics file."""
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def untimed(line: Mapping[str, Any]) -> dict[str, Any]:
    """A step's metrics without those that measure the machine."""
    return {name: value for name, value in line.items() if not name.startswith(("timing", "perf/"))}
