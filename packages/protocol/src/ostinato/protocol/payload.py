"""Columns and the row operations on them, whatever kind they are: dense tensor, jagged tensor or numpy array.

A batch's columns are two plain dicts, tensors and arrays. The functions here take such dicts whole, so that work that
columns share (an index on the right device, new offsets) is done once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from ostinato.protocol import jagged
from ostinato.protocol.cells import same_array, same_tensor
from ostinato.protocol.errors import ColumnMismatchError, ColumnTypeError
from ostinato.protocol.jagged import is_jagged
from ostinato.protocol.rows import Bounds

Column = torch.Tensor | np.ndarray
Tensors = dict[str, torch.Tensor]
Arrays = dict[str, np.ndarray]


def as_tensor(name: str, value: Any) -> torch.Tensor:
    """Make a tensor column.

    Args:
        name: the column's name, for errors.
        value: tensor of shape (B, ...), jagged tensor (B, *, ...), or list of tensors (length, ...), one a row, which
            always becomes a jagged column.

    Returns:
        The column; a dense tensor is shared as it is.

    Raises:
        ColumnTypeError: anything else.
    """
    if isinstance(value, list | tuple) and all(isinstance(row, torch.Tensor) for row in value):
        return jagged.from_rows(name, value)
    if not isinstance(value, torch.Tensor):
        raise ColumnTypeError(
            f"column {name!r}: expected a tensor with one row per sample, or a list of tensors, got "
            f"{type(value).__name__}; pass lists and numpy arrays under `non_tensors`, or convert with torch.as_tensor"
        )
    if value.is_nested:
        return jagged.canonical(name, value)
    if value.layout != torch.strided or value.is_quantized:
        kind, cure = (
            ("a quantized one", ".dequantize()") if value.is_quantized else (f"layout {value.layout}", ".to_dense()")
        )
        raise ColumnTypeError(f"column {name!r}: expected a dense or jagged tensor, got {kind}; use {cure}")
    if value.ndim == 0:
        raise ColumnTypeError(
            f"column {name!r}: a 0-dimensional tensor has no rows; use .expand(num_rows) or meta_info"
        )
    return value


def num_rows(column: Column) -> int:
    """Rows of a column."""
    return jagged.rows_and_shape(column)[0] if is_jagged(column) else int(column.shape[0])


def shape(column: Column) -> tuple[int | str, ...]:
    """Shape of a column, with "*" for a jagged dimension."""
    if is_jagged(column):
        rows, rest, _ = jagged.rows_and_shape(column)
        return rows, *rest
    return tuple(column.shape)


def describe(column: Column) -> str:
    """Shape, dtype and kind of a column, for errors and `repr`."""
    sizes = ", ".join(map(str, shape(column)))
    size = f"({sizes},)" if len(column.shape) == 1 else f"({sizes})"
    if isinstance(column, np.ndarray):
        return f"{size} {column.dtype} array"
    place = "" if column.device.type == "cpu" else f" on {column.device}"
    kind = "jagged tensor" if is_jagged(column) else "tensor"
    return f"{size} {str(column.dtype).removeprefix('torch.')} {kind}{place}"


def _kind(column: Column) -> tuple[object, ...]:
    """What must agree for two columns to be joined."""
    if isinstance(column, np.ndarray):
        return "array", column.dtype, column.shape[1:]
    if is_jagged(column):
        _, rest, values = jagged.rows_and_shape(column)
        return "jagged", values.dtype, rest, values.device
    return "dense", column.dtype, column.shape[1:], column.device


def same(a: Column, b: Column) -> bool:
    """Compare two columns: kind, dtype, device, shape and values; NaN equals NaN."""
    if a is b:
        return True
    if isinstance(a, np.ndarray) or isinstance(b, np.ndarray):
        return isinstance(a, np.ndarray) and isinstance(b, np.ndarray) and same_array(a, b)
    if _kind(a) != _kind(b):
        return False
    if not is_jagged(a):
        return same_tensor(a, b)
    (values_a, offsets_a, _), (values_b, offsets_b, _) = jagged.unpacked(a), jagged.unpacked(b)
    return same_tensor(offsets_a, offsets_b) and same_tensor(values_a, values_b)


def cut(
    tensors: Mapping[str, torch.Tensor], arrays: Mapping[str, np.ndarray], bounds: Bounds
) -> list[tuple[Tensors, Arrays]]:
    """Cut columns into runs of rows that share their storage.

    Args:
        tensors: tensor columns.
        arrays: numpy columns.
        bounds: (start, stop) for each run.

    Returns:
        The columns of each run.
    """
    cutter = jagged.Cutter(bounds)
    ragged = {name: cutter(column) for name, column in tensors.items() if is_jagged(column)}
    return [
        (
            {name: ragged[name][i] if name in ragged else column[start:stop] for name, column in tensors.items()},
            {name: column[start:stop] for name, column in arrays.items()},
        )
        for i, (start, stop) in enumerate(bounds)
    ]


def take(
    tensors: Mapping[str, torch.Tensor], arrays: Mapping[str, np.ndarray], index: np.ndarray
) -> tuple[Tensors, Arrays]:
    """Gather rows of columns, as copies.

    Args:
        tensors: tensor columns.
        arrays: numpy columns.
        index: (N,) int64 rows, in range.

    Returns:
        The columns, N rows each.
    """
    rows = torch.from_numpy(np.ascontiguousarray(index))
    taker = jagged.Taker(rows)
    on_device = {torch.device("cpu"): rows}
    taken: Tensors = {}
    for name, column in tensors.items():
        if is_jagged(column):
            taken[name] = taker(column)
            continue
        if column.device not in on_device:
            on_device[column.device] = rows.to(column.device)
        taken[name] = jagged.gather(column, 0, on_device[column.device])
    return taken, {name: column[index] for name, column in arrays.items()}


def join(parts: Sequence[tuple[Mapping[str, torch.Tensor], Mapping[str, np.ndarray]]]) -> tuple[Tensors, Arrays]:
    """Put columns end to end; one part alone is shared, several are copied.

    Args:
        parts: tensor columns and numpy columns of each part, at least one part.

    Returns:
        The columns, in the first part's order.

    Raises:
        ColumnMismatchError: a part lacks a column or has one of another kind, dtype, width or device.
    """
    for i, part in enumerate(parts[1:], start=1):
        _check_alike(parts[0], part, i)
    if len(parts) == 1:
        return dict(parts[0][0]), dict(parts[0][1])
    joiner = jagged.Joiner()
    tensors = {}
    for name, column in parts[0][0].items():
        columns = [part[name] for part, _ in parts]
        tensors[name] = joiner(columns) if is_jagged(column) else torch.cat(columns)
    return tensors, {name: np.concatenate([part[name] for _, part in parts]) for name in parts[0][1]}


def _check_alike(
    first: tuple[Mapping[str, Any], Mapping[str, Any]], part: tuple[Mapping[str, Any], Mapping[str, Any]], i: int
) -> None:
    for mine, other in zip(first, part, strict=True):
        if mine.keys() != other.keys():
            lacks, more = sorted(mine.keys() - other.keys()), sorted(other.keys() - mine.keys())
            raise ColumnMismatchError(
                f"concat: part {i} lacks {lacks or 'nothing'} and has {more or 'nothing'} beyond part 0; all parts "
                "need the same tensor columns and the same numpy columns: use select or drop first"
            )
        for name, column in mine.items():
            if _kind(column) != _kind(other[name]):
                raise ColumnMismatchError(
                    f"concat: column {name!r} is a {describe(column)} in part 0 and a {describe(other[name])} in part "
                    f"{i}; all but the number of rows must agree: pad or convert before concat"
                )


def move(tensors: Mapping[str, torch.Tensor], device: torch.device, non_blocking: bool = False) -> Tensors:
    """Bring tensor columns to a device; those that are there already are shared."""
    moved: Tensors = {}
    offsets_there: dict[int, torch.Tensor] = {}
    for name, column in tensors.items():
        if not is_jagged(column):
            moved[name] = column.to(device, non_blocking=non_blocking)
            continue
        values, offsets, dim = jagged.unpacked(column)
        if values.device == device:
            moved[name] = column
            continue
        there = offsets_there.setdefault(id(offsets), offsets.to(device))
        moved[name] = jagged.build(values.to(device, non_blocking=non_blocking), there, dim)
    return moved
