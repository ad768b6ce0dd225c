"""Putting batches together: concat and union, their meta and metrics, and what is refused."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch

from ostinato.protocol import DataProto, Metric, errors
from ostinato.protocol.testing import assert_equal


def test_concat_of_nothing_is_refused():
    """P-212."""
    with pytest.raises(errors.EmptyConcatError, match="no parts"):
        DataProto.concat([])
    with pytest.raises(errors.EmptyConcatError):
        DataProto.concat(iter(()))


@pytest.mark.parametrize(
    ("a", "b", "says"),
    [
        ({"x": torch.ones(2), "y": torch.ones(2)}, {"x": torch.ones(2)}, "'y'"),
        ({"x": torch.ones(2)}, {"x": torch.ones(2), "y": torch.ones(2)}, "'y'"),
        ({"x": torch.ones(2, 6)}, {"x": torch.ones(2, 8)}, r"\(2, 6\).*\(2, 8\)"),
        ({"x": torch.ones(2)}, {"x": torch.ones(2, 1)}, r"\(2,\).*\(2, 1\)"),
        ({"x": torch.ones(2)}, {"x": torch.ones(2).int()}, "float32.*int32"),
        ({"x": torch.ones(2)}, {"x": np.ones(2)}, "'x'"),
        ({"x": torch.ones(2, 1)}, {"x": [torch.ones(1)] * 2}, "jagged"),
        ({"x": [torch.ones(1, 2)]}, {"x": [torch.ones(1, 3)]}, r"\(1, \*, 2\).*\(1, \*, 3\)"),
        ({"x": np.ones(2)}, {"x": [1.0, 2.0]}, "float64 array.*object array"),
        ({"x": np.ones((2, 2))}, {"x": np.ones((2, 3))}, r"\(2, 2\).*\(2, 3\)"),
        ({"x": np.ones(2)}, {"x": np.ones(2, dtype=np.float32)}, "float64.*float32"),
        ({"t": ["a"], "x": ["b"]}, {"t": ["a"]}, "'x'"),
    ],
)
def test_concat_of_unlike_columns_is_refused(a, b, says):
    """P-211: never a shorter column, never a silent conversion."""
    parts = [DataProto.from_single_dict(part) for part in (a, b)]
    with pytest.raises(errors.ColumnMismatchError, match=says):
        DataProto.concat([parts[0], parts[0], parts[1]])


def test_concat_merges_meta_and_names_a_conflict():
    """P-210: equal stays, a conflict names the key and both values; what differs by part is a metric."""
    a, b = (DataProto.from_dict({"x": torch.ones(1)}, meta_info={"same": [1], "t": t}) for t in (1.25, 1.5))
    with pytest.raises(errors.MetaConflictError, match=r"'t'.*1\.25.*1\.5"):
        DataProto.concat([a, b])
    b = b.with_meta(t=1.25, more=2)
    assert DataProto.concat([a, b]).meta_info == {"same": [1], "t": 1.25, "more": 2}
    nan = DataProto(meta_info={"t": float("nan")})
    assert "t" in DataProto.concat([nan, pickle.loads(pickle.dumps(nan))]).meta_info
    with pytest.raises(errors.MetaConflictError):
        DataProto.concat([DataProto(meta_info={"k": True}), DataProto(meta_info={"k": 1})])


def test_timings_go_by_the_metrics(full):
    """P-210: timings that differ by part are lists, not a conflict."""
    parts = full(4).chunk(2)
    parts = [p.with_metrics({"t": Metric.list(i), "n": Metric.sum(i)}) for i, p in enumerate(parts, start=1)]
    joined = DataProto.concat(parts)
    assert joined.metrics["t"].value == (1.0, 2.0)
    assert joined.metrics["n"].value == 3.0
    assert parts[0].metrics["n"].value == 1.0


def test_metrics_count_once(full):
    """Pieces hand a batch's metrics on once, so that joining them again does not multiply sums."""
    x = full(5).with_metrics({"n": Metric.sum(7)})
    assert [p.metrics for p in x.chunk(3)] == [{"n": Metric.sum(7)}, {}, {}]
    assert DataProto.concat(x.chunk(3)).metrics == x.metrics
    assert [p.metrics for p in x.split(4)] == [{"n": Metric.sum(7)}, {}]
    assert x[1:].metrics == x[0].metrics == x[[1, 2]].metrics == next(x.make_iterator(2)).metrics == {}
    assert x.reorder(range(5)).metrics == x.repeat(2).metrics == x.select(["ids"]).metrics == x.metrics
    popped = x.pop(["ids"])
    assert popped.metrics == {}
    assert x.union(popped).metrics == {"n": Metric.sum(7)}


def test_union_joins_every_kind():
    """P-214."""
    x = DataProto.from_dict({"y": torch.ones(2)}, {"t": ["a", "b"]}, {"step": 1})
    other = DataProto.from_dict(
        {"z": torch.zeros(2), "j": [torch.ones(1), torch.ones(2)]}, {"n": np.arange(2)}, {"k": 2}
    )
    both = x.union(other)
    assert both.columns == ("y", "z", "j", "t", "n")
    assert both.meta_info == {"step": 1, "k": 2}
    assert x.columns == ("y", "t")
    assert other.columns == ("z", "j", "n")


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ({"c": torch.tensor([1, 2])}, {"c": torch.tensor([1, 3])}),
        ({"c": torch.tensor([1, 2])}, {"c": torch.tensor([1, 2], dtype=torch.int32)}),
        ({"c": torch.ones(2, 1)}, {"c": torch.ones(2, 2)}),
        ({"c": torch.ones(2, 1)}, {"c": [torch.ones(1)] * 2}),
        ({"c": [torch.ones(1), torch.ones(2)]}, {"c": [torch.ones(2), torch.ones(1)]}),
        ({"c": ["a", "b"]}, {"c": ["a", "c"]}),
        ({"c": [{"k": [1]}, 2]}, {"c": [{"k": [2]}, 2]}),
        ({"c": [[1], 2]}, {"c": [(1,), 2]}),
        ({"c": [1, 2]}, {"c": [True, 2]}),
        ({"c": np.ones(2)}, {"c": np.zeros(2)}),
        ({"c": np.ones(2)}, {"c": [1.0, 1.0]}),
        ({"c": torch.ones(2)}, {"c": np.ones(2, dtype=np.float32)}),
    ],
)
def test_union_of_differing_columns_is_refused(a, b):
    """P-216: neither side wins."""
    a, b = DataProto.from_single_dict(a), DataProto.from_single_dict(b)
    for x, y in ((a, b), (b, a)):
        with pytest.raises(errors.ColumnConflictError, match="'c'"):
            x.union(y)


def test_union_of_unlike_rows_or_meta_is_refused():
    """P-216."""
    with pytest.raises(errors.RowCountError, match=r"2 rows \(a\) and 3 rows \(b\)"):
        DataProto.from_dict({"a": torch.ones(2)}).union(DataProto.from_dict({"b": torch.ones(3)}))
    with pytest.raises(errors.MetaConflictError, match="'k'"):
        DataProto(meta_info={"k": 1}).union(DataProto(meta_info={"k": 2}))


@pytest.mark.parametrize(
    "column",
    [
        torch.tensor([1.0, torch.nan]),
        torch.tensor([1.0, torch.nan], dtype=torch.bfloat16),
        [torch.tensor([torch.nan]), torch.tensor([1.0, torch.nan])],
        np.array([1.0, np.nan]),
        [float("nan"), {"k": [float("nan")]}],
        [np.array([np.nan]), torch.tensor([torch.nan])],
        [None, np.float32("nan")],
    ],
)
def test_nan_equals_nan_in_union(column):
    """P-217."""
    x = DataProto.from_single_dict({"c": column})
    y = pickle.loads(pickle.dumps(x))
    assert_equal(x.union(y), x)
    assert x == y
