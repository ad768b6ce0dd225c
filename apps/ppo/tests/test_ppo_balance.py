"""Rows are dealt over ranks without changing which rows an optimizer step sees."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ostinato.ppo.balance import balance
from ostinato.protocol import DataProto


def batch_of(lengths):
    width = max(lengths)
    mask = (torch.arange(width)[None] < torch.tensor(lengths)[:, None]).long()
    row = torch.arange(len(lengths))
    uid = list(map(str, row.tolist()))
    return DataProto.from_dict(tensors={"attention_mask": mask, "row": row}, non_tensors={"uid": uid})


@pytest.mark.parametrize("dp_size", [1, 2, 3, 4])
@pytest.mark.parametrize(("rows", "mini_batches"), [(16, 4), (15, 2), (7, 3), (4, 1), (5, 5)])
def test_balance_keeps_the_rows_of_each_mini_batch(dp_size, rows, mini_batches):
    lengths = np.random.default_rng(rows).integers(1, 50, rows).tolist()
    balanced = balance(batch_of(lengths), dp_size, mini_batches)
    expected = [set(part.tolist()) for part in np.array_split(np.arange(rows), mini_batches)]
    found = [set() for _ in range(mini_batches)]
    for piece in balanced.chunk(dp_size):
        per_step = np.bincount(piece.batch["mini_batch"].numpy(), minlength=mini_batches)
        assert per_step.max() - per_step.min() <= 2, "each rank has its share of every step"
        for row, step in zip(piece.batch["row"].tolist(), piece.batch["mini_batch"].tolist(), strict=True):
            found[step].add(row)
    assert found == expected
    assert balanced.non_tensor_batch["uid"].tolist() == list(map(str, balanced.batch["row"].tolist()))


def test_balance_evens_out_tokens():
    lengths = [100, 90, 80, 70, 4, 3, 2, 1]
    balanced = balance(batch_of(lengths), 2, 1)
    loads = [int(piece.batch["attention_mask"].sum()) for piece in balanced.chunk(2)]
    assert max(loads) - min(loads) <= 10
    metrics = balanced.metrics
    assert metrics["global_seqlen/minmax_diff"].value == 330
    assert metrics["global_seqlen/balanced_max"].value == max(loads)
    assert metrics["global_seqlen/mean"].value == 175


def test_balance_off_leaves_rows_in_order():
    """H-66: the switch has an effect in the default path."""
    lengths = [9, 1, 8, 2, 7, 3]
    same = balance(batch_of(lengths), 2, 3, enabled=False)
    assert same.batch["row"].tolist() == list(range(6))
    assert "mini_batch" not in same.columns
    assert balance(batch_of(lengths), 2, 1).batch["row"].tolist() != list(range(6))


def test_balance_of_one_rank_keeps_order():
    assert balance(batch_of([5, 1, 4, 2]), 1, 2).batch["row"].tolist() == [0, 1, 2, 3]
