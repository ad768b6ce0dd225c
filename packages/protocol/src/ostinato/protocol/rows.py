"""Index arithmetic of the row operations: row counts in, bounds and indices out.

Nothing here knows what a row holds, so the same functions serve a batch whose rows are here and a handle to rows that
lie somewhere else. A selection is either a `slice` with step 1 and `0 <= start <= stop <= num_rows` (rows can be shared
as a view) or a 1-D int64 array with values in `[0, num_rows)` (rows are gathered).
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Sequence
from typing import Any

import numpy as np

from ostinato.protocol.errors import ArgumentError, RowIndexError

Bounds = list[tuple[int, int]]
Selection = slice | np.ndarray


def whole_number(where: str, name: str, value: object, minimum: int) -> int:
    """Check an integer argument.

    Args:
        where: the operation, for the error's text.
        name: the argument's name.
        value: what the caller gave.
        minimum: the smallest value allowed.

    Returns:
        The value as a Python int.

    Raises:
        ArgumentError: not an integer, or below the minimum.
    """
    try:
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        number = None
    if number is None or isinstance(value, bool) or number < minimum:
        raise ArgumentError(f"{where}: {name} must be a whole number >= {minimum}, got {value!r}")
    return number


def chunk_bounds(num_rows: int, n: int) -> Bounds:
    """Cut rows into n runs whose sizes differ by at most one, the longer ones first (10 in 4: 3 3 2 2).

    Args:
        num_rows: rows there are.
        n: number of runs, at least 1; where it exceeds `num_rows` the last ones are empty.

    Returns:
        n pairs (start, stop).

    Raises:
        ArgumentError: n is not a whole number >= 1.
    """
    n = whole_number("chunk", "n", n, 1)
    size, longer = divmod(num_rows, n)
    starts = [i * size + min(i, longer) for i in range(n + 1)]
    return list(itertools.pairwise(starts))


def split_bounds(num_rows: int, size: int) -> Bounds:
    """Cut rows into runs of `size`; the last one holds what is left (5 by 2: 2 2 1).

    No rows give one empty run, so that concatenation gives the batch back.

    Args:
        num_rows: rows there are.
        size: rows in a run, at least 1.

    Returns:
        Pairs (start, stop).

    Raises:
        ArgumentError: size is not a whole number >= 1.
    """
    size = whole_number("split", "size", size, 1)
    return [(start, min(start + size, num_rows)) for start in range(0, max(num_rows, 1), size)]


def repeat_index(num_rows: int, n: int, interleave: bool = True) -> np.ndarray:
    """Index that repeats every row n times.

    Args:
        num_rows: rows there are.
        n: how often, at least 1.
        interleave: a a b b where true, a b a b where false.

    Returns:
        (num_rows * n,) int64.

    Raises:
        ArgumentError: n is not a whole number >= 1.
    """
    n = whole_number("repeat", "n", n, 1)
    rows = np.arange(num_rows, dtype=np.int64)
    return np.repeat(rows, n) if interleave else np.tile(rows, n)


def padding_index(num_rows: int, multiple: int) -> tuple[np.ndarray, int]:
    """Index that fills rows up to a multiple by starting again at row 0, as often as needed.

    Args:
        num_rows: rows there are.
        multiple: what the new count is divisible by, at least 1.

    Returns:
        The index, (num_rows + pad,) int64, and pad, in [0, multiple). No rows need no padding.

    Raises:
        ArgumentError: multiple is not a whole number >= 1.
    """
    multiple = whole_number("pad_to_multiple", "k", multiple, 1)
    pad = -num_rows % multiple
    if num_rows == 0:
        return np.zeros(0, dtype=np.int64), 0
    return np.arange(num_rows + pad, dtype=np.int64) % num_rows, pad


def permutation(num_rows: int, indices: Any) -> np.ndarray:
    """Check that indices name every row exactly once.

    Args:
        num_rows: rows there are.
        indices: list, array or tensor of integers.

    Returns:
        (num_rows,) int64.

    Raises:
        RowIndexError: a row is missing, named twice or does not exist.
    """
    index = _gather_index(num_rows, indices, "reorder")
    if len(index) != num_rows or (np.bincount(index, minlength=num_rows) != 1).any():
        raise RowIndexError(
            f"reorder: indices must name each of the {num_rows} rows exactly once, got {len(index)} indices over "
            f"{len(np.unique(index))} different rows; use indexing, x[indices], to pick or repeat rows"
        )
    return index


def epoch_order(num_rows: int, seed: int | None, epoch: int) -> np.ndarray | None:
    """Row order of one pass over a batch.

    Args:
        num_rows: rows there are.
        seed: of the shuffle; None keeps the order.
        epoch: number of the pass; each has its own order.

    Returns:
        (num_rows,) int64 permutation, the same for the same arguments on every machine; None for the order as it is.
    """
    if seed is None:
        return None
    seed = whole_number("make_iterator", "shuffle_seed", seed, 0)
    return np.random.Generator(np.random.Philox(np.random.SeedSequence([seed, epoch]))).permutation(num_rows)


def selection(num_rows: int, item: Any) -> Selection:
    """Read what stands in the brackets of `x[item]`.

    Args:
        num_rows: rows there are.
        item: int (one row), slice, mask of `num_rows` booleans, or integers (list, range, array, tensor); negative
            integers count from the end.

    Returns:
        A slice with step 1 and bounds in range, or an int64 array.

    Raises:
        RowIndexError: out of range, a mask of another length, or a type that names no rows.
    """
    if isinstance(item, slice):
        try:
            start, stop, step = item.indices(num_rows)
        except (TypeError, ValueError) as error:
            raise RowIndexError(f"indexing: {item!r} is no slice of rows: {error}") from error
        if step == 1:
            return slice(start, max(start, stop))
        return np.arange(start, stop, step, dtype=np.int64)
    if isinstance(item, str):
        raise RowIndexError(
            f"indexing: brackets name rows, got the string {item!r}; use x.batch[{item!r}] or "
            f"x.non_tensor_batch[{item!r}] for a column's values, x.select([{item!r}]) for a batch of it"
        )
    if not isinstance(item, bool | np.bool_) and hasattr(item, "__index__") and np.ndim(item) == 0:
        row = operator.index(item)
        if not -num_rows <= row < num_rows:
            raise RowIndexError(f"indexing: row {row} does not exist in a batch of {num_rows} rows")
        return slice(row % num_rows, row % num_rows + 1)
    return _gather_index(num_rows, item, "indexing")


def _gather_index(num_rows: int, item: Any, where: str) -> np.ndarray:
    if hasattr(item, "detach"):  # a tensor, on whatever device
        item = item.detach().cpu().numpy()
    if isinstance(item, Sequence) and any(isinstance(i, bool | np.bool_) for i in item):
        # numpy would read [True, 2] as [1, 2].
        if not all(isinstance(i, bool | np.bool_) for i in item):
            raise RowIndexError(f"{where}: a list of row numbers and booleans names no rows; use one of the two")
        item = np.fromiter(item, dtype=np.bool_, count=len(item))
    try:
        index = np.asarray(item)
    except (TypeError, ValueError) as error:  # ragged lists, and objects that look like lists
        raise RowIndexError(f"{where}: a {type(item).__name__} names no rows ({error})") from error
    if index.ndim == 1 and index.size == 0 and index.dtype.kind != "b":
        return np.zeros(0, dtype=np.int64)
    if index.ndim != 1 or index.dtype.kind not in "biu":
        raise RowIndexError(
            f"{where}: rows are named by an int, a slice, a mask or a 1-D list, array or tensor of integers, got "
            f"{type(item).__name__} of shape {index.shape} and dtype {index.dtype}"
        )
    if index.dtype.kind == "b":
        if len(index) != num_rows:
            raise RowIndexError(f"{where}: a mask needs one boolean a row, got {len(index)} for {num_rows} rows")
        return np.flatnonzero(index)
    if index.dtype.kind == "u" and index.itemsize == 8:
        index = np.minimum(index, np.uint64(2**63 - 1))  # would turn negative, and count from the end
    index = index.astype(np.int64)
    outside = (index < -num_rows) | (index >= num_rows)
    if outside.any():
        raise RowIndexError(
            f"{where}: row {int(index[outside][0])} does not exist in a batch of {num_rows} rows "
            f"({int(outside.sum())} of {len(index)} indices are out of range)"
        )
    return np.where(index < 0, index + num_rows, index)
