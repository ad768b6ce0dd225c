"""Policy losses per token. Nothing here averages: `aggregate` does, once, with global counts.

In all of them: d = log π − log π_old, clamped to ±20 before the exp; r = exp(d); A the advantage. Old
log-probabilities, advantages and weights carry no gradient. Losses and diagnostics are exactly 0 under the mask,
whatever the inputs hold there, and no gradient flows there.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ostinato.algos._checks import check_not_negative, check_positive, check_same_shape, check_token_floats
from ostinato.algos._typing import TokenFloats, TokenMask
from ostinato.algos.errors import ArgumentError
from ostinato.algos.kl import LOG_RATIO_LIMIT
from ostinato.algos.masked import is_valid, masked_mean, zero_masked
from ostinato.algos.registry import register_policy_loss

GSPO_LOG_RATIO_MAX = 10.0


@dataclass(frozen=True)
class PolicyLoss:
    """What a policy loss returns.

    Attributes:
        loss: (B, R) per-token loss to minimise, exactly 0 under the mask.
        diagnostics: name -> (B, R) per-token values without gradient, exactly 0 under the mask; their masked mean over
            the mini-batch is the metric `actor/<name>`. `pg_clipfrac`: 1 where a clip took the gradient away (for gspo,
            cispo and geo_mean: where it changed the ratio or the branch). `pg_clipfrac_lower`: 1 where a second bound
            did. `ppo_kl`: −d.
    """

    loss: Tensor
    diagnostics: dict[str, Tensor]


@dataclass(frozen=True)
class Tokens:
    """The inputs of a policy loss, made harmless under the mask."""

    valid: Tensor
    log_probs: Tensor
    old_log_probs: Tensor
    advantages: Tensor
    weights: Tensor | None

    @property
    def log_ratio(self) -> Tensor:
        """The log-ratio d, unclamped; 0 under the mask."""
        return self.log_probs - self.old_log_probs

    @property
    def ratio(self) -> Tensor:
        """The ratio r = exp(clamp(d, ±20)); 1 under the mask."""
        return self.log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()

    def result(self, loss: Tensor, **diagnostics: Tensor) -> PolicyLoss:
        """Weigh the loss, clear what lies under the mask, add `ppo_kl`."""
        if self.weights is not None:
            loss = loss * self.weights
        ppo_kl = -self.log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
        named = {**diagnostics, "ppo_kl": ppo_kl}
        kept = {name: zero_masked(value.detach().to(loss.dtype), self.valid) for name, value in named.items()}
        return PolicyLoss(loss=zero_masked(loss, self.valid), diagnostics=kept)


def read_tokens(
    where: str,
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    weights: Tensor | None,
) -> Tokens:
    """Check the shapes and take out what lies under the mask, before any arithmetic."""
    check_token_floats(where, "log_probs", log_probs)
    check_same_shape(
        where,
        log_probs=log_probs,
        old_log_probs=old_log_probs,
        advantages=advantages,
        response_mask=response_mask,
        weights=weights,
    )
    valid = is_valid(response_mask)
    return Tokens(
        valid=valid,
        log_probs=zero_masked(log_probs, valid),
        old_log_probs=zero_masked(old_log_probs.detach(), valid),
        advantages=zero_masked(advantages.detach(), valid),
        weights=None if weights is None else zero_masked(weights.detach(), valid),
    )


def clipped_surrogate(advantages: Tensor, ratio: Tensor, low: float, high: float) -> tuple[Tensor, Tensor]:
    """max(−A·r, −A·clip(r, 1 − low, 1 + high)) and where the clipped branch is the larger one."""
    plain = -advantages * ratio
    clipped = -advantages * ratio.clamp(1.0 - low, 1.0 + high)
    is_clipped = clipped > plain
    return torch.where(is_clipped, clipped, plain), is_clipped


def _zeros(x: Tensor) -> Tensor:
    return torch.zeros_like(x).detach()


@register_policy_loss("vanilla")
def vanilla(
    log_probs: TokenFloats,
    old_log_probs: TokenFloats,
    advantages: TokenFloats,
    response_mask: TokenMask,
    *,
    clip_ratio_low: float = 0.2,
    clip_ratio_high: float = 0.2,
    clip_ratio_c: float | None = 3.0,
    weights: TokenFloats | None = None,
) -> PolicyLoss:
    """PPO's clipped surrogate with dual clip.

    max(−A·r, −A·clip(r, 1 − low, 1 + high)); where A < 0 no more than −A·c. Clipped and dual-clipped tokens have zero
    gradient.

    Args:
        log_probs: (B, R) of the current policy, in nats; carries the gradient.
        old_log_probs: (B, R) of the policy before the update.
        advantages: (B, R).
        response_mask: (B, R).
        clip_ratio_low: how far below 1 the ratio may go.
        clip_ratio_high: how far above 1 the ratio may go.
        clip_ratio_c: c, above 1; None leaves the dual clip out.
        weights: (B, R) importance weights of the rollout correction.

    Returns:
        Per-token loss; diagnostics pg_clipfrac (the clipped branch), pg_clipfrac_lower (the dual clip), ppo_kl.

    Raises:
        ShapeError: the shapes differ.
        ArgumentError: a clip constant is out of range.

    Source:
        Schulman et al. 2017 (PPO, arXiv 1707.06347), eq. 7; Ye et al. 2020 (dual clip, arXiv 1912.09729); unequal
        bounds: Yu et al. 2025 (DAPO, arXiv 2503.14476), section 3.1.
    """
    check_not_negative("vanilla", clip_ratio_low=clip_ratio_low, clip_ratio_high=clip_ratio_high)
    tokens = read_tokens("vanilla", log_probs, old_log_probs, advantages, response_mask, weights)
    loss, is_clipped = clipped_surrogate(tokens.advantages, tokens.ratio, clip_ratio_low, clip_ratio_high)
    if clip_ratio_c is None:
        return tokens.result(loss, pg_clipfrac=is_clipped, pg_clipfrac_lower=_zeros(loss))
    if not clip_ratio_c > 1.0:
        raise ArgumentError(f"vanilla: clip_ratio_c must be above 1, got {clip_ratio_c}; None leaves the dual clip out")
    bound = -tokens.advantages * clip_ratio_c
    is_bounded = (tokens.advantages < 0) & (loss > bound)
    return tokens.result(torch.where(is_bounded, bound, loss), pg_clipfrac=is_clipped, pg_clipfrac_lower=is_bounded)


@register_policy_loss("gspo")
def gspo(
    log_probs: TokenFloats,
    old_log_probs: TokenFloats,
    advantages: TokenFloats,
    response_mask: TokenMask,
    *,
    clip_ratio_low: float = 0.2,
    clip_ratio_high: float = 0.2,
    weights: TokenFloats | None = None,
) -> PolicyLoss:
    """Clipped surrogate with one ratio a sequence.

    s_i = exp(mean_t d_t); per token log s_{i,t} = sg(mean_t d_t) + log π_t − sg(log π_t), at most 10, so the value is
    the sequence's and the gradient the token's own. Then max(−A·s, −A·clip(s, 1 − low, 1 + high)). Meant for
    `seq-mean-token-mean`; the paper's bounds are 3e-4 and 4e-4.

    Args:
        log_probs: (B, R) of the current policy, in nats; carries the gradient.
        old_log_probs: (B, R) of the policy before the update.
        advantages: (B, R).
        response_mask: (B, R).
        clip_ratio_low: how far below 1 the sequence's ratio may go.
        clip_ratio_high: how far above 1 the sequence's ratio may go.
        weights: (B, R) importance weights of the rollout correction.

    Returns:
        Per-token loss; diagnostics pg_clipfrac (the clipped branch), pg_clipfrac_lower (0), ppo_kl.

    Raises:
        ShapeError: the shapes differ.
        ArgumentError: a clip constant is out of range.

    Source:
        Zheng et al. 2025 (GSPO, arXiv 2507.18071), eq. 5, 7 and 13-14 (the token variant).
    """
    check_not_negative("gspo", clip_ratio_low=clip_ratio_low, clip_ratio_high=clip_ratio_high)
    tokens = read_tokens("gspo", log_probs, old_log_probs, advantages, response_mask, weights)
    sequence = masked_mean(tokens.log_ratio.detach(), tokens.valid, dim=-1)[:, None]
    own = tokens.log_probs - tokens.log_probs.detach()
    ratio = (own + sequence).clamp(max=GSPO_LOG_RATIO_MAX).exp()
    loss, is_clipped = clipped_surrogate(tokens.advantages, ratio, clip_ratio_low, clip_ratio_high)
    return tokens.result(loss, pg_clipfrac=is_clipped, pg_clipfrac_lower=_zeros(loss))


@register_policy_loss("sapo")
def sapo(
    log_probs: TokenFloats,
    old_log_probs: TokenFloats,
    advantages: TokenFloats,
    response_mask: TokenMask,
    *,
    tau_pos: float = 1.0,
    tau_neg: float = 1.05,
    weights: TokenFloats | None = None,
) -> PolicyLoss:
    """A smooth gate in place of the clip.

    −A·σ(τ(r − 1))·4/τ, τ = τ⁺ where A > 0, else τ⁻. At r = 1 the gradient is that of −A·r.

    Args:
        log_probs: (B, R) of the current policy, in nats; carries the gradient.
        old_log_probs: (B, R) of the policy before the update.
        advantages: (B, R).
        response_mask: (B, R).
        tau_pos: τ⁺, above 0.
        tau_neg: τ⁻, above 0; larger closes the gate faster.
        weights: (B, R) importance weights of the rollout correction.

    Returns:
        Per-token loss; diagnostics pg_clipfrac and pg_clipfrac_lower (0), ppo_kl.

    Raises:
        ShapeError: the shapes differ.
        ArgumentError: a τ is not above 0.

    Source:
        Gao et al. 2025 (SAPO, arXiv 2511.20347).
    """
    check_positive("sapo", tau_pos=tau_pos, tau_neg=tau_neg)
    tokens = read_tokens("sapo", log_probs, old_log_probs, advantages, response_mask, weights)
    # A Python number in `where` would come in as float32, whatever the dtype of the rest.
    one = torch.ones_like(tokens.log_probs).detach()
    tau = torch.where(tokens.advantages > 0, one * tau_pos, one * tau_neg)
    gate = torch.sigmoid(tau * (tokens.ratio - 1.0)) * (4.0 / tau)
    loss = -tokens.advantages * gate
    return tokens.result(loss, pg_clipfrac=_zeros(loss), pg_clipfrac_lower=_zeros(loss))


@register_policy_loss("gpg")
def gpg_loss(
    log_probs: TokenFloats,
    old_log_probs: TokenFloats,
    advantages: TokenFloats,
    response_mask: TokenMask,
    *,
    weights: TokenFloats | None = None,
) -> PolicyLoss:
    """REINFORCE: −A·log π. The old policy is only read for ppo_kl.

    Args:
        log_probs: (B, R) of the current policy, in nats; carries the gradient.
        old_log_probs: (B, R) of the policy before the update.
        advantages: (B, R).
        response_mask: (B, R).
        weights: (B, R) importance weights of the rollout correction.

    Returns:
        Per-token loss; diagnostic ppo_kl.

    Raises:
        ShapeError: the shapes differ.

    Source:
        Chu et al. 2025 (GPG, arXiv 2504.02546).
    """
    tokens = read_tokens("gpg", log_probs, old_log_probs, advantages, response_mask, weights)
    return tokens.result(-tokens.advantages * tokens.log_probs)


@register_policy_loss("geo_mean")
def geo_mean(
    log_probs: TokenFloats,
    old_log_probs: TokenFloats,
    advantages: TokenFloats,
    response_mask: TokenMask,
    *,
    clip_ratio_low: float = 0.2,
    clip_ratio_high: float = 0.2,
    weights: TokenFloats | None = None,
) -> PolicyLoss:
    """Geometric mean of the clipped token ratios, the same on every token of a row.

    d⁻_t = sign(A)·min(sign(A)·d, sign(A)·clip(d, −low, high)); loss = −Ā_i·exp(mean_t d⁻_t), Ā_i the mean advantage of
    the row. Meant for `seq-mean-token-mean`, which gives the paper's mean over sequences. The clip is on the log-ratio;
    the paper's bound is 0.4. Weights enter as their geometric mean over the row.

    Args:
        log_probs: (B, R) of the current policy, in nats; carries the gradient.
        old_log_probs: (B, R) of the policy before the update.
        advantages: (B, R), normally constant along a row.
        response_mask: (B, R).
        clip_ratio_low: how far below 0 the log-ratio may go.
        clip_ratio_high: how far above 0 the log-ratio may go.
        weights: (B, R) importance weights of the rollout correction.

    Returns:
        Per-token loss; diagnostics pg_clipfrac (clipped where A > 0), pg_clipfrac_lower (clipped where A < 0), ppo_kl.

    Raises:
        ShapeError: the shapes differ.
        ArgumentError: a clip constant is out of range.

    Source:
        Zhao et al. 2025 (GMPO, arXiv 2507.20673), algorithm 1.
    """
    check_not_negative("geo_mean", clip_ratio_low=clip_ratio_low, clip_ratio_high=clip_ratio_high)
    tokens = read_tokens("geo_mean", log_probs, old_log_probs, advantages, response_mask, weights)
    d = tokens.log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    clamped = d.clamp(-clip_ratio_low, clip_ratio_high)
    sign = tokens.advantages.sign()
    is_clipped = sign * clamped < sign * d
    kept = torch.where(is_clipped, clamped, d)
    ratio = masked_mean(kept, tokens.valid, dim=-1).exp()
    row = -masked_mean(tokens.advantages, tokens.valid, dim=-1) * ratio
    if tokens.weights is not None:
        # A weight of 0 (outside of a band) makes the geometric mean 0: log 0 = −inf, exp(−inf) = 0.
        row = row * masked_mean(tokens.weights.log(), tokens.valid, dim=-1).exp()
    loss = row[:, None].to(tokens.log_probs.dtype).expand_as(tokens.log_probs)
    unweighted = Tokens(tokens.valid, tokens.log_probs, tokens.old_log_probs, tokens.advantages, None)
    return unweighted.result(
        loss,
        pg_clipfrac=is_clipped & (tokens.advantages > 0),
        pg_clipfrac_lower=is_clipped & (tokens.advantages < 0),
    )


@register_policy_loss("cispo")
def cispo(
    log_probs: TokenFloats,
    old_log_probs: TokenFloats,
    advantages: TokenFloats,
    response_mask: TokenMask,
    *,
    clip_ratio_low: float | None = 0.2,
    clip_ratio_high: float = 0.2,
    weights: TokenFloats | None = None,
) -> PolicyLoss:
    """REINFORCE with a clipped importance weight; no token loses its gradient.

    −sg(clip(r, 1 − low, 1 + high))·A·log π

    Args:
        log_probs: (B, R) of the current policy, in nats; carries the gradient.
        old_log_probs: (B, R) of the policy before the update.
        advantages: (B, R).
        response_mask: (B, R).
        clip_ratio_low: how far below 1 the ratio may go; None leaves the lower bound out, as the paper does.
        clip_ratio_high: how far above 1 the ratio may go.
        weights: (B, R) importance weights of the rollout correction.

    Returns:
        Per-token loss; diagnostics pg_clipfrac (the ratio was changed), pg_clipfrac_lower (0), ppo_kl.

    Raises:
        ShapeError: the shapes differ.
        ArgumentError: a clip constant is out of range.

    Source:
        MiniMax 2025 (MiniMax-M1, arXiv 2506.13585), eq. 4-5.
    """
    check_not_negative("cispo", clip_ratio_low=clip_ratio_low or 0.0, clip_ratio_high=clip_ratio_high)
    tokens = read_tokens("cispo", log_probs, old_log_probs, advantages, response_mask, weights)
    ratio = tokens.ratio.detach()
    low = 0.0 if clip_ratio_low is None else 1.0 - clip_ratio_low
    clipped = ratio.clamp(low, 1.0 + clip_ratio_high)
    loss = -clipped * tokens.advantages * tokens.log_probs
    return tokens.result(loss, pg_clipfrac=clipped != ratio, pg_clipfrac_lower=_zeros(loss))
