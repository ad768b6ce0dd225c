"""Parameters and optimizer state between the device and host memory."""

from __future__ import annotations

import torch
from torch import nn


def move_parameters(module: nn.Module, device: torch.device) -> None:
    """Move parameters, gradients and buffers; FSDP keeps the parameter objects, so an optimizer still owns them."""
    module.to(device)


def move_optimizer(optimizer: torch.optim.Optimizer, device: torch.device) -> None:
    """Move the optimizer's state; an optimizer that has not stepped has none, and keeps none.

    The step counter stays where the optimizer made it: the plain implementation wants it in host memory.
    """
    for state in optimizer.state.values():
        for key, value in state.items():
            if key != "step" and isinstance(value, torch.Tensor):
                state[key] = value.to(device, non_blocking=True)
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def free_device_cache(device: torch.device) -> None:
    """Give freed device memory back, so that a rollout engine in the same process can have it."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
