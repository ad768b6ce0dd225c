"""Jagged columns: rows of unlike length in `torch.nested` tensors of layout `torch.jagged`.

Such a tensor is `values`, all rows end to end along the ragged dimension, and `offsets`, (B + 1,) int64, row i being
`values[offsets[i]:offsets[i + 1]]`. Torch has no row operations for them; these are written on values and offsets.

Torch lets two jagged tensors meet in arithmetic only if they hold the *same* offsets object, so columns of one
structure share theirs here before and after every operation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeGuard

import torch

from ostinato.protocol.errors import ColumnTypeError

_SIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}


def movable(values: torch.Tensor) -> torch.Tensor:
    """The same bytes as signed integers where torch (before 2.14) cannot gather or scatter the unsigned ones."""
    return values.view(_SIGNED[values.dtype]) if values.dtype in _SIGNED else values


def gather(values: torch.Tensor, dim: int, index: torch.Tensor) -> torch.Tensor:
    """`index_select`, for every dtype."""
    picked = movable(values).index_select(dim, index)
    return picked if picked.dtype == values.dtype else picked.view(values.dtype)


def is_jagged(column: object) -> TypeGuard[torch.Tensor]:
    """Whether a column is a nested tensor of layout jagged."""
    # The type alone answers for plain tensors; every attribute of a tensor subclass takes a long way round.
    return type(column) is not torch.Tensor and isinstance(column, torch.Tensor) and column.layout == torch.jagged


def rows_and_shape(column: torch.Tensor) -> tuple[int, tuple[int | str, ...], torch.Tensor]:
    """Number of rows, what follows it in the shape, with "*" for the ragged dimension, and the plain values."""
    values: torch.Tensor = column._values  # type: ignore[assignment]
    dim = ragged_dim(column)
    return len(offsets_of(column)) - 1, (*values.shape[: dim - 1], "*", *values.shape[dim:]), values


def ragged_dim(column: torch.Tensor) -> int:
    """The dimension of a jagged tensor in which rows differ, at least 1."""
    return column._ragged_idx  # type: ignore[attr-defined]


def offsets_of(column: torch.Tensor) -> torch.Tensor:
    """The offsets that a jagged tensor holds: (B + 1,) integers."""
    return column._offsets  # type: ignore[attr-defined]


def build(values: torch.Tensor, offsets: torch.Tensor, dim: int = 1) -> torch.Tensor:
    """Make a jagged tensor.

    Args:
        values: rows end to end along dimension `dim - 1`.
        offsets: (B + 1,) int64, from 0 to the length of that dimension.
        dim: the ragged dimension of the result.

    Returns:
        The jagged tensor, which shares `values` and holds `offsets` itself.
    """
    # What `torch.nested.nested_tensor_from_jagged` calls, after a check that logs a warning in every process (2.14).
    from torch.nested._internal.nested_tensor import nested_view_from_values_offsets_lengths

    return nested_view_from_values_offsets_lengths(values, offsets, None, ragged_idx=dim)


def from_rows(name: str, rows: Sequence[torch.Tensor]) -> torch.Tensor:
    """Make a jagged column from one tensor a row, whether or not their lengths happen to be equal.

    Args:
        name: the column's name, for errors.
        rows: tensors of shape (length, ...) that agree in all but the first dimension; at least one.

    Returns:
        (B, *, ...), a copy.

    Raises:
        ColumnTypeError: no rows, scalars, or rows that disagree in trailing shape, dtype or device.
    """
    if not rows or any(row.is_nested or row.ndim == 0 for row in rows):
        raise ColumnTypeError(
            f"column {name!r}: a list makes a jagged column of at least one tensor of shape (length, ...); stack "
            "scalars with torch.stack(...), and give an empty column as a tensor so that its dtype is known"
        )
    kinds = {(row.shape[1:], row.dtype, row.device) for row in rows}
    if len(kinds) > 1:
        raise ColumnTypeError(
            f"column {name!r}: rows of a jagged column agree in dtype, device and all but their first dimension, got "
            + "; ".join(sorted(f"(length, {', '.join(map(str, s))}) {d} on {v}" for s, d, v in kinds))
        )
    lengths = torch.tensor([0, *(row.shape[0] for row in rows)], dtype=torch.int64)
    return build(torch.cat(list(rows)), lengths.cumsum(0).to(rows[0].device))


def checked(name: str, values: torch.Tensor, offsets: torch.Tensor, dim: int) -> torch.Tensor:
    """`build`, for values and offsets that come from elsewhere.

    Args:
        name: the column's name, for errors.
        values: as in `build`.
        offsets: as in `build`.
        dim: as in `build`.

    Returns:
        The jagged tensor.

    Raises:
        ColumnTypeError: the three do not describe rows.
    """
    fits = offsets.dtype == torch.int64 and offsets.ndim == 1 and len(offsets) > 0 and 1 <= dim <= values.ndim
    if not fits or offsets[0] != 0 or (offsets.diff() < 0).any() or offsets[-1] != values.shape[dim - 1]:
        raise ColumnTypeError(
            f"column {name!r}: offsets must be (B + 1,) int64, rising from 0 to the length of dimension {dim - 1} of "
            f"values {tuple(values.shape)}, got {offsets}"
        )
    return build(values, offsets, dim)


def unpacked(column: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Take a jagged tensor apart; the inverse of `build`.

    Args:
        column: jagged; one that leaves gaps between its rows (`torch.nested.narrow`) is copied without them.

    Returns:
        values, offsets (int64) and the ragged dimension.
    """
    # `values()` is the differentiable way in, `_values` the short one.
    values: torch.Tensor = column.values() if column.requires_grad else column._values  # type: ignore[attr-defined]
    offsets, dim = offsets_of(column), ragged_dim(column)
    lengths = column._lengths  # type: ignore[attr-defined]
    if lengths is None:
        return values, offsets.to(torch.int64), dim
    new, tokens = _gather_plan(offsets[:-1].to(torch.int64), lengths.to(torch.int64))
    return gather(values, dim - 1, tokens), new, dim


def canonical(name: str, column: torch.Tensor) -> torch.Tensor:
    """Bring a jagged tensor into the form that this module works on: no gaps, offsets int64 from 0 to the end.

    Args:
        name: the column's name, for errors.
        column: nested tensor.

    Returns:
        The tensor itself where it has that form already.

    Raises:
        ColumnTypeError: nested tensor of strided layout, or rows of no length.
    """
    if column.layout != torch.jagged:
        raise ColumnTypeError(
            f"column {name!r}: nested tensors of layout {column.layout} have no row operations; build it with "
            "layout=torch.jagged, or pass a list of tensors"
        )
    values, offsets, dim = unpacked(column)
    first, last = (int(end) for end in offsets[[0, -1]].tolist())
    if offsets is offsets_of(column) and first == 0 and last == values.shape[dim - 1]:
        return column
    return build(values.narrow(dim - 1, first, last - first), offsets - first if first else offsets, dim)


def _gather_plan(starts: torch.Tensor, lengths: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """New offsets, and for every token of the new values its place in the old ones."""
    offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
    total = int(offsets[-1])
    shift = torch.repeat_interleave(starts - offsets[:-1], lengths, output_size=total)
    return offsets, shift + torch.arange(total, device=shift.device)


class Taker:
    """Gathers rows of jagged columns; columns that share offsets go on sharing them."""

    def __init__(self, index: torch.Tensor):
        self.index = index
        self._plans: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._seen: list[torch.Tensor] = []  # an id is a name only as long as its owner lives

    def __call__(self, column: torch.Tensor) -> torch.Tensor:
        """Rows `index` of a column, as a copy."""
        values, offsets, dim = unpacked(column)
        if id(offsets) not in self._plans:
            self._seen.append(offsets)
            index = self.index.to(offsets.device)
            self._plans[id(offsets)] = _gather_plan(offsets[:-1][index], offsets.diff()[index])
        new, tokens = self._plans[id(offsets)]
        return build(gather(values, dim - 1, tokens), new, dim)


class Cutter:
    """Cuts jagged columns into runs of rows that are views; columns that share offsets go on sharing them."""

    def __init__(self, bounds: Sequence[tuple[int, int]]):
        self.bounds = bounds
        self._plans: dict[int, list[tuple[int, int, torch.Tensor]]] = {}
        self._seen: list[torch.Tensor] = []

    def __call__(self, column: torch.Tensor) -> list[torch.Tensor]:
        """One jagged tensor for each of the bounds."""
        values, offsets, dim = unpacked(column)
        if id(offsets) not in self._plans:
            self._seen.append(offsets)
            # One transfer for all cuts, should the offsets lie on another device.
            ends = offsets[torch.tensor(self.bounds, device=offsets.device)].tolist()
            self._plans[id(offsets)] = [
                (low, high - low, offsets[start : stop + 1] - low)
                for (start, stop), (low, high) in zip(self.bounds, ends, strict=True)
            ]
        return [build(values.narrow(dim - 1, low, n), new, dim) for low, n, new in self._plans[id(offsets)]]


class Joiner:
    """Joins jagged columns end to end; columns whose parts share offsets go on sharing them."""

    def __init__(self) -> None:
        self._plans: dict[tuple[int, ...], torch.Tensor] = {}
        self._seen: list[torch.Tensor] = []

    def __call__(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """All rows of all parts, as a copy; parts agree in dtype, trailing shape and ragged dimension."""
        apart = [unpacked(part) for part in parts]
        dim = apart[0][2]
        key = tuple(id(offsets) for _, offsets, _ in apart)
        if key not in self._plans:
            self._seen.extend(offsets for _, offsets, _ in apart)
            joined, base = [apart[0][1]], apart[0][0].shape[dim - 1]
            for values, offsets, _ in apart[1:]:
                joined.append(offsets[1:] + base)
                base += values.shape[dim - 1]
            self._plans[key] = torch.cat(joined)
        return build(torch.cat([values for values, _, _ in apart], dim - 1), self._plans[key], dim)


def share_offsets(columns: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Let jagged columns of one structure hold one offsets object, so that torch takes them as alike.

    Args:
        columns: dense and jagged columns by name.

    Returns:
        The same columns in the same order; jagged ones with equal offsets share the first one's.
    """
    known: list[torch.Tensor] = []
    shared = dict(columns)
    for name, column in columns.items():
        if not is_jagged(column):
            continue
        values, offsets, dim = unpacked(column)
        twin = next((other for other in known if other is offsets or _alike(other, offsets)), None)
        if twin is None:
            known.append(offsets)
        elif twin is not offsets_of(column):
            shared[name] = build(values, twin, dim)
    return shared


def _alike(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.device == b.device and a.shape == b.shape and torch.equal(a, b)
