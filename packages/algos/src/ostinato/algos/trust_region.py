"""Policy losses that bound a divergence instead of the ratio: DPPO (total variation or KL), DRO (quadratic penalty)."""

from __future__ import annotations

import torch
from torch import Tensor

from ostinato.algos._checks import check_not_negative, check_positive
from ostinato.algos._typing import TokenFloats, TokenMask
from ostinato.algos.policy import PolicyLoss, Tokens, read_tokens
from ostinato.algos.registry import register_policy_loss

BINARY_EPSILON = 1e-8


def _masked_reinforce(tokens: Tokens, inside: Tensor, clip_ratio_c: float) -> PolicyLoss:
    """−sg(min(r, c))·A·log π inside the trust region, 0 outside."""
    ratio = tokens.ratio.detach()
    loss = -ratio.clamp(max=clip_ratio_c) * tokens.advantages * tokens.log_probs
    loss = torch.where(inside, loss, loss.new_zeros(()))
    return tokens.result(loss, pg_clipfrac=~inside, pg_clipfrac_lower=inside & (ratio > clip_ratio_c))


@register_policy_loss("dppo_tv")
def dppo_tv(
    log_probs: TokenFloats,
    old_log_probs: TokenFloats,
    advantages: TokenFloats,
    response_mask: TokenMask,
    *,
    clip_ratio_low: float = 0.2,
    clip_ratio_high: float = 0.2,
    clip_ratio_c: float = 20.0,
    weights: TokenFloats | None = None,
) -> PolicyLoss:
    """REINFORCE with importance weights inside a total-variation trust region.

    −sg(min(r, c))·A·log π where the step stays inside: p − p_old ≤ high for A > 0, p − p_old ≥ −low else; 0 outside.
    p is the probability of the sampled token; |p − p_old| is the total variation of the two-outcome distribution "this
    token or another".

    Args:
        log_probs: (B, R) of the current policy, in nats; carries the gradient.
        old_log_probs: (B, R) of the policy before the update.
        advantages: (B, R).
        response_mask: (B, R).
        clip_ratio_low: how far the probability may fall.
        clip_ratio_high: how far the probability may rise.
        clip_ratio_c: c, largest importance weight, above 0.
        weights: (B, R) importance weights of the rollout correction.

    Returns:
        Per-token loss; diagnostics pg_clipfrac (outside), pg_clipfrac_lower (inside, weight cut at c), ppo_kl.

    Raises:
        ShapeError: the shapes differ.
        ArgumentError: a constant is out of range.

    Source:
        "Rethinking the trust region in LLM reinforcement learning" (DPPO, arXiv 2602.04879), the binary TV variant.
    """
    check_not_negative("dppo_tv", clip_ratio_low=clip_ratio_low, clip_ratio_high=clip_ratio_high)
    check_positive("dppo_tv", clip_ratio_c=clip_ratio_c)
    tokens = read_tokens("dppo_tv", log_probs, old_log_probs, advantages, response_mask, weights)
    rise = tokens.log_probs.detach().exp() - tokens.old_log_probs.exp()
    inside = torch.where(tokens.advantages > 0, rise <= clip_ratio_high, rise >= -clip_ratio_low)
    return _masked_reinforce(tokens, inside, clip_ratio_c)


@register_policy_loss("dppo_kl")
def dppo_kl(
    log_probs: TokenFloats,
    old_log_probs: TokenFloats,
    advantages: TokenFloats,
    response_mask: TokenMask,
    *,
    clip_ratio_low: float = 0.2,
    clip_ratio_high: float = 0.2,
    clip_ratio_c: float = 20.0,
    weights: TokenFloats | None = None,
) -> PolicyLoss:
    """REINFORCE with importance weights inside a KL trust region.

    With K = p_old·log(p_old/p) + (1 − p_old)·log((1 − p_old + ε)/(1 − p + ε)), ε = 1e-8, the KL of the two-outcome
    distribution "this token or another": −sg(min(r, c))·A·log π where the step stays inside (K ≤ high or p ≤ p_old for
    A > 0; K ≤ low or p ≥ p_old else), 0 outside.

    Args:
        log_probs: (B, R) of the current policy, in nats; carries the gradient.
        old_log_probs: (B, R) of the policy before the update.
        advantages: (B, R).
        response_mask: (B, R).
        clip_ratio_low: largest K, in nats, where the probability falls.
        clip_ratio_high: largest K, in nats, where the probability rises.
        clip_ratio_c: c, largest importance weight, above 0.
        weights: (B, R) importance weights of the rollout correction.

    Returns:
        Per-token loss; diagnostics pg_clipfrac (outside), pg_clipfrac_lower (inside, weight cut at c), ppo_kl.

    Raises:
        ShapeError: the shapes differ.
        ArgumentError: a constant is out of range.

    Source:
        "Rethinking the trust region in LLM reinforcement learning" (DPPO, arXiv 2602.04879), the binary KL variant.
    """
    check_not_negative("dppo_kl", clip_ratio_low=clip_ratio_low, clip_ratio_high=clip_ratio_high)
    check_positive("dppo_kl", clip_ratio_c=clip_ratio_c)
    tokens = read_tokens("dppo_kl", log_probs, old_log_probs, advantages, response_mask, weights)
    new, old = tokens.log_probs.detach(), tokens.old_log_probs
    # −expm1(log p) keeps 1 − p apart from 0 where p rounds to 1.
    rest = (BINARY_EPSILON - torch.expm1(old)).log() - (BINARY_EPSILON - torch.expm1(new)).log()
    divergence = -old.exp() * tokens.log_ratio.detach() - torch.expm1(old) * rest
    up = (divergence <= clip_ratio_high) | (new <= old)
    down = (divergence <= clip_ratio_low) | (new >= old)
    return _masked_reinforce(tokens, torch.where(tokens.advantages > 0, up, down), clip_ratio_c)


@register_policy_loss("dro")
def dro(
    log_probs: TokenFloats,
    old_log_probs: TokenFloats,
    advantages: TokenFloats,
    response_mask: TokenMask,
    *,
    dro_beta: float = 0.05,
    weights: TokenFloats | None = None,
) -> PolicyLoss:
    """REINFORCE with a quadratic penalty on the log-ratio, for data of any policy.

    −A·log π + β/2·d²; d is not clamped, as there is no exp.

    Args:
        log_probs: (B, R) of the current policy, in nats; carries the gradient.
        old_log_probs: (B, R) of the policy that sampled.
        advantages: (B, R).
        response_mask: (B, R).
        dro_beta: β, 0 or more.
        weights: (B, R) importance weights of the rollout correction.

    Returns:
        Per-token loss; diagnostic ppo_kl.

    Raises:
        ShapeError: the shapes differ.
        ArgumentError: β is negative.

    Source:
        Richemond et al. 2024 (DRO, arXiv 2405.19107), per token and with a given advantage in place of its value term.
    """
    check_not_negative("dro", dro_beta=dro_beta)
    tokens = read_tokens("dro", log_probs, old_log_probs, advantages, response_mask, weights)
    penalty = 0.5 * dro_beta * tokens.log_ratio.square()
    return tokens.result(penalty - tokens.advantages * tokens.log_probs)
