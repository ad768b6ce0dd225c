"""The modules that are put into Megatron's model: a scalar head, and a rotary embedding for packed rows."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional


class ValueHead(nn.Module):
    """One number a position, in place of the output layer; every tensor-parallel rank holds all of it.

    Args:
        hidden_size: width of the model.
        config: Megatron's TransformerConfig.
    """

    def __init__(self, hidden_size: int, config: Any) -> None:
        super().__init__()
        self.config = config
        device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
        self.weight = nn.Parameter(torch.empty(1, hidden_size, dtype=config.params_dtype, device=device))

    def forward(self, hidden: torch.Tensor, **_: Any) -> tuple[torch.Tensor, None]:
        """Values (…, 1) of hidden states (…, H), with the bias that Megatron's layers return beside their output."""
        return functional.linear(hidden, self.weight), None


class PackedRotary(nn.Module):
    """Megatron's rotary embedding, counted from 0 in each packed row.

    Args:
        inner: Megatron's own.

    Attributes:
        position_ids: (T,) int64 of the micro-batch that is about to run, and its longest row; None: Megatron's own
            count from 0 on.
    """

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner = inner
        self.position_ids: tuple[torch.Tensor, int] | None = None

    def get_rotary_seq_len(self, *args: Any, **kwargs: Any) -> int:
        """How many positions Megatron asks for."""
        return self.inner.get_rotary_seq_len(*args, **kwargs)

    def forward(self, length: int, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Angles (T, 1, 1, head_dim)."""
        if self.position_ids is None:
            return self.inner(length, *args, **kwargs)
        positions, longest = self.position_ids
        return self.inner(longest)[positions]
