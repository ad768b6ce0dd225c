from __future__ import annotations

import pytest
import torch

from ostinato.protocol import DataProto
from ostinato.workers.core.errors import BatchError
from ostinato.workers.core.microbatch import largest_over_ranks, micro_batches, pack, pack_last
from ostinato.workers.core.testing import ThreadRanks


def alone(values: torch.Tensor) -> torch.Tensor:
    return values.clone()


def rows_of(attention: list[list[int]], mask: list[list[int]], ids: list[list[int]] | None = None) -> DataProto:
    attention_mask = torch.tensor(attention)
    tokens = torch.arange(attention_mask.numel()).reshape(attention_mask.shape) if ids is None else torch.tensor(ids)
    return DataProto.from_dict(
        {"input_ids": tokens, "attention_mask": attention_mask, "response_mask": torch.tensor(mask)}
    )


def test_pack_labels_never_cross_a_row():
    """H-57: [1 2 3][4 5] packed, every response token asked about: labels 2 3 and 5, none of them the next row's."""
    rows = rows_of([[1, 1, 1], [1, 1, 0]], [[1, 1], [1, 0]], [[1, 2, 3], [4, 5, 0]])
    packed = pack(rows)
    assert packed.input_ids.tolist() == [1, 2, 3, 4, 5]
    assert packed.position_ids.tolist() == [0, 1, 2, 0, 1]
    assert packed.cu_seqlens.tolist() == [0, 3, 5]
    assert packed.cu_seqlens.dtype == torch.int32
    assert packed.max_seqlen == 3
    assert packed.predict.tolist() == [0, 1, 3]
    assert packed.labels.tolist() == [2, 3, 5]


def test_pack_reads_the_state_before_each_token():
    """H-29: prompt 3, response 2, outputs v0..v4: the response's values are v2 and v3, under the response mask."""
    packed = pack(rows_of([[1, 1, 1, 1, 1]], [[1, 1]]))
    assert packed.predict.tolist() == [2, 3]
    assert packed.to_response(torch.arange(5.0)[packed.predict]).tolist() == [[2.0, 3.0]]


def test_pack_skips_padding_and_tool_tokens():
    packed = pack(rows_of([[0, 1, 1, 1, 1, 0], [1, 1, 1, 0, 0, 0]], [[1, 0, 1, 0], [1, 0, 0, 0]]))
    assert packed.input_ids.tolist() == [1, 2, 3, 4, 6, 7, 8]
    # Row 0: tokens 2 (after 1), 4 (after tool token 3); row 1: token 8 (after 7).
    assert packed.predict.tolist() == [0, 2, 5]
    assert packed.labels.tolist() == [2, 4, 8]
    assert packed.to_response(torch.tensor([1.0, 2.0, 3.0])).tolist() == [[1, 0, 2, 0], [3, 0, 0, 0]]


def test_pack_agrees_with_a_loop_over_rows(make_rows):
    rows = make_rows(9, seed=3)
    packed = pack(rows)
    attention, mask, ids = (rows.batch[name] for name in ("attention_mask", "response_mask", "input_ids"))
    prompt = attention.shape[1] - mask.shape[1]
    expected = [
        (int(ids[i, prompt + j - 1]), int(ids[i, prompt + j]))
        for i in range(len(rows))
        for j in range(mask.shape[1])
        if mask[i, j]
    ]
    assert list(zip(packed.input_ids[packed.predict].tolist(), packed.labels.tolist(), strict=True)) == expected
    assert torch.equal(packed.to_response(packed.labels), ids[:, prompt:] * mask)


def test_to_response_is_differentiable_and_exactly_zero_elsewhere(make_rows):
    packed = pack(make_rows(4))
    values = torch.randn(len(packed.predict), requires_grad=True)
    placed = packed.to_response(values)
    assert bool((placed[~packed.mask] == 0).all())
    (placed * 3).sum().backward()
    assert values.grad is not None
    assert values.grad.tolist() == [3.0] * len(values)


def test_pack_takes_a_micro_batch_without_rows(make_rows):
    packed = pack(make_rows(3)[[]])
    assert len(packed) == 0
    assert packed.input_ids.shape == (0,)
    assert packed.cu_seqlens.tolist() == [0]
    assert packed.max_seqlen == 0
    assert packed.to_response(torch.zeros(0)).shape == (0, 6)


def test_pack_takes_rows_without_a_policy_token():
    packed = pack(rows_of([[1, 1, 0]], [[0, 0]]))
    assert packed.input_ids.tolist() == [0, 1]
    assert packed.predict.tolist() == []
    assert packed.to_response(torch.zeros(0)).tolist() == [[0, 0]]


def test_pack_keeps_response_columns_and_drops_sequence_columns(make_rows):
    packed = pack(make_rows(2), temperature=0.7)
    assert packed.temperature == 0.7
    assert "old_log_probs" in packed.rows.columns
    assert "input_ids" not in packed.rows.columns


@pytest.mark.parametrize(
    ("attention", "mask", "text"),
    [
        ([[1, 1, 0]], [[1, 1]], "attention_mask is 0"),
        ([[0, 1, 1]], [[1, 1]], "no token before it"),
        ([[1]], [[1, 0]], "wider"),
    ],
)
def test_pack_refuses_masks_that_contradict_each_other(attention, mask, text):
    with pytest.raises(BatchError, match=text):
        pack(rows_of(attention, mask))


def test_pack_refuses_a_first_token_whose_neighbour_is_another_row():
    """H-57: without a prompt, the token before a row's first one would be the last row's."""
    with pytest.raises(BatchError, match="no token before it"):
        pack(rows_of([[1, 1, 1], [0, 1, 1]], [[0, 1], [1, 1]]))


def test_pack_names_a_missing_column():
    with pytest.raises(BatchError, match="response_mask"):
        pack(DataProto.from_dict({"input_ids": torch.zeros(1, 2).long(), "attention_mask": torch.ones(1, 2).long()}))


@pytest.mark.parametrize("temperature", [0.0, -1.0])
def test_pack_refuses_a_temperature_that_is_not_positive(make_rows, temperature):
    with pytest.raises(BatchError, match="temperature"):
        pack(make_rows(1), temperature=temperature)


def test_pack_last_reads_each_row_once_and_scores_the_last_policy_token():
    packed = pack_last(rows_of([[1, 1, 1, 1], [0, 1, 1, 0], [1, 1, 1, 0]], [[1, 1, 0], [1, 1, 0], [0, 0, 0]]))
    assert packed.input_ids.tolist() == [0, 1, 2, 3, 5, 6, 8, 9, 10]
    # Row 0 ends with a tool token: it is read there and scored on the policy's last; row 2 has no policy token.
    assert packed.predict.tolist() == [3, 5]
    assert packed.to_response(torch.tensor([1.0, 2.0])).tolist() == [[0, 1, 0], [0, 2, 0], [0, 0, 0]]


@pytest.mark.parametrize(("size", "expected"), [(1, 5), (2, 3), (5, 1), (9, 1)])
def test_micro_batches_by_rows_hold_each_row_once(make_rows, size, expected):
    groups = micro_batches(make_rows(5), reduce=alone, micro_batch_size=size)
    assert len(groups) == expected
    assert [i for group in groups for i in group] == list(range(5))


@pytest.mark.parametrize("budget", [1, 7, 12, 30, 1000])
def test_micro_batches_keep_the_token_budget(make_rows, budget):
    rows = make_rows(12, seed=5)
    lengths = rows.batch["attention_mask"].sum(1).tolist()
    groups = micro_batches(rows, reduce=alone, max_tokens=budget)
    assert sorted(i for group in groups for i in group) == list(range(12))
    assert all(len(group) == 1 or sum(lengths[i] for i in group) <= budget for group in groups)


@pytest.mark.parametrize("limit", [{"max_tokens": 12}, {"micro_batch_size": 2}])
@pytest.mark.parametrize("sizes", [(8, 3), (0, 4), (0, 0), (5, 5, 1)])
def test_micro_batches_are_equally_many_on_every_rank(make_rows, limit, sizes):
    ranks = ThreadRanks(len(sizes))
    batches = [make_rows(max(size, 1), seed=i)[list(range(size))] for i, size in enumerate(sizes)]
    plans = ranks.run(lambda rank: micro_batches(batches[rank], reduce=lambda v: ranks.all_reduce(rank, v), **limit))
    needed = max(len(micro_batches(batch, reduce=alone, **limit)) for batch in batches)
    assert [len(plan) for plan in plans] == [needed] * len(sizes)
    for plan, size in zip(plans, sizes, strict=True):
        assert sorted(i for group in plan for i in group) == list(range(size))


@pytest.mark.parametrize("limit", [{}, {"max_tokens": 1, "micro_batch_size": 1}, {"max_tokens": 0}])
def test_micro_batches_want_exactly_one_positive_limit(make_rows, limit):
    with pytest.raises(BatchError):
        micro_batches(make_rows(2), reduce=alone, **limit)


@pytest.mark.parametrize("counts", [(3,), (0, 5), (2, 2, 2), (0, 0), (7, 1, 4)])
def test_largest_over_ranks_needs_sums_alone(counts):
    ranks = ThreadRanks(len(counts))
    found = ranks.run(lambda rank: largest_over_ranks(counts[rank], lambda v: ranks.all_reduce(rank, v)))
    assert found == [max(counts)] * len(counts)
