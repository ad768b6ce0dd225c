from __future__ import annotations

import importlib.util
import os
import pickle

import pytest
import torch
from safetensors.torch import save_file

from ostinato.workers.core.config import ModelConfig
from ostinato.workers.core.testing.oracle import make_rows, start
from ostinato.workers.megatron import MegatronConfig, MegatronEngine
from ostinato.workers.megatron.errors import (
    DeviceError,
    EngineStateError,
    LayoutConflictError,
    MegatronConfigError,
    ModelLoadError,
    TransformerEngineMissingError,
)
from ostinato.workers.megatron.folder import Folder
from ostinato.workers.megatron.testing import cpu
from ostinato.workers.megatron.testing.runs import megatron

pytestmark = pytest.mark.usefixtures("megatron_on_cpu")


def engine(folder, *, head="lm", trainable=False, model=None, **config) -> MegatronEngine:
    settings = ModelConfig(path=str(folder), **(model or {}))
    return MegatronEngine(head=head, model=settings, engine=MegatronConfig(**config), trainable=trainable)


def test_megatron_on_a_cpu_is_refused_with_what_to_do(megatron_workspace):
    cpu.uninstall()
    with pytest.raises(DeviceError, match="strategy=fsdp"):
        engine(megatron_workspace / "lm").build()


@pytest.mark.skipif(importlib.util.find_spec("transformer_engine") is not None, reason="TransformerEngine is there")
@pytest.mark.parametrize(
    ("config", "error", "text"),
    [
        (
            {"override_transformer_config": {"transformer_impl": "transformer_engine"}},
            TransformerEngineMissingError,
            "transformer_engine is not installed",
        ),
        ({"tensor_model_parallel_size": 2}, MegatronConfigError, r"do not divide 1; take one of \[1\]"),
        (
            {"override_transformer_config": {"recompute_granularty": "full"}},
            MegatronConfigError,
            "recompute_granularity",
        ),
        ({"override_ddp_config": {"overlap_grad_reduce": True}}, MegatronConfigError, "is fixed"),
        ({"override_ddp_config": {"use_distributed_optimizer": False}}, MegatronConfigError, "use megatron.use_distri"),
        ({"override_ddp_config": {"buckets": 1}}, MegatronConfigError, "did you mean num_buckets"),
        ({"override_ddp_config": {"num_buckets": 0}}, MegatronConfigError, "refuses it .AssertionError: num_buckets"),
        (
            {"override_transformer_config": {"attention_backend": "flesh"}},
            MegatronConfigError,
            "attention_backend: expected one of flash, .*, got 'flesh'",
        ),
        (
            {"override_transformer_config": {"attention_backend": None}},
            MegatronConfigError,
            "attention_backend: expected one of flash, .*, got None",
        ),
        (
            {"override_transformer_config": {"recompute_granularity": "some"}},
            MegatronConfigError,
            "refuses it .ValueError: .*some must be .*override_transformer_config is {'recompute_gran",
        ),
        (
            {"override_transformer_config": {"num_layers": "two"}},
            MegatronConfigError,
            "refuses it .TypeError: .*override_transformer_config is {'num_layers",
        ),
    ],
)
def test_megatron_build_refuses_what_cannot_work(config, error, text, megatron_workspace):
    with pytest.raises(error, match=text):
        engine(megatron_workspace / "lm", trainable=True, **config).build()


@pytest.mark.skipif(importlib.util.find_spec("transformer_engine") is not None, reason="TransformerEngine is there")
def test_megatron_parallelism_that_needs_transformer_engine_says_so():
    from ostinato.workers.megatron.transformer import uses_transformer_engine

    for config in ({"context_parallel_size": 2}, {"sequence_parallel": True, "tensor_model_parallel_size": 2}):
        with pytest.raises(
            TransformerEngineMissingError, match="needs TransformerEngine, whose layers are not installed"
        ):
            uses_transformer_engine(MegatronConfig(**config))


@pytest.mark.skipif(importlib.util.find_spec("transformer_engine") is not None, reason="TransformerEngine is there")
def test_megatron_transformer_engine_that_does_not_fit_says_so(tmp_path, monkeypatch):
    from ostinato.workers.megatron.transformer import uses_transformer_engine

    (tmp_path / "transformer_engine").mkdir()
    (tmp_path / "transformer_engine" / "__init__.py").write_text("raise OSError('undefined symbol')")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(TransformerEngineMissingError, match=r"OSError: undefined symbol.*transformer_impl to local"):
        uses_transformer_engine(MegatronConfig())
    settings = {"transformer_impl": "local"}
    assert not uses_transformer_engine(MegatronConfig(override_transformer_config=settings))


def test_megatron_has_one_layout_a_process(megatron_workspace):
    engine(megatron_workspace / "lm").build()
    with pytest.raises(LayoutConflictError, match="expert_tensor_parallel_size"):
        engine(megatron_workspace / "lm", expert_tensor_parallel_size=1).build()


def test_megatron_layers_of_its_own_leave_the_environment_alone(megatron_workspace, monkeypatch):
    """Megatron-Core writes `attention_backend` there and refuses a second model of the process with another one."""
    monkeypatch.setenv("NVTE_FLASH_ATTN", "0")
    monkeypatch.delenv("NVTE_FUSED_ATTN", raising=False)
    for backend in ("auto", "local"):
        settings = {"transformer_impl": "local", "attention_backend": backend}
        engine(megatron_workspace / "lm", override_transformer_config=settings).build()
    assert (os.environ["NVTE_FLASH_ATTN"], os.environ.get("NVTE_FUSED_ATTN")) == ("0", None)


def test_megatron_refuses_calls_out_of_order(megatron_workspace):
    frozen = engine(megatron_workspace / "lm")
    with pytest.raises(EngineStateError, match="not built"):
        frozen.forward([], lambda *_: None)
    frozen.build()
    with pytest.raises(EngineStateError, match="frozen"):
        frozen.optimizer_step()
    frozen.offload()
    with pytest.raises(EngineStateError, match="host memory"):
        frozen.forward([], lambda *_: None)
    with pytest.raises(MegatronConfigError, match=r"model\.lora_rank: 4, but"):
        engine(megatron_workspace / "lm", model={"lora_rank": 4}).build()
    with pytest.raises(ModelLoadError, match="expected a trained head"):
        engine(megatron_workspace / "lm", head="value").build()


INDEX, SHARD = "model.safetensors.index.json", "model-00001-of-00002.safetensors"


@pytest.mark.parametrize(
    ("files", "text"),
    [
        ({INDEX: "{}"}, f"{INDEX}: expected a `weight_map`"),
        ({INDEX: f'{{"weight_map": {{"a": "{SHARD}"}}}}'}, f"names .*/{SHARD}, which is not there"),
        ({INDEX: '{"weight_map": {"a": "one.safetensors"}}'}, "one.safetensors cannot be read .SafetensorError"),
        ({"two.safetensors": "cut"}, "two.safetensors cannot be read .SafetensorError"),
    ],
)
def test_megatron_folder_that_is_not_whole_is_named_by_its_file(files, text, tmp_path):
    save_file({"b": torch.ones(2)}, tmp_path / "one.safetensors")
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    with pytest.raises(ModelLoadError, match=text) as caught:
        Folder(str(tmp_path)).read("a", (2,))
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_megatron_offload_frees_parameters_optimizer_and_gradients(megatron_workspace):
    """H-56; weights stream from host memory as well."""
    driver = start(megatron(), megatron_workspace / "tied")
    driver.train(make_rows(4, seed=1))
    before = driver.state()
    driver.engine.offload()
    parameters = [p for chunk in driver.engine._built.chunks for p in chunk.parameters()]
    adam = driver.engine._optimizer.chained_optimizers[0].optimizer
    gradients = [buffer.grad_data for chunk in driver.engine._built.chunks for buffer in chunk.buffers]
    moments = [state["exp_avg"] for state in adam.state.values()]
    assert {tensor.untyped_storage().nbytes() for tensor in [*parameters, *gradients, *moments]} == {0}
    after = driver.state()
    assert all(torch.equal(after[name], before[name]) for name in before)
    driver.engine.onload()
    assert driver.train(make_rows(4, seed=1))[1].grad_norm > 0


def test_megatron_bf16_is_near_float32(megatron_workspace):
    """bf16 products with float32 weights in the optimizer: near the float32 numbers, weights are handed on in bf16."""
    exact, half = start(megatron(), megatron_workspace / "lm"), start(megatron(dtype="bf16"), megatron_workspace / "lm")
    rows = make_rows(4, seed=2)
    expected, got = exact.outputs(rows, 4)[0], half.outputs(rows, 4)[0]
    assert got["log_probs"].dtype == torch.float32
    assert (got["log_probs"] - expected["log_probs"]).abs().max() < 0.2
    assert half.engine.weight_source().specs()["lm_head.weight"].dtype == torch.bfloat16
    assert half.train(rows)[1].grad_norm == pytest.approx(exact.train(rows)[1].grad_norm, rel=0.1)
