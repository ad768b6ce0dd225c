"""The optimizer, and the global gradient norm."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from ostinato.workers.core.optim import OptimConfig
from ostinato.workers.fsdp.quantized import build_adamw8bit


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a tensor: the shard of a DTensor, any other tensor as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def gradient_norm(parameters: Iterable[nn.Parameter], group: dist.ProcessGroup, device: torch.device) -> float:
    """The l2 norm of the whole model's gradient.

    norm = sqrt(sum over shards of the sum of squares). After backward every replica of a hybrid mesh holds the same
    gradient, so only the ranks of one copy of the model are added up.

    Args:
        parameters: The sharded parameters; those without a gradient count as 0.
        group: The ranks that share one copy of the model.
        device: Where the group communicates.

    Returns:
        The norm; inf or nan where any rank's gradient is not finite.
    """
    grads = [local(parameter.grad) for parameter in parameters if parameter.grad is not None]
    squares = torch.zeros((), dtype=torch.float64, device=device)
    if grads:
        norms = [torch.linalg.vector_norm(grad, dtype=torch.float32) for grad in grads]
        squares = torch.stack([norm.to(device) for norm in norms]).double().square().sum()
    dist.all_reduce(squares, group=group)
    return math.sqrt(squares.item()) if squares.item() >= 0 else math.nan


def scale_gradients(parameters: Sequence[nn.Parameter], factor: float) -> None:
    """Multiply every gradient in place."""
    for parameter in parameters:
        if parameter.grad is not None:
            local(parameter.grad).mul_(factor)


def build_optimizer(parameters: Iterable[nn.Parameter], optim: OptimConfig, *, fused: bool) -> torch.optim.Optimizer:
    """AdamW over all parameters, decayed alike.

    Args:
        parameters: The sharded parameters.
        optim: Which of the two, learning rate, betas, epsilon, weight decay.
        fused: Use the fused kernel; in 8 bits the step is compiled instead.

    Raises:
        FsdpConfigError: `AdamW8bit` needs torchao, which is missing.
    """
    if optim.optimizer == "AdamW8bit":
        return build_adamw8bit(parameters, optim)
    return torch.optim.AdamW(
        parameters, lr=optim.lr, betas=optim.betas, eps=optim.eps, weight_decay=optim.weight_decay, fused=fused or None
    )


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Set the learning rate of the next step."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].fill_(lr)
        else:
            group["lr"] = lr
