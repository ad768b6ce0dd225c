"""A tiny mixture of experts and a tiny Qwen3, as Hugging Face folders."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

VOCAB = 97
"""Odd, so that two tensor-parallel ranks need a row of padding."""


def _write(model_type: Any, config: Any, path: Path, seed: int) -> Path:
    generator = torch.Generator().manual_seed(seed)
    model = model_type(config)
    with torch.no_grad():
        for parameter in model.parameters():
            # Larger than a usual start, so that logits, routing and norms matter.
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(0.2 * noise if parameter.dim() > 1 else 1 + 0.2 * noise)
    model.save_pretrained(path)
    return path


def _sizes(tied: bool) -> dict[str, Any]:
    return {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 64,
        "tie_word_embeddings": tied,
        "pad_token_id": 0,
    }


def tiny_qwen3(path: Path, *, tied: bool = True, num_layers: int = 2, seed: int = 3) -> Path:
    """Write a random Qwen3 with normed queries and keys."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(**{**_sizes(tied), "num_hidden_layers": num_layers})
    return _write(Qwen3ForCausalLM, config, path, seed)


def tiny_mixture(path: Path, *, num_layers: int = 2, seed: int = 4) -> Path:
    """Write a random Qwen3-MoE: four experts, two a token, the last layer dense."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    sizes = {**_sizes(False), "num_hidden_layers": num_layers}
    config = Qwen3MoeConfig(
        **sizes,
        moe_intermediate_size=16,
        num_experts=4,
        num_experts_per_tok=2,
        decoder_sparse_step=1,
        mlp_only_layers=[num_layers - 1],
        norm_topk_prob=True,
    )
    return _write(Qwen3MoeForCausalLM, config, path, seed)
