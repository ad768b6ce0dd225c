"""Sums, means and whitening over the valid entries of a tensor.

A masked entry is taken out before any arithmetic (`where`, not a product), so NaN or infinity under the mask reaches
neither a result nor a gradient. A mask of any dtype is read as "not 0 = valid".
"""

from __future__ import annotations

import torch
from torch import Tensor

from ostinato.algos._checks import check_same_shape
from ostinato.algos._typing import AnyFloats, AnyMask, Reduced

WHITEN_EPSILON = 1e-8


def is_valid(mask: Tensor) -> Tensor:
    """The mask as bool: True where it is not 0."""
    return mask.to(torch.bool)


def zero_masked(x: Tensor, mask: Tensor) -> Tensor:
    """`x` where the mask is set, exactly 0 elsewhere; no gradient flows to masked entries."""
    return torch.where(is_valid(mask), x, x.new_zeros(()))


def accumulation_dtype(x: Tensor) -> torch.dtype:
    """At least float32: half-precision values are summed wider than they are stored."""
    return torch.promote_types(x.dtype, torch.float32)


def masked_sum(x: AnyFloats, mask: AnyMask, dim: int | None = None) -> Reduced:
    """Sum over valid entries: Σ x·m.

    Args:
        x: any shape, floating; masked entries may hold anything.
        mask: same shape; not 0 = valid.
        dim: the dimension to sum over; None sums over all.

    Returns:
        The sum, at least float32; 0 where nothing is valid.

    Raises:
        ShapeError: the shapes differ.
    """
    check_same_shape("masked_sum", x=x, mask=mask)
    kept = zero_masked(x, mask)
    dtype = accumulation_dtype(x)
    return kept.sum(dtype=dtype) if dim is None else kept.sum(dim, dtype=dtype)


def masked_mean(x: AnyFloats, mask: AnyMask, dim: int | None = None) -> Reduced:
    """Mean over valid entries: Σ x·m / Σ m.

    Args:
        x: any shape, floating; masked entries may hold anything.
        mask: same shape; not 0 = valid.
        dim: the dimension to reduce; None reduces all.

    Returns:
        The mean, at least float32; exactly 0 where nothing is valid.

    Raises:
        ShapeError: the shapes differ.
    """
    valid = is_valid(mask)
    count = valid.sum() if dim is None else valid.sum(dim)
    return masked_sum(x, mask, dim) / count.clamp(min=1)


def masked_whiten(x: AnyFloats, mask: AnyMask, shift_mean: bool = True) -> AnyFloats:
    """Bring the valid entries to mean 0 and variance 1.

    (x − mean)·rsqrt(var + 1e-8), with the Bessel-corrected variance over valid entries, computed in float64.
    `shift_mean=False` adds the mean back. Fewer than two valid entries have no variance: the result is then 0 (x with
    `shift_mean=False`).

    Args:
        x: any shape, floating; masked entries may hold anything.
        mask: same shape; not 0 = valid.
        shift_mean: whether the mean is taken away.

    Returns:
        Same shape and dtype as x; exactly 0 under the mask.

    Raises:
        ShapeError: the shapes differ.

    Source:
        Advantage whitening of PPO implementations (Huang et al. 2022, "The 37 implementation details of PPO", no. 7).
    """
    check_same_shape("masked_whiten", x=x, mask=mask)
    wide = zero_masked(x.to(torch.float64), mask)
    mean = masked_mean(wide, mask)
    centred = zero_masked(wide - mean, mask)
    variance = centred.square().sum() / (is_valid(mask).sum() - 1).clamp(min=1)
    whitened = centred * torch.rsqrt(variance + WHITEN_EPSILON)
    if not shift_mean:
        whitened = whitened + mean
    return zero_masked(whitened, mask).to(x.dtype)
