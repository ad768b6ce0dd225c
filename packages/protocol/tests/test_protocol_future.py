"""A handle to rows elsewhere: its operations equal those on rows here, whatever lies where."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ostinato.protocol import DataProto, DataProtoFuture, Metric
from ostinato.protocol.blocks import HeldBlock, PackedBlock, kind_of, packed_blocks
from ostinato.protocol.columns import validate
from ostinato.protocol.errors import (
    ArgumentError,
    ColumnConflictError,
    ColumnMismatchError,
    EmptyConcatError,
    MetaConflictError,
    MissingColumnError,
    ProtocolError,
    RowCountError,
    RowIndexError,
    RowsElsewhereError,
)
from ostinato.protocol.future import State
from ostinato.protocol.lanes import Lane, Piece, Rows, Source
from ostinato.protocol.testing import assert_equal, batches, differences

settings.register_profile("protocol", deadline=None, max_examples=30, derandomize=True)
settings.load_profile("protocol")


class Kept:
    """A reference of `ParcelStore`: the pickled block."""

    def __init__(self, value):
        self.buffers = []
        data = pickle.dumps(value, protocol=5, buffer_callback=self.buffers.append)
        self.buffers = [bytes(buffer) for buffer in self.buffers]  # read-only, as shared memory is
        self.data = data


class ParcelStore:
    """A store whose blocks went through pickle, as those of a cluster do; knows what it still holds."""

    def __init__(self):
        self.alive = weakref.WeakSet()
        self.puts = 0
        self.fetched = []

    def _keep(self, value):
        self.puts += 1
        self.alive.add(kept := Kept(value))
        return kept

    def put(self, tensors, arrays):
        blocks = [(names, self._keep(block)) for names, block in packed_blocks(tensors, arrays)]
        return {name: kept for names, kept in blocks for name in names}

    def put_order(self, order):
        return self._keep(order)

    def fetch(self, references):
        self.fetched += references
        return [pickle.loads(kept.data, buffers=kept.buffers) for kept in references]


def elsewhere(batch: DataProto, store=None, pieces: int = 3) -> DataProtoFuture:
    """The batch as one call on several ranks would have left it: cut into pieces that lie in a store."""
    store = store or ParcelStore()
    made = []
    for piece in batch.chunk(pieces):
        columns = piece._columns()
        kept = store.put(piece._tensors(), piece._arrays())
        kinds = {name: kind_of(column) for name, column in columns.items()}
        made.append(Piece(store, len(piece), {name: (kept[name], name) for name in columns}, kinds))
    lane = Lane(Source(made), Rows(0, len(batch)))
    meta = {key: value for key, value in batch.meta_info.items() if key != "metrics"}
    metrics = (batch.metrics,) if batch.metrics else ()
    return DataProtoFuture(State(len(batch), {name: (lane, name) for name in batch.columns}, meta, metrics))


futures = st.sampled_from([elsewhere, DataProtoFuture.of, lambda batch: elsewhere(batch, pieces=1)])


def unlike(future, batch) -> list[str]:
    """What tells a future from a batch; empty where nothing does."""
    if not isinstance(future, DataProtoFuture):
        return [f"{type(future).__name__} is no future"]
    said = [(len(future), len(batch)), (set(future.columns), set(batch.columns)), (future.metrics, batch.metrics)]
    if found := [f"{mine} instead of {theirs}" for mine, theirs in said if mine != theirs]:
        return found
    found = differences(future.get(), batch)
    return found + [line for name in batch.columns for line in differences(future.get([name]), batch.get([name]))]


def test_get_of_nothing_is_the_batch_without_columns():
    x = DataProto.from_dict({"a": torch.arange(3)}, meta_info={"step": 1})
    assert_equal(elsewhere(x).get([]), x.get([]))


@given(batches(), futures)
def test_get_brings_the_rows(x, future_of):
    assert unlike(future_of(x), x) == []


@given(batches(), futures, st.integers(1, 9))
def test_chunk_split_and_concat_equal_the_local_ones(x, future_of, n):
    f = future_of(x)
    for cut in ("chunk", "split"):
        pieces, expected = getattr(f, cut)(n), getattr(x, cut)(n)
        assert len(pieces) == len(expected)
        for piece, local in zip(pieces, expected, strict=True):
            assert unlike(piece, local) == []
        assert unlike(DataProtoFuture.concat(pieces), x) == []
        assert unlike(DataProto.concat([*pieces[:1], *expected[1:]]), x) == []


@given(batches(), futures, st.data())
def test_row_operations_equal_the_local_ones(x, future_of, data):
    f = future_of(x)
    order = data.draw(st.permutations(range(len(x))))
    index = data.draw(st.lists(st.integers(-len(x), len(x) - 1), max_size=9)) if len(x) else []
    mask = np.array(data.draw(st.lists(st.booleans(), min_size=len(x), max_size=len(x))), dtype=bool)
    item = data.draw(st.slices(7))
    assert unlike(f.reorder(order), x.reorder(order)) == []
    assert unlike(f.reorder(order).reorder(order), x.reorder(order).reorder(order)) == []
    assert unlike(f[index], x[index]) == []
    assert unlike(f[mask], x[mask]) == []
    assert unlike(f[item], x[item]) == []
    assert unlike(f[item].repeat(2), x[item].repeat(2)) == []
    assert unlike(f.repeat(3, interleave=False), x.repeat(3, interleave=False)) == []
    assert unlike(f.repeat(2).reorder(range(2 * len(x))[::-1]), x.repeat(2).reorder(range(2 * len(x))[::-1])) == []
    for row, local in zip(f, x, strict=True):
        assert unlike(row, local) == []
    for mine, theirs in zip(f.reorder(order).chunk(3), x.reorder(order).chunk(3), strict=True):
        assert unlike(mine, theirs) == []
    parts = [f[index], f.reorder(order).chunk(2)[1], f[item], DataProtoFuture.of(x)[mask]]
    expected = DataProto.concat([x[index], x.reorder(order).chunk(2)[1], x[item], x[mask]])
    assert unlike(DataProtoFuture.concat(parts), expected) == []


@given(batches(), futures, st.integers(1, 9))
def test_padding_equals_the_local_one(x, future_of, k):
    padded, pad = future_of(x).pad_to_multiple(k)
    expected, local_pad = x.pad_to_multiple(k)
    assert pad == local_pad
    assert unlike(padded, expected) == []
    assert unlike(padded.unpad(pad), x) == []


@given(batches(), futures, st.data())
def test_column_operations_equal_the_local_ones(x, future_of, data):
    names = data.draw(st.lists(st.sampled_from(x.columns), unique=True)) if x.columns else []
    f = future_of(x)
    assert unlike(f.select(names), x.select(names)) == []
    assert unlike(f.drop(names), x.drop(names)) == []
    there = {name: f"{name}_new" for name in names}
    assert unlike(f.rename(there), x.rename(there)) == []
    assert unlike(f.rename(there)[::-1].rename({new: old for old, new in there.items()}), x[::-1]) == []
    whole = x.select(names).union(x.drop(names).with_metrics({}))
    for one, other in ((f, f), (x, f), (f, x)):
        assert unlike(one.select(names).union(other.drop(names).with_metrics({})), whole) == []
    assert unlike(f.union(f.with_metrics({})), x) == []
    assert unlike(f.union(DataProto()), x) == []
    assert unlike(DataProto().union(f), x) == []
    popped, local = f.with_meta(), x.get()
    assert unlike(popped.pop(names), local.pop(names)) == []
    assert unlike(popped, local) == []
    meta = {"step": 7, "metrics": {"a": Metric.sum(1)}}
    assert unlike(f.with_meta(**meta), x.with_meta(**meta)) == []
    assert unlike(f, x) == []


@given(batches(), st.data())
def test_columns_of_one_batch_may_lie_in_many_places(x, data):
    """As in a training step: stages add columns, rows move between them, some columns were made here."""
    order = data.draw(st.permutations(range(len(x))))
    marks = DataProto.from_dict({"mark": torch.arange(len(x))}, {"text": [f"r{i}" for i in range(len(x))]})
    more = DataProto.from_dict({"more": torch.arange(len(x)) * 2.0})
    f = elsewhere(x).union(marks).reorder(order).union(elsewhere(more, pieces=2))
    local = x.union(marks).reorder(order).union(more)
    assert unlike(f, local) == []
    store = ParcelStore()
    for _ in range(2):  # what lies elsewhere is copied into a store once
        for piece, expected in zip(f.chunk(3), local.chunk(3), strict=True):
            layout, references = piece.layout(store)
            assert all(of is store for of, _ in references)
            objects = store.fetch([reference for _, reference in references])
            built = pickle.loads(pickle.dumps(layout)).build(objects, private=False)
            assert_equal(built, expected.with_metrics({}))
        seen, store.seen = getattr(store, "seen", store.puts), store.puts
        assert store.puts == seen


@given(batches())
def test_jagged_columns_of_one_structure_stay_so(x):
    if "jagged_twin" not in x.columns:
        return
    for f in (elsewhere(x), elsewhere(x)[::-1], elsewhere(x).repeat(2)):
        back = f.get()
        assert back.batch["jagged"].offsets() is back.batch["jagged_twin"].offsets()


def test_only_the_wanted_columns_and_rows_are_fetched():
    x = DataProto.from_dict({"a": torch.arange(8), "b": torch.arange(8)}, {"t": list("abcdefgh")})
    store = ParcelStore()
    f = elsewhere(x, store, pieces=4)
    f[2:4].get(["a"])
    assert len(store.fetched) == 1
    store.fetched.clear()
    f.reorder([7, 6, 5, 4, 3, 2, 1, 0])[:3].get(["t"])
    assert len(store.fetched) == 2
    store.fetched.clear()
    _ = f.rename({"a": "z"}).reorder(range(8)).repeat(2).chunk(4), f.columns, len(f), repr(f)
    assert not store.fetched


def test_chunks_put_together_again_are_the_same_references():
    f = elsewhere(DataProto.from_dict({"a": torch.arange(10)}))
    ((lane, key),) = DataProtoFuture.concat(f.chunk(4))._state.places.values()
    assert (lane, key) == f._state.places["a"]
    ((lane, _),) = DataProtoFuture.concat(f.reorder(range(10)[::-1]).chunk(4))._state.places.values()
    assert lane.source is f._state.places["a"][0].source


def test_the_last_future_drops_the_rows():
    store = ParcelStore()
    x = DataProto.from_dict({"a": torch.arange(10)}, {"t": [str(i) for i in range(10)]})
    f = elsewhere(x, store)
    half = f.reorder(range(10)[::-1]).union(DataProto.from_dict({"here": torch.zeros(10)}))[:5]
    half.layout(store)
    del f
    gc.collect()
    assert len(store.alive) > 0
    del half
    assert len(store.alive) == 0, "no cycle keeps references"


def test_rows_that_others_share_come_as_copies_and_for_workers_as_asked():
    """H-05."""
    x = DataProto.from_dict({"a": torch.arange(4), "b": torch.arange(4)}, {"n": np.arange(4)})
    store = ParcelStore()
    f = elsewhere(x, store, pieces=1)
    back = f.get()
    back.batch["a"].add_(1)
    back.non_tensor_batch["n"][:] = 0
    assert_equal(f.get(), x)
    layout, references = f.layout(store)
    objects = store.fetch([reference for _, reference in references])
    views = layout.build(objects, private=["b"])
    again = layout.build(objects, private=["b"])
    assert views.batch["a"].data_ptr() == again.batch["a"].data_ptr()
    assert views.batch["b"].data_ptr() != again.batch["b"].data_ptr()
    assert not views.non_tensor_batch["n"].flags.writeable
    held = DataProtoFuture.of(x).get()
    assert held.batch["a"].data_ptr() == x.batch["a"].data_ptr()


class Call:
    """A call under way, as a controller has it."""

    def __init__(self, batch=None, error=None):
        self.batch, self.error, self.asked = batch, error, []

    def _end(self, what):
        self.asked.append(what)
        if self.error:
            raise self.error
        return elsewhere(self.batch)._state

    def state(self):
        return self._end("state")

    def metrics(self):
        return dict(self._end("metrics").metrics[0])


def test_a_call_under_way_is_waited_for_when_something_must_be_known():
    x = DataProto.from_dict({"a": torch.arange(4)}, meta_info={"metrics": {"n": Metric.sum(1)}})
    call = Call(x)
    f = DataProtoFuture(call)
    assert "under way" in repr(f)
    assert call.asked == []
    assert len(f) == 4
    assert f.columns == ("a",)
    assert call.asked == ["state"]
    assert unlike(f, x) == []


def test_promised_rows_need_no_waiting_and_errors_come_with_the_first_use_of_values():
    x = DataProto.from_dict({"a": torch.arange(4)}, meta_info={"metrics": {"n": Metric.sum(1)}})
    call = Call(x, ZeroDivisionError("in the call"))
    known = elsewhere(x)._state
    f = DataProtoFuture(known._replace(metrics=(call,)))
    g = f.reorder([3, 2, 1, 0]).union(elsewhere(DataProto.from_dict({"b": torch.arange(4)}))).chunk(2)[0]
    assert (len(g), g.columns) == (2, ("a", "b"))
    assert call.asked == []
    for use in (g.get, g.wait, lambda: g.metrics, lambda: g.meta_info):
        with pytest.raises(ZeroDivisionError, match="in the call"):
            use()
    call.error = None
    assert g.metrics["n"].value == 1


def test_refusals_are_named_and_equal_the_local_ones():
    x = DataProto.from_dict({"a": torch.arange(4), "b": torch.arange(4)}, meta_info={"step": 1})
    f = elsewhere(x)
    for use in (f.select, f.drop, f.pop, f.get):
        with pytest.raises(MissingColumnError, match="'c'"):
            use(["a", "c"])
    assert f.columns == ("a", "b")
    for other in (
        DataProto.from_dict({"a": torch.arange(4)}),
        x.select(["a"]),
        elsewhere(x),
        f[::-1],
        f[:].reorder([1, 0, 2, 3]),
    ):
        with pytest.raises(ColumnConflictError, match=r"'a'.*not compared"):
            f.union(other)
    with pytest.raises(RowCountError, match=r"4 rows.*3 rows"):
        f.union(DataProto.from_dict({"c": torch.arange(3)}))
    with pytest.raises(MetaConflictError, match="step"):
        f.union(DataProto.from_dict(meta_info={"step": 2}))
    with pytest.raises(ColumnConflictError, match="two columns the name"):
        f.rename({"a": "b"})
    with pytest.raises(EmptyConcatError):
        DataProtoFuture.concat([])
    with pytest.raises(ColumnMismatchError, match=r"lacks \['b'\]"):
        DataProtoFuture.concat([f, f.drop(["b"])])
    with pytest.raises(ColumnMismatchError, match=r"'a' is a .*int64.* part 0 and a .*float32"):
        DataProtoFuture.concat([f, elsewhere(DataProto.from_dict({"a": torch.zeros(2), "b": torch.arange(2)}))])
    with pytest.raises(RowIndexError):
        f.reorder([0, 0, 1, 2])
    with pytest.raises(RowIndexError):
        f[9]
    with pytest.raises(ArgumentError):
        f.chunk(0)
    with pytest.raises(ArgumentError):
        f.unpad(5)


def test_what_needs_values_says_how_to_get_them():
    f = elsewhere(DataProto.from_dict({"a": torch.arange(4)}))
    for use in (lambda: f.to("cpu"), lambda: f.make_iterator(2), lambda: pickle.dumps(f)):
        with pytest.raises(RowsElsewhereError, match=r"\.get\("):
            use()
    assert issubclass(RowsElsewhereError, ProtocolError)
    assert f.batch["a"].tolist() == [0, 1, 2, 3]
    assert f.non_tensor_batch == {}
    with pytest.raises(AttributeError, match="no_such"):
        _ = f.no_such
    validate(f, ["a"])
    with pytest.raises(MissingColumnError):
        validate(f, ["prompts"])
    assert unlike(copy.copy(f), f.get()) == []


def test_blocks_give_single_columns_and_pickle_their_own_rows():
    big = torch.arange(1000)
    block = PackedBlock.of({"a": big[:4], "b": big[4:8]}, {"n": np.arange(4)})
    buffers = []
    data = pickle.dumps(block, protocol=5, buffer_callback=buffers.append)
    assert sum(len(bytes(buffer)) for buffer in buffers) == 3 * 4 * 8
    back = pickle.loads(data, buffers=buffers)
    tensors, arrays = back.take({"b"})
    assert list(tensors) == ["b"]
    assert not arrays
    assert tensors["b"].tolist() == [4, 5, 6, 7]
    assert HeldBlock({"a": big}, {}).take({"a"})[0]["a"] is big
    names = [names for names, _ in packed_blocks({"a": big}, {"n": np.arange(3), "t": np.array(["x"], dtype=object)})]
    assert names == [["a", "n"], ["t"]]


def test_kinds_tell_what_must_agree():
    jagged = DataProto.from_dict({"j": [torch.arange(2), torch.arange(3)]}).batch["j"]
    kinds = [kind_of(column) for column in (torch.zeros(3, 2), torch.zeros(5, 2), torch.zeros(3, 4), jagged)]
    assert kinds[0] == kinds[1] != kinds[2]
    assert kinds[3] == "(0, *) int64 jagged tensor"
