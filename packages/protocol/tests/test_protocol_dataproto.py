"""DataProto by hand tables: construction, refusals, value semantics, and the cases that others got wrong."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from ostinato.protocol import DataProto, Metric, errors
from ostinato.protocol.testing import assert_equal, differences


def _full(n=5):
    return DataProto.from_dict(
        tensors={
            "ids": torch.arange(n * 2).reshape(n, 2),
            "logp": torch.linspace(0, 1, n, dtype=torch.bfloat16),
            "ragged": [torch.arange(i % 3) for i in range(n)],
        },
        non_tensors={"text": [f"t{i}" for i in range(n)], "num": np.arange(n, dtype=np.int32)},
        meta_info={"step": 3, "nested": {"list": [1, 2]}},
    )


def _rows(x, name):
    column = x.batch[name] if name in x.batch else x.non_tensor_batch[name]
    return [row.tolist() for row in column.unbind()] if isinstance(column, torch.Tensor) else column.tolist()


# ---------------------------------------- construction


def test_from_dict_takes_plain_lists_tensors_and_arrays():
    x = _full()
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
def test_list_of_tensors_is_jagged_whatever_the_lengths(lengths):
    """H-04: equally long rows, or one row alone, make the same kind of column as any others."""
    x = DataProto.from_single_dict({"responses": [torch.arange(n) for n in lengths]})
    column = x.batch["responses"]
    assert column.is_nested
    assert column.layout == torch.jagged
    assert column.dtype == torch.int64
    for part in (x[0], x[:1], x[[0]], *x.chunk(3), DataProto.concat([x, x]), pickle.loads(pickle.dumps(x[0]))):
        assert part.batch["responses"].is_nested
    assert _rows(x, "responses") == [list(range(n)) for n in lengths]


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


def test_jagged_views_with_gaps_are_taken():
    """A jagged tensor that skips tokens, or starts late in its values, is brought into one form."""
    dense = torch.arange(12).reshape(3, 4)
    gaps = torch.nested.narrow(dense, 1, torch.tensor([0, 1, 2]), torch.tensor([2, 0, 1]), layout=torch.jagged)
    late = torch.nested.nested_tensor_from_jagged(torch.arange(9), torch.tensor([2, 4, 4, 5], dtype=torch.int32))
    x = DataProto.from_dict({"gaps": gaps, "late": late})
    assert _rows(x, "gaps") == [[0, 1], [], [10]]
    assert _rows(x, "late") == [[2, 3], [], [4]]
    assert x.batch["late"].offsets() is x.batch["gaps"].offsets()
    assert_equal(DataProto.concat(x.chunk(2)), x)
    assert len(x.batch["late"].values()) == 3


def test_what_is_written_around_the_batch_is_found_out():
    x = _full()
    x.non_tensor_batch["odd"] = np.arange(3)
    for operation in (lambda: x.chunk(2), lambda: x[0], lambda: x.select(["odd"]), lambda: pickle.dumps(x)):
        with pytest.raises(errors.RowCountError, match="'odd'"):
            operation()


# ---------------------------------------- kinds of batch


def test_lab_4_runs_as_written():
    data = DataProto.from_dict(
        tensors={"input_ids": torch.arange(32).reshape(8, 4)},
        non_tensors={"answer": [str(i) for i in range(8)]},
        meta_info={"temperature": 1.0},
    )
    parts = data.chunk(4)
    assert [p.batch["input_ids"].shape for p in parts] == [(2, 4)] * 4
    back = DataProto.concat(parts)
    assert back.batch["input_ids"].shape == (8, 4)
    assert list(back.non_tensor_batch["answer"][:3]) == ["0", "1", "2"]
    merged = back.union(DataProto.from_dict(tensors={"reward": torch.ones(8)}))
    assert list(merged.batch.keys()) == ["input_ids", "reward"]


def test_text_only_batch_is_a_batch():
    """P-204."""
    x = DataProto.from_dict(non_tensors={"t": list("abcd")})
    assert len(x) == 4
    assert [_rows(p, "t") for p in x.chunk(3)] == [["a", "b"], ["c"], ["d"]]
    assert_equal(DataProto.concat(x.chunk(3)), x)
    assert _rows(x.repeat(2), "t") == list("aabbccdd")
    padded, pad = x.pad_to_multiple(3)
    assert (_rows(padded, "t"), pad) == (list("abcdab"), 2)


def test_rows_outlive_their_columns():
    x = _full()
    bare = x.select([])
    assert len(bare) == 5
    assert [len(p) for p in bare.chunk(2)] == [3, 2]
    assert len(DataProto.concat(bare.chunk(2))) == 5
    assert len(bare.repeat(2)) == 10
    assert_equal(bare.union(x), x)
    y = x.get()
    y.pop(y.columns)
    assert len(y) == 5
    with pytest.raises(errors.RowCountError):
        bare.union(DataProto.from_dict({"a": torch.ones(4)}))


def test_chunk_of_ten_in_four():
    x = DataProto.from_dict({"a": torch.arange(10)})
    assert [_rows(p, "a") for p in x.chunk(4)] == [[0, 1, 2], [3, 4, 5], [6, 7], [8, 9]]
    assert [len(p) for p in x[:2].chunk(4)] == [1, 1, 0, 0]
    assert [len(p) for p in x[:0].chunk(3)] == [0, 0, 0]


def test_split_with_a_remainder():
    """P-206."""
    x = _full(5)
    assert [len(p) for p in x.split(2)] == [2, 2, 1]
    assert len(DataProto.concat(x.split(2))) == 5
    assert [len(p) for p in x.split(9)] == [5]
    assert [len(p) for p in x[:0].split(2)] == [0]


def test_concat_keeps_text_in_order():
    """H-03."""
    a, b = (DataProto.from_dict(non_tensors={"label": cells}) for cells in (["a", "b"], ["c", "c"]))
    assert _rows(DataProto.concat([a, b]), "label") == ["a", "b", "c", "c"]
    numbers = [DataProto.from_dict(non_tensors={"n": np.array(v)}) for v in ([1, 2], [3, 3])]
    assert _rows(DataProto.concat(numbers), "n") == [1, 2, 3, 3]


@pytest.mark.parametrize(
    "dtype",
    [torch.bfloat16, torch.bool, torch.int32, torch.float16, torch.uint16, torch.uint32, torch.uint64, torch.complex64],
)
def test_dtypes_are_kept(dtype):
    """P-203."""
    x = DataProto.from_dict({"a": torch.tensor([1, 0, 1]).to(dtype), "j": [torch.ones(2, dtype=dtype)] * 3})
    padded, pad = x.pad_to_multiple(2)
    results = [
        DataProto.concat(x.chunk(2)), x[[0, 2]], x[::-1], x.reorder([2, 0, 1]), x.repeat(2), padded, padded.unpad(pad),
        x.to("cpu"), x.select(["a", "j"]), x.union(x), pickle.loads(pickle.dumps(x)),
        DataProto.from_bytes(x.to_bytes()), next(x.make_iterator(2, shuffle_seed=0)),
    ]  # fmt: skip
    for result in results:
        assert result.batch["a"].dtype == dtype
        assert result.batch["j"].dtype == dtype


# ---------------------------------------- padding


def test_padding_starts_again_at_row_0_as_often_as_needed():
    """H-01."""
    x = DataProto.from_dict({"r": torch.arange(3), "j": [torch.arange(i) for i in range(3)]}, {"t": list("abc")})
    padded, pad = x.pad_to_multiple(8)
    assert pad == 5
    assert _rows(padded, "r") == [0, 1, 2, 0, 1, 2, 0, 1]
    assert _rows(padded, "t") == list("abcabcab")
    assert _rows(padded, "j") == [[], [0], [0, 1], [], [0], [0, 1], [], [0]]
    assert_equal(padded.unpad(pad), x)


def test_padding_adds_nothing_where_rows_divide():
    """P-227."""
    x = _full(8)
    padded, pad = x.pad_to_multiple(4)
    assert pad == 0
    assert_equal(padded, x)
    assert padded is not x
    empty, pad = x[:0].pad_to_multiple(4)
    assert (len(empty), pad) == (0, 0)


def test_unpad_refuses_more_rows_than_there_are():
    for pad in (6, -1, 1.5, None, True):
        with pytest.raises(errors.ArgumentError, match="unpad"):
            _full(5).unpad(pad)


# ---------------------------------------- value semantics


def test_pieces_share_no_meta():
    """P-208: writing into one part's meta changes no other's, however deep."""
    x = _full()
    results = [*x.chunk(2), *x.split(3), x[0], x[[0, 1]], x.select(["ids"]), x.get(), x.drop(["ids"]), x.repeat(2)]
    results += [x.rename({"ids": "i"}), x.union(DataProto()), DataProto.concat([x]), x.to("cpu"), x.reorder(range(5))]
    results += [x.with_meta(a=1), x.pad_to_multiple(2)[0], x.unpad(1), next(x.make_iterator(2)), x.get().pop(["ids"])]
    for part in results:
        part.meta_info["step"] = 99
        part.meta_info["nested"]["list"].append(3)
        part.meta_info["new"] = 1
    for part in results[1:]:
        assert part.meta_info["nested"] == {"list": [1, 2, 3]}
    assert x.meta_info == {"step": 3, "nested": {"list": [1, 2]}}


def test_operations_share_storage():
    x = _full()
    address = x.batch["ids"].data_ptr()
    for part in (x.select(["ids"]), x.chunk(2)[0], x[:3], x.union(DataProto()), DataProto.concat([x]), x.to("cpu")):
        assert part.batch["ids"].data_ptr() == address
    assert np.shares_memory(x.chunk(2)[1].non_tensor_batch["num"], x.non_tensor_batch["num"])
    assert x.chunk(2)[0].batch["ragged"].values().data_ptr() == x.batch["ragged"].values().data_ptr()


def test_pop_alone_changes_its_operand():
    x = _full()
    other = x.get()
    popped = x.pop(["ids", "text"])
    assert popped.columns == ("ids", "text")
    assert x.columns == ("logp", "ragged", "num")
    assert other.columns == ("ids", "logp", "ragged", "text", "num")
    assert_equal(x.union(popped), other)


def test_select_leaves_its_source():
    """P-221."""
    x = _full()
    part = x.select(["ids", "text"])
    part.batch["new"] = torch.ones(5)
    part.non_tensor_batch["more"] = part.non_tensor_batch["text"]
    del part.batch["ids"], part.non_tensor_batch["text"]
    assert_equal(x, _full())


def test_unknown_columns_are_refused_and_nothing_is_taken():
    """P-220: tensors and text alike."""
    x = _full()
    for names in (["nope"], ["ids", "nope"], ["text", "nope"], "nope"):
        for operation in (
            x.select,
            x.pop,
            x.drop,
            x.get,
            lambda n: x.rename(dict.fromkeys([n] if isinstance(n, str) else n, "z")),
        ):
            with pytest.raises(errors.MissingColumnError, match=r"'nope'.*'ids'") as caught:
                operation(names)
            assert isinstance(caught.value, KeyError)
            assert_equal(x, _full())


def test_a_lone_name_is_one_column():
    assert _full().select("ids").columns == ("ids",)
    assert _full().drop("ids").columns == ("logp", "ragged", "text", "num")


def test_rename_swaps_and_refuses_a_clash():
    x = _full()
    swapped = x.rename({"ids": "logp", "logp": "ids"})
    assert swapped.batch["logp"] is x.batch["ids"]
    assert swapped.batch["ids"] is x.batch["logp"]
    for names in ({"ids": "text"}, {"ids": "z", "text": "z"}):
        with pytest.raises(errors.ColumnConflictError, match="rename"):
            x.rename(names)


# ---------------------------------------- concat and union


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


def test_timings_go_by_the_metrics():
    """P-210: timings that differ by part are lists, not a conflict."""
    parts = _full(4).chunk(2)
    parts = [p.with_metrics({"t": Metric.list(i), "n": Metric.sum(i)}) for i, p in enumerate(parts, start=1)]
    joined = DataProto.concat(parts)
    assert joined.metrics["t"].value == (1.0, 2.0)
    assert joined.metrics["n"].value == 3.0
    assert parts[0].metrics["n"].value == 1.0


def test_metrics_count_once():
    """Pieces hand a batch's metrics on once, so that joining them again does not multiply sums."""
    x = _full(5).with_metrics({"n": Metric.sum(7)})
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


# ---------------------------------------- rows


@pytest.mark.parametrize("mask", [[True, False, False, True, False], np.array([1, 0, 0, 1, 0], dtype=bool)])
def test_boolean_lists_are_masks_in_every_column(mask):
    """P-222."""
    x = _full()[mask]
    assert _rows(x, "ids") == [[0, 1], [6, 7]]
    assert _rows(x, "ragged") == [[], []]
    assert _rows(x, "text") == ["t0", "t3"]
    assert _rows(x, "num") == [0, 3]


@pytest.mark.parametrize(
    "item",
    [5, -6, [0, 5], [-6], [True], [True, False, True, False, True, False], [True, 2], [0.5], "ids", None, [[0, 1]], 1.0,
     True, np.array([1.5]), torch.ones(3), ["a"], {"a": 1}, slice("a", "b")],
)  # fmt: skip
def test_indices_that_name_no_rows_are_refused(item):
    with pytest.raises(errors.RowIndexError) as caught:
        _full()[item]
    assert isinstance(caught.value, IndexError)


def test_int_gives_one_row_and_iteration_ends():
    x = _full(3)
    assert [_rows(row, "text") for row in x] == [["t0"], ["t1"], ["t2"]]
    assert _rows(x[-1], "text") == _rows(x[np.int64(2)], "text") == _rows(x[torch.tensor(2)], "text") == ["t2"]


@pytest.mark.parametrize("indices", [[0, 1], [0, 0, 1], [0, 1, 3], [0, 1, 2, 2], [True, True, False]])
def test_reorder_takes_permutations_alone(indices):
    with pytest.raises(errors.RowIndexError, match="reorder"):
        _full(3).reorder(indices)


def test_repeat_orders():
    """P-224."""
    x = DataProto.from_dict({"a": torch.tensor([0, 1])}, {"t": ["a", "b"]})
    assert _rows(x.repeat(2), "a") == [0, 0, 1, 1]
    assert _rows(x.repeat(2), "t") == list("aabb")
    assert _rows(x.repeat(2, interleave=False), "a") == [0, 1, 0, 1]
    assert _rows(x.repeat(2, interleave=False), "t") == list("abab")


@pytest.mark.parametrize("bad", [0, -1, 1.5, "2", None, True])
def test_counts_below_one_are_refused(bad):
    x = _full()
    for operation in (
        x.chunk,
        x.split,
        x.repeat,
        x.pad_to_multiple,
        x.make_iterator,
        lambda n: x.make_iterator(2, epochs=n),
    ):
        with pytest.raises(errors.ArgumentError, match="whole number >= 1"):
            operation(bad)


def test_mini_batches_are_shuffled_anew_each_epoch():
    x = DataProto.from_dict({"a": torch.arange(64)})
    epochs = DataProto.concat(x.make_iterator(16, epochs=2, shuffle_seed=1)).batch["a"].reshape(2, 64)
    assert not torch.equal(epochs[0], epochs[1])
    other = DataProto.concat(x.make_iterator(16, shuffle_seed=2)).batch["a"]
    assert not torch.equal(epochs[0], other)
    with pytest.raises(errors.ArgumentError, match="shuffle_seed"):
        list(x.make_iterator(2, shuffle_seed=-1))


def test_gradients_pass_through_row_operations():
    weight = torch.ones(3, requires_grad=True)
    x = DataProto.from_dict({"w": weight})
    DataProto.concat(x.repeat(2).chunk(4)).batch["w"].sum().backward()
    assert weight.grad.tolist() == [2, 2, 2]


@pytest.mark.parametrize("n", [8, 64, 5000])
def test_parts_cost_no_copies_of_copies(monkeypatch, n):
    """H-06: each row is copied once, whatever the number of parts."""
    x = DataProto.from_dict(
        {"a": torch.zeros(4096, 4), "j": [torch.zeros(2)] * 4096},
        {"n": np.zeros((4096, 8)), "t": [str(i) for i in range(4096)]},
    )
    written = []

    def counted(function):
        def call(parts, *args, **kwargs):
            written.append((result := function(parts, *args, **kwargs)).nbytes)
            return result

        return call

    parts = x.chunk(n)
    monkeypatch.setattr(torch, "cat", counted(torch.cat))
    monkeypatch.setattr(np, "concatenate", counted(np.concatenate))
    assert len(DataProto.concat(parts)) == 4096
    offsets = x.batch["j"].offsets().nbytes
    once = x.batch["a"].nbytes + 4096 * 2 * 4 + offsets + sum(column.nbytes for column in x.non_tensor_batch.values())
    assert sum(written) == once


# ---------------------------------------- places


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_every_operation_works_on_a_gpu():
    x = _full(7).union(DataProto.from_dict({"twin": [torch.arange(i % 3) * 2.0 for i in range(7)]}))
    y = x.to("cuda")
    assert {column.device.type for column in y.batch.values()} == {"cuda"}
    assert y.batch["twin"].offsets() is y.batch["ragged"].offsets()
    assert_equal(y.to("cpu"), x)
    order = [3, 1, 0, 2, 6, 5, 4]
    for there, here in [
        (DataProto.concat(y.chunk(3)), x),
        (y.chunk(3)[1], x.chunk(3)[1]),
        (y.reorder(order), x.reorder(order)),
        (y[y.batch["ids"][:, 0] > 4], x[x.batch["ids"][:, 0] > 4]),
        (y.repeat(2), x.repeat(2)),
        (y.pad_to_multiple(4)[0], x.pad_to_multiple(4)[0]),
        (y.union(y), x),
    ]:
        assert_equal(there.to("cpu"), here)
    assert_equal(pickle.loads(pickle.dumps(y)), x)
    assert_equal(DataProto.from_bytes(y.to_bytes()), x)
    assert y != x


# ---------------------------------------- look and feel


def test_equality_looks_at_everything():
    x = _full()
    assert x == _full()
    assert x != x[:4]
    assert x != x.drop(["text"])
    assert x != x.with_meta(step=4)
    assert x != x.reorder([1, 0, 2, 3, 4])
    assert x != 3
    with pytest.raises(TypeError, match="unhashable"):
        hash(x)


def test_differences_say_which_row():
    x = _full()
    y = x.drop(["text"]).union(DataProto.from_dict(non_tensors={"text": ["t0", "t1", "odd", "t3", "t4"]}))
    (told,) = differences(y, x)
    assert "'text'" in told
    assert "row 2 is 'odd'" in told
    with pytest.raises(AssertionError, match="rows"):
        assert_equal(x[:1], x)


def test_repr_tells_rows_and_columns():
    told = repr(_full())
    assert "5 rows" in told
    assert "ragged (5, *) int64 jagged tensor" in told
    assert "text (5,) object array" in told


def test_with_meta_leaves_its_operand():
    x = _full()
    assert x.with_meta(step=4, new=1).meta_info["step"] == 4
    assert x.meta_info["step"] == 3
    assert "new" not in x.meta_info


def test_errors_survive_pickling():
    leaves = [e for e in vars(errors).values() if isinstance(e, type) and issubclass(e, errors.ProtocolError)]
    assert len(leaves) > 10
    for leaf in leaves:
        back = pickle.loads(pickle.dumps(leaf("where: what 'key'; how")))
        assert type(back) is leaf
        assert str(back) == "where: what 'key'; how"
        assert leaf is errors.ProtocolError or len(leaf.__mro__) > 4
