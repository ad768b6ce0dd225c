"""Laws that hold for every batch: every payload kind, no tensors, no columns, no rows, one row."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ostinato.protocol import DataProto
from ostinato.protocol.testing import assert_equal, batches

settings.register_profile("protocol", deadline=None, max_examples=30, derandomize=True)
settings.load_profile("protocol")


def _snapshot(x):
    return copy.deepcopy(x), x.batch, dict(x.batch.items()), x.non_tensor_batch, dict(x.non_tensor_batch)


def _unchanged(x, snapshot):
    was, batch, tensors, arrays, held = snapshot
    assert_equal(x, was)
    assert x.batch is batch
    assert x.non_tensor_batch is arrays
    assert all(x.batch[name] is column for name, column in tensors.items())
    assert all(x.non_tensor_batch[name] is column for name, column in held.items())


@given(batches(), st.integers(1, 12))
def test_concat_undoes_chunk(x, n):
    """P-206, P-213: sizes differ by at most one, longer first; nothing is changed."""
    was = _snapshot(x)
    pieces = x.chunk(n)
    sizes = [len(piece) for piece in pieces]
    assert len(pieces) == n
    assert sizes == sorted(sizes, reverse=True)
    assert max(sizes) - min(sizes) <= 1
    before = [_snapshot(piece) for piece in pieces]
    back = DataProto.concat(pieces)
    assert_equal(back, x)
    assert back == x
    _unchanged(x, was)
    for piece, snapshot in zip(pieces, before, strict=True):
        _unchanged(piece, snapshot)


@given(batches(), st.integers(1, 9))
def test_concat_undoes_split(x, size):
    pieces = x.split(size)
    assert all(len(piece) == size for piece in pieces[:-1])
    assert_equal(DataProto.concat(pieces), x)


@given(batches(), st.data())
def test_chunks_of_chunks_and_of_gathered_rows_still_join(x, data):
    order = data.draw(st.permutations(range(len(x))))
    moved = x.reorder(order)
    parts = [piece for half in moved.chunk(2) for piece in half.chunk(2)]
    assert_equal(DataProto.concat(parts), moved)


@given(batches(), st.sampled_from([2, 4, 5]))
def test_pickle_gives_an_equal_batch(x, protocol):
    """P-203, P-228."""
    assert_equal(pickle.loads(pickle.dumps(x, protocol=protocol)), x)
    for piece in (*x.chunk(3), x[::2], x[[]]):
        assert_equal(pickle.loads(pickle.dumps(piece, protocol=protocol)), piece)


@given(batches())
def test_pickle_out_of_band_gives_an_equal_batch(x):
    buffers = []
    data = pickle.dumps(x, protocol=5, buffer_callback=buffers.append)
    assert_equal(pickle.loads(data, buffers=buffers), x)
    assert_equal(pickle.loads(data, buffers=[bytes(buffer) for buffer in buffers]), x)


@given(batches())
def test_bytes_give_an_equal_batch(x):
    assert_equal(DataProto.from_bytes(x.to_bytes()), x)
    for piece in x.chunk(3):
        assert_equal(DataProto.from_bytes(piece.to_bytes()), piece)
    assert DataProto.from_bytes(x.to_bytes()).to_bytes() == x.to_bytes()


@given(batches(), st.integers(1, 20))
def test_unpad_undoes_pad(x, k):
    """H-01, P-227."""
    padded, pad = x.pad_to_multiple(k)
    assert 0 <= pad < k
    assert len(padded) % k == 0
    assert len(padded) == len(x) + pad
    assert_equal(padded.unpad(pad), x)


@given(batches(), st.data())
def test_reorder_and_back_is_the_batch(x, data):
    """P-223."""
    order = np.array(data.draw(st.permutations(range(len(x)))), dtype=np.int64)
    was = _snapshot(x)
    assert_equal(x.reorder(order).reorder(np.argsort(order)), x)
    assert_equal(x.reorder(order.tolist()), x.reorder(torch.from_numpy(order)))
    _unchanged(x, was)


@given(batches(), st.data())
def test_indexing_agrees_with_row_by_row(x, data):
    index = data.draw(st.lists(st.integers(-len(x), len(x) - 1), max_size=9)) if len(x) else []
    rows = [x[i] for i in index] or [x[0:0]]
    assert_equal(x[index], DataProto.concat(rows))
    assert_equal(x[np.array(index, dtype=np.int64)], x[index])
    assert_equal(x[torch.tensor(index, dtype=torch.int64)], x[index])


@given(batches(), st.slices(7))
def test_slice_is_the_list_of_its_rows(x, item):
    assert_equal(x[item], x[list(range(len(x)))[item]])


@given(batches(), st.data())
def test_mask_is_the_list_of_its_true_rows(x, data):
    """P-222."""
    mask = data.draw(st.lists(st.booleans(), min_size=len(x), max_size=len(x)))
    rows = x[[i for i, keep in enumerate(mask) if keep]]
    assert_equal(x[np.array(mask, dtype=bool)], rows)
    assert_equal(x[torch.tensor(mask, dtype=torch.bool)], rows)
    if mask:
        assert_equal(x[mask], rows)


@given(batches(), st.integers(1, 3), st.booleans())
def test_repeat_is_an_index(x, n, interleave):
    """P-224."""
    rows = [i for i in range(len(x)) for _ in range(n)] if interleave else list(range(len(x))) * n
    repeated = x.repeat(n, interleave=interleave)
    assert_equal(repeated.drop([]), x[rows].with_meta(**x.meta_info))


@given(batches(), st.data())
def test_select_drop_pop_and_union_are_each_other_s_inverse(x, data):
    names = data.draw(st.lists(st.sampled_from(x.columns), unique=True)) if x.columns else []
    was = _snapshot(x)
    kept, rest = x.select(names), x.drop(names)
    assert kept.columns == tuple(
        n for n in (*[c for c in names if c in x.batch], *[c for c in names if c not in kept.batch])
    )
    assert_equal(kept.union(rest.with_metrics({})).with_meta(**x.meta_info), x)
    assert_equal(x.get(names), kept)
    assert_equal(x.get(), x)
    _unchanged(x, was)
    left = x.get()
    popped = left.pop(names)
    assert left.columns == rest.columns
    assert popped.columns == kept.columns
    assert_equal(left.union(popped), x)


@given(batches())
def test_union_with_itself_without_metrics_is_itself(x):
    """P-217: equal columns are no conflict, NaN or not."""
    once = x.with_metrics({})
    assert_equal(once.union(copy.deepcopy(once)), once)
    assert_equal(once.union(DataProto()), once)
    assert_equal(DataProto().union(once), once)


@given(batches())
def test_rename_and_back_is_the_batch(x):
    there = {name: f"{name}_new" for name in x.columns}
    back = {new: old for old, new in there.items()}
    assert x.rename(there).columns == tuple(there.values())
    assert_equal(x.rename(there).rename(back), x)


@given(batches(min_rows=1), st.integers(1, 8), st.integers(1, 3))
def test_mini_batches_of_an_epoch_are_the_rows(x, size, epochs):
    once = x.with_metrics({}).drop([])
    plain = list(x.make_iterator(size, epochs))
    assert len(plain) == epochs * -(-len(x) // size)
    per_epoch = len(plain) // epochs
    bare = once[:]
    for epoch in range(epochs):
        assert_equal(DataProto.concat(plain[epoch * per_epoch : (epoch + 1) * per_epoch]), bare)
    numbered = x.union(DataProto.from_dict({"row": torch.arange(len(x))}))
    shuffled = list(numbered.make_iterator(size, epochs, shuffle_seed=3))
    for epoch in range(epochs):
        part = DataProto.concat(shuffled[epoch * per_epoch : (epoch + 1) * per_epoch])
        assert_equal(part.reorder(part.batch["row"].argsort()), numbered[:])
    for a, b in zip(shuffled, numbered.make_iterator(size, epochs, shuffle_seed=3), strict=True):
        assert_equal(a, b)


@given(batches())
def test_copies_are_equal_and_deep_ones_private(x):
    assert_equal(copy.copy(x), x)
    deep = copy.deepcopy(x)
    assert_equal(deep, x)
    for name, column in x.batch.items():
        if not column.is_nested and column.numel():
            assert deep.batch[name].data_ptr() != column.data_ptr()


@given(batches())
def test_jagged_columns_of_one_structure_stay_so(x):
    """Torch refuses arithmetic between jagged tensors that do not hold the same offsets."""
    if "jagged_twin" not in x.columns:
        return
    buffers = []
    data = pickle.dumps(x, protocol=5, buffer_callback=buffers.append)
    results = [
        x,
        *x.chunk(2),
        x.reorder(range(len(x))[::-1]),
        x.repeat(2),
        x[::-1],
        DataProto.concat([x.with_metrics({})] * 2),
        DataProto.concat(x.chunk(2)),
        x.drop(["jagged_twin"]).union(copy.deepcopy(x.select(["jagged_twin"]).with_metrics({}))),
        pickle.loads(data, buffers=buffers),
        DataProto.from_bytes(x.to_bytes()),
        copy.deepcopy(x),
        x.to("cpu"),
    ]
    for result in results:
        offsets = result.batch["jagged"].offsets()
        for name in ("jagged_twin", "jagged_wide", "jagged_last"):
            assert result.batch[name].offsets() is offsets
        if len(result) and result.batch["jagged"].dtype == torch.float32:
            _ = result.batch["jagged"] * result.batch["jagged_twin"]
