"""Attention over packed rows for Megatron-Core's own layers.

Megatron-Core's own attention multiplies out every pair of a pack and takes a mask. The kernels of
`ostinato.workers.core.row_attention`, which run in half precision on a GPU, do no work between rows.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from ostinato.workers.core.row_attention import KERNEL_WIDTH, attend_within_rows

_SWITCHES = ("NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN", "NVTE_UNFUSED_ATTN")


@contextmanager
def switches_kept() -> Iterator[None]:
    """Keep the environment from what Megatron-Core writes into it for TransformerEngine's attention.

    It writes `attention_backend` there whichever layers a model has, and refuses the next model of the process that has
    another one.
    """
    before = {name: os.environ.pop(name, None) for name in _SWITCHES}
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def runs_kernel(transformer: Any, device: torch.device) -> bool:
    """Whether a model's rows can run through the kernel.

    Args:
        transformer: Megatron's TransformerConfig. `attention_backend=local` asks for a mask.
        device: where the model runs.
    """
    return (
        device.type == "cuda"
        and transformer.bf16
        and transformer.attention_backend.name in ("auto", "flash")
        and transformer.kv_channels <= KERNEL_WIDTH
        and transformer.kv_channels % 8 == 0
        and transformer.attention_dropout == 0
        and transformer.softmax_type == "vanilla"
        and transformer.window_size is None
        and not transformer.apply_query_key_layer_scaling
    )


class RowAttention(nn.Module):
    """In place of a layer's attention: rows with boundaries go to the kernel, anything else to Megatron's own.

    Args:
        inner: Megatron's own.
    """

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner = inner

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        packed_seq_params: Any = None,
        **others: Any,
    ) -> torch.Tensor:
        """Causal attention inside each row.

        Args:
            query: (T, 1, H, D), all rows of a pack; a padded batch comes as (S, b, H, D).
            key: (T, 1, G, D), H a multiple of G.
            value: (T, 1, G, D).
            attention_mask: for Megatron's own.
            packed_seq_params: where rows begin, and the longest; None: there is a mask.
            others: for Megatron's own.

        Returns:
            (T, 1, H·D).
        """
        if packed_seq_params is None:
            return self.inner(query, key, value, attention_mask, **others)
        out = attend_within_rows(
            query[:, 0],
            key[:, 0],
            value[:, 0],
            packed_seq_params.cu_seqlens_q,
            packed_seq_params.max_seqlen_q,
            scale=self.inner.softmax_scale,
        )
        return out.flatten(1)[:, None]
