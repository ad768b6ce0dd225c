"""Recurrences over the policy tokens of a row, without a loop over time.

Masked positions are no time steps. So a row's policy tokens are moved together first (`compact`), the recurrence then
has one constant coefficient, and the result is moved back (`spread`).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from ostinato.algos.masked import is_valid, zero_masked

BLOCK = 32


def policy_ordinal(response_mask: Tensor) -> Tensor:
    """(B, R) int64: how many policy tokens of the row lie before each position; the k-th policy token has k."""
    valid = is_valid(response_mask).to(torch.int64)
    return valid.cumsum(-1) - valid


def compact(x: Tensor, response_mask: Tensor, ordinal: Tensor) -> Tensor:
    """Move each row's policy tokens to its front.

    Args:
        x: (B, R); masked entries may hold anything.
        response_mask: (B, R).
        ordinal: (B, R), `policy_ordinal` of the mask.

    Returns:
        (B, R) float64, 0 behind the last policy token.
    """
    num_tokens = x.shape[-1]
    # What is masked goes to a column that is cut off again.
    target = torch.where(is_valid(response_mask), ordinal, num_tokens)
    front = x.new_zeros((*x.shape[:-1], num_tokens + 1), dtype=torch.float64)
    return front.scatter(-1, target, x.to(torch.float64))[..., :num_tokens]


def spread(x: Tensor, response_mask: Tensor, ordinal: Tensor) -> Tensor:
    """Undo `compact`: each policy token's value at its own position, exactly 0 under the mask."""
    return zero_masked(x.gather(-1, ordinal), response_mask)


def discounted_sum(x: Tensor, coefficient: float) -> Tensor:
    """Solve y_t = x_t + c·y_{t+1}, y_R = 0, for all t at once: y_t = Σ_{k≥t} c^{k−t}·x_k.

    A two-level scan. Inside of a block of 32 the sum is a product with the triangular matrix of powers c^{k−t}; the
    blocks' own sums follow the same recurrence with coefficient c³² and are solved by the same function; each position
    then adds what comes from behind its block, times its power of c. Only powers with exponents of 0 and more occur:
    with |c| ≤ 1 none is larger than 1, and one that underflows belongs to a term that has decayed to 0. The closed
    form by cumulative sums, Σ c^k·x_k / c^t, divides by c^t instead and overflows for long rows.

    Args:
        x: (..., R) floating and finite.
        coefficient: c.

    Returns:
        y, same shape and dtype.

    Source:
        Blelloch 1990, "Prefix sums and their applications", 1.4 (recurrences as scans), with blocks in place of pairs.
    """
    length = x.shape[-1]
    if length == 0:
        return x
    size = min(BLOCK, length)
    steps = torch.arange(size, device=x.device)
    distance = steps[:, None] - steps
    c = x.new_full((), coefficient)
    powers = torch.where(distance >= 0, c ** distance.clamp(min=0), x.new_zeros(()))
    blocks = pad(x, (0, -length % size)).unflatten(-1, (-1, size))
    local = blocks @ powers
    if local.shape[-2] == 1:
        return local.flatten(-2)[..., :length]
    starts = discounted_sum(local[..., 0], coefficient**size)
    behind = pad(starts[..., 1:], (0, 1))
    return (local + behind[..., None] * c ** (size - steps)).flatten(-2)[..., :length]


def reward_to_go(rewards: Tensor, response_mask: Tensor, gamma: float) -> Tensor:
    """G_t = r_t + γ·G_{t+1} over policy tokens; masked positions are carried across without a decay step.

    Args:
        rewards: (B, R); masked entries may hold anything.
        response_mask: (B, R).
        gamma: discount a policy token.

    Returns:
        (B, R) float64, exactly 0 under the mask.
    """
    ordinal = policy_ordinal(response_mask)
    returns = discounted_sum(compact(rewards, response_mask, ordinal), gamma)
    return spread(returns, response_mask, ordinal)
