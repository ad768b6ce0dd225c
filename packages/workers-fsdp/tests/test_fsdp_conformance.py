from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from ostinato.workers.core.config import ModelConfig
from ostinato.workers.core.testing import conformance
from ostinato.workers.core.testing.lora import ADAPTER, with_model
from ostinato.workers.core.testing.oracle import assert_same_weights, start
from ostinato.workers.core.testing.spawn import spawn
from ostinato.workers.fsdp.saved import SavedWeights
from ostinato.workers.fsdp.testing import fsdp, parity
from ostinato.workers.fsdp.testing.runs import four_ranks, two_ranks


@pytest.fixture
def large(tmp_path):
    """A model whose weights are many times what a process needs besides: 109 MB in float32."""
    config = LlamaConfig(
        vocab_size=2000,
        hidden_size=512,
        intermediate_size=2048,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=4,
        tie_word_embeddings=False,
        dtype="bfloat16",
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    model.to_empty(device="cpu").to(torch.bfloat16).save_pretrained(tmp_path)
    return tmp_path


@pytest.mark.parametrize("check", conformance.CHECKS, ids=lambda check: check.__name__)
@pytest.mark.usefixtures("process_group")
def test_fsdp_one_rank(check, workspace):
    check(fsdp(), workspace)


@pytest.mark.usefixtures("process_group")
def test_fsdp_many_ranks(workspace, large):
    """H-54, H-55, H-56, H-57, H-58, H-29, H-60 at two and four ranks; saved at one, resumed at two replicas;
    saved at two, resumed at one and at four, adapters at one."""
    conformance.save_for_other_world(fsdp(), workspace)
    (workspace / "adapted").mkdir()
    (workspace / "adapted" / "lm").symlink_to(workspace / "lm")
    first, second = spawn(two_ranks, 2, workspace, "cpu", large)
    assert first == second
    assert len(first) == len(conformance.CHECKS) + len(parity.TABLE)
    conformance.load_from_other_world(fsdp(), workspace)
    conformance.load_from_other_world(with_model(fsdp(), **ADAPTER), workspace / "adapted")
    whole = start(fsdp(), workspace / "lm")
    whole.engine.load(workspace / "other-world")
    saved = SavedWeights(workspace / "other-world", ModelConfig(path=str(workspace / "lm")), "lm")
    assert_same_weights(dict(saved.weights()), dict(whole.engine.weight_source(torch.float32).weights()), rtol=0)
    spawn(four_ranks, 4, workspace)
