"""Help for tests of anything that takes or returns a `DataProto`.

`batches` and `cells` are hypothesis strategies; the rest needs no hypothesis.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ostinato.protocol import jagged, payload
from ostinato.protocol.cells import object_array, same
from ostinato.protocol.dataproto import DataProto
from ostinato.protocol.future import DataProtoFuture
from ostinato.protocol.metrics import Metric

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy

TENSOR_DTYPES = (
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float64,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.uint16,
    torch.bool,
    torch.float8_e4m3fn,
)
ARRAY_DTYPES = ("int64", "int32", "float32", "float64", "bool", "uint8")


def differences(actual: DataProto, expected: DataProto) -> list[str]:
    """What differs between two batches.

    Args:
        actual: a batch.
        expected: a batch.

    Returns:
        One sentence a difference: rows, columns, kinds, first unlike row, meta. NaN equals NaN.
    """
    told = []
    if len(actual) != len(expected):
        told.append(f"{len(actual)} rows, expected {len(expected)}")
    mine, theirs = actual._columns(), expected._columns()
    if mine.keys() != theirs.keys():
        told.append(f"lacks {sorted(theirs.keys() - mine.keys())}, has {sorted(mine.keys() - theirs.keys())} too many")
    for name in mine.keys() & theirs.keys():
        if payload.same(mine[name], theirs[name]):
            continue
        kinds = payload.describe(mine[name]), payload.describe(theirs[name])
        text = f"column {name!r} is a {kinds[0]}" + (f", expected a {kinds[1]}" if kinds[0] != kinds[1] else "")
        pairs = zip(_rows(mine[name]), _rows(theirs[name]), strict=False)
        unlike = next((f"; row {i} is {a!r}, expected {b!r}" for i, (a, b) in enumerate(pairs) if not same(a, b)), "")
        told.append(text + unlike)
    for key in actual.meta_info.keys() | expected.meta_info.keys():
        a, b = actual.meta_info.get(key, "nothing"), expected.meta_info.get(key, "nothing")
        if not same(a, b):
            told.append(f"meta_info[{key!r}] is {a!r}, expected {b!r}")
    return told


def assert_equal(actual: DataProto | DataProtoFuture, expected: DataProto | DataProtoFuture) -> None:
    """Fail with what differs, unless two batches are equal in rows, columns, kinds, values and meta.

    Args:
        actual: a batch; rows elsewhere are brought here.
        expected: a batch; likewise.

    Raises:
        AssertionError: they differ.
    """
    if told := differences(actual.get(), expected.get()):
        raise AssertionError("batches differ: " + "; ".join(told))


def _rows(column: payload.Column) -> list[Any]:
    return list(column.unbind()) if isinstance(column, torch.Tensor) else list(column)


def _tensor(rng: np.random.Generator, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    values = torch.from_numpy(rng.integers(-3, 4, shape).astype(np.float64))
    if dtype.is_floating_point and dtype.itemsize > 1:
        values = torch.where(torch.from_numpy(rng.random(shape) < 0.1), torch.nan, values / 3)
    return values.abs().to(dtype) if dtype in (torch.bool, torch.uint8, torch.uint16) else values.to(dtype)


def _array(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    values = rng.integers(0, 4, shape).astype(dtype)
    if values.dtype.kind == "f":
        values[rng.random(shape) < 0.1] = np.nan
    return values


def cells() -> SearchStrategy[Any]:
    """JSON-like cells: text, numbers (NaN and infinities too), None, lists and dicts of them."""
    from hypothesis import strategies as st

    leaves = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
    keys = st.sampled_from(["a", "b", "$", "of"])
    return st.recursive(leaves, lambda x: st.lists(x, max_size=3) | st.dictionaries(keys, x, max_size=3), max_leaves=5)


def batches(min_rows: int = 0, max_rows: int = 7) -> SearchStrategy[DataProto]:
    """Batches of every payload kind.

    Args:
        min_rows: fewest rows.
        max_rows: most rows.

    Returns:
        Strategy of batches whose columns are any subset of: dense tensors of every dtype, jagged tensors (two of one
        structure, one with trailing dimension, one ragged in its last dimension), object and numeric arrays; with meta
        entries and metrics, or without. It may have no tensors, no columns, no rows.
    """
    from hypothesis import strategies as st

    @st.composite
    def build(draw: Any) -> DataProto:
        n = draw(st.integers(min_rows, max_rows))
        rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
        tensors: dict[str, torch.Tensor] = {}
        for dtype in draw(st.lists(st.sampled_from(TENSOR_DTYPES), max_size=3, unique=True)):
            width = draw(st.sampled_from([(), (3,), (2, 2), (0,)]))
            tensors[f"dense_{str(dtype)[6:]}"] = _tensor(rng, (n, *width), dtype)
        if draw(st.booleans()):
            dtype = draw(st.sampled_from(TENSOR_DTYPES))
            ends = torch.from_numpy(np.concatenate([[0], rng.integers(0, 4, n).cumsum()]).astype(np.int64))
            total = int(ends[-1])
            tensors["jagged"] = jagged.build(_tensor(rng, (total,), dtype), ends)
            tensors["jagged_twin"] = jagged.build(_tensor(rng, (total,), torch.float32), ends)
            tensors["jagged_wide"] = jagged.build(_tensor(rng, (total, 2), dtype), ends.clone())
            tensors["jagged_last"] = jagged.build(_tensor(rng, (2, total), dtype), ends, 2)
        arrays: dict[str, np.ndarray] = {}
        if draw(st.booleans()):
            arrays["cells"] = object_array(draw(st.lists(cells(), min_size=n, max_size=n)))
        for dtype in draw(st.lists(st.sampled_from(ARRAY_DTYPES), max_size=2, unique=True)):
            arrays[f"array_{dtype}"] = _array(rng, (n, *draw(st.sampled_from([(), (2,)]))), dtype)
        meta: dict[str, Any] = draw(st.dictionaries(st.sampled_from(["step", "note"]), cells(), max_size=2))
        if draw(st.booleans()):
            meta["metrics"] = {"loss": Metric.mean(0.5, 3), "tokens": Metric.sum(7), "times": Metric.list([1, 2])}
        # The TensorDict's own batch size tells the rows where there is no column.
        return DataProto.from_dict({"rows": torch.arange(n), **tensors}, arrays, meta).drop(["rows"])

    return build()
