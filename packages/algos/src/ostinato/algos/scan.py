"""Reverse recurrences over time without a loop over time."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from ostinato.algos.masked import is_valid, zero_masked


def reverse_scan(x: Tensor, coefficient: Tensor) -> Tensor:
    """Solve y_t = x_t + c_t·y_{t+1}, y_R = 0, for all t at once.

    Recursive doubling: each of ⌈log₂ R⌉ rounds composes the affine map of a span with that of the span behind it,
    (x, c) ∘ (x', c') = (x + c·x', c·c'). Only products of coefficients and sums occur. With |c| ≤ 1 every intermediate
    is bounded by what the sequential loop itself meets, and a product that underflows is a term that has decayed to 0.
    The closed form by cumulative sums, Σ γ^k x_k / γ^t, divides by γ^t instead and overflows for long rows.

    Args:
        x: (..., R) floating.
        coefficient: same shape.

    Returns:
        y, same shape and dtype.

    Source:
        Hillis and Steele 1986, "Data parallel algorithms"; Blelloch 1990, "Prefix sums and their applications", 1.4.
    """
    length, step = x.shape[-1], 1
    while step < length:
        behind = pad(x[..., step:], (0, step))
        behind_coefficient = pad(coefficient[..., step:], (0, step))
        x = x + coefficient * behind
        coefficient = coefficient * behind_coefficient
        step *= 2
    return x


def carry(valid: Tensor, coefficient: float) -> Tensor:
    """Coefficients of `reverse_scan`: `coefficient` at a policy token, 1 across a masked position; float64."""
    one = torch.ones((), dtype=torch.float64, device=valid.device)
    return torch.where(valid, one * coefficient, one)


def reward_to_go(rewards: Tensor, response_mask: Tensor, gamma: float) -> Tensor:
    """G_t = r_t + γ·G_{t+1} over policy tokens, in float64; masked positions are carried across without a decay step.

    Args:
        rewards: (B, R); masked entries may hold anything.
        response_mask: (B, R).
        gamma: discount a policy token.

    Returns:
        (B, R) float64, exactly 0 under the mask.
    """
    valid = is_valid(response_mask)
    return zero_masked(reverse_scan(zero_masked(rewards.to(torch.float64), valid), carry(valid, gamma)), valid)


def next_valid(values: Tensor, response_mask: Tensor) -> Tensor:
    """At each position the value of the next policy token behind it; 0 behind the last.

    Args:
        values: (B, R) without NaN under the mask.
        response_mask: (B, R).

    Returns:
        (B, R), dtype of `values`.
    """
    valid = is_valid(response_mask)
    length = values.shape[-1]
    here = torch.arange(length, device=values.device).expand_as(valid)
    position = torch.where(valid, here, length)
    nearest = position.flip(-1).cummin(-1).values.flip(-1) if length else position
    behind = pad(nearest[..., 1:], (0, 1), value=length) if length else nearest
    return pad(values, (0, 1)).gather(-1, behind)


def policy_ordinal(response_mask: Tensor) -> Tensor:
    """(B, R) int64: how many policy tokens of the row lie before each position; the k-th policy token has k."""
    valid = is_valid(response_mask).to(torch.int64)
    return valid.cumsum(-1) - valid
