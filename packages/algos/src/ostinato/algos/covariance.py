"""Policy losses that treat the tokens of high covariance between log-probability and advantage apart.

Which tokens those are depends on the whole mini-batch, so it is decided once for it (`select_clip_cov`,
`select_kl_cov`), not in each micro-batch, where the choice would depend on how the rows are split.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ostinato.algos._checks import check_not_negative, check_same_shape
from ostinato.algos._typing import AnyFloats, AnyMask, TokenFloats, TokenMask
from ostinato.algos.masked import is_valid, masked_mean, zero_masked
from ostinato.algos.policy import PolicyLoss, clipped_surrogate, read_tokens
from ostinato.algos.registry import register_policy_loss


def _covariance(log_probs: Tensor, advantages: Tensor, valid: Tensor) -> Tensor:
    """(A − mean A)·(log π − mean log π) in float64; 0 under the mask."""
    a = zero_masked(advantages.to(torch.float64), valid)
    lp = zero_masked(log_probs.to(torch.float64), valid)
    return zero_masked((a - masked_mean(a, valid)) * (lp - masked_mean(lp, valid)), valid)


def _smallest(keys: Tensor, eligible: Tensor, count: Tensor) -> Tensor:
    """The `count` eligible entries with the smallest keys, as a mask; without reading a value on the host."""
    flat = torch.where(eligible, keys, torch.inf).flatten()
    order = flat.argsort(stable=True)
    rank = torch.empty_like(order).scatter_(0, order, torch.arange(order.numel(), device=order.device))
    return eligible & (rank.view_as(eligible) < count)


def _how_many(ratio: float, valid: Tensor) -> Tensor:
    return (valid.sum().to(torch.float64) * ratio).floor().clamp(min=1)


@torch.no_grad()
def select_clip_cov(
    log_probs: AnyFloats,
    advantages: AnyFloats,
    response_mask: AnyMask,
    *,
    clip_cov_ratio: float = 0.0002,
    clip_cov_lb: float = 1.0,
    clip_cov_ub: float = 5.0,
    seed: int = 0,
) -> AnyMask:
    """Draw the tokens whose gradient `clip_cov` drops.

    From the tokens whose covariance (A − mean A)·(log π − mean log π) lies strictly between the bounds, draw
    max(⌊ratio·T⌋, 1) without replacement, T the valid tokens. The draw depends on the seed and on the order of the
    entries alone, not on the device.

    Args:
        log_probs: any shape, of the current policy, over the whole mini-batch; masked entries may hold anything.
        advantages: same shape.
        response_mask: same shape.
        clip_cov_ratio: share of the tokens to drop.
        clip_cov_lb: lower bound of the covariance.
        clip_cov_ub: upper bound of the covariance.
        seed: of the draw; change it every step.

    Returns:
        Bool mask of that shape; False under the response mask.

    Raises:
        ShapeError: the shapes differ.
        ArgumentError: the ratio is negative.

    Source:
        Cui et al. 2025 (The entropy mechanism, arXiv 2505.22617), section 4, Clip-Cov.
    """
    check_not_negative("select_clip_cov", clip_cov_ratio=clip_cov_ratio)
    check_same_shape("select_clip_cov", log_probs=log_probs, advantages=advantages, response_mask=response_mask)
    valid = is_valid(response_mask)
    covariance = _covariance(log_probs, advantages, valid)
    eligible = valid & (covariance > clip_cov_lb) & (covariance < clip_cov_ub)
    generator = torch.Generator().manual_seed(seed)
    keys = torch.rand(tuple(valid.shape), generator=generator, dtype=torch.float64).to(valid.device)
    return _smallest(keys, eligible, _how_many(clip_cov_ratio, valid))


@torch.no_grad()
def select_kl_cov(
    log_probs: AnyFloats,
    advantages: AnyFloats,
    response_mask: AnyMask,
    *,
    kl_cov_ratio: float = 0.0002,
) -> AnyMask:
    """The tokens of largest covariance, which `kl_cov` holds back by a KL term.

    The max(⌊ratio·T⌋, 1) valid tokens with the largest (A − mean A)·(log π − mean log π); of equal ones the earlier.

    Args:
        log_probs: any shape, of the current policy, over the whole mini-batch; masked entries may hold anything.
        advantages: same shape.
        response_mask: same shape.
        kl_cov_ratio: share of the tokens to hold back.

    Returns:
        Bool mask of that shape; False under the response mask.

    Raises:
        ShapeError: the shapes differ.
        ArgumentError: the ratio is negative.

    Source:
        Cui et al. 2025 (The entropy mechanism, arXiv 2505.22617), section 4, KL-Cov.
    """
    check_not_negative("select_kl_cov", kl_cov_ratio=kl_cov_ratio)
    check_same_shape("select_kl_cov", log_probs=log_probs, advantages=advantages, response_mask=response_mask)
    valid = is_valid(response_mask)
    return _smallest(-_covariance(log_probs, advantages, valid), valid, _how_many(kl_cov_ratio, valid))


@register_policy_loss("clip_cov", selector=select_clip_cov)
def clip_cov(
    log_probs: TokenFloats,
    old_log_probs: TokenFloats,
    advantages: TokenFloats,
    response_mask: TokenMask,
    *,
    selected: TokenMask,
    clip_ratio_low: float = 0.2,
    clip_ratio_high: float = 0.2,
    weights: TokenFloats | None = None,
) -> PolicyLoss:
    """PPO's clipped surrogate without the selected tokens, which count as 0.

    max(−A·r, −A·clip(r, 1 − low, 1 + high)) where not selected, 0 where selected; no dual clip.

    Args:
        log_probs: (B, R) of the current policy, in nats; carries the gradient.
        old_log_probs: (B, R) of the policy before the update.
        advantages: (B, R).
        response_mask: (B, R).
        selected: (B, R) these rows' part of the mini-batch's `select_clip_cov`.
        clip_ratio_low: how far below 1 the ratio may go.
        clip_ratio_high: how far above 1 the ratio may go.
        weights: (B, R) importance weights of the rollout correction.

    Returns:
        Per-token loss; diagnostics pg_clipfrac (clipped branch or selected), pg_clipfrac_lower (selected), ppo_kl.

    Raises:
        ShapeError: the shapes differ.
        ArgumentError: a clip constant is out of range.

    Source:
        Cui et al. 2025 (The entropy mechanism, arXiv 2505.22617), section 4, Clip-Cov.
    """
    check_not_negative("clip_cov", clip_ratio_low=clip_ratio_low, clip_ratio_high=clip_ratio_high)
    tokens = read_tokens("clip_cov", log_probs, old_log_probs, advantages, response_mask, weights)
    check_same_shape("clip_cov", log_probs=log_probs, selected=selected)
    loss, is_clipped = clipped_surrogate(tokens.advantages, tokens.ratio, clip_ratio_low, clip_ratio_high)
    dropped = is_valid(selected)
    loss = torch.where(dropped, loss.new_zeros(()), loss)
    return tokens.result(loss, pg_clipfrac=is_clipped | dropped, pg_clipfrac_lower=dropped)


@register_policy_loss("kl_cov", selector=select_kl_cov)
def kl_cov(
    log_probs: TokenFloats,
    old_log_probs: TokenFloats,
    advantages: TokenFloats,
    response_mask: TokenMask,
    *,
    selected: TokenMask,
    ppo_kl_coef: float = 1.0,
    weights: TokenFloats | None = None,
) -> PolicyLoss:
    """Unclipped surrogate with a KL term on the selected tokens.

    −A·r, plus coef·|d| where selected.

    Args:
        log_probs: (B, R) of the current policy, in nats; carries the gradient.
        old_log_probs: (B, R) of the policy before the update.
        advantages: (B, R).
        response_mask: (B, R).
        selected: (B, R) these rows' part of the mini-batch's `select_kl_cov`.
        ppo_kl_coef: coefficient of |d|, 0 or more.
        weights: (B, R) importance weights of the rollout correction.

    Returns:
        Per-token loss; diagnostics pg_clipfrac (selected), ppo_kl.

    Raises:
        ShapeError: the shapes differ.
        ArgumentError: the coefficient is negative.

    Source:
        Cui et al. 2025 (The entropy mechanism, arXiv 2505.22617), section 4, KL-Cov.
    """
    check_not_negative("kl_cov", ppo_kl_coef=ppo_kl_coef)
    tokens = read_tokens("kl_cov", log_probs, old_log_probs, advantages, response_mask, weights)
    check_same_shape("kl_cov", log_probs=log_probs, selected=selected)
    held = is_valid(selected)
    loss = -tokens.advantages * tokens.ratio
    loss = torch.where(held, loss + ppo_kl_coef * tokens.log_ratio.abs(), loss)
    return tokens.result(loss, pg_clipfrac=held)
