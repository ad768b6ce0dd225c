"""Megatron-Core beside what it stands in for: the FSDP engine's numbers, weights of the rollouts, runs of the app."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from functools import partial

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from toy_runs import metrics_of, nested, toy_overrides

from ostinato.protocol import DataProto
from ostinato.rollout import RolloutConfig, SamplingParams, build_rollout
from ostinato.rollout.reshard import reshard
from ostinato.workers.core.testing import oracle, tiny_causal_lm
from ostinato.workers.core.testing.oracle import make_rows, start
from ostinato.workers.fsdp import FsdpConfig, FsdpEngine

pytestmark = pytest.mark.skipif(importlib.util.find_spec("megatron") is None, reason="Megatron-Core is not installed")


@pytest.fixture
def on_cpu(tmp_path):
    """Megatron-Core on the CPU and a process group of one rank."""
    from ostinato.workers.megatron import parallel
    from ostinato.workers.megatron.testing import cpu

    cpu.install()
    made = not dist.is_initialized()
    if made:
        dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield
    if parallel.made_for() is not None:
        parallel.shutdown()
    if made and "vllm" not in sys.modules:  # vLLM keeps the group that it has met first
        dist.destroy_process_group()
    cpu.uninstall()


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    from ostinato.workers.megatron.testing import runs

    folder = tmp_path_factory.mktemp("models")
    oracle.prepare(folder)
    runs.prepare(folder)
    tiny_causal_lm(folder / "policy", hidden_size=128, scale=0.1)  # vLLM's attention on a CPU wants heads of 32
    return folder


def test_megatron_is_fsdp(on_cpu, models, tmp_path):
    """H-59: same specs, log-probabilities, loss and gradient norm for 1, 2 and 4 micro-batches, weights of 3 steps."""
    from ostinato.workers.megatron.testing.runs import megatron

    fsdp = partial(FsdpEngine, engine=FsdpConfig(dtype="fp32"))
    for name, head in (("lm", "lm"), ("tied", "lm"), ("value", "value"), ("lm", "value"), ("qwen3", "lm")):
        first, second = (start(make, models / name, head=head) for make in (fsdp, megatron()))
        assert first.engine.weight_source().specs() == second.engine.weight_source().specs()
        for expected, got in zip(first.outputs(make_rows(6), 3), second.outputs(make_rows(6), 3), strict=True):
            for key, value in expected.items():
                torch.testing.assert_close(got[key], value, rtol=0, atol=1e-5)
        for step, size in enumerate((8, 4, 2)):
            loss, stats = first.train(make_rows(8, seed=step), size)
            other_loss, other = second.train(make_rows(8, seed=step), size)
            assert other_loss == pytest.approx(loss, rel=1e-5)
            assert other.grad_norm == pytest.approx(stats.grad_norm, rel=1e-5)
        oracle.assert_same_weights(second.state(), first.state(), rtol=1e-5)


@pytest.mark.parametrize("name", ["hf", pytest.param("vllm", marks=pytest.mark.slow)])
def test_megatron_feeds_rollouts(name, on_cpu, models):
    """`reshard` hands Megatron's weights to an engine; log-probabilities agree before a training step and after."""
    if name == "vllm" and importlib.util.find_spec("vllm") is None:
        pytest.skip("vLLM is not installed")
    from ostinato.workers.megatron.testing.runs import megatron

    driver = start(megatron(), models / "policy")
    config = RolloutConfig(
        name=name, dtype="float32", prompt_length=4, response_length=6, gpu_memory_utilization=0.1, enforce_eager=True
    )
    rollout = build_rollout(config, model_path=str(models / "policy"), device="cpu", dp_rank=0, dp_size=1)
    ids = torch.arange(8).reshape(2, 4) + 5
    prompts = DataProto.from_dict(
        {"input_ids": ids, "attention_mask": torch.ones_like(ids), "position_ids": torch.arange(4).repeat(2, 1)},
        {"uid": ["a", "b"], "rollout_id": [0, 1]},
    )
    sampling = SamplingParams(temperature=oracle.TEMPERATURE, max_tokens=6, seed=1, ignore_eos=True)
    try:
        for _ in range(2):
            driver.engine.offload()
            with reshard(driver.engine.weight_source(), rollout, check=True):
                rows = rollout.generate(prompts, sampling)
            driver.engine.onload()
            rows = rows.select(["input_ids", "attention_mask", "response_mask", "rollout_log_probs"])
            got = driver.engine.forward(driver.packed(rows, 2), lambda out, packed: packed.to_response(out.log_probs))[
                0
            ]
            expected = rows.batch["rollout_log_probs"]
            torch.testing.assert_close(got, expected, rtol=0, atol=2e-4)
            driver.train(make_rows(4, seed=3))
    finally:
        rollout.close()


def test_megatron_export_is_read_by_transformers(on_cpu, models, tmp_path):
    """A trained model, exported and read by transformers, has Megatron's log-probabilities."""
    from ostinato.workers.core.config import ModelConfig
    from ostinato.workers.core.export import export_hf
    from ostinato.workers.megatron.testing.runs import megatron

    for name in ("tied", "mixture"):
        driver = start(megatron(), models / name)
        driver.train(make_rows(4, seed=1))
        out = tmp_path / name
        export_hf(driver.engine.weight_source(), ModelConfig(path=str(models / name)), out, head="lm", writes=True)
        log_probs, _ = oracle.Oracle(out, "lm", oracle.STILL, torch.device("cpu")).all_outputs(make_rows(4, seed=2))
        got = torch.cat([entry["log_probs"] for entry in driver.outputs(make_rows(4, seed=2), 4)])
        torch.testing.assert_close(got, log_probs, rtol=0, atol=1e-5)


@pytest.mark.e2e
def test_megatron_runs_of_the_app(toy, tmp_path):
    """GRPO, and PPO with both roles: `strategy` is the one change, and step 1 is the FSDP engine's to 1e-3.

    An export of PPO's checkpoint, written in the background, is what the run exported.
    """
    from ostinato.ppo.cli import main
    from ostinato.ppo.config import PpoConfig
    from ostinato.ppo.preflight import check
    from ostinato.ppo.run import run

    base = {"trainer.backend": "local", "actor_rollout_ref.actor.use_kl_loss": True}
    trial = {"actor_rollout_ref.actor.strategy": "megatron", "actor_rollout_ref.model.external_lib": "cpu_trial"}
    ppo = {"algorithm.adv_estimator": "gae", "critic.strategy": "megatron"}
    ppo |= {"trainer.save_freq": 2, "trainer.save_hf_model": True}
    ppo |= {"actor_rollout_ref.actor.checkpoint.async_save": True, "critic.checkpoint.async_save": True}
    runs = {"fsdp": {}, "grpo": trial, "ppo": trial | ppo}
    try:
        for name, more in runs.items():
            values = toy_overrides(toy, tmp_path / name, **base, **more)
            run(check(PpoConfig.from_mapping(nested(values))).config, lambda event: None)
    finally:
        sys.modules.pop("cpu_trial", None)
        importlib.import_module("ostinato.workers.megatron.testing.cpu").uninstall()
    first, same = metrics_of(tmp_path / "fsdp")[0], metrics_of(tmp_path / "grpo")[0]
    for key in ("actor/grad_norm", "actor/kl_loss", "actor/entropy", "actor/pg_loss"):
        assert same[key] == pytest.approx(first[key], rel=1e-3)
    assert len(metrics_of(tmp_path / "ppo")) == 2
    assert metrics_of(tmp_path / "ppo")[1]["critic/vf_loss"] > 0
    checkpoint = tmp_path / "ppo" / "global_step_2"
    for role in ("actor", "critic"):
        assert main(["export", str(checkpoint), "--role", role, "--to", str(tmp_path / role)]) == 0
    exported = load_file(checkpoint / "huggingface" / "model.safetensors")
    oracle.assert_same_weights(load_file(tmp_path / "actor" / "model.safetensors"), exported, rtol=0)
    assert load_file(tmp_path / "critic" / "model.safetensors")["score.weight"].shape[0] == 1


@pytest.mark.e2e
@pytest.mark.slow
def test_megatron_dispatch_follows_its_mesh(toy, tmp_path, ray_session):
    """Two stages of a pipeline are one data-parallel rank: both get the same rows, the last one answers.

    Both sample, so rows are dealt over two ranks for the rollout and over one for training; the numbers of the first
    step are those of one process.
    """
    from ostinato.ppo.config import PpoConfig
    from ostinato.ppo.preflight import check
    from ostinato.ppo.run import train

    runs = {
        "alone": {"trainer.backend": "local", "trainer.total_training_steps": 1},
        "staged": {
            "trainer.n_gpus_per_node": 2,
            "actor_rollout_ref.actor.strategy": "megatron",
            "actor_rollout_ref.actor.megatron.pipeline_model_parallel_size": 2,
            "actor_rollout_ref.model.external_lib": "cpu_trial",
        },
    }
    try:
        for name, more in runs.items():
            values = toy_overrides(toy, tmp_path / name, **more)
            train(check(PpoConfig.from_mapping(nested(values))).config, emit=lambda event: None)
    finally:
        sys.modules.pop("cpu_trial", None)
        importlib.import_module("ostinato.workers.megatron.testing.cpu").uninstall()
    expected, got = metrics_of(tmp_path / "alone")[0], metrics_of(tmp_path / "staged")
    for key in ("actor/grad_norm", "actor/entropy", "critic/score/mean", "response_length/mean"):
        assert got[0][key] == pytest.approx(expected[key], rel=1e-3), key
    assert len(got) == 2
