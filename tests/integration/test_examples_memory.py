"""The memory timeline: a run logs it phase by phase, and the example draws it."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path

import pytest
import torch

from ostinato.controller import LocalBackend, WorkerSpec
from ostinato.protocol import DataProto
from ostinato.rollout import RolloutConfig
from ostinato.rollout.reshard import PHASES
from ostinato.rollout.testing import make_prompts
from ostinato.workers.core import ActorConfig, ActorRolloutRefConfig, ActorRolloutRefWorker, ModelConfig, OptimConfig
from ostinato.workers.core.testing import tiny_causal_lm

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "memory_timeline.py"
PREFIX = "perf/memory_used_gb/"


@pytest.fixture(scope="module")
def metrics(tmp_path_factory) -> dict[str, float]:
    """What generation and one update of a tiny actor log."""
    config = ActorRolloutRefConfig(
        model=ModelConfig(path=str(tiny_causal_lm(tmp_path_factory.mktemp("model")))),
        actor=ActorConfig(optim=OptimConfig(lr=1e-3)),
        rollout=RolloutConfig(name="hf", dtype="float32", prompt_length=4, response_length=4),
    )
    backend = LocalBackend()
    engine = "ostinato.workers.core.testing:PlainEngine"
    actor = backend.launch_one("actor", WorkerSpec(ActorRolloutRefWorker, config, role="actor_rollout", engine=engine))
    actor.init_model()
    batch = actor.generate_sequences(make_prompts([[5, 6, 7], [8, 9]], width=4))
    generated = dict(batch.metrics)
    batch = batch.union(actor.compute_log_prob(batch))
    assert batch.batch is not None
    mask = batch.batch["response_mask"]
    batch = batch.union(DataProto.from_dict({"advantages": torch.tensor([[1.0], [-1.0]]) * mask}))
    updated = actor.update_actor(batch).metrics
    backend.shutdown()
    return {name: metric.value for name, metric in {**generated, **updated}.items()}


def test_memory_timeline_has_every_phase_in_order(metrics):
    """wake weights, sync, free the copy, wake the cache, generate, free it, training state back."""
    phases = [name.removeprefix(PREFIX) for name in metrics if name.startswith(PREFIX)]
    assert phases == [*PHASES, "update_actor"]
    assert all(0.05 < metrics[PREFIX + phase] < 64 for phase in phases)


def test_memory_timeline_example_draws_a_run(metrics, tmp_path, monkeypatch, capsys):
    lines = [{"training/global_step": step, **metrics} for step in (1, 2, 3)]
    lines.append({"training/global_step": 3, "val-core/x": 1.0})
    (tmp_path / "metrics.jsonl").write_text("\n".join(json.dumps(line) for line in lines))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [EXAMPLE.name, "metrics.jsonl"])
    script = runpy.run_path(str(EXAMPLE))
    assert script["PHASES"] == (*PHASES, "update_actor")
    script["main"]()
    printed = capsys.readouterr().out
    assert "3 steps" in printed
    assert all(any(line.startswith(f"{phase} ") for line in printed.splitlines()) for phase in script["PHASES"])
    assert (tmp_path / "memory_timeline.png").stat().st_size > 5_000


def test_memory_timeline_example_says_what_is_missing(tmp_path, monkeypatch):
    (tmp_path / "metrics.jsonl").write_text('{"training/global_step": 1}\n')
    monkeypatch.setattr(sys, "argv", [EXAMPLE.name, str(tmp_path / "metrics.jsonl")])
    with pytest.raises(SystemExit, match="no line has perf/memory_used_gb"):
        runpy.run_path(str(EXAMPLE))["main"]()
