"""What a DataProto is made of: the values that are taken, the kinds of column they become, and refusals by name."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from ostinato.protocol import DataProto, errors
from ostinato.protocol.testing import assert_equal


def test_from_dict_takes_plain_lists_tensors_and_arrays(full):
    x = full()
    assert len(x) == 5
    assert x.columns == ("ids", "logp", "ragged", "text", "num")
    assert x.non_tensor_batch["text"].dtype == object
    assert x.non_tensor_batch["num"].dtype == np.int32
    assert x.batch["logp"].dtype == torch.bfloat16
    assert x.batch.batch_size == (5,)


def test_constructor_takes_a_tensordict_and_shares_no_dict_with_it():
    td = TensorDict({"a": torch.arange(3)}, batch_size=[3]).lock_()
    arrays, meta = {"t": np.array(list("abc"), dtype=object)}, {"k": 1}
    x = DataProto(td, arrays, meta)
    x.batch["b"] = torch.ones(3)
    assert not x.batch.is_locked
    assert list(td.keys()) == ["a"]
    arrays["u"], meta["k"] = arrays["t"], 2
    assert x.columns == ("a", "b", "t")
    assert x.meta_info == {"k": 1}
    assert x.batch["a"].data_ptr() == td["a"].data_ptr()


def test_constructor_keeps_the_rows_of_a_tensordict_without_columns():
    assert len(DataProto(TensorDict({}, batch_size=[4]))) == 4
    assert len(DataProto()) == 0
    with pytest.raises(errors.RowCountError, match="batch_size"):
        DataProto(TensorDict({"a": torch.ones(3)}, batch_size=[]))


def test_from_single_dict_sorts_by_kind():
    x = DataProto.from_single_dict(
        {"a": torch.ones(2), "j": [torch.ones(1), torch.ones(3)], "t": ["x", "y"], "e": np.zeros((2, 3))}
    )
    assert list(x.batch.keys()) == ["a", "j"]
    assert list(x.non_tensor_batch) == ["t", "e"]
    assert DataProto.from_single_dict({"t": []}).columns == ("t",)


@pytest.mark.parametrize("lengths", [(3, 5, 4), (5, 5, 5), (5,), (0, 0), (0,)])
def test_list_of_tensors_is_jagged_whatever_the_lengths(lengths, rows_of):
    """H-04: equally long rows, or one row alone, make the same kind of column as any others."""
    x = DataProto.from_single_dict({"responses": [torch.arange(n) for n in lengths]})
    column = x.batch["responses"]
    assert column.is_nested
    assert column.layout == torch.jagged
    assert column.dtype == torch.int64
    for part in (x[0], x[:1], x[[0]], *x.chunk(3), DataProto.concat([x, x]), pickle.loads(pickle.dumps(x[0]))):
        assert part.batch["responses"].is_nested
    assert rows_of(x, "responses") == [list(range(n)) for n in lengths]


@pytest.mark.parametrize(
    "cells", [[[1, 2], [3, 4]], [[1], [2, 3]], [[], []], [[[1]], [[2]]], [(1, 2), (3, 4)], [np.ones(2), np.ones(2)]]
)
def test_list_cells_stay_in_a_1d_object_column(cells):
    """H-02: cells of one length do not make a 2-D array, so that ragged ones can follow."""
    x = DataProto.from_dict(non_tensors={"m": cells})
    y = DataProto.from_dict(non_tensors={"m": [[5], [6, 7, 8]]})
    assert x.non_tensor_batch["m"].shape == (2,)
    joined = DataProto.concat([x, y]).non_tensor_batch["m"]
    assert joined.shape == (4,)
    assert joined.dtype == object
    assert list(joined[2:]) == [[5], [6, 7, 8]]
    for piece in DataProto.concat([x, y]).chunk(4):
        assert piece.non_tensor_batch["m"].shape == (1,)
    np.testing.assert_equal(list(joined[:2]), cells)


def test_object_arrays_of_more_dimensions_and_text_arrays_become_cells():
    """H-02, the same mistake made before the batch is built."""
    wide = np.array([[1, 2], [3, 4]], dtype=object)
    x = DataProto.from_dict(non_tensors={"m": wide, "t": np.array(["a", "bcd"])})
    assert x.non_tensor_batch["m"].tolist() == [[1, 2], [3, 4]]
    assert x.non_tensor_batch["m"].shape == (2,)
    assert x.non_tensor_batch["t"].dtype == object
    longer = DataProto.concat([x, DataProto.from_dict(non_tensors={"m": [[1]], "t": ["longer text"]})])
    assert longer.non_tensor_batch["t"].tolist() == ["a", "bcd", "longer text"]


@pytest.mark.parametrize(
    ("tensors", "non_tensors"),
    [
        ({"a": torch.ones(2), "b": torch.ones(3)}, {}),
        ({"a": torch.ones(2)}, {"b": [1, 2, 3]}),
        ({}, {"a": [1, 2], "b": np.ones(3)}),
        ({"a": torch.ones(2), "b": [torch.ones(1)] * 3}, {}),
        ({"a": torch.ones(0)}, {"b": [1]}),
    ],
)
def test_unlike_column_lengths_are_refused(tensors, non_tensors):
    """P-202."""
    with pytest.raises(errors.RowCountError, match=r"a \d, b \d") as caught:
        DataProto.from_dict(tensors, non_tensors)
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (torch.tensor(1.0), "0-dimensional"),
        (np.ones(2), "non_tensors"),
        ([1, 2], "non_tensors"),
        ("ab", "expected a tensor"),
        (None, "expected a tensor"),
        ({"nested": torch.ones(2)}, "expected a tensor"),
        (torch.ones(2).to_sparse(), "to_dense"),
        ([], "at least one tensor"),
        ([torch.tensor(1)], "torch.stack"),
        ([torch.ones(1, 2), torch.ones(1, 3)], "first dimension"),
        ([torch.ones(1), torch.ones(1, dtype=torch.int64)], "dtype"),
    ],
)
def test_values_that_are_no_tensor_column_are_refused_by_name(value, says):
    with pytest.raises(errors.ColumnTypeError, match=says) as caught:
        DataProto.from_dict({"odd": value})
    assert "'odd'" in str(caught.value)
    assert isinstance(caught.value, TypeError)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_strided_nested_tensors_are_refused_by_name():
    nested = torch.nested.nested_tensor([torch.ones(1), torch.ones(2)], layout=torch.strided)
    with pytest.raises(errors.ColumnTypeError, match=r"'odd'.*jagged"):
        DataProto.from_dict({"odd": nested})


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (torch.ones(2), "tensors"),
        (np.array(1), "0-dimensional"),
        ("ab", "list"),
        (None, "list"),
        ({"a": 1}, "list"),
        (np.array(["2020-01-01"], dtype="datetime64[D]"), "datetime64"),
        (np.zeros(2, dtype=[("a", int)]), "dtype"),
        (np.ma.masked_array([1, 2], [True, False]), "MaskedArray"),
    ],
)
def test_values_that_are_no_numpy_column_are_refused_by_name(value, says):
    with pytest.raises(errors.ColumnTypeError, match=says) as caught:
        DataProto.from_dict(non_tensors={"odd": value})
    assert "'odd'" in str(caught.value)


def test_payloads_are_dicts():
    for payload in ([1, 2], torch.ones(2), "ab"):
        with pytest.raises(errors.ColumnTypeError, match="dict"):
            DataProto.from_dict(payload)


@pytest.mark.parametrize("name", [1, "", ("a", "b"), None])
def test_names_are_text(name):
    with pytest.raises(errors.ColumnTypeError, match="name"):
        DataProto.from_dict(non_tensors={name: [1]})


def test_a_name_is_one_column():
    with pytest.raises(errors.ColumnConflictError, match="'a'"):
        DataProto.from_dict({"a": torch.ones(2)}, {"a": [1, 2]})


def test_big_endian_arrays_are_taken_in_native_order():
    x = DataProto.from_dict(non_tensors={"a": np.array([1, 2], dtype=">i4")})
    assert x.non_tensor_batch["a"].dtype == np.dtype("int32")
    assert_equal(DataProto.from_bytes(x.to_bytes()), x)


def test_jagged_views_with_gaps_are_taken(rows_of):
    """A jagged tensor that skips tokens, or starts late in its values, is brought into one form."""
    dense = torch.arange(12).reshape(3, 4)
    gaps = torch.nested.narrow(dense, 1, torch.tensor([0, 1, 2]), torch.tensor([2, 0, 1]), layout=torch.jagged)
    late = torch.nested.nested_tensor_from_jagged(torch.arange(9), torch.tensor([2, 4, 4, 5], dtype=torch.int32))
    x = DataProto.from_dict({"gaps": gaps, "late": late})
    assert rows_of(x, "gaps") == [[0, 1], [], [10]]
    assert rows_of(x, "late") == [[2, 3], [], [4]]
    assert x.batch["late"].offsets() is x.batch["gaps"].offsets()
    assert_equal(DataProto.concat(x.chunk(2)), x)
    assert len(x.batch["late"].values()) == 3


def test_what_is_written_around_the_batch_is_found_out(full):
    x = full()
    x.non_tensor_batch["odd"] = np.arange(3)
    for operation in (lambda: x.chunk(2), lambda: x[0], lambda: x.select(["odd"]), lambda: pickle.dumps(x)):
        with pytest.raises(errors.RowCountError, match="'odd'"):
            operation()
