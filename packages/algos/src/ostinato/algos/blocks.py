"""Rows in blocks whose intermediate tensors stay in a core's cache.

On a CPU an intermediate as large as the batch costs more than the arithmetic on it: the system has to hand out its
pages, and it is written to main memory and read back. There the estimators go through the rows in blocks, and only
their results are as large as the batch. On a GPU one block holds all rows: there each operation is a kernel launch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ostinato.algos.masked import WHITEN_EPSILON, accumulation_dtype, is_valid, zero_masked

BLOCK_ELEMENTS = 1 << 18
"""Entries of a block: 1 MiB in float32. Smaller ones pay for their calls, larger ones for main memory."""

_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def row_blocks(x: Tensor) -> list[slice]:
    """Cut the rows of (B, R) into blocks; none where there are no rows."""
    rows, tokens = x.shape
    size = max(BLOCK_ELEMENTS // max(tokens, 1), 1) if x.device.type == "cpu" else max(rows, 1)
    return [slice(start, start + size) for start in range(0, rows, size)]


def mask_bits(valid: Tensor, dtype: torch.dtype) -> Tensor:
    """A bool mask as integers as wide as a floating dtype: all bits set where valid, none elsewhere."""
    return valid.to(_BITS[dtype.itemsize]).neg_()


def kept(x: Tensor, bits: Tensor) -> Tensor:
    """`zero_masked` by a bitwise and: exactly 0 where no bit is set, whatever x holds there; carries no gradient.

    A vectorised instruction on every CPU, where choosing element by element is several times as slow.
    """
    return (x.view(bits.dtype) & bits).view(x.dtype)


def keep_(x: Tensor, bits: Tensor) -> Tensor:
    """`kept` in place."""
    return x.view(bits.dtype).bitwise_and_(bits).view(x.dtype)


def row_totals(x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Sum each row over its valid entries, and count these.

    Args:
        x: (B, R); masked entries may hold anything.
        mask: (B, R).

    Returns:
        (B,) sums and (B,) counts, both float64, and the mask as (B, R) bool, an eighth of what it often is.
    """
    sums, counts = (x.new_empty(x.shape[0], dtype=torch.float64) for _ in range(2))
    valid = is_valid(mask)
    for part in row_blocks(x):
        bits = mask_bits(valid[part], x.dtype)
        sums[part] = bits.bitwise_and_(x[part].view(bits.dtype)).view(x.dtype).sum(-1, dtype=torch.float64)
        counts[part] = valid[part].view(torch.int8).sum(-1, dtype=torch.int32)
    return sums, counts, valid


def tile(rows: Tensor, valid: Tensor, dtype: torch.dtype) -> Tensor:
    """(B,) -> (B, R): a row's number on each of its valid entries (bool mask), exactly 0 elsewhere."""
    out = rows.new_empty(valid.shape, dtype=dtype)
    column, raw = rows.to(dtype)[:, None].view(_BITS[dtype.itemsize]), out.view(_BITS[dtype.itemsize])
    for part in row_blocks(valid):
        raw[part].copy_(valid[part]).neg_().bitwise_and_(column[part])
    return out


def _partial_sums(x: Tensor, squared: bool = False) -> Tensor:
    """Sums over 64 entries each in the dtype of x, where rounding cannot add up, as float64 to be summed further."""
    flat = x.flatten()
    whole = flat.numel() // 64 * 64
    parts = flat[:whole].unflatten(0, (-1, 64)), flat[whole:, None]
    if squared:
        return torch.cat([torch.linalg.vector_norm(part, dim=-1) for part in parts]).to(torch.float64).square_()
    return torch.cat([part.sum(-1) for part in parts]).to(torch.float64)


class Moments:
    """Mean and variance over the valid entries of blocks that come one after another.

    Each block's own mean and sum of squared distances are merged (Chan, Golub & LeVeque 1983), so that nothing has to
    be read twice and no large numbers cancel. All float64, on the tensors' device.
    """

    def __init__(self) -> None:
        self._parts: list[tuple[Tensor, Tensor, Tensor]] = []

    def add(self, x: Tensor, bits: Tensor, count: Tensor) -> None:
        """Take in a block: values that are 0 under the mask, `mask_bits` of their width, and how many are valid."""
        count = count.to(torch.float64)
        mean = _partial_sums(x).sum() / count.clamp(min=1)
        centred = keep_(x - mean.to(x.dtype), bits)
        # The rounding of the mean shifts every distance alike: it is taken out of the squares again.
        squares = _partial_sums(centred, squared=True).sum()
        self._parts.append((count, mean, squares - count * (mean.to(x.dtype) - mean).square()))

    def mean_and_scale(self) -> tuple[Tensor, Tensor]:
        """The mean, and rsqrt(variance + 1e-8) with the Bessel-corrected variance."""
        counts, means, squares = (torch.stack(values) for values in zip(*self._parts, strict=True))
        total = counts.sum()
        mean = (counts * means).sum() / total.clamp(min=1)
        variance = (squares + counts * (means - mean).square()).sum() / (total - 1).clamp(min=1)
        return mean, torch.rsqrt(variance + WHITEN_EPSILON)


def whiten_(x: Tensor, valid: Tensor, moments: Moments) -> Tensor:
    """Whiten a result in place, by moments taken when its blocks were made: `masked_whiten` in one further pass.

    Args:
        x: (B, R), exactly 0 under the mask; is overwritten.
        valid: (B, R) bool.
        moments: of all valid entries of x.

    Returns:
        x.
    """
    blocks = row_blocks(x)
    if not blocks:
        return x
    dtype = accumulation_dtype(x)
    mean, scale = (value.to(dtype) for value in moments.mean_and_scale())
    for part in blocks:
        wide = x[part].to(dtype).sub_(mean).mul_(scale)
        if wide.dtype != x.dtype:
            x[part] = wide
        keep_(x[part], mask_bits(valid[part], x.dtype))
    return x


def whiten_rows(rows: Tensor, counts: Tensor) -> Tensor:
    """Whiten numbers that stand for `counts` equal entries each: `masked_whiten` of the tiled rows, without tiling.

    Args:
        rows: (B,) float64.
        counts: (B,) float64, entries of each row; 0 leaves a row out.

    Returns:
        (B,) float64.
    """
    counted = zero_masked(rows, counts)
    total = counts.sum()
    centred = counted - (counts * counted).sum() / total.clamp(min=1)
    variance = (counts * centred.square()).sum() / (total - 1).clamp(min=1)
    return centred * torch.rsqrt(variance + WHITEN_EPSILON)
