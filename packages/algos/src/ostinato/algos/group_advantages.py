"""Advantage estimators from the scores of a group: one number a row, the same on each of its policy tokens.

In all of them: a row's score is the sum of its token-level rewards over policy tokens; a group is named by its label;
one rollout that came back as several rows (`rollouts`) counts once, with the mean of its rows' scores; a row without a
valid token leaves the statistics; statistics are float64; a group of one rollout gets 0.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ostinato.algos._checks import check_not_negative, check_rows
from ostinato.algos._typing import Labels, RowFloats, TokenFloats, TokenMask
from ostinato.algos.blocks import tile, whiten_rows
from ostinato.algos.errors import ArgumentError
from ostinato.algos.groups import Groups, scored_groups
from ostinato.algos.masked import zero_masked
from ostinato.algos.registry import register_adv_est

GROUP_STD_EPSILON = 1e-6


def _tile(row_advantages: Tensor, table: Groups, dtype: torch.dtype) -> tuple[TokenFloats, TokenFloats]:
    """(B,) -> (B, R), on policy tokens of the rows that count, 0 elsewhere: as advantages and as returns.

    Both are one tensor: a second copy would be half of what an estimator costs.
    """
    advantages = tile(zero_masked(row_advantages, table.counted), table.valid, dtype)
    return advantages, advantages


def _normalised(scores: Tensor, table: Groups, by_std: bool, epsilon: float) -> Tensor:
    centred, _ = table.centre(scores)
    return centred / (table.std(centred) + epsilon)[table.group] if by_std else centred


@register_adv_est("grpo")
@torch.no_grad()
def grpo(
    token_level_rewards: TokenFloats,
    response_mask: TokenMask,
    *,
    groups: Labels,
    rollouts: Labels | None = None,
    norm_adv_by_std_in_grpo: bool = True,
    epsilon: float = GROUP_STD_EPSILON,
) -> tuple[TokenFloats, TokenFloats]:
    """Score relative to the group, in standard deviations.

    A = (s − mean_g)/(std_g + ε), sample standard deviation (ddof 1). `norm_adv_by_std_in_grpo=False` leaves the
    division out (Dr. GRPO). A group without spread gets exactly 0; with ε = 1e-6, two scores 1e-5 apart get ±0.62.

    Args:
        token_level_rewards: (B, R); masked entries may hold anything.
        response_mask: (B, R).
        groups: (B) hashable labels, equal for the responses to one prompt.
        rollouts: (B) hashable labels; rows with one label in a group are one rollout.
        norm_adv_by_std_in_grpo: whether to divide by the standard deviation.
        epsilon: ε, in units of the score.

    Returns:
        (B, R) advantages, and the same tensor as returns; dtype of the rewards, exactly 0 under the mask.

    Raises:
        ShapeError: the shapes or the number of labels differ.

    Source:
        Shao et al. 2024 (GRPO, arXiv 2402.03300), section 4.1.2; Liu et al. 2025 (Dr. GRPO, arXiv 2503.20783).
    """
    check_not_negative("grpo", epsilon=epsilon)
    scores, table = scored_groups("grpo", token_level_rewards, response_mask, groups, rollouts)
    row = _normalised(scores, table, norm_adv_by_std_in_grpo, epsilon)
    return _tile(row, table, token_level_rewards.dtype)


@register_adv_est("grpo_passk")
@torch.no_grad()
def grpo_passk(
    token_level_rewards: TokenFloats,
    response_mask: TokenMask,
    *,
    groups: Labels,
    rollouts: Labels | None = None,
    norm_adv_by_std_in_grpo: bool = True,
    epsilon: float = GROUP_STD_EPSILON,
) -> tuple[TokenFloats, TokenFloats]:
    """Only the best response of a group learns, by its lead.

    A = (r₁ − r₂)/(std_g + ε) for the best of the group, 0 for the others; r₁ and r₂ are the largest and second-largest
    score. A tie for the best has no lead and gives 0.

    Args:
        token_level_rewards: (B, R); masked entries may hold anything.
        response_mask: (B, R).
        groups: (B) hashable labels, equal for the responses to one prompt.
        rollouts: (B) hashable labels; rows with one label in a group are one rollout.
        norm_adv_by_std_in_grpo: whether to divide by the standard deviation.
        epsilon: ε, in units of the score.

    Returns:
        (B, R) advantages, and the same tensor as returns; dtype of the rewards, exactly 0 under the mask.

    Raises:
        ShapeError: the shapes or the number of labels differ.

    Source:
        Pass@k training with a leave-one-out maximum as baseline: Tang et al. 2025 (arXiv 2503.19595).
    """
    check_not_negative("grpo_passk", epsilon=epsilon)
    scores, table = scored_groups("grpo_passk", token_level_rewards, response_mask, groups, rollouts)
    units = table.unit_mean(scores)
    largest, second = table.second_largest(units)
    lead = torch.where(table.size >= 2, largest - second, largest.new_zeros(()))
    if norm_adv_by_std_in_grpo:
        lead = lead / (table.std(table.centre(scores)[0]) + epsilon)
    is_best = units == largest[table.unit_group]
    row = torch.where(is_best[table.unit], lead[table.group], lead.new_zeros(()))
    return _tile(row, table, token_level_rewards.dtype)


@register_adv_est("rloo")
@torch.no_grad()
def rloo(
    token_level_rewards: TokenFloats,
    response_mask: TokenMask,
    *,
    groups: Labels,
    rollouts: Labels | None = None,
) -> tuple[TokenFloats, TokenFloats]:
    """Score minus the mean of the others (leave one out).

    A = s·n/(n−1) − mean_g·n/(n−1), which is s − mean of the other n − 1. There is no division by a standard deviation:
    a leave-one-out deviation is 0 where the others agree.

    Args:
        token_level_rewards: (B, R); masked entries may hold anything.
        response_mask: (B, R).
        groups: (B) hashable labels, equal for the responses to one prompt.
        rollouts: (B) hashable labels; rows with one label in a group are one rollout.

    Returns:
        (B, R) advantages, and the same tensor as returns; dtype of the rewards, exactly 0 under the mask.

    Raises:
        ShapeError: the shapes or the number of labels differ.

    Source:
        Kool et al. 2019, "Buy 4 REINFORCE samples, get a baseline for free!"; Ahmadian et al. 2024 (RLOO, arXiv
        2402.14740).
    """
    scores, table = scored_groups("rloo", token_level_rewards, response_mask, groups, rollouts)
    factor = table.size / (table.size - 1).clamp(min=1)
    row = table.centre(scores)[0] * factor[table.group]
    return _tile(row, table, token_level_rewards.dtype)


@register_adv_est("reinforce_plus_plus_baseline")
@torch.no_grad()
def reinforce_plus_plus_baseline(
    token_level_rewards: TokenFloats,
    response_mask: TokenMask,
    *,
    groups: Labels,
    rollouts: Labels | None = None,
) -> tuple[TokenFloats, TokenFloats]:
    """Score minus the group mean, tiled over the tokens, whitened over the batch.

    Args:
        token_level_rewards: (B, R); masked entries may hold anything.
        response_mask: (B, R).
        groups: (B) hashable labels, equal for the responses to one prompt.
        rollouts: (B) hashable labels; rows with one label in a group are one rollout.

    Returns:
        (B, R) advantages, and the same tensor as returns; dtype of the rewards, exactly 0 under the mask and in rows of
        a group of one (which do not enter the whitening either).

    Raises:
        ShapeError: the shapes or the number of labels differ.

    Source:
        Hu 2025 (REINFORCE++, arXiv 2501.03262), the variant with a group baseline.
    """
    where = "reinforce_plus_plus_baseline"
    scores, table = scored_groups(where, token_level_rewards, response_mask, groups, rollouts)
    row = whiten_rows(table.centre(scores)[0], zero_masked(table.lengths, table.counted))
    return _tile(row, table, token_level_rewards.dtype)


@register_adv_est("opo")
@torch.no_grad()
def opo(
    token_level_rewards: TokenFloats,
    response_mask: TokenMask,
    *,
    groups: Labels,
    rollouts: Labels | None = None,
) -> tuple[TokenFloats, TokenFloats]:
    """Score minus the length-weighted mean of the group.

    A = s − Σ(len·s)/Σ len over the group, len the number of policy tokens. A rollout's rows add up their lengths.

    Args:
        token_level_rewards: (B, R); masked entries may hold anything.
        response_mask: (B, R).
        groups: (B) hashable labels, equal for the responses to one prompt.
        rollouts: (B) hashable labels; only tells which groups hold a single rollout.

    Returns:
        (B, R) advantages, and the same tensor as returns; dtype of the rewards, exactly 0 under the mask.

    Raises:
        ShapeError: the shapes or the number of labels differ.

    Source:
        Hao et al. 2025 (OPO, arXiv 2505.23585).
    """
    scores, table = scored_groups("opo", token_level_rewards, response_mask, groups, rollouts)
    centred, _ = table.centre(scores)
    # The weighted mean of centred scores is what is left to take away; a flat group stays exactly 0.
    shift = table.row_group_sum(table.lengths * centred) / table.row_group_sum(table.lengths).clamp(min=1)
    return _tile(centred - shift[table.group], table, token_level_rewards.dtype)


@register_adv_est("gpg")
@torch.no_grad()
def gpg(
    token_level_rewards: TokenFloats,
    response_mask: TokenMask,
    *,
    groups: Labels,
    rollouts: Labels | None = None,
) -> tuple[TokenFloats, TokenFloats]:
    """Score minus the group mean, scaled up for the share of responses that scored nothing.

    A = α·(s − mean_g), α = rollouts of the batch / rollouts with a non-zero score; no standard deviation.

    Args:
        token_level_rewards: (B, R); masked entries may hold anything.
        response_mask: (B, R).
        groups: (B) hashable labels, equal for the responses to one prompt.
        rollouts: (B) hashable labels; rows with one label in a group are one rollout.

    Returns:
        (B, R) advantages, and the same tensor as returns; dtype of the rewards, exactly 0 under the mask.

    Raises:
        ShapeError: the shapes or the number of labels differ.

    Source:
        Chu et al. 2025 (GPG, arXiv 2504.02546).
    """
    scores, table = scored_groups("gpg", token_level_rewards, response_mask, groups, rollouts)
    non_zero = table.unit_valid & (table.unit_mean(scores) != 0)
    alpha = table.unit_valid.sum().to(torch.float64) / non_zero.sum().clamp(min=1)
    return _tile(alpha * table.centre(scores)[0], table, token_level_rewards.dtype)


@register_adv_est("gdpo")
@torch.no_grad()
def gdpo(
    token_level_rewards: TokenFloats,
    response_mask: TokenMask,
    *,
    groups: Labels,
    reward_scores: Mapping[str, RowFloats],
    weights: Mapping[str, float] | None = None,
    rollouts: Labels | None = None,
    norm_adv_by_std_in_grpo: bool = True,
    epsilon: float = GROUP_STD_EPSILON,
) -> tuple[TokenFloats, TokenFloats]:
    """GRPO for each reward on its own, then a weighted sum, whitened over the batch.

    A = whiten(Σ_k w_k·GRPO(s_k)). Normalising before summing keeps a reward with a small spread from drowning in one
    with a large spread.

    Args:
        token_level_rewards: (B, R); gives shape and dtype, its values are not read.
        response_mask: (B, R).
        groups: (B) hashable labels, equal for the responses to one prompt.
        reward_scores: reward name -> (B,) scores.
        weights: reward name -> w_k; None weighs each reward with 1.
        rollouts: (B) hashable labels; rows with one label in a group are one rollout.
        norm_adv_by_std_in_grpo: whether to divide by the standard deviation.
        epsilon: ε, in units of the score.

    Returns:
        (B, R) advantages, and the same tensor as returns; dtype of the rewards, exactly 0 under the mask and in rows of
        a group of one (which do not enter the whitening either).

    Raises:
        ShapeError: the shapes or the number of labels differ.
        ArgumentError: no reward, or the weights do not name exactly the rewards.

    Source:
        Liu et al. 2026 (GDPO, arXiv 2601.05242).
    """
    check_not_negative("gdpo", epsilon=epsilon)
    _, table = scored_groups("gdpo", token_level_rewards, response_mask, groups, rollouts)
    if not reward_scores:
        raise ArgumentError("gdpo: reward_scores is empty; give at least one reward name -> (B,) scores")
    if weights is not None and weights.keys() != reward_scores.keys():
        raise ArgumentError(
            f"gdpo: weights names {sorted(weights)}, but reward_scores names {sorted(reward_scores)}; name the same"
        )
    row = torch.zeros(response_mask.shape[0], dtype=torch.float64, device=response_mask.device)
    for name, scores in reward_scores.items():
        check_rows("gdpo", f"reward_scores[{name!r}]", scores, response_mask.shape[0])
        weight = 1.0 if weights is None else weights[name]
        wide = torch.where(table.row_valid, scores.to(torch.float64), row.new_zeros(()))
        row = row + weight * _normalised(wide, table, norm_adv_by_std_in_grpo, epsilon)
    row = whiten_rows(row, zero_masked(table.lengths, table.counted))
    return _tile(row, table, token_level_rewards.dtype)
