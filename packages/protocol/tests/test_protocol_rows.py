"""Rows chosen, ordered, repeated and moved to another device."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch

from ostinato.protocol import DataProto, errors
from ostinato.protocol.testing import assert_equal

# ---------------------------------------- rows


@pytest.mark.parametrize("mask", [[True, False, False, True, False], np.array([1, 0, 0, 1, 0], dtype=bool)])
def test_boolean_lists_are_masks_in_every_column(mask, full, rows_of):
    """P-222."""
    x = full()[mask]
    assert rows_of(x, "ids") == [[0, 1], [6, 7]]
    assert rows_of(x, "ragged") == [[], []]
    assert rows_of(x, "text") == ["t0", "t3"]
    assert rows_of(x, "num") == [0, 3]


@pytest.mark.parametrize(
    "item",
    [5, -6, [0, 5], [-6], [True], [True, False, True, False, True, False], [True, 2], [0.5], "ids", None, [[0, 1]], 1.0,
     True, np.array([1.5]), torch.ones(3), ["a"], {"a": 1}, slice("a", "b")],
)  # fmt: skip
def test_indices_that_name_no_rows_are_refused(item, full):
    with pytest.raises(errors.RowIndexError) as caught:
        full()[item]
    assert isinstance(caught.value, IndexError)


def test_int_gives_one_row_and_iteration_ends(full, rows_of):
    x = full(3)
    assert [rows_of(row, "text") for row in x] == [["t0"], ["t1"], ["t2"]]
    assert rows_of(x[-1], "text") == rows_of(x[np.int64(2)], "text") == rows_of(x[torch.tensor(2)], "text") == ["t2"]


@pytest.mark.parametrize("indices", [[0, 1], [0, 0, 1], [0, 1, 3], [0, 1, 2, 2], [True, True, False]])
def test_reorder_takes_permutations_alone(indices, full):
    with pytest.raises(errors.RowIndexError, match="reorder"):
        full(3).reorder(indices)


def test_repeat_orders(rows_of):
    """P-224."""
    x = DataProto.from_dict({"a": torch.tensor([0, 1])}, {"t": ["a", "b"]})
    assert rows_of(x.repeat(2), "a") == [0, 0, 1, 1]
    assert rows_of(x.repeat(2), "t") == list("aabb")
    assert rows_of(x.repeat(2, interleave=False), "a") == [0, 1, 0, 1]
    assert rows_of(x.repeat(2, interleave=False), "t") == list("abab")


@pytest.mark.parametrize("bad", [0, -1, 1.5, "2", None, True])
def test_counts_below_one_are_refused(bad, full):
    x = full()
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
def test_every_operation_works_on_a_gpu(full):
    x = full(7).union(DataProto.from_dict({"twin": [torch.arange(i % 3) * 2.0 for i in range(7)]}))
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
