"""The critic's loss and alignment; where rewards are placed."""

from __future__ import annotations

import math

import pytest
import torch

from ostinato.algos import (
    ArgumentError,
    ShapeError,
    aggregate,
    gae,
    grpo,
    place_outcome,
    response_states,
    rewards_with_kl,
    value_loss,
)


def test_value_loss_gives_the_checked_value():
    ones = torch.ones(1, 2)
    loss, clipped = value_loss(torch.tensor([[0.5, 2.0]]), ones, torch.tensor([[0.0, 1.0]]), ones, 0.5)
    assert aggregate(loss, ones, "token-mean").item() == pytest.approx(0.3125)
    assert clipped.tolist() == [[0.0, 0.0]]


def test_a_clipped_value_has_no_gradient():
    values = torch.tensor([[2.0, 0.0]], requires_grad=True)
    loss, clipped = value_loss(values, torch.tensor([[3.0, 3.0]]), torch.tensor([[0.0, 0.0]]), torch.ones(1, 2), 0.5)
    assert clipped.tolist() == [[1.0, 0.0]]
    (gradient,) = torch.autograd.grad(loss.sum(), values)
    assert gradient.tolist() == [[0.0, -3.0]]


@pytest.mark.parametrize("junk", [math.nan, math.inf])
@pytest.mark.parametrize("cliprange", [None, 0.5])
def test_value_loss_ignores_what_lies_under_the_mask(cliprange, junk):
    mask = torch.tensor([[1, 0, 1]])
    tensors = [torch.where(mask.bool(), torch.randn(1, 3), junk).requires_grad_() for _ in range(3)]
    loss, clipped = value_loss(tensors[0], tensors[1], tensors[2], mask, cliprange)
    loss.sum().backward()
    assert loss[0, 1] == 0
    assert clipped[0, 1] == 0
    assert tensors[0].grad is not None
    assert torch.isfinite(tensors[0].grad).all()
    assert tensors[1].grad is None
    assert tensors[2].grad is None


def test_value_loss_refuses_what_does_not_fit():
    x = torch.zeros(1, 2)
    with pytest.raises(ShapeError, match="old_values"):
        value_loss(x, x, torch.zeros(1, 3), x)
    with pytest.raises(ArgumentError, match="cliprange_value"):
        value_loss(x, x, x, x, -0.1)


def test_the_values_of_a_response_are_those_of_the_states_before_its_tokens():
    """H-29: prompt 3, response 2, value head outputs v0..v4 -> v2, v3, with the response mask unshifted."""
    outputs = torch.tensor([[0.0, 1, 2, 3, 4]])
    assert response_states(outputs, 2).tolist() == [[2.0, 3.0]]
    assert response_states(outputs[..., None].expand(1, 5, 7), 2).shape == (1, 2, 7)
    assert response_states(outputs, 4).tolist() == [[0.0, 1, 2, 3]]
    assert response_states(outputs, 0).shape == (1, 0)
    with pytest.raises(ShapeError, match="5 positions"):
        response_states(outputs, 5)


def test_the_values_of_a_response_enter_gae_unshifted():
    """H-29: with γ = 1, λ = 0, A + V of token t is r_t + V_{t+1}."""
    values = response_states(torch.tensor([[9.0, 9, 0.2, 0.6, 7]]), 2)
    _, returns = gae(torch.tensor([[0.0, 1.0]]), torch.ones(1, 2), values=values, gamma=1.0, lam=0.0)
    torch.testing.assert_close(returns, torch.tensor([[0.6, 1.0]]))


@pytest.mark.parametrize(
    ("mask", "expected"),
    [
        ([1, 1, 0, 0], [0, 5, 0, 0]),
        ([1, 1, 1, 1], [0, 0, 0, 5]),
        ([1, 0, 0, 1], [0, 0, 0, 5]),
        ([0, 1, 0, 0], [0, 5, 0, 0]),
        ([0, 0, 0, 0], [0, 0, 0, 0]),
    ],
)
@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float32])
def test_an_outcome_lies_on_the_last_policy_token(mask, expected, dtype):
    """H-19 and H-38: by valid length, never by prompt or padded length, and not on tool output."""
    assert place_outcome(torch.tensor([5.0]), torch.tensor([mask], dtype=dtype)).tolist() == [expected]


def test_an_outcome_after_tool_output_is_not_lost():
    """H-19: mask 1 1 0; GAE and GRPO both see the reward."""
    mask = torch.tensor([[1, 1, 0], [1, 1, 0]])
    rewards = place_outcome(torch.tensor([1.0, 0.0]), mask)
    assert rewards.tolist() == [[0, 1, 0], [0, 0, 0]]
    _, returns = gae(rewards, mask, values=torch.zeros(2, 3))
    assert returns.tolist() == [[1, 1, 0], [0, 0, 0]]
    advantages, _ = grpo(rewards, mask, groups=[0, 0], norm_adv_by_std_in_grpo=False)
    assert advantages.tolist() == [[0.5, 0.5, 0], [-0.5, -0.5, 0]]


def test_outcomes_of_nothing():
    assert place_outcome(torch.zeros(0), torch.zeros(0, 4)).shape == (0, 4)
    assert place_outcome(torch.tensor([math.nan]), torch.zeros(1, 3)).tolist() == [[0, 0, 0]]
    assert place_outcome(torch.zeros(2), torch.zeros(2, 0)).shape == (2, 0)
    with pytest.raises(ShapeError, match="scores has 2 entries"):
        place_outcome(torch.zeros(2), torch.zeros(3, 4))


def test_rewards_lose_the_kl_penalty_on_policy_tokens():
    scores = torch.tensor([[0.0, 1.0, math.nan]])
    log_probs = torch.tensor([[-1.2, -0.5, math.nan]], requires_grad=True)
    reference = torch.tensor([[-0.9, -0.5, 3.0]])
    mask = torch.tensor([[1, 1, 0]])
    rewards = rewards_with_kl(scores, log_probs, reference, mask, 0.5, "k1")
    torch.testing.assert_close(rewards, torch.tensor([[0.15, 1.0, 0.0]]))
    assert not rewards.requires_grad
    torch.testing.assert_close(rewards_with_kl(scores, log_probs, reference, mask, torch.tensor(0.5), "kl"), rewards)
