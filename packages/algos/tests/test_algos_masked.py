"""Masked sums, means, whitening; scans; group labels."""

from __future__ import annotations

import math
import pickle

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ostinato.algos import (
    ArgumentError,
    ShapeError,
    UnknownNameError,
    group_index,
    masked_mean,
    masked_sum,
    masked_whiten,
)
from ostinato.algos.errors import unknown_name
from ostinato.algos.groups import make_groups
from ostinato.algos.scan import DiscountedSum, PolicyTokens, reward_to_go

JUNK = (math.nan, math.inf, -math.inf)


@pytest.mark.parametrize("junk", JUNK)
@pytest.mark.parametrize("mask_dtype", [torch.bool, torch.int64, torch.float32, torch.bfloat16])
def test_masked_mean_ignores_junk_in_value_and_gradient(junk, mask_dtype):
    x = torch.tensor([[1.0, junk, 3.0], [junk, 5.0, junk]], requires_grad=True)
    mask = torch.tensor([[1, 0, 1], [0, 1, 0]]).to(mask_dtype)
    assert masked_mean(x, mask).item() == 3.0
    assert masked_mean(x, mask, dim=-1).tolist() == [2.0, 5.0]
    assert masked_sum(x, mask).item() == 9.0
    (gradient,) = torch.autograd.grad(masked_mean(x, mask), x)
    torch.testing.assert_close(gradient, mask.float() / 3)


@pytest.mark.parametrize("shape", [(2,), (1, 2), (0, 4), (3, 0)])
def test_masked_mean_of_nothing_is_zero(shape):
    """A-117: an empty mask gives 0, never NaN; so do empty tensors."""
    x = torch.full(shape, math.nan, requires_grad=True)
    mean = masked_mean(x, torch.zeros(shape))
    assert mean.item() == 0.0
    assert masked_mean(x, torch.zeros(shape), dim=-1).sum().item() == 0.0
    (gradient,) = torch.autograd.grad(mean, x)
    assert not gradient.any()


def test_masked_mean_accumulates_half_precision_in_float32():
    x = torch.full((1, 4097), 1.0, dtype=torch.bfloat16)
    assert masked_sum(x, torch.ones(1, 4097)).item() == 4097.0


def test_masked_mean_refuses_unlike_shapes():
    with pytest.raises(ShapeError, match=r"mask has shape \(2, 3\), but x has \(3, 2\)"):
        masked_sum(torch.zeros(3, 2), torch.zeros(2, 3))


@pytest.mark.parametrize("junk", JUNK)
def test_whiten_gives_mean_zero_variance_one_over_valid_entries(junk):
    torch.manual_seed(0)
    mask = torch.rand(5, 7) < 0.6
    x = torch.where(mask, torch.randn(5, 7) * 3 + 2, junk)
    kept = x[mask].double()
    white = masked_whiten(x, mask)
    expected = (kept - kept.mean()) * torch.rsqrt(kept.var() + 1e-8)
    torch.testing.assert_close(white[mask].double(), expected, rtol=1e-6, atol=1e-6)
    assert white.dtype == x.dtype
    assert not white[~mask].any()
    unshifted = masked_whiten(x, mask, shift_mean=False)
    torch.testing.assert_close(unshifted[mask].double(), expected + kept.mean(), rtol=1e-6, atol=1e-6)
    assert not unshifted[~mask].any()


@pytest.mark.parametrize("mask", [[0, 0, 0], [0, 1, 0]])
def test_whiten_below_two_entries_is_zero_or_the_value(mask):
    x, m = torch.tensor([[math.nan, 7.0, math.nan]]), torch.tensor([mask])
    assert not masked_whiten(x, m).any()
    assert masked_whiten(x, m, shift_mean=False).tolist() == [[0.0, 7.0 * mask[1], 0.0]]


def test_whiten_of_equal_values_is_exactly_zero():
    assert not masked_whiten(torch.full((3, 5), 0.35), torch.ones(3, 5)).any()


@given(st.integers(0, 140), st.one_of(st.floats(0, 1), st.sampled_from([0.0, 1.0, 1e-300, 1.1])), st.integers(0, 2**31))
@settings(max_examples=80, deadline=None)
def test_discounted_sum_equals_the_loop(length, coefficient, seed):
    x = torch.randn(3, length, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    expected, running = torch.zeros_like(x), torch.zeros(3, dtype=torch.float64)
    for t in reversed(range(length)):
        running = x[:, t] + coefficient * running
        expected[:, t] = running
    found = DiscountedSum(length, coefficient, x)(x)
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("gamma", [0.0, 1e-3, 0.5, 0.99, 1.0])
def test_reward_to_go_is_stable_over_long_rows(gamma):
    """A closed form that divides by γ^t would overflow here."""
    rewards = torch.ones(1, 20_000, dtype=torch.float64)
    returns = reward_to_go(rewards, torch.ones(1, 20_000), gamma)
    first = 20_000.0 if gamma == 1.0 else (1 - gamma**20_000) / (1 - gamma)
    assert torch.isfinite(returns).all()
    assert returns[0, 0].item() == pytest.approx(first, rel=1e-12)
    assert returns[0, -1].item() == 1.0
    single = reward_to_go(rewards.float(), torch.ones(1, 20_000), gamma)
    assert single.dtype == torch.float32
    torch.testing.assert_close(single.double(), returns, rtol=1e-6, atol=0)


def test_policy_tokens_move_to_the_front_and_back():
    mask = torch.tensor([[1, 0, 0, 1, 1, 0], [0, 0, 0, 0, 0, 0], [0, 1, 1, 0, 0, 1], [1, 1, 1, 1, 1, 1]])
    values = torch.where(mask.bool(), torch.arange(1.0, 25.0).view(4, 6), math.nan)
    tokens = PolicyTokens(mask, torch.float64)
    assert tokens.place.tolist() == [[1, 1, 1, 2, 3, 3], [0] * 6, [0, 1, 2, 2, 2, 3], [1, 2, 3, 4, 5, 6]]
    assert tokens.counts.tolist() == [3, 0, 3, 6]
    front = tokens.compact(values)
    rows = [[1, 4, 5], [], [14, 15, 18], [19, 20, 21, 22, 23, 24]]
    assert front.tolist() == [[0.0, *row, *[0.0] * (31 - len(row))] for row in rows]
    assert torch.equal(tokens.spread(front), torch.where(mask.bool(), values, 0).double())
    assert tokens.behind(front)[mask.bool()].tolist() == [4, 5, 0, 15, 18, 0, 20, 21, 22, 23, 24, 0]


@pytest.mark.parametrize(
    "labels",
    [
        ["p", "q", "p", "r", "q"],
        (7, 9, 7, 1, 9),
        np.array(["p", "q", "p", "r", "q"], dtype=object),
        np.array([7, 9, 7, 1, 9]),
        torch.tensor([7, 9, 7, 1, 9]),
        [("a", 1), ("a", 2), ("a", 1), None, ("a", 2)],
    ],
)
def test_group_index_takes_any_hashable_labels(labels):
    assert group_index(labels).tolist() == [0, 1, 0, 2, 1]


def test_group_index_of_nothing_is_empty():
    assert group_index([]).shape == (0,)


def test_group_index_refuses_unhashable_labels():
    with pytest.raises(ArgumentError, match="hashable"):
        group_index([["p"], ["q"]])  # pyright: ignore[reportArgumentType]


def test_groups_refuse_a_wrong_number_of_labels():
    with pytest.raises(ShapeError, match="groups has 2 entries, but there are 3 rows"):
        make_groups("f", ["a", "b"], None, torch.ones(3, 1), torch.ones(3))
    with pytest.raises(ShapeError, match="rollouts has 1 entries"):
        make_groups("f", ["a", "b"], ["x"], torch.ones(2, 1), torch.ones(2))


def test_errors_name_the_nearest_and_survive_pickling():
    error = unknown_name("kind", "grppo", ["grpo", "gae"])
    assert "did you mean 'grpo'" in str(error)
    assert "gae, grpo" in str(error)
    for kind in (UnknownNameError, ShapeError, ArgumentError):
        assert issubclass(kind, ValueError)
        again = pickle.loads(pickle.dumps(kind("text")))
        assert type(again) is kind
        assert str(again) == "text"
