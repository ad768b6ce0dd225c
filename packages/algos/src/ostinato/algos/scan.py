"""Recurrences over the policy tokens of a row, without a loop over time.

Masked positions are no time steps. So a row's policy tokens are moved together first (`PolicyTokens.compact`), the
recurrence then has one constant coefficient, and the result is moved back (`PolicyTokens.spread`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from ostinato.algos.blocks import kept, mask_bits
from ostinato.algos.masked import accumulation_dtype, is_valid

BLOCK = 32
"""Positions that one small matrix sums over."""

BEGINNINGS = 512
"""So many blocks, or fewer, are summed over by one matrix: they are few, and the next level would cost more calls."""


class PolicyTokens:
    """Where the policy tokens of some rows are.

    Args:
        response_mask: (B, R).
        dtype: of the values that are moved.

    Attributes:
        bits: (B, R) `mask_bits` for the dtype.
        place: (B, R) int64: how many policy tokens the row has up to each position, that one included; the row's k-th
            policy token, counted from 1, has k.
    """

    def __init__(self, response_mask: Tensor, dtype: torch.dtype) -> None:
        valid = is_valid(response_mask)
        count = valid.to(torch.int64)
        self.dtype = dtype
        self.bits = mask_bits(valid, dtype)
        self.place = count.cumsum(-1)
        self._target = count.neg_().bitwise_and_(self.place)  # masked: 0, a column that is cleared again

    @property
    def counts(self) -> Tensor:
        """(B,) int64, policy tokens of each row."""
        return self.place[:, -1] if self.place.shape[1] else self.place.sum(-1)

    def compact(self, x: Tensor) -> Tensor:
        """Move each row's policy tokens to its front.

        Args:
            x: (B, R); masked entries may hold anything.

        Returns:
            (B, W) of the dtype, W the next multiple of `BLOCK` above R + 1: column k holds the k-th policy token
            counted from 1; 0 in column 0 and behind the last policy token.
        """
        num_rows, num_tokens = x.shape
        width = ((num_tokens + 1) // BLOCK + 1) * BLOCK
        front = x.new_zeros((num_rows, width), dtype=self.dtype).scatter_(-1, self._target, x.to(self.dtype))
        front[:, 0] = 0
        return front

    def spread(self, front: Tensor) -> Tensor:
        """Undo `compact`: each policy token's value at its own position, exactly 0 under the mask."""
        return kept(front.gather(-1, self.place), self.bits)

    def behind(self, front: Tensor) -> Tensor:
        """At each policy token what (B, W) says of the next one; under the mask any of the row's values."""
        return front[:, 1:].gather(-1, self.place)


class DiscountedSum:
    """Solve y_t = x_t + c·y_{t+1}, y_R = 0, for all t at once: y_t = Σ_{k≥t} c^{k−t}·x_k.

    A two-level scan. Inside of a block of 32 the sum is a product with the triangular matrix of powers c^{k−t}. The
    sums at the blocks' beginnings follow the same recurrence with coefficient c³² and are solved alike; what the next
    block passes on, c times its beginning, is added to each block's last entry before the product. Only powers with
    exponents of 0 and more occur: with |c| ≤ 1 none is larger than 1, and one that underflows belongs to a term that
    has decayed to 0. The closed form by cumulative sums, Σ c^k·x_k / c^t, divides by c^t instead and overflows for
    long rows.

    Args:
        length: R.
        coefficient: c.
        like: a tensor of the dtype and device of what will be summed.
        at_once: so many positions, or fewer, need no second level.

    Source:
        Blelloch 1990, "Prefix sums and their applications", 1.4 (recurrences as scans), with blocks in place of pairs.
    """

    def __init__(self, length: int, coefficient: float, like: Tensor, at_once: int = BLOCK) -> None:
        self.coefficient = coefficient
        self.size = length if length <= at_once else BLOCK
        steps = torch.arange(self.size, device=like.device)
        distance = steps[:, None] - steps
        c = like.new_full((), coefficient)
        self.powers = torch.where(distance >= 0, c ** distance.clamp(min=0), like.new_zeros(()))
        self.beginnings = None
        if self.size < length:
            self.beginnings = DiscountedSum(-(-length // self.size), coefficient**self.size, like, BEGINNINGS)

    def __call__(self, x: Tensor) -> Tensor:
        """Sum over (..., R), floating and finite; x may be overwritten."""
        if self.beginnings is None:
            return x @ self.powers
        length = x.shape[-1]
        if length % self.size:
            x = torch.nn.functional.pad(x, (0, -length % self.size))
        blocks = x.unflatten(-1, (-1, self.size))
        beginnings = self.beginnings(blocks @ self.powers[:, 0])
        blocks[..., :-1, -1].add_(beginnings[..., 1:], alpha=self.coefficient)
        return (blocks @ self.powers).flatten(-2)[..., :length]


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
    front = tokens.compact(rewards)
    return tokens.spread(DiscountedSum(front.shape[1], gamma, front)(front))
