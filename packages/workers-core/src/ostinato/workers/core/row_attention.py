"""Attention inside the rows of a pack, by the fastest kernel that a GPU has; for engines.

FlashAttention-4 (extra `flash-attn`) on Hopper and Blackwell, else PyTorch's variable-length kernel, which is
FlashAttention 2. Neither does any work between rows.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from functools import cache
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from packaging.version import Version

KERNEL_WIDTH = 256
"""The widest head that the kernels run."""

_FLASH_4 = "flash-attn-4"
_FLASH_4_SINCE = "4.0.0b36"
_FLASH_4_WIDTHS = {9: (64, 96, 128, 192, 256), 10: (64, 96, 128)}
"""Head widths by the major number of the GPU's capability.

FlashAttention-4 takes any multiple of 8, but its authors test few of them, below 64 the forward pass alone; and on
Hopper its backward pass (4.0.0b36) writes sums for heads rounded up to 16 and reads them back rounded up to 32, which
is not the same for a width of 80.
"""

logger = logging.getLogger(__name__)


def attend_within_rows(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seqlens: torch.Tensor,
    longest: int,
    *,
    scale: float | None = None,
    window: int | None = None,
) -> torch.Tensor:
    """Causal attention inside each row of a pack, on a GPU, in half precision.

    `row_kernel` says which kernel runs. FlashAttention-4 compiles a kernel when a head shape is first met, some seconds
    each for forward and backward. Its backward pass adds in no fixed order, so gradients differ in the last bits
    from run to run; under `torch.use_deterministic_algorithms(True)` PyTorch's kernel runs, which has an order then.

    Args:
        query: (T, H, D) bf16 or fp16, tokens of all rows one after another; any strides with the last one 1.
        key: (T, G, D), H a multiple of G.
        value: (T, G, D).
        cu_seqlens: (b + 1,) int32, where each row begins; the last entry is T. A row may have no tokens.
        longest: tokens of the longest row.
        scale: factor of the scores; None is 1/sqrt(D).
        window: how many tokens back a token sees, itself included; None is all.

    Returns:
        (T, H, D), the query's number type.
    """
    back = -1 if window is None or window >= longest else window - 1
    kernel = _flash_4_kernel(query.device, query.shape[-1], torch.are_deterministic_algorithms_enabled())
    if kernel is None:
        return _torch(query, key, value, cu_seqlens, longest, scale, back)
    out, _ = kernel(
        query,
        key,
        value,
        cu_seqlens_q=cu_seqlens,
        cu_seqlens_k=cu_seqlens,
        max_seqlen_q=longest,
        max_seqlen_k=longest,
        softmax_scale=scale,
        causal=True,
        window_size=(None, None) if back < 0 else (back, 0),
    )
    return out


def row_kernel(device: torch.device, head_width: int) -> str:
    """Name and version of the kernel that `attend_within_rows` runs.

    Args:
        device: a GPU.
        head_width: D.
    """
    return _name(_flash_4_kernel(device, head_width, torch.are_deterministic_algorithms_enabled()))


@cache
def _flash_4_kernel(device: torch.device, head_width: int, in_order: bool) -> Callable[..., Any] | None:
    """FlashAttention-4's function where a GPU runs heads of this width with it; what was chosen is logged once.

    Args:
        device: a GPU.
        head_width: D.
        in_order: gradients must add up in a fixed order, which it does not have.
    """
    widths = _FLASH_4_WIDTHS.get(torch.cuda.get_device_capability(device)[0], ())
    kernel = _flash_4() if head_width in widths and not in_order else None
    logger.info("attention of packed rows, heads of %d on %s: %s", head_width, device, _name(kernel))
    return kernel


def _name(kernel: Callable[..., Any] | None) -> str:
    return f"PyTorch {torch.__version__}" if kernel is None else f"{_FLASH_4} {version(_FLASH_4)}"


@cache
def _flash_4() -> Callable[..., Any] | None:
    """FlashAttention-4's function; None where it is not installed, and, with a warning, where it is of no use."""
    try:
        release = version(_FLASH_4)
    except PackageNotFoundError:
        return None
    instead = f"PyTorch's kernel runs packed rows. `pip install -U '{_FLASH_4}[cu13]>={_FLASH_4_SINCE}'` may help"
    try:
        if Version(release) < Version(_FLASH_4_SINCE):
            logger.warning("%s %s is older than %s: %s", _FLASH_4, release, _FLASH_4_SINCE, instead)
            return None
        return import_module("flash_attn.cute").flash_attn_varlen_func
    except Exception as error:
        # It loads a compiler and CUDA's libraries, and what it raises when one does not fit is not only ImportError. Of
        # an installation that was broken off there may be a folder without a version.
        logger.warning("%s %s cannot be used (%s: %s): %s", _FLASH_4, release, type(error).__name__, error, instead)
        return None


def _torch(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seqlens: torch.Tensor,
    longest: int,
    scale: float | None,
    back: int,
) -> torch.Tensor:
    from torch.nn.attention.varlen import varlen_attn

    groups = query.shape[1] // key.shape[1]
    # A window that ends at the token itself is what makes it causal.
    options: dict[str, Any] = {"scale": scale, "window_size": (back, 0)}
    if "enable_gqa" in inspect.signature(varlen_attn).parameters:
        options["enable_gqa"] = groups > 1
    elif groups > 1:
        key, value = (x.repeat_interleave(groups, dim=1) for x in (key, value))
    out = varlen_attn(query, key, value, cu_seqlens, cu_seqlens, longest, longest, **options)
    assert isinstance(out, torch.Tensor)
    return out
