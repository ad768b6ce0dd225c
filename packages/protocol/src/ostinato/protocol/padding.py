"""Padded <-> packed, without a Python loop over rows.

Padded is (B, L, ...) with a mask (B, L); packed is (T, ...), the masked tokens end to end in row-major order, with
`cu_seqlens` (B + 1,) int32, row i being `packed[cu_seqlens[i]:cu_seqlens[i + 1]]`. Jagged tensors are the third form.
Values may carry gradients.
"""

from __future__ import annotations

from typing import Literal

import torch

from ostinato.protocol import jagged
from ostinato.protocol.errors import ArgumentError
from ostinato.protocol.rows import whole_number

Side = Literal["left", "right"]


def cu_seqlens(mask: torch.Tensor) -> torch.Tensor:
    """Where packed rows begin and end.

    Args:
        mask: (B, L), nonzero = token.

    Returns:
        (B + 1,) int32, from 0 to the number of tokens.
    """
    _check_mask("cu_seqlens", mask)
    ends = (mask != 0).sum(1, dtype=torch.int32).cumsum(0, dtype=torch.int32)
    return torch.nn.functional.pad(ends, (1, 0))


def position_ids(mask: torch.Tensor) -> torch.Tensor:
    """Place of each token in its row.

    Args:
        mask: (B, L), nonzero = token.

    Returns:
        (B, L) int64: tokens before this place, so 0 for the first token and in left padding.
    """
    _check_mask("position_ids", mask)
    tokens = (mask != 0).to(torch.int64)
    return (tokens.cumsum(1) - 1).clamp_(min=0)


def pack(padded: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Put masked tokens end to end.

    Args:
        padded: (B, L, ...); what masked-out places hold does not matter.
        mask: (B, L), nonzero = token, anywhere in its row.

    Returns:
        packed (T, ...) and cu_seqlens (B + 1,) int32.

    Raises:
        ArgumentError: shapes do not fit.
    """
    _check_mask("pack", mask)
    _check_tensor("pack", "padded", padded)
    if padded.is_nested or padded.shape[:2] != mask.shape:
        raise ArgumentError(f"pack: padded {tuple(padded.shape)} must begin with the mask's shape {tuple(mask.shape)}")
    return padded[mask != 0], cu_seqlens(mask)


def unpack(packed: torch.Tensor, mask: torch.Tensor, fill: float | int | bool = 0) -> torch.Tensor:
    """Put packed tokens back to their places; the inverse of `pack`.

    Args:
        packed: (T, ...), in row-major order of the mask.
        mask: (B, L) with T nonzero places.
        fill: what all other places hold.

    Returns:
        (B, L, ...).

    Raises:
        ArgumentError: T is not the number of nonzero places, or `fill` is none of the dtype's values.
    """
    _check_mask("unpack", mask)
    _check_tensor("unpack", "packed", packed)
    places = (mask != 0).nonzero(as_tuple=True)
    if packed.ndim == 0 or packed.shape[0] != places[0].shape[0]:
        raise ArgumentError(
            f"unpack: the mask has {places[0].shape[0]} tokens, packed has shape {tuple(packed.shape)}; use the mask "
            "that pack was given"
        )
    if not (packed.is_floating_point() or packed.is_complex() or float(fill).is_integer()):
        raise ArgumentError(f"unpack: fill {fill!r} has no place among {packed.dtype}; fill with a whole number")
    padded = packed.new_full((*mask.shape, *packed.shape[1:]), fill)
    filled = jagged.movable(padded).index_put(places, jagged.movable(packed))
    return filled if filled.dtype == packed.dtype else filled.view(packed.dtype)


def to_jagged(padded: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Drop padding.

    Args:
        padded: (B, L, ...).
        mask: (B, L), nonzero = token.

    Returns:
        (B, *, ...) jagged; rows without a token have length 0.

    Raises:
        ArgumentError: shapes do not fit.
    """
    packed, ends = pack(padded, mask)
    return jagged.build(packed, ends.to(torch.int64))


def to_padded(
    column: torch.Tensor, length: int | None = None, fill: float | int | bool = 0, side: Side = "right"
) -> tuple[torch.Tensor, torch.Tensor]:
    """Pad the rows of a jagged tensor to one length.

    Args:
        column: (B, *, ...) jagged in its second dimension.
        length: L; None is the longest row's.
        fill: what padding holds.
        side: where the padding goes; "left" for prompts, "right" for responses.

    Returns:
        padded (B, L, ...) and mask (B, L) bool, True = token.

    Raises:
        ArgumentError: not jagged in its second dimension, an unknown side, or a row longer than L.
    """
    if not jagged.is_jagged(column) or jagged.ragged_dim(column) != 1:
        raise ArgumentError("to_padded: expected a tensor that is jagged in its second dimension, (B, *, ...)")
    if side not in ("left", "right"):
        raise ArgumentError(f"to_padded: side must be 'left' or 'right', got {side!r}")
    values, offsets, _ = jagged.unpacked(column)
    lengths = offsets.diff()
    longest = int(lengths.max()) if len(lengths) else 0
    length = longest if length is None else whole_number("to_padded", "length", length, 0)
    if longest > length:
        raise ArgumentError(f"to_padded: a row has {longest} tokens, length is {length}; truncate first or pad to more")
    places = torch.arange(length, device=values.device)
    mask = places < lengths[:, None] if side == "right" else places >= length - lengths[:, None]
    return unpack(values, mask, fill), mask


def _check_mask(where: str, mask: torch.Tensor) -> None:
    _check_tensor(where, "the mask", mask)
    if mask.is_nested or mask.ndim != 2:
        raise ArgumentError(f"{where}: the mask must be dense, of shape (B, L), got {tuple(mask.shape)}")


def _check_tensor(where: str, name: str, value: object) -> None:
    if not isinstance(value, torch.Tensor):
        raise ArgumentError(f"{where}: {name} must be a tensor, got {type(value).__name__}; use torch.as_tensor")
