"""Balanced parts and micro-batches: complete, within their limits, deterministic, and not far from the best."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ostinato.protocol.errors import ArgumentError
from ostinato.protocol.partition import balanced_partition, token_budget_micro_batches

LENGTHS = st.lists(st.integers(0, 40), max_size=30)


def _heaviest(costs, parts):
    return max((sum(costs[i] for i in part) for part in parts), default=0)


def _best(costs, sizes):
    """Slow reference: the lowest heaviest part over every assignment."""
    best = math.inf
    for labels in itertools.product(range(len(sizes)), repeat=len(costs)):
        if [labels.count(i) for i in range(len(sizes))] == list(sizes):
            best = min(
                best, _heaviest(costs, [[j for j, label in enumerate(labels) if label == i] for i in range(len(sizes))])
            )
    return best


@given(LENGTHS, st.integers(1, 9))
def test_parts_hold_each_row_once_and_differ_by_one(costs, k):
    parts = balanced_partition(costs, k)
    sizes = [len(part) for part in parts]
    assert sorted(itertools.chain(*parts)) == list(range(len(costs)))
    assert sizes == [len(costs) // k + (i < len(costs) % k) for i in range(k)]
    assert all(part == sorted(part) for part in parts)
    assert parts == balanced_partition(np.array(costs, dtype=float), k) == balanced_partition(torch.tensor(costs), k)


@given(st.lists(st.tuples(st.integers(0, 5)), min_size=1, max_size=6), st.data())
def test_prescribed_sizes_are_kept(shape, data):
    sizes = [size for (size,) in shape]
    costs = data.draw(st.lists(st.floats(0, 1e4), min_size=sum(sizes), max_size=sum(sizes)))
    parts = balanced_partition(costs, len(sizes), sizes)
    assert [len(part) for part in parts] == sizes
    assert sorted(itertools.chain(*parts)) == list(range(len(costs)))


@settings(max_examples=40)
@given(st.lists(st.integers(1, 20), min_size=1, max_size=7), st.integers(1, 3))
def test_parts_are_near_the_best(costs, k):
    parts = balanced_partition(costs, k)
    best = _best(costs, [len(part) for part in parts])
    assert _heaviest(costs, parts) <= best * 7 / 6 + max(costs) / 4


def test_parts_by_hand():
    assert balanced_partition([8, 1, 1, 8], 2) == [[0, 1], [2, 3]] or balanced_partition([8, 1, 1, 8], 2) == [
        [0, 2],
        [1, 3],
    ]
    assert balanced_partition([10, 1, 1, 1, 1, 1], 2, sizes=[1, 5]) == [[0], [1, 2, 3, 4, 5]]
    assert balanced_partition([1, 2], 4) == [[1], [0], [], []]
    assert balanced_partition([], 2) == [[], []]
    assert [len(p) for p in balanced_partition([0] * 7, 3)] == [3, 2, 2]


@pytest.mark.parametrize("k", [2, 8, 32])
def test_parts_of_response_lengths_are_level(k):
    """Long-tailed lengths, as rollouts give them: within a percent of the mean, where contiguous parts are far off."""
    lengths = np.random.default_rng(0).lognormal(5.5, 0.8, 1024).clip(1, 4096).astype(int)
    parts = balanced_partition(lengths, k)
    mean = lengths.sum() / k
    assert _heaviest(lengths, parts) <= max(1.01 * mean, lengths.max() + mean / 100)
    contiguous = _heaviest(lengths, np.array_split(np.arange(1024), k))
    assert _heaviest(lengths, parts) < contiguous


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (([1, 2], 0), "k must be"),
        (([1, 2], 2, [1]), "sum to"),
        (([1, 2], 2, [1, 2]), "sum to"),
        (([1, 2], 2, [3, -1]), "sizes"),
        (([1, -2], 2), "costs"),
        (([1, math.nan], 2), "costs"),
        (([[1], [2]], 2), "costs"),
    ],
)
def test_partition_refuses_what_does_not_fit(args, says):
    with pytest.raises(ArgumentError, match=says):
        balanced_partition(*args)


@given(LENGTHS, st.integers(1, 50), st.integers(1, 6))
def test_micro_batches_keep_the_budget(lengths, budget, min_count):
    batches = token_budget_micro_batches(lengths, budget, min_count=min_count)
    assert sorted(itertools.chain(*batches)) == list(range(len(lengths)))
    assert len(batches) >= min_count
    totals = [sum(lengths[i] for i in batch) for batch in batches]
    for batch, total in zip(batches, totals, strict=True):
        assert total <= budget or len(batch) == 1
        assert batch == sorted(batch)
    assert totals == sorted(totals, reverse=True)
    assert batches == token_budget_micro_batches(np.array(lengths), budget, min_count=min_count)
    filled = sum(1 for batch in batches if batch)
    assert filled <= max(min_count, 2 * math.ceil(sum(lengths) / budget), 1)
    assert filled >= min(min_count, len(lengths))
    assert filled == len(batches) or len(batches) == min_count


def test_micro_batches_by_hand():
    assert token_budget_micro_batches([5, 3, 9, 12, 1, 2], 10) == [[3], [0, 1, 5], [2, 4]]
    assert token_budget_micro_batches([4, 4, 4, 4], 100) == [[0, 1, 2, 3]]
    assert token_budget_micro_batches([4, 4, 4, 4], 100, min_count=2) == [[0, 2], [1, 3]]
    assert token_budget_micro_batches([5], 10, min_count=3) == [[0], [], []]
    assert token_budget_micro_batches([], 10) == [[]]
    assert token_budget_micro_batches([0, 0, 0], 10, min_count=2) == [[0, 2], [1]]


def test_micro_batches_are_few_and_even():
    lengths = np.random.default_rng(1).integers(50, 1500, 512)
    batches = token_budget_micro_batches(lengths, 8192)
    totals = [lengths[batch].sum() for batch in batches]
    assert len(batches) <= math.ceil(lengths.sum() / 8192) + 1
    assert min(totals) > 0.95 * max(totals)


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [(([1], 0), {}), (([1], 5), {"min_count": 0}), (([-1], 5), {}), (([1], 5.5), {}), (([[1]], 5), {})],
)
def test_micro_batches_refuse_what_makes_no_sense(args, kwargs):
    with pytest.raises(ArgumentError, match="token_budget_micro_batches"):
        token_budget_micro_batches(*args, **kwargs)
