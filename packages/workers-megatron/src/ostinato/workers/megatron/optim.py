"""The global gradient norm, clipping, and the parts of Megatron's optimizer."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist


def parts(optimizer: Any) -> list[Any]:
    """The optimizers of a chain: one for the dense layers, one for the experts."""
    return list(getattr(optimizer, "chained_optimizers", [optimizer]))


def inner(part: Any) -> torch.optim.Optimizer | None:
    """The torch optimizer of a part; None where this rank has none of its parameters."""
    return getattr(part, "optimizer", None)


def gradient_norm(optimizer: Any, device: torch.device) -> float:
    """The l2 norm of the whole model's gradient, every parameter counted once.

    Megatron says which of this rank's gradients are not copies of another's and which ranks to add up.

    Returns:
        The norm; inf or nan where any rank's gradient is not finite.
    """
    total = 0.0
    for part in parts(optimizer):
        norms = [torch.linalg.vector_norm(grad, dtype=torch.float32) for grad in part.get_grads_for_grad_norm()]
        squares = torch.zeros((), dtype=torch.float64, device=device)
        if norms:
            squares = torch.stack([norm.to(device) for norm in norms]).double().square().sum()
        dist.all_reduce(squares, group=part.get_grad_stats_parallel_group())
        total += squares.item()
    return math.sqrt(total) if total >= 0 else math.nan


def scale_gradients(optimizer: Any, factor: float) -> None:
    """Multiply every gradient in place."""
    for part in parts(optimizer):
        for parameter in part.get_parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(factor)
