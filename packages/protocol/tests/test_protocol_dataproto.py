"""DataProto by hand tables: kinds of batch, padding, value semantics, and how it looks."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch

from ostinato.protocol import DataProto, errors
from ostinato.protocol.testing import assert_equal, differences

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


def test_text_only_batch_is_a_batch(rows_of):
    """P-204."""
    x = DataProto.from_dict(non_tensors={"t": list("abcd")})
    assert len(x) == 4
    assert [rows_of(p, "t") for p in x.chunk(3)] == [["a", "b"], ["c"], ["d"]]
    assert_equal(DataProto.concat(x.chunk(3)), x)
    assert rows_of(x.repeat(2), "t") == list("aabbccdd")
    padded, pad = x.pad_to_multiple(3)
    assert (rows_of(padded, "t"), pad) == (list("abcdab"), 2)


def test_rows_outlive_their_columns(full):
    x = full()
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


def test_chunk_of_ten_in_four(rows_of):
    x = DataProto.from_dict({"a": torch.arange(10)})
    assert [rows_of(p, "a") for p in x.chunk(4)] == [[0, 1, 2], [3, 4, 5], [6, 7], [8, 9]]
    assert [len(p) for p in x[:2].chunk(4)] == [1, 1, 0, 0]
    assert [len(p) for p in x[:0].chunk(3)] == [0, 0, 0]


def test_split_with_a_remainder(full):
    """P-206."""
    x = full(5)
    assert [len(p) for p in x.split(2)] == [2, 2, 1]
    assert len(DataProto.concat(x.split(2))) == 5
    assert [len(p) for p in x.split(9)] == [5]
    assert [len(p) for p in x[:0].split(2)] == [0]


def test_concat_keeps_text_in_order(rows_of):
    """H-03."""
    a, b = (DataProto.from_dict(non_tensors={"label": cells}) for cells in (["a", "b"], ["c", "c"]))
    assert rows_of(DataProto.concat([a, b]), "label") == ["a", "b", "c", "c"]
    numbers = [DataProto.from_dict(non_tensors={"n": np.array(v)}) for v in ([1, 2], [3, 3])]
    assert rows_of(DataProto.concat(numbers), "n") == [1, 2, 3, 3]


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


def test_padding_starts_again_at_row_0_as_often_as_needed(rows_of):
    """H-01."""
    x = DataProto.from_dict({"r": torch.arange(3), "j": [torch.arange(i) for i in range(3)]}, {"t": list("abc")})
    padded, pad = x.pad_to_multiple(8)
    assert pad == 5
    assert rows_of(padded, "r") == [0, 1, 2, 0, 1, 2, 0, 1]
    assert rows_of(padded, "t") == list("abcabcab")
    assert rows_of(padded, "j") == [[], [0], [0, 1], [], [0], [0, 1], [], [0]]
    assert_equal(padded.unpad(pad), x)


def test_padding_adds_nothing_where_rows_divide(full):
    """P-227."""
    x = full(8)
    padded, pad = x.pad_to_multiple(4)
    assert pad == 0
    assert_equal(padded, x)
    assert padded is not x
    empty, pad = x[:0].pad_to_multiple(4)
    assert (len(empty), pad) == (0, 0)


def test_unpad_refuses_more_rows_than_there_are(full):
    for pad in (6, -1, 1.5, None, True):
        with pytest.raises(errors.ArgumentError, match="unpad"):
            full(5).unpad(pad)


# ---------------------------------------- value semantics


def test_pieces_share_no_meta(full):
    """P-208: writing into one part's meta changes no other's, however deep."""
    x = full()
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


def test_operations_share_storage(full):
    x = full()
    address = x.batch["ids"].data_ptr()
    for part in (x.select(["ids"]), x.chunk(2)[0], x[:3], x.union(DataProto()), DataProto.concat([x]), x.to("cpu")):
        assert part.batch["ids"].data_ptr() == address
    assert np.shares_memory(x.chunk(2)[1].non_tensor_batch["num"], x.non_tensor_batch["num"])
    assert x.chunk(2)[0].batch["ragged"].values().data_ptr() == x.batch["ragged"].values().data_ptr()


def test_pop_alone_changes_its_operand(full):
    x = full()
    other = x.get()
    popped = x.pop(["ids", "text"])
    assert popped.columns == ("ids", "text")
    assert x.columns == ("logp", "ragged", "num")
    assert other.columns == ("ids", "logp", "ragged", "text", "num")
    assert_equal(x.union(popped), other)


def test_select_leaves_its_source(full):
    """P-221."""
    x = full()
    part = x.select(["ids", "text"])
    part.batch["new"] = torch.ones(5)
    part.non_tensor_batch["more"] = part.non_tensor_batch["text"]
    del part.batch["ids"], part.non_tensor_batch["text"]
    assert_equal(x, full())


def test_unknown_columns_are_refused_and_nothing_is_taken(full):
    """P-220: tensors and text alike."""
    x = full()
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
            assert_equal(x, full())


def test_a_lone_name_is_one_column(full):
    assert full().select("ids").columns == ("ids",)
    assert full().drop("ids").columns == ("logp", "ragged", "text", "num")


def test_rename_swaps_and_refuses_a_clash(full):
    x = full()
    swapped = x.rename({"ids": "logp", "logp": "ids"})
    assert swapped.batch["logp"] is x.batch["ids"]
    assert swapped.batch["ids"] is x.batch["logp"]
    for names in ({"ids": "text"}, {"ids": "z", "text": "z"}):
        with pytest.raises(errors.ColumnConflictError, match="rename"):
            x.rename(names)


# ---------------------------------------- look and feel


def test_equality_looks_at_everything(full):
    x = full()
    assert x == full()
    assert x != x[:4]
    assert x != x.drop(["text"])
    assert x != x.with_meta(step=4)
    assert x != x.reorder([1, 0, 2, 3, 4])
    assert x != 3
    with pytest.raises(TypeError, match="unhashable"):
        hash(x)


def test_differences_say_which_row(full):
    x = full()
    y = x.drop(["text"]).union(DataProto.from_dict(non_tensors={"text": ["t0", "t1", "odd", "t3", "t4"]}))
    (told,) = differences(y, x)
    assert "'text'" in told
    assert "row 2 is 'odd'" in told
    with pytest.raises(AssertionError, match="rows"):
        assert_equal(x[:1], x)


def test_repr_tells_rows_and_columns(full):
    told = repr(full())
    assert "5 rows" in told
    assert "ragged (5, *) int64 jagged tensor" in told
    assert "text (5,) object array" in told


def test_with_meta_leaves_its_operand(full):
    x = full()
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
