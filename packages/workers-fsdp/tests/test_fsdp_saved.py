"""The weights of a checkpoint without the engine that wrote it."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

from ostinato.workers.core.config import ModelConfig
from ostinato.workers.core.export import export_hf
from ostinato.workers.core.testing.oracle import VOCAB, make_rows, start
from ostinato.workers.fsdp.errors import CheckpointError
from ostinato.workers.fsdp.saved import SavedWeights
from ostinato.workers.fsdp.testing import fsdp

pytestmark = pytest.mark.usefixtures("process_group")


@pytest.mark.parametrize(("name", "head"), [("lm", "lm"), ("tied", "lm"), ("lm", "value")])
def test_saved_weights_are_those_of_the_engine(workspace, tmp_path, name, head):
    driver = start(fsdp(), workspace / name, head=head)
    driver.train(make_rows(2, seed=1))
    driver.engine.save(tmp_path / "saved")
    source = SavedWeights(tmp_path / "saved", ModelConfig(path=str(workspace / name)), head)
    live = driver.engine.weight_source(torch.float32)
    assert source.specs() == live.specs()
    for (name, weight), (other, expected) in zip(source.weights(), live.weights(), strict=True):
        assert name == other
        assert torch.equal(weight, expected), name


@pytest.mark.parametrize("tied", [False, True])
def test_export_of_a_checkpoint_has_the_engine_s_log_probs(workspace, tmp_path, tied):
    from transformers import AutoModelForCausalLM

    model = ModelConfig(path=str(workspace / ("tied" if tied else "lm")))
    driver = start(fsdp(), model.path)
    rows = make_rows(3, seed=1)
    driver.train(rows)
    driver.engine.save(tmp_path / "saved")
    source = SavedWeights(tmp_path / "saved", model, "lm")
    export_hf(source, model, tmp_path / "out", head="lm", writes=True, shard_bytes=20_000, dtype=torch.float32)
    files = sorted(path.name for path in (tmp_path / "out").glob("*.safetensors"))
    assert len(files) > 1
    assert files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert (loaded.lm_head.weight is loaded.model.embed_tokens.weight) == tied
    other = start(fsdp(), tmp_path / "out")
    for ours, theirs in zip(driver.outputs(rows, 2), other.outputs(rows, 2), strict=True):
        assert torch.equal(ours["log_probs"], theirs["log_probs"])


def test_export_of_a_mixture_of_experts_is_what_transformers_reads(tmp_path):
    """In memory the experts are one tensor, in the folder each is its own."""
    from transformers import AutoModelForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=24,
        moe_intermediate_size=8,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        num_experts=4,
        num_experts_per_tok=2,
    )
    torch.manual_seed(0)
    original = Qwen3MoeForCausalLM(config)
    original.save_pretrained(tmp_path / "base")
    model = ModelConfig(path=str(tmp_path / "base"))
    start(fsdp(), tmp_path / "base").engine.save(tmp_path / "saved")
    export_hf(SavedWeights(tmp_path / "saved", model, "lm"), model, tmp_path / "out", head="lm", writes=True)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32).state_dict()
    assert loaded.keys() == original.state_dict().keys()
    assert all(torch.equal(loaded[name], weight) for name, weight in original.state_dict().items())


def test_buffers_that_a_folder_holds_are_saved_given_and_exported(tmp_path):
    """Not parameters, and no function of the config: a router's correction, an activation's constants.

    An export was without them, and what reads it took any value.
    """
    from transformers import ApertusConfig, AutoModelForCausalLM

    sizes = {"num_attention_heads": 2, "num_key_value_heads": 1, "num_hidden_layers": 2}
    torch.manual_seed(0)
    base = AutoModelForCausalLM.from_config(
        ApertusConfig(vocab_size=VOCAB, hidden_size=16, intermediate_size=24, **sizes)
    )
    for name, buffer in base.named_buffers():
        if name.endswith("beta"):
            buffer.fill_(0.3)
    base.save_pretrained(tmp_path / "base")
    model = ModelConfig(path=str(tmp_path / "base"))
    driver, rows = start(fsdp(dtype="bf16"), model.path), make_rows(3, seed=1)
    held = load_file(tmp_path / "base" / "model.safetensors")
    given = dict(driver.engine.weight_source().weights())
    assert given.keys() == held.keys()
    assert {name: tensor.dtype for name, tensor in given.items() if name.endswith(("beta", "eps"))} == {
        name: tensor.dtype for name, tensor in held.items() if name.endswith(("beta", "eps"))
    }
    driver.engine.save(tmp_path / "saved")
    export_hf(SavedWeights(tmp_path / "saved", model, "lm"), model, tmp_path / "out", head="lm", writes=True)
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert found.keys() == held.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in held.items())
    exact, again = start(fsdp(), model.path), start(fsdp(), tmp_path / "out")
    again.engine.load(tmp_path / "saved")
    for ours, theirs in zip(exact.outputs(rows, 2), again.outputs(rows, 2), strict=True):
        assert torch.equal(ours["log_probs"], theirs["log_probs"])


@pytest.mark.parametrize(("name", "head"), [("lm", "lm"), ("tied", "lm"), ("tied", "value")])
def test_saved_weights_of_an_adapter_come_merged(workspace, tmp_path, name, head):
    pytest.importorskip("peft")
    driver = start(fsdp(), workspace / name, head=head, lora_rank=4)
    driver.train(make_rows(2, seed=1))
    driver.engine.save(tmp_path)
    source = SavedWeights(tmp_path, ModelConfig(path=str(workspace / name), lora_rank=4), head)
    live = driver.engine.weight_source(torch.float32)
    assert source.specs() == live.specs()
    for (name, weight), (_, expected) in zip(source.weights(), live.weights(), strict=True):
        assert torch.equal(weight, expected), name


def test_saved_weights_refuse_what_is_no_whole_checkpoint_of_the_model(workspace, tmp_path):
    model = ModelConfig(path=str(workspace / "lm"))
    with pytest.raises(CheckpointError, match="cut off"):
        SavedWeights(tmp_path, model, "lm")
    start(fsdp(), workspace / "tied").engine.save(tmp_path)
    with pytest.raises(CheckpointError, match="another model"):
        SavedWeights(tmp_path, model, "lm")
