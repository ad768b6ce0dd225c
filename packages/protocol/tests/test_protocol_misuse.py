"""Wrong use of public names: refused by name, alike by a batch and by a handle to rows elsewhere, never half done."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ostinato.protocol import DataProto, DataProtoFuture, Metric
from ostinato.protocol.errors import ArgumentError, ColumnTypeError, MetricError, ProtocolError, RowIndexError
from ostinato.protocol.padding import pack, to_jagged, to_padded, unpack
from ostinato.protocol.partition import balanced_partition, token_budget_micro_batches
from ostinato.protocol.testing import assert_equal


def batch() -> DataProto:
    return DataProto.from_dict({"a": torch.arange(8).reshape(4, 2)}, {"t": list("abcd")}, {"step": 1})


@pytest.fixture(params=["here", "elsewhere"])
def x(request):
    return batch() if request.param == "here" else DataProtoFuture.of(batch())


@pytest.mark.parametrize(
    ("use", "error", "says"),
    [
        (lambda x: x.select(None), ArgumentError, "select: expected names of columns, got NoneType"),
        (lambda x: x.get(3), ArgumentError, "expected names of columns, got int"),
        (lambda x: x.rename(["a", "b"]), ArgumentError, "rename: expected a dict of old name -> new name, got list"),
        (lambda x: x.rename({"a": 3}), ColumnTypeError, "non-empty string, got 3"),
        (lambda x: x.rename({"a": ""}), ColumnTypeError, "non-empty string, got ''"),
        (lambda x: x.union(None), ArgumentError, "expected a DataProto or a handle to rows elsewhere, got NoneType"),
        (lambda x: x.union({"b": torch.ones(4)}), ArgumentError, "expected a DataProto.*, got dict"),
        (lambda x: x.concat(x), ArgumentError, "concat: expected a list of batches, got DataProto"),
        (lambda x: x.concat(None), ArgumentError, "concat: expected a list of batches, got NoneType"),
        (lambda x: x.concat([x, {"a": 1}]), ArgumentError, "expected a DataProto.*, got dict"),
        (lambda x: x[x], RowIndexError, "a DataProto.* names no rows"),
        (lambda x: x[[[0], [1, 2]]], RowIndexError, "a list names no rows"),
        (lambda x: x[np.array([2**64 - 1], dtype=np.uint64)], RowIndexError, "does not exist in a batch of 4 rows"),
        (lambda x: x[{0, 1}], RowIndexError, "got set"),
        (lambda x: x.reorder(x), RowIndexError, "a DataProto.* names no rows"),
        (lambda x: x.with_metrics(None), MetricError, "metrics must be a dict of name -> Metric, got NoneType"),
        (
            lambda x: x.with_metrics({"loss": 0.5}),
            MetricError,
            r"'loss': expected a Metric, got float; write Metric.mean",
        ),
        (lambda x: x.with_meta(metrics=[1]), MetricError, "metrics must be a dict of name -> Metric, got list"),
    ],
)
def test_operations_refuse_what_makes_no_sense_by_name(x, use, error, says):
    with pytest.raises(error, match=says) as caught:
        use(x)
    assert isinstance(caught.value, ProtocolError)
    assert_equal(x, batch())


@pytest.mark.parametrize(
    ("make", "error", "says"),
    [
        (lambda: DataProto.from_dict(meta_info=[1]), ArgumentError, "meta_info must be a dict.*, got list"),
        (lambda: DataProto.from_dict(meta_info={"metrics": {"loss": 1.0}}), MetricError, "'loss': expected a Metric"),
        (lambda: DataProto.from_dict(meta_info={"metrics": 1}), MetricError, "metrics must be a dict.*, got int"),
        (lambda: DataProto.from_single_dict([1]), ColumnTypeError, "data must be a dict of name -> column, got list"),
        (lambda: DataProtoFuture.of(None), ArgumentError, "expected a DataProto.*, got NoneType"),
        (lambda: Metric.list("abc"), MetricError, "must be numbers, got 'abc'"),
        (lambda: Metric.mean(torch.ones(2)), MetricError, "must be numbers"),
        (lambda: balanced_partition(["a"], 1), ArgumentError, r"costs must be a 1-D list of numbers, got \['a'\]"),
        (lambda: token_budget_micro_batches([[1], [1, 2]], 4), ArgumentError, "lengths must be a 1-D list of numbers"),
        (lambda: pack([1], [1]), ArgumentError, "pack: the mask must be a tensor, got list"),
        (lambda: pack([1], torch.ones(1, 1)), ArgumentError, "pack: padded must be a tensor, got list"),
        (lambda: unpack(torch.tensor(1.0), torch.ones(1, 1)), ArgumentError, r"unpack: .*shape \(\)"),
        (lambda: unpack(torch.ones(1).long(), torch.ones(1, 1), fill=0.5), ArgumentError, "fill 0.5.*torch.int64"),
        (
            lambda: unpack(torch.ones(1).long(), torch.ones(1, 1), fill=float("-inf")),
            ArgumentError,
            "fill -inf.*torch.int64",
        ),
        (
            lambda: to_padded(to_jagged(torch.ones(2, 3), torch.ones(2, 3)), 3.0),
            ArgumentError,
            "length must be a whole number >= 0, got 3.0",
        ),
    ],
)
def test_functions_refuse_what_makes_no_sense_by_name(make, error, says):
    with pytest.raises(error, match=says):
        make()


def test_quantized_tensors_are_no_columns():
    column = torch.ops.aten.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)
    with pytest.raises(ColumnTypeError, match="'q': expected a dense or jagged tensor, got a quantized one"):
        DataProto.from_dict({"q": column})


def test_lists_of_metrics_take_arrays_and_tensors():
    assert Metric.list(np.arange(3)) == Metric.list(torch.arange(3)) == Metric.list([0, 1, 2])
    assert Metric.list(torch.tensor(2.0)) == Metric.list(2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int32, torch.float64])
def test_lengths_may_be_tensors_of_any_dtype(dtype):
    lengths = torch.tensor([3, 1, 2], dtype=dtype)
    assert token_budget_micro_batches(lengths, 3) == [[0], [1, 2]]
    assert balanced_partition(lengths, 2, [1, 2]) == [[0], [1, 2]]
