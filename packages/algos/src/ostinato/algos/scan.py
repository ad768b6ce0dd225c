"""Recurrences over the policy tokens of a row, without a loop over time.

Masked positions are no time steps. So a row's policy tokens are moved together first (`PolicyTokens.compact`), the
recurrence then has one constant coefficient, and the result is moved back (`PolicyTokens.spread`).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from ostinato.algos.blocks import kept, mask_bits
from ostinato.algos.masked import accumulation_dtype, is_valid

BLOCK = 32


class PolicyTokens:
    """Where the policy tokens of some rows are.

    Args:
        response_mask: (B, R).
        dtype: of the values that are moved.

    Attributes:
        bits: (B, R) `mask_bits` for the dtype.
        ordinal: (B, R) int64: how many policy tokens of the row lie before each position; the k-th policy token has k.
    """

    def __init__(self, response_mask: Tensor, dtype: torch.dtype) -> None:
        valid = is_valid(response_mask)
        count = valid.to(torch.int64)
        self.dtype = dtype
        self.bits = mask_bits(valid, dtype)
        self.ordinal = count.cumsum(-1).sub_(count)
        # What is masked goes to a column behind the row, which is cut off again.
        self._target = torch.where(valid, self.ordinal, valid.shape[-1])

    def compact(self, x: Tensor) -> Tensor:
        """Move each row's policy tokens to its front.

        Args:
            x: (B, R); masked entries may hold anything.

        Returns:
            (B, R) of the dtype, 0 behind the last policy token.
        """
        num_rows, num_tokens = x.shape
        front = x.new_zeros((num_rows, num_tokens + 1), dtype=self.dtype)
        return front.scatter_(-1, self._target, x.to(self.dtype))[:, :num_tokens]

    def spread(self, x: Tensor) -> Tensor:
        """Undo `compact`: each policy token's value at its own position, exactly 0 under the mask."""
        return kept(x.gather(-1, self.ordinal), self.bits)


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
    whole = pad(x, (0, -length % size)) if length % size else x
    local = whole.unflatten(-1, (-1, size)) @ powers
    if local.shape[-2] > 1:
        starts = discounted_sum(local[..., 0], coefficient**size)
        local[..., :-1, :].addcmul_(starts[..., 1:, None], c ** (size - steps))
    return local.flatten(-2)[..., :length]


def reward_to_go(rewards: Tensor, response_mask: Tensor, gamma: float) -> Tensor:
    """G_t = r_t + γ·G_{t+1} over policy tokens; masked positions are carried across without a decay step.

    Args:
        rewards: (B, R); masked entries may hold anything.
        response_mask: (B, R).
        gamma: discount a policy token.

    Returns:
        (B, R) of the rewards' dtype, at least float32; exactly 0 under the mask.
    """
    dtype = accumulation_dtype(rewards)
    if gamma == 1.0:  # without a decay a masked step is a reward of 0
        bits = mask_bits(is_valid(response_mask), dtype)
        return kept(kept(rewards.to(dtype), bits).flip(-1).cumsum(-1).flip(-1), bits)
    tokens = PolicyTokens(response_mask, dtype)
    return tokens.spread(discounted_sum(tokens.compact(rewards), gamma))
