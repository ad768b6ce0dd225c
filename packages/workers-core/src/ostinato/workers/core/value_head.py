"""How a value head that no folder holds begins: alike for every engine."""

from __future__ import annotations

import torch

SEED = 20260
STD = 1e-3


def fresh_value_head(hidden_size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Weights (1, hidden_size) near 0 in host memory, the same in every run; drawn in float32 and cast."""
    generator = torch.Generator().manual_seed(SEED)
    return torch.empty(1, hidden_size).normal_(0.0, STD, generator=generator).to(dtype)
