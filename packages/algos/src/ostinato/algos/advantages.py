"""Advantage estimators over time: each looks at one row's own tokens (and, for the last one, at its group)."""

from __future__ import annotations

import torch

from ostinato.algos._checks import check_not_negative, check_rows, check_same_shape, check_token_floats
from ostinato.algos._typing import Labels, RowFloats, TokenFloats, TokenMask
from ostinato.algos.blocks import Moments, keep_, kept, mask_bits, row_blocks, whiten_
from ostinato.algos.groups import scored_groups
from ostinato.algos.masked import accumulation_dtype, is_valid, zero_masked
from ostinato.algos.registry import register_adv_est
from ostinato.algos.scan import DiscountedSum, PolicyTokens, reward_to_go

BASELINE_EPSILON = 1e-8


@register_adv_est("gae")
@torch.no_grad()
def gae(
    token_level_rewards: TokenFloats,
    response_mask: TokenMask,
    *,
    values: TokenFloats,
    gamma: float = 1.0,
    lam: float = 1.0,
) -> tuple[TokenFloats, TokenFloats]:
    """Generalised advantage estimation over policy tokens.

    δ_t = r_t + γ·V_{t+1} − V_t, A_t = δ_t + γλ·A_{t+1}, returns = A + V, then A is whitened over the batch. t counts
    policy tokens only: a masked position (tool output, padding) is no time step, its reward and value are not read, and
    the next value and the running sum are carried across it. V behind the last policy token is 0.

    Args:
        token_level_rewards: (B, R); masked entries may hold anything.
        response_mask: (B, R).
        values: (B, R) value of the state in which each token was sampled; masked entries may hold anything.
        gamma: γ, discount a policy token.
        lam: λ; 0 gives the TD error, 1 reward-to-go minus value.

    Returns:
        (B, R) whitened advantages and (B, R) returns, dtype of the rewards; exactly 0 under the mask.

    Raises:
        ShapeError: the shapes differ.

    Source:
        Schulman et al. 2016 (arXiv 1506.02438), eq. 11 and 16.
    """
    check_token_floats("gae", "token_level_rewards", token_level_rewards)
    check_same_shape("gae", token_level_rewards=token_level_rewards, response_mask=response_mask, values=values)
    check_not_negative("gae", gamma=gamma, lam=lam)
    valid = is_valid(response_mask)
    advantages, returns = (token_level_rewards.new_empty(valid.shape) for _ in range(2))
    moments = Moments()
    dtype = accumulation_dtype(token_level_rewards)
    summed: DiscountedSum | None = None
    for part in row_blocks(token_level_rewards):
        tokens = PolicyTokens(valid[part], dtype)
        r, v = token_level_rewards[part].to(dtype), values[part].to(dtype)
        # The recurrence of the returns R = A + V wants no value of the next token at this one's place:
        # R_t = r_t + γ·Y_{t+1} with Y_t = (1 − λ)·V_t + λ·r_t + γλ·Y_{t+1}.
        front = tokens.compact(keep_(torch.lerp(v, r, lam), tokens.bits))
        summed = summed or DiscountedSum(front.shape[1], gamma * lam, front)
        behind = tokens.behind(summed(front))
        total = keep_(torch.add(r, behind, alpha=gamma, out=behind), tokens.bits)
        returns[part] = total
        raw = keep_(torch.sub(total, v, out=total), tokens.bits)
        moments.add(raw, tokens.bits, tokens.counts.sum())
        advantages[part] = raw
    return whiten_(advantages, valid, moments), returns


@register_adv_est("reinforce_plus_plus")
@torch.no_grad()
def reinforce_plus_plus(
    token_level_rewards: TokenFloats, response_mask: TokenMask, *, gamma: float = 1.0
) -> tuple[TokenFloats, TokenFloats]:
    """Discounted reward-to-go, whitened over the batch.

    G_t = r_t + γ·G_{t+1} over policy tokens (masked positions are carried across without a decay step);
    A = whiten(G), returns = G.

    Args:
        token_level_rewards: (B, R), usually with the KL penalty inside; masked entries may hold anything.
        response_mask: (B, R).
        gamma: γ, discount a policy token.

    Returns:
        (B, R) advantages and (B, R) returns, dtype of the rewards; exactly 0 under the mask.

    Raises:
        ShapeError: the shapes differ.

    Source:
        Hu 2025 (REINFORCE++, arXiv 2501.03262).
    """
    check_token_floats("reinforce_plus_plus", "token_level_rewards", token_level_rewards)
    check_same_shape("reinforce_plus_plus", token_level_rewards=token_level_rewards, response_mask=response_mask)
    check_not_negative("reinforce_plus_plus", gamma=gamma)
    valid = is_valid(response_mask)
    advantages, returns = (token_level_rewards.new_empty(valid.shape) for _ in range(2))
    moments = Moments()
    for part in row_blocks(token_level_rewards):
        to_go = reward_to_go(token_level_rewards[part], valid[part], gamma)
        moments.add(to_go, mask_bits(valid[part], to_go.dtype), valid[part].sum())
        advantages[part] = returns[part] = to_go
    return whiten_(advantages, valid, moments), returns


@register_adv_est("remax")
@torch.no_grad()
def remax(
    token_level_rewards: TokenFloats, response_mask: TokenMask, *, reward_baselines: RowFloats
) -> tuple[TokenFloats, TokenFloats]:
    """Reward-to-go minus the score of the greedy response to the same prompt.

    A_t = Σ_{k≥t} r_k − b, over policy tokens; returns = Σ_{k≥t} r_k.

    Args:
        token_level_rewards: (B, R); masked entries may hold anything.
        response_mask: (B, R).
        reward_baselines: (B,) b, the summed reward of each row's greedy response.

    Returns:
        (B, R) advantages and (B, R) returns, dtype of the rewards; exactly 0 under the mask.

    Raises:
        ShapeError: the shapes differ.

    Source:
        Li et al. 2024 (ReMax, arXiv 2310.10505), algorithm 1.
    """
    check_token_floats("remax", "token_level_rewards", token_level_rewards)
    check_same_shape("remax", token_level_rewards=token_level_rewards, response_mask=response_mask)
    check_rows("remax", "reward_baselines", reward_baselines, response_mask.shape[0])
    valid = is_valid(response_mask)
    advantages, returns = (token_level_rewards.new_empty(valid.shape) for _ in range(2))
    for part in row_blocks(token_level_rewards):
        returns[part] = to_go = reward_to_go(token_level_rewards[part], valid[part], 1.0)
        bits = mask_bits(valid[part], to_go.dtype)
        advantages[part] = kept(to_go - reward_baselines[part, None].to(to_go.dtype), bits)
    return advantages, returns


@register_adv_est("optimal_token_baseline")
@torch.no_grad()
def optimal_token_baseline(
    token_level_rewards: TokenFloats,
    response_mask: TokenMask,
    *,
    groups: Labels,
    log_probs: TokenFloats,
    sum_pi_squared: TokenFloats,
    rollouts: Labels | None = None,
) -> tuple[TokenFloats, TokenFloats]:
    """Reward-to-go minus a variance-minimising baseline for each position of a group.

    G_t = Σ_{k≥t} r_k. With w = 1 − 2π + Σπ² (the squared norm of the logits' score, π the probability of the sampled
    token and Σπ² over the vocabulary) and W_t = Σ_{k≤t} w_k, the baseline of a group at its t-th policy token is
    b_t = Σ_i G_{i,t}·W_{i,t} / (Σ_i W_{i,t} + 1e-8); A = G − b. Past the end of the group's second-longest rollout
    the baseline would be the row's own return, so A is 0 there. A group of one rollout gets 0. Rows of one rollout
    share one rollout's weight.

    Args:
        token_level_rewards: (B, R); masked entries may hold anything.
        response_mask: (B, R).
        groups: (B) hashable labels, equal for the responses to one prompt.
        log_probs: (B, R) log-probability of the sampled token when it was sampled, in nats.
        sum_pi_squared: (B, R) Σπ² of the same distribution, see `token_sum_pi_squared`.
        rollouts: (B) hashable labels; rows with one label in a group are one rollout.

    Returns:
        (B, R) advantages and (B, R) returns, dtype of the rewards; exactly 0 under the mask.

    Raises:
        ShapeError: the shapes differ.

    Source:
        Greensmith et al. 2004, "Variance reduction techniques for gradient estimates" (the optimal constant baseline),
        for each position, with the squared norm in logit space as weight.
    """
    where = "optimal_token_baseline"
    check_same_shape(where, response_mask=response_mask, log_probs=log_probs, sum_pi_squared=sum_pi_squared)
    _, table = scored_groups(where, token_level_rewards, response_mask, groups, rollouts)
    valid = table.valid
    returns = reward_to_go(token_level_rewards.to(torch.float64), valid, 1.0)
    probability = zero_masked(log_probs.to(torch.float64), valid).exp()
    norm = 1.0 - 2.0 * probability + zero_masked(sum_pi_squared.to(torch.float64), valid)
    cumulative = zero_masked(zero_masked(norm, valid).cumsum(-1), valid)
    weight = cumulative / table.rows_in_unit.clamp(min=1)[table.unit][:, None]

    num_tokens = response_mask.shape[1]
    ordinal = PolicyTokens(valid, torch.float64).place - valid.to(torch.int64)  # policy tokens before each position
    cell = (table.group[:, None] * num_tokens + ordinal).flatten()
    cells = returns.new_zeros(table.num_groups * num_tokens + 1)
    # A masked position has the ordinal of the policy token behind it; its weight is 0, so it adds nothing there.
    weighted = cells.index_add(0, cell, (returns * weight).flatten())
    weights = cells.index_add(0, cell, weight.flatten())
    baseline = (weighted / (weights + BASELINE_EPSILON))[cell].view_as(returns)

    unit_length = table.lengths.new_zeros(table.num_units).scatter_reduce(0, table.unit, table.lengths, "amax")
    second = table.second_largest(unit_length)[1]
    compared = valid & table.counted[:, None] & (ordinal < second[table.group][:, None])
    dtype = token_level_rewards.dtype
    return zero_masked(returns - baseline, compared).to(dtype), returns.to(dtype)
