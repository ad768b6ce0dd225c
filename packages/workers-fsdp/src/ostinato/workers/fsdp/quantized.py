"""Optimizer state in 8 bits: made by torchao, saved in float32.

A checkpoint holds the values in full, so that it loads at any number of ranks and into any optimizer, and each rank's
block scales, with which the same layout gets back the very same codes.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable
from typing import Any, TypeGuard

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from ostinato.workers.core.optim import OptimConfig
from ostinato.workers.fsdp.errors import FsdpConfigError

HOST = torch.device("cpu")


def build_adamw8bit(parameters: Iterable[nn.Parameter], optim: OptimConfig) -> torch.optim.Optimizer:
    """AdamW of torchao, with quantised moments.

    Raises:
        FsdpConfigError: torchao is not installed.
    """
    if importlib.util.find_spec("torchao") is None:
        raise FsdpConfigError(
            "optim.optimizer=AdamW8bit: torchao is not installed: pip install 'ostinato-workers-fsdp[adamw8bit]'"
        )
    from torchao.optim import AdamW8bit  # pyright: ignore[reportMissingImports]

    # A rate in a tensor: a number would be compiled into the step.
    rate: Any = torch.tensor(optim.lr)
    return AdamW8bit(parameters, lr=rate, betas=optim.betas, eps=optim.eps, weight_decay=optim.weight_decay)


def is_quantized(tensor: Any) -> TypeGuard[torch.Tensor]:
    """Whether a value of an optimizer's state is kept in 8 bits."""
    return type(_local(tensor)).__name__ == "OptimState8bit"


def new_moment(optimizer: torch.optim.Optimizer, parameter: torch.Tensor, kind: str) -> torch.Tensor:
    """A moment of zeros in the form that the optimizer keeps it in; only the second one has no sign."""
    new_buffer = getattr(optimizer, "_new_buffer", None)
    return torch.zeros_like(parameter) if new_buffer is None else new_buffer(parameter, kind == "exp_avg")


def in_full(moment: torch.Tensor) -> torch.Tensor:
    """The values of a moment in 8 bits in float32, in host memory; a DTensor gives a DTensor."""
    values = _local(moment).dequantize(torch.float32)
    if not isinstance(moment, DTensor):
        return values.to(HOST)
    return DTensor.from_local(
        values,
        moment.device_mesh,
        moment.placements,
        run_check=False,
        shape=moment.shape,
        stride=moment.stride(),
    ).to(HOST)


def scale_of(moment: torch.Tensor) -> torch.Tensor:
    """This rank's block scales of a moment in 8 bits."""
    return _local(moment).scale


def fill(moment: torch.Tensor, values: torch.Tensor, scale: torch.Tensor | None) -> None:
    """Quantise values into a moment.

    Args:
        moment: in 8 bits.
        values: float32, of the same layout.
        scale: the scales that the values were once quantised with, which give the same codes again; None: new ones.
    """
    from torchao.optim.quant_utils import quantize_8bit_with_qmap  # pyright: ignore[reportMissingImports]

    target, source = _local(moment), _local(values).to(moment.device)
    if scale is None:
        target.copy_(source)
        return
    target.scale.copy_(scale)
    scaled = (source.view(-1, target.block_size) / target.scale.view(-1, 1)).view(source.shape)
    target.codes.copy_(quantize_8bit_with_qmap(scaled, target.qmap))


def _local(tensor: Any) -> Any:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
