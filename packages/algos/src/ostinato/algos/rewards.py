"""From scores to token-level rewards."""

from __future__ import annotations

import torch
from torch import Tensor

from ostinato.algos._checks import check_rows, check_same_shape
from ostinato.algos._typing import RowFloats, TokenFloats, TokenMask
from ostinato.algos.kl import kl_penalty
from ostinato.algos.masked import is_valid, zero_masked


def place_outcome(scores: RowFloats, response_mask: TokenMask) -> TokenFloats:
    """Put each row's outcome score on its last policy token.

    A response may end in tool output or padding; the score then lies on the last position whose mask is set, where no
    estimator can lose it.

    Args:
        scores: (B,) one score a row.
        response_mask: (B, R).

    Returns:
        (B, R), dtype of scores; 0 elsewhere, and in the whole row where no token is valid.

    Raises:
        ShapeError: there is not one score a row.
    """
    check_rows("place_outcome", "scores", scores, response_mask.shape[0])
    valid = is_valid(response_mask)
    behind = valid.flip(-1).cumsum(-1).flip(-1)
    is_last = valid & (behind == 1)
    return torch.where(is_last, scores[:, None], scores.new_zeros(()))


def rewards_with_kl(
    token_level_scores: TokenFloats,
    log_probs: TokenFloats,
    ref_log_probs: TokenFloats,
    response_mask: TokenMask,
    beta: float | Tensor,
    kind: str = "kl",
) -> TokenFloats:
    """Take the KL penalty off the scores: r = score − β·kl on policy tokens.

    Args:
        token_level_scores: (B, R); masked entries may hold anything.
        log_probs: (B, R) of the policy that sampled (the old policy), in nats.
        ref_log_probs: (B, R) of the reference.
        response_mask: (B, R).
        beta: the coefficient, `controller.value`.
        kind: the estimator, see `kl_penalty`.

    Returns:
        (B, R) token_level_rewards, no gradient, exactly 0 under the mask.

    Raises:
        ShapeError: the shapes differ.
        UnknownNameError: no such kind.

    Source:
        Ziegler et al. 2019 (arXiv 1909.08593), eq. 2.
    """
    check_same_shape("rewards_with_kl", token_level_scores=token_level_scores, response_mask=response_mask)
    kl = kl_penalty(log_probs.detach(), ref_log_probs.detach(), kind, response_mask)
    return zero_masked(zero_masked(token_level_scores, response_mask) - beta * kl, response_mask)
