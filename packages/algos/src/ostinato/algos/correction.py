"""Correction for the gap between the policy that sampled and the policy that is trained from.

The rollout engine and the training engine give the same weights slightly different log-probabilities. With
d = log π_old − log π_rollout per token, a ratio w = exp(d) reweighs or rejects tokens and sequences. Nothing here
carries a gradient, and the current policy does not enter: the correction is the same in every epoch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ostinato.algos._checks import check_same_shape, check_token_floats
from ostinato.algos._typing import TokenFloats, TokenMask
from ostinato.algos.errors import ArgumentError, unknown_name
from ostinato.algos.kl import LOG_RATIO_LIMIT
from ostinato.algos.masked import is_valid, masked_mean, zero_masked

IMPORTANCE_LEVELS = ("token", "sequence")
REJECTION_KINDS = (
    *(f"token_{kind}" for kind in ("k1", "k2", "k3")),
    *(f"sequence_{kind}" for kind in ("k1", "k2", "k3")),
    *(f"seq_sum_{kind}" for kind in ("k1", "k2", "k3")),
    *(f"seq_mean_{kind}" for kind in ("k1", "k2", "k3")),
    *(f"seq_max_{kind}" for kind in ("k2", "k3")),
)


@dataclass(frozen=True)
class RolloutCorrection:
    """What the correction gives.

    Attributes:
        weights: (B, R) importance weights, no gradient, exactly 0 where `response_mask` is; None where no importance
            weighting was asked for. A policy loss takes them as `weights`.
        response_mask: (B, R) the mask without the rejected tokens, dtype of the one that came in.
        metrics: metric name -> scalar tensor.
    """

    weights: Tensor | None
    response_mask: Tensor
    metrics: dict[str, Tensor]


def parse_bounds(where: str, threshold: str | float, *, band: bool) -> tuple[float | None, float]:
    """Read "upper" or "lower_upper", both bounds on the ratio.

    Args:
        where: the option's name, for error texts.
        threshold: a number, or its text, or two numbers joined by "_".
        band: whether a single number implies 1/number as the lower bound; else there is no lower bound.

    Returns:
        lower (or None) and upper.

    Raises:
        ArgumentError: it cannot be read, or not 0 < lower < upper, or the ratio 1 lies outside.
    """
    parts = str(threshold).split("_")
    try:
        numbers = [float(part) for part in parts]
    except ValueError as error:
        raise ArgumentError(f'{where}: expected "upper" or "lower_upper", got {threshold!r}') from error
    if len(numbers) not in (1, 2) or not all(math.isfinite(number) and number > 0 for number in numbers):
        raise ArgumentError(f'{where}: expected "upper" or "lower_upper", ratios above 0, got {threshold!r}')
    if len(numbers) == 2:
        lower, upper = numbers
    else:
        lower, upper = (1.0 / numbers[0] if band else None), numbers[0]
    if upper < 1.0 or (lower is not None and not lower <= 1.0 <= upper) or lower == upper:
        raise ArgumentError(
            f"{where}: the bounds are on the ratio and must hold 1 between them, got {threshold!r}; "
            'for example "2.0", or "0.5_2.0"'
        )
    return lower, upper


def _divergence(d: Tensor, kind: str) -> Tensor:
    if kind == "k2":
        return 0.5 * d.square()
    return (torch.expm1(d) - d).clamp(min=0.0)


def _bound(limit: float, kind: str) -> float:
    d = math.log(limit)
    return 0.5 * d * d if kind == "k2" else math.expm1(d) - d


def _kept(d: Tensor, valid: Tensor, rejection: str, lower: float, upper: float) -> Tensor:
    """Where (B, R) tokens stay: the statistic lies within the bounds, whole rows at sequence level."""
    level, kind = rejection.rsplit("_", 1)
    summed = level in ("sequence", "seq_sum")
    # One direction for a sequence: that of its summed log-ratio.
    direction = d if level == "token" else d.sum(-1, keepdim=True)
    if kind == "k1":
        statistic = direction if level == "token" or summed else masked_mean(d, valid, dim=-1)[:, None]
        return (statistic >= math.log(lower)) & (statistic <= math.log(upper))
    divergence = zero_masked(_divergence(d, kind), valid)
    if level == "token":
        statistic = divergence
    elif summed:
        statistic = divergence.sum(-1, keepdim=True)
    elif level == "seq_mean":
        statistic = masked_mean(divergence, valid, dim=-1)[:, None]
    else:
        statistic = divergence.amax(-1, keepdim=True)
    above, below = d.new_full((), _bound(upper, kind)), d.new_full((), _bound(lower, kind))
    return statistic <= torch.where(direction > 0, above, below)


def _cut(ratio: Tensor, lower: float | None, upper: float) -> Tensor:
    """Upper truncation, or 0 outside of a band."""
    if lower is None:
        return ratio.clamp(max=upper)
    return torch.where((ratio >= lower) & (ratio <= upper), ratio, ratio.new_zeros(()))


def _masked_extreme(x: Tensor, valid: Tensor, largest: bool) -> Tensor:
    none = x.new_full((), -torch.inf if largest else torch.inf)
    kept = torch.cat([torch.where(valid, x, none).flatten(), none[None]])
    extreme = kept.amax() if largest else kept.amin()
    return torch.where(valid.any(), extreme, extreme.new_zeros(()))


def _masked_std(x: Tensor, valid: Tensor) -> Tensor:
    centred = zero_masked(x - masked_mean(x, valid), valid)
    return (centred.square().sum() / (valid.sum() - 1).clamp(min=1)).sqrt()


def _importance_metrics(weights: Tensor, ratio: Tensor, valid: Tensor, bounds: tuple[float | None, float]) -> dict:
    lower, upper = bounds
    squares = masked_mean(weights.square(), valid)
    mean = masked_mean(weights, valid)
    low = torch.zeros_like(ratio, dtype=torch.bool) if lower is None else ratio < lower
    return {
        "rollout_corr/rollout_is_mean": mean,
        "rollout_corr/rollout_is_std": _masked_std(weights, valid),
        "rollout_corr/rollout_is_min": _masked_extreme(weights, valid, largest=False),
        "rollout_corr/rollout_is_max": _masked_extreme(weights, valid, largest=True),
        "rollout_corr/rollout_is_eff_sample_size": mean.square() / torch.where(squares > 0, squares, 1.0),
        "rollout_corr/rollout_is_ratio_fraction_high": masked_mean((ratio > upper).to(ratio.dtype), valid),
        "rollout_corr/rollout_is_ratio_fraction_low": masked_mean(low.to(ratio.dtype), valid),
    }


def _gap_metrics(old: Tensor, rollout: Tensor, valid: Tensor) -> dict[str, Tensor]:
    d = (old - rollout).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    rows = valid.any(-1)
    training = -masked_mean(old, valid, dim=-1)
    sampling = -masked_mean(rollout, valid, dim=-1)
    return {
        "rollout_corr/kl": masked_mean(rollout - old, valid),
        "rollout_corr/k3_kl": masked_mean(_divergence(d, "k3"), valid),
        "rollout_corr/training_ppl": masked_mean(training.exp(), rows),
        "rollout_corr/rollout_ppl": masked_mean(sampling.exp(), rows),
        "rollout_corr/log_ppl_diff": masked_mean(sampling - training, rows),
    }


@torch.no_grad()
def rollout_correction(
    old_log_probs: TokenFloats,
    rollout_log_probs: TokenFloats,
    response_mask: TokenMask,
    *,
    rollout_is: str | None = None,
    rollout_is_threshold: str | float = "2.0",
    rollout_is_batch_normalize: bool = False,
    rollout_rs: str | None = None,
    rollout_rs_threshold: str | float | None = None,
) -> RolloutCorrection:
    """Importance weights and rejection for tokens that another policy sampled.

    d = log π_old − log π_rollout, w = exp(d). Importance (`rollout_is`): `token` w_t; `sequence` exp(Σ_t d_t) on every
    token of the row; the exponent is clamped to ±20. Threshold "2.0" truncates above; "0.5_2.0" sets 0 outside of the
    band. `rollout_is_batch_normalize` divides by the mean weight of the tokens that stay (of their sequences at
    sequence level).

    Rejection (`rollout_rs`) takes tokens, or whole rows, out of the mask: `token_k1|k2|k3`, `sequence_k1|k2|k3` (the
    sum over the row, also `seq_sum_…`), `seq_mean_…`, `seq_max_k2|k3`. k1 = log w, k2 = d²/2, k3 = w − 1 − log w. The
    bounds are ratios in every kind: a k2 or k3 may be as large as that of the bound on its own side (the upper one
    where d > 0, for rows Σd > 0). "0.5_5.0" keeps a ratio of 3; "2.0" alone means "0.5_2.0". Several kinds joined by
    commas must all agree, with one threshold for all or one each.

    Args:
        old_log_probs: (B, R) of the training engine before the update, in nats; masked entries may hold anything.
        rollout_log_probs: (B, R) of the rollout engine, in nats.
        response_mask: (B, R).
        rollout_is: None, `token` or `sequence`.
        rollout_is_threshold: "upper" or "lower_upper", ratios.
        rollout_is_batch_normalize: whether to normalise.
        rollout_rs: None or kinds from `REJECTION_KINDS` joined by commas.
        rollout_rs_threshold: "upper" or "lower_upper", ratios, joined by commas; needed with `rollout_rs`.

    Returns:
        Weights, the mask without what was rejected, and metrics `rollout_corr/*` (importance metrics over the mask that
        came in, with the ratios before any cut where they say so; k3_kl and perplexities of both engines).

    Raises:
        ShapeError: the shapes differ.
        UnknownNameError: no such level or kind.
        ArgumentError: a threshold is missing or cannot be read.

    Source:
        Espeholt et al. 2018 (truncated weights, V-trace, arXiv 1802.01561), section 4; Liu, Li et al. 2025, "When speed
        kills stability"; the gap between engines: Yao et al. 2025, "Your efficient RL framework secretly brings you
        off-policy RL training".
    """
    check_token_floats("rollout_correction", "old_log_probs", old_log_probs)
    check_same_shape(
        "rollout_correction",
        old_log_probs=old_log_probs,
        rollout_log_probs=rollout_log_probs,
        response_mask=response_mask,
    )
    valid = is_valid(response_mask)
    old, rollout = zero_masked(old_log_probs, valid), zero_masked(rollout_log_probs, valid)
    d = old - rollout
    metrics = {**_gap_metrics(old, rollout, valid), **rollout_probs_diff(old_log_probs, rollout_log_probs, valid)}
    stays = valid
    for kind, (lower, upper) in _rejections(rollout_rs, rollout_rs_threshold):
        stays = stays & _kept(d, valid, kind, lower, upper)
    if rollout_rs is not None:
        rejected = valid & ~stays
        metrics["rollout_corr/rollout_rs_masked_fraction"] = masked_mean(rejected.to(d.dtype), valid)
        whole = (valid.any(-1) & ~stays.any(-1)).to(d.dtype)
        metrics["rollout_corr/rollout_rs_seq_masked_fraction"] = masked_mean(whole, valid.any(-1))
    weights = None
    if rollout_is is not None:
        if rollout_is not in IMPORTANCE_LEVELS:
            raise unknown_name("rollout_is", rollout_is, IMPORTANCE_LEVELS)
        bounds = parse_bounds("rollout_is_threshold", rollout_is_threshold, band=False)
        exponent = d if rollout_is == "token" else d.sum(-1, keepdim=True).expand_as(d)
        ratio = exponent.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
        weights = _cut(ratio, *bounds)
        if rollout_is_batch_normalize:
            weights = _normalise(weights, stays, by_row=rollout_is == "sequence")
        metrics.update(_importance_metrics(weights, ratio, valid, bounds))
        weights = zero_masked(weights, stays)
    return RolloutCorrection(weights, zero_masked(response_mask, stays), metrics)


def _rejections(rollout_rs: str | None, threshold: str | float | None) -> list[tuple[str, tuple[float, float]]]:
    if rollout_rs is None:
        return []
    kinds = [kind.strip() for kind in rollout_rs.split(",")]
    for kind in kinds:
        if kind not in REJECTION_KINDS:
            raise unknown_name("rollout_rs", kind, REJECTION_KINDS)
    if threshold is None:
        raise ArgumentError('rollout_rs_threshold: missing; rollout_rs needs bounds on the ratio such as "0.5_2.0"')
    texts = str(threshold).split(",")
    if len(texts) not in (1, len(kinds)):
        raise ArgumentError(f"rollout_rs_threshold: {len(texts)} entries for {len(kinds)} kinds; give one, or one each")
    pairs = []
    for kind, text in zip(kinds, texts * len(kinds) if len(texts) == 1 else texts, strict=True):
        lower, upper = parse_bounds("rollout_rs_threshold", text.strip(), band=True)
        pairs.append((kind, (1.0 / upper if lower is None else lower, upper)))
    return pairs


def _normalise(weights: Tensor, stays: Tensor, *, by_row: bool) -> Tensor:
    mean = masked_mean(masked_mean(weights, stays, dim=-1), stays.any(-1)) if by_row else masked_mean(weights, stays)
    return weights / torch.where(mean > 0, mean, torch.ones_like(mean))


@torch.no_grad()
def rollout_probs_diff(
    old_log_probs: TokenFloats, rollout_log_probs: TokenFloats, response_mask: TokenMask
) -> dict[str, Tensor]:
    """How far the probabilities of the sampled tokens differ between the two engines, before any clamp.

    |exp(log π_old) − exp(log π_rollout)| over valid tokens.

    Args:
        old_log_probs: (B, R) of the training engine, in nats; masked entries may hold anything.
        rollout_log_probs: (B, R) of the rollout engine, in nats.
        response_mask: (B, R).

    Returns:
        `training/rollout_probs_diff_mean|max|std` and `training/rollout_actor_probs_pearson_corr`, scalar tensors; 0
        where nothing is valid (the correlation also where one side has no spread).

    Raises:
        ShapeError: the shapes differ.
    """
    check_same_shape(
        "rollout_probs_diff",
        old_log_probs=old_log_probs,
        rollout_log_probs=rollout_log_probs,
        response_mask=response_mask,
    )
    valid = is_valid(response_mask)
    old = zero_masked(zero_masked(old_log_probs, valid).to(torch.float64).exp(), valid)
    rollout = zero_masked(zero_masked(rollout_log_probs, valid).to(torch.float64).exp(), valid)
    gap = (old - rollout).abs()
    a = zero_masked(old - masked_mean(old, valid), valid)
    b = zero_masked(rollout - masked_mean(rollout, valid), valid)
    spread = (a.square().sum() * b.square().sum()).sqrt()
    correlation = (a * b).sum() / torch.where(spread > 0, spread, 1.0)
    dtype = old_log_probs.dtype
    return {
        "training/rollout_probs_diff_mean": masked_mean(gap, valid).to(dtype),
        "training/rollout_probs_diff_max": _masked_extreme(gap, valid, largest=True).to(dtype),
        "training/rollout_probs_diff_std": _masked_std(gap, valid).to(dtype),
        "training/rollout_actor_probs_pearson_corr": correlation.to(dtype),
    }
