from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

from ostinato.workers.core.config import ModelConfig
from ostinato.workers.core.testing.oracle import STILL, make_rows, start
from ostinato.workers.fsdp import FsdpEngine
from ostinato.workers.fsdp.testing import fsdp

pytestmark = pytest.mark.usefixtures("process_group")


@pytest.fixture(scope="module")
def mixture(tmp_path_factory):
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    folder = tmp_path_factory.mktemp("mixture")
    config = Qwen3MoeConfig(
        vocab_size=96,
        hidden_size=16,
        intermediate_size=16,
        moe_intermediate_size=8,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=8,
        num_experts=4,
        num_experts_per_tok=2,
        decoder_sparse_step=1,
        max_position_embeddings=64,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    Qwen3MoeForCausalLM(config).save_pretrained(folder)
    return folder


def test_weights_of_a_mixture_come_as_its_folder_has_them(mixture):
    """transformers keeps all experts in one tensor; the folder, and every rollout engine, has them one by one."""
    engine = FsdpEngine(head="lm", model=ModelConfig(path=str(mixture)), trainable=False)
    engine.build()
    folder = load_file(mixture / "model.safetensors")
    source = engine.weight_source()
    assert {name: spec.shape for name, spec in source.specs().items()} == {
        name: tuple(tensor.shape) for name, tensor in folder.items()
    }
    seen = []
    for name, tensor in source.weights():
        torch.testing.assert_close(tensor, folder[name], rtol=0, atol=0)
        seen.append(name)
    assert seen == list(source.specs())


def test_mixture_trains_with_empty_micro_batches(mixture):
    """Experts that no token reached still take part in every collective."""
    driver = start(fsdp(), mixture, optim=STILL)
    rows = make_rows(3, seed=1)
    loss = driver.accumulate(rows, 1, extra=1)
    stats = driver.engine.optimizer_step()
    again, same = driver.train(rows, 3)
    assert again == pytest.approx(loss, rel=1e-5)
    assert same.grad_norm == pytest.approx(stats.grad_norm, rel=1e-4)


def test_weights_are_cast_before_they_are_gathered(workspace):
    engine = FsdpEngine(head="lm", model=ModelConfig(path=str(workspace / "lm")), trainable=False)
    engine.build()
    source = engine.weight_source(torch.bfloat16)
    exact = dict(engine.weight_source().weights())
    assert {spec.dtype for spec in source.specs().values()} == {torch.bfloat16}
    for name, tensor in source.weights():
        torch.testing.assert_close(tensor, exact[name].to(torch.bfloat16), rtol=0, atol=0)


def test_weights_given_are_copies(workspace):
    """What a rollout engine does with a tensor must not reach the model, at one rank too."""
    driver = start(fsdp(), workspace / "lm")
    before = driver.state()
    for _, tensor in driver.engine.weight_source().weights():
        tensor.zero_()
    after = driver.state()
    assert all(torch.equal(after[name], before[name]) for name in before)
