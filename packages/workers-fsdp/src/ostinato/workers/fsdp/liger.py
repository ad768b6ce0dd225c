"""Liger's kernels for what a layer does between its matrix products."""

# pyright: reportMissingImports=false
from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ostinato.workers.fsdp.errors import ModelLoadError

_KEY = "model.use_liger"


def use_liger_kernels(module: nn.Module, device: torch.device) -> None:
    """Run norms, rotary positions and gated activations of a model as one kernel each.

    The head is left alone: `TokenHead` has its own way. Liger's rotary function takes the place of transformers' in the
    model's family, for every model of this process.

    Args:
        module: The whole model, before it is sharded.
        device: Where it trains.

    Raises:
        ModelLoadError: Liger is not installed, has nothing for this model, or the device is no GPU.
    """
    if device.type != "cuda":
        raise ModelLoadError(f"{_KEY}: its kernels run on GPUs, this rank trains on {device.type}. Set it to False.")
    try:
        from liger_kernel.transformers.monkey_patch import (
            MODEL_TYPE_TO_APPLY_LIGER_FN,
            _apply_liger_kernel_to_instance,
        )
    except ImportError as error:
        raise ModelLoadError(
            f"{_KEY}: liger-kernel cannot be imported ({error}). Install it with `pip install "
            "'ostinato-workers-fsdp[liger]'`, or set it to False."
        ) from error
    config: Any = module.config
    if config.model_type not in MODEL_TYPE_TO_APPLY_LIGER_FN:
        raise ModelLoadError(f"{_KEY}: Liger has no kernels for {config.model_type} models. Set it to False.")
    _apply_liger_kernel_to_instance(module, cross_entropy=False, fused_linear_cross_entropy=False)  # pyright: ignore[reportArgumentType]
