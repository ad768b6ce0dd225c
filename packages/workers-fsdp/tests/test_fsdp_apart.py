"""Models that cannot tell packed rows apart are found out when they are built."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from ostinato.workers.core.config import ModelConfig
from ostinato.workers.core.testing.oracle import STILL, VOCAB, Oracle, assert_near, make_rows, start
from ostinato.workers.fsdp import engine
from ostinato.workers.fsdp.errors import ModelLoadError
from ostinato.workers.fsdp.testing import fsdp

pytestmark = pytest.mark.usefixtures("process_group")

SIZES = {"vocab_size": VOCAB, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "head_dim": 8}
GPT = {"vocab_size": VOCAB, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32}
EXPERTS = {"intermediate_size": 24, "intermediate_size_mlp": 24, "num_key_value_heads": 1, "num_local_experts": 2}
KINDS = {
    "bloom": {"vocab_size": VOCAB, "hidden_size": 16, "n_layer": 2, "n_head": 2},
    "lfm2": {**SIZES, "num_key_value_heads": 1, "block_ff_dim": 24, "layer_types": ["conv", "full_attention"]},
    "llama4_text": {**SIZES, **EXPERTS, "attention_chunk_size": 64},
    "gpt2": GPT,
    "gpt_oss": {**SIZES, **EXPERTS, "num_experts_per_tok": 1},
}
"""A bias by distance, a convolution over tokens, a mask in chunks, learned positions, sinks without `sdpa`."""


@pytest.fixture(scope="module", params=KINDS)
def kind(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(request.param, **KINDS[request.param]))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(4)  # far from uniform
    model.save_pretrained(folder)
    return request.param, folder


def test_a_model_whose_packed_rows_see_each_other_is_refused_and_runs_padded(kind):
    """They gave numbers like any others."""
    name, folder = kind
    rows = make_rows(5, seed=3)
    oracle = Oracle(folder, "lm", STILL, torch.device("cpu"))
    expected = oracle.loss(rows), oracle.step().grad_norm
    packs = name == "gpt2"
    if not packs:
        with pytest.raises(ModelLoadError, match=r"does not keep packed rows apart: .*model\.use_remove_padding=False"):
            start(fsdp(), folder)
        with pytest.raises(ModelLoadError, match="does not keep packed rows apart"):
            fsdp()(head="lm", model=ModelConfig(path=str(folder)), trainable=False).build()
    for padding in (True, False) if packs else (False,):
        loss, stats = start(fsdp(), folder, optim=STILL, use_remove_padding=padding).train(rows, 3)
        assert_near("loss", loss, expected[0])
        assert_near("gradient norm", stats.grad_norm, expected[1], rtol=1e-5)


def test_rows_of_a_family_that_is_known_are_not_tried(workspace, monkeypatch):
    tried = []
    monkeypatch.setattr(engine, "check_apart", lambda *arguments: tried.append(arguments))
    for options in ({}, {"override_config": {"attn_implementation": "sdpa"}}, {"use_remove_padding": False}):
        start(fsdp(), workspace / "lm", **options)
    assert not tried
    start(fsdp(), workspace / "lm", override_config={"attn_implementation": "eager"})
    assert len(tried) == 1
