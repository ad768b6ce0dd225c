from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from ostinato.workers.core.config import ModelConfig
from ostinato.workers.megatron.architecture import read_architecture
from ostinato.workers.megatron.errors import ModelLoadError
from ostinato.workers.megatron.mapping import merge, padded_vocab, split, table


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("name", ["lm", "tied", "qwen3", "mixture"])
def test_megatron_mapping_is_undone_by_its_reverse(name, size, megatron_workspace):
    """Every part of a model: the folder's tensors, cut for each rank and merged again, are themselves."""
    a = read_architecture(ModelConfig(path=str(megatron_workspace / name)), "lm")
    for part in table(a, "lm"):
        tensors = [torch.randn(shape) for _, shape in part.hf]
        ranks = 1 if part.kind == "copy" else size
        pieces = [split(part, tensors, a, rank, ranks) for rank in range(ranks)]
        for again, tensor in zip(merge(part, pieces, a), tensors, strict=True):
            assert torch.equal(again, tensor), part.name


def test_megatron_mapping_keeps_heads_and_halves_together(megatron_workspace):
    """Fused qkv goes head by head, gate and up are both dealt, padding of the vocabulary is rows of 0 at the end."""
    a = read_architecture(ModelConfig(path=str(megatron_workspace / "qwen3")), "lm")
    parts = {part.name.partition("layers.0.")[2] or part.name: part for part in table(a, "lm")}
    rows = a.num_heads * a.head_dim
    q, k, v = torch.arange(rows), 1000 + torch.arange(rows // 2), 2000 + torch.arange(rows // 2)
    qkv = replace(parts["self_attention.linear_qkv.weight"], hf=(("q", ()), ("k", ()), ("v", ())))
    second = split(qkv, [q, k, v], a, 1, 2)
    assert second.tolist() == [*q[rows // 2 :].tolist(), *k[rows // 4 :].tolist(), *v[rows // 4 :].tolist()]
    gate, up = torch.arange(4), 10 + torch.arange(4)
    assert split(parts["mlp.linear_fc1.weight"], [gate, up], a, 1, 2).tolist() == [2, 3, 12, 13]
    assert padded_vocab(a, 2) == a.vocab_size + 1
    embedding = split(parts["embedding.word_embeddings.weight"], [torch.ones(a.vocab_size, 2)], a, 1, 2)
    assert embedding[-1].tolist() == [0, 0]
    assert embedding[-2].tolist() == [1, 1]


@pytest.mark.parametrize(
    ("overrides", "text"),
    [
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}}, "rotary scaling"),
        ({"attention_bias": True}, "a bias in its projections"),
    ],
)
def test_megatron_mapping_refuses_what_it_does_not_map(overrides, text, megatron_workspace):
    model = ModelConfig(path=str(megatron_workspace / "lm"), override_config=overrides)
    with pytest.raises(ModelLoadError, match=text):
        read_architecture(model, "lm")
