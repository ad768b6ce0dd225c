"""The app with vLLM as its engine: `rollout.name` is the whole change."""

from __future__ import annotations

import importlib.util
import shutil

import pytest
import torch
from toy_runs import metrics_of, nested, toy_overrides
from transformers import AutoConfig, AutoModelForCausalLM

from ostinato.ppo.config import PpoConfig
from ostinato.ppo.preflight import check
from ostinato.ppo.run import train

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
]


@pytest.fixture(scope="module")
def model(toy, tmp_path_factory):
    """The toy model with fewer, wider heads: vLLM's attention on a CPU starts at 32 channels a head."""
    folder = shutil.copytree(toy / "model", tmp_path_factory.mktemp("wider") / "model")
    config = AutoConfig.from_pretrained(folder, num_attention_heads=2, num_key_value_heads=1, head_dim=32)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def run(toy, model, folder, **more) -> list[dict]:
    """Two steps, the loop in this process; returns the metrics."""
    values = toy_overrides(toy, folder, **{"actor_rollout_ref.model.path": str(model), **more})
    train(check(PpoConfig.from_mapping(nested(values))).config, emit=lambda event: None)
    return metrics_of(folder)


def test_rollout_name_vllm_is_the_whole_change(toy, model, tmp_path, ray_session):
    """Its samples are the trained policy's at every step, so the weights have arrived; all else is logged alike."""
    lines = run(toy, model, tmp_path / "vllm", **{"actor_rollout_ref.rollout.name": "vllm"})
    assert [line["training/global_step"] for line in lines] == [1, 2]
    assert all(line["training/rollout_probs_diff_max"] < 1e-5 for line in lines)
    assert all(line["actor/grad_norm"] > 0 for line in lines)
    engine_of_its_own = run(toy, model, tmp_path / "hf", **{"trainer.backend": "local"})
    assert {name for name in lines[-1] if not name.startswith(("timing", "perf/"))} == {
        name for name in engine_of_its_own[-1] if not name.startswith(("timing", "perf/"))
    }
