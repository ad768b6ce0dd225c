"""Advantage estimators: checked values, known failures of the field, refusals."""

from __future__ import annotations

import inspect
import warnings

import pytest
import torch

from ostinato.algos import (
    ArgumentError,
    SingletonGroupWarning,
    adv_estimators,
    gae,
    gdpo,
    get_adv_estimator,
    gpg,
    grpo,
    grpo_passk,
    keywords,
    masked_whiten,
    opo,
    optimal_token_baseline,
    place_outcome,
    reinforce_plus_plus,
    reinforce_plus_plus_baseline,
    remax,
    rloo,
)

F64 = torch.float64
GROUP_ESTIMATORS = [name for name in adv_estimators() if "groups" in keywords(get_adv_estimator(name))]

pytestmark = pytest.mark.filterwarnings("ignore::ostinato.algos.SingletonGroupWarning")


def outcome(scores, lengths=None, width=4):
    """(rewards, mask): each score on the last of `lengths` valid tokens."""
    lengths = [1] * len(scores) if lengths is None else lengths
    mask = torch.arange(width) < torch.tensor(lengths)[:, None]
    return place_outcome(torch.tensor(scores, dtype=F64), mask), mask


REWARDS, MASK = outcome([1, 0, 0.5, 2, 1], [3, 2, 4, 1, 3])
LABELS = list("pppqp")


@pytest.mark.parametrize(
    ("name", "options", "expected"),
    [
        ("grpo", {}, [0.783348, -1.305580, -0.261116, 0, 0.783348]),
        ("grpo", {"norm_adv_by_std_in_grpo": False}, [0.375, -0.625, -0.125, 0, 0.375]),
        ("rloo", {}, [0.5, -0.833333, -0.166667, 0, 0.5]),
        ("opo", {}, [0.333333, -0.666667, -0.166667, 0, 0.333333]),
        ("gpg", {}, [0.46875, -0.78125, -0.15625, 0, 0.46875]),
    ],
)
def test_group_estimators_give_the_checked_values(name, options, expected):
    advantages, returns = get_adv_estimator(name)(REWARDS, MASK, groups=LABELS, **options)
    tiled = torch.tensor(expected, dtype=F64)[:, None] * MASK
    torch.testing.assert_close(advantages, tiled, rtol=0, atol=6e-7)
    assert torch.equal(advantages, returns)


def test_reinforce_plus_plus_gives_the_checked_values():
    advantages, returns = reinforce_plus_plus(REWARDS, MASK, gamma=0.9)
    torch.testing.assert_close(
        advantages[0], torch.tensor([0.205336, 0.378111, 0.570082, 0], dtype=F64), rtol=0, atol=6e-7
    )
    torch.testing.assert_close(returns[0], torch.tensor([0.81, 0.9, 1.0, 0], dtype=F64))


def test_gae_gives_the_checked_values():
    values = torch.zeros(5, 4, dtype=F64)
    for row, numbers in enumerate([[0.1, 0.2, 0.3], [0.5, 0.4], [0.1] * 4, [0.7], [0.3, 0.2, 0.1]]):
        values[row, : len(numbers)] = torch.tensor(numbers, dtype=F64)
    advantages, returns = gae(REWARDS, MASK, values=values, gamma=0.9, lam=0.8)
    for row, expected in [(0, [0.239774, 0.410597, 0.677244]), (1, [-1.709877, -1.650623]), (3, [1.946989])]:
        got = advantages[row, : len(expected)]
        torch.testing.assert_close(got, torch.tensor(expected, dtype=F64), rtol=0, atol=1.1e-6)
    torch.testing.assert_close(returns[0], torch.tensor([0.593280, 0.774, 1, 0], dtype=F64), rtol=0, atol=6e-7)
    torch.testing.assert_close(returns[1], torch.tensor([0.072, 0, 0, 0], dtype=F64), rtol=0, atol=6e-7)


def unwhitened(rewards, values, mask, gamma, lam):
    _, returns = gae(rewards, mask, values=values, gamma=gamma, lam=lam)
    return torch.where(mask.bool(), returns - values, 0), returns


def test_gae_basics():
    """H-12."""
    rewards = torch.tensor([[0.0, 0, 2]], dtype=F64)
    values = torch.tensor([[0.5, 0.4, 0.3]], dtype=F64)
    mask = torch.ones(1, 3)
    raw, returns = unwhitened(rewards, values, mask, 1.0, 0.95)
    torch.testing.assert_close(raw, torch.tensor([[1.33925, 1.515, 1.7]], dtype=F64))
    torch.testing.assert_close(returns, torch.tensor([[1.83925, 1.915, 2.0]], dtype=F64))
    advantages, _ = gae(rewards, mask, values=values, gamma=1.0, lam=0.95)
    torch.testing.assert_close(advantages, masked_whiten(raw, mask))


@pytest.mark.parametrize("tool_value", [8.0, -100.0, float("nan")])
def test_gae_steps_over_tool_tokens(tool_value):
    """H-13: the critic's value on a tool token and a decay step for it do not leak."""
    rewards = torch.tensor([[0.0, tool_value, 0, 1]], dtype=F64)
    values = torch.tensor([[0.2, tool_value, 0.6, 0.4]], dtype=F64)
    mask = torch.tensor([[1, 0, 1, 1]])
    raw, returns = unwhitened(rewards, values, mask, 1.0, 0.9)
    torch.testing.assert_close(raw, torch.tensor([[0.706, 0, 0.34, 0.6]], dtype=F64))
    torch.testing.assert_close(returns, torch.tensor([[0.906, 0, 0.94, 1]], dtype=F64))


@pytest.mark.parametrize("gaps", [1, 2, 5])
@pytest.mark.parametrize("name", ["gae", "reinforce_plus_plus", "remax", "optimal_token_baseline"])
def test_time_estimators_do_not_see_how_long_a_tool_gap_is(name, gaps, estimate):
    """H-13, its kind: rows with their gaps cut out give the same advantages on the policy tokens."""
    torch.manual_seed(gaps)
    dense = [torch.randn(4, 6, dtype=F64) for _ in range(3)]
    columns = [0, 1, 2 + gaps, 3 + gaps, 4 + gaps, 5 + gaps]
    spread = [torch.full((4, 6 + gaps), float("nan"), dtype=F64) for _ in range(3)]
    for wide, narrow in zip(spread, dense, strict=True):
        wide[:, columns] = narrow
    mask = torch.zeros(4, 6 + gaps)
    mask[:, columns] = 1

    def run(tensors, valid):
        rewards, values, log_probs = tensors
        return estimate(
            name, rewards, valid, list("aabb"), values=values, log_probs=-log_probs.abs(), sum_pi_squared=values.abs()
        )

    for got, expected in zip(run(spread, mask), run(dense, torch.ones(4, 6)), strict=True):
        torch.testing.assert_close(got[:, columns], expected)
        assert not got[mask == 0].any()


@pytest.mark.parametrize("gamma", [1.0, 0.9])
def test_gae_limits_of_lambda(gamma):
    """A-104: λ = 1 is reward-to-go minus V, λ = 0 the TD error."""
    torch.manual_seed(0)
    rewards, values = torch.randn(2, 3, 9, dtype=F64)
    mask = torch.ones(3, 9)
    raw, returns = unwhitened(rewards, values, mask, gamma, 1.0)
    to_go = sum(gamma**k * torch.nn.functional.pad(rewards[:, k:], (0, k)) for k in range(9))
    torch.testing.assert_close(returns, to_go)
    torch.testing.assert_close(raw, to_go - values)
    raw, _ = unwhitened(rewards, values, mask, gamma, 0.0)
    torch.testing.assert_close(raw, rewards + gamma * torch.nn.functional.pad(values[:, 1:], (0, 1)) - values)


def test_grpo_basics():
    """H-14."""
    rewards, mask = outcome([2, 4, 6, 8])
    by_std, _ = grpo(rewards, mask, groups=[0] * 4)
    torch.testing.assert_close(
        by_std[:, 0], torch.tensor([-1.1619, -0.3873, 0.3873, 1.1619], dtype=F64), rtol=0, atol=5e-5
    )
    plain, _ = grpo(rewards, mask, groups=[0] * 4, norm_adv_by_std_in_grpo=False)
    assert plain[:, 0].tolist() == [-3, -1, 1, 3]


def test_rloo_basics():
    """H-15."""
    rewards, mask = outcome([1, 2, 6])
    torch.testing.assert_close(rloo(rewards, mask, groups=[0] * 3)[0][:, 0], torch.tensor([-3, -1.5, 4.5], dtype=F64))


def test_one_epsilon_decides_what_a_nearly_flat_group_is_worth():
    """H-16: rewards 1 and 1.00001 give ±.619 in every form that divides by a standard deviation."""
    rewards, mask = outcome([1, 1.00001])
    expected = torch.tensor([-0.619, 0.619], dtype=F64)
    torch.testing.assert_close(grpo(rewards, mask, groups=[0, 0])[0][:, 0], expected, rtol=0, atol=6e-4)
    best = grpo_passk(rewards, mask, groups=[0, 0])[0][1, 0].item()
    assert best == pytest.approx(2 * 0.619, abs=1.2e-3)
    defaults = {
        inspect.signature(get_adv_estimator(name)).parameters["epsilon"].default
        for name in GROUP_ESTIMATORS
        if "epsilon" in keywords(get_adv_estimator(name))
    }
    assert defaults == {1e-6}


UNEVEN = [9.0, 8, 7, 6, 5, 5, 5, 1, 2, 3, 12]
UNEVEN_LABELS = list("aaaabbbcccc")


@pytest.mark.parametrize("name", GROUP_ESTIMATORS)
def test_groups_come_from_labels_not_from_a_stride(name, estimate):
    """H-17: sizes 4, 3, 4; the flat middle group is 0, and so are the sums of each group where the form is linear."""
    rewards, mask = outcome(UNEVEN)
    advantages, _ = estimate(name, rewards, mask, UNEVEN_LABELS)
    if name not in ("reinforce_plus_plus_baseline", "gdpo"):
        # The ε of the token baseline leaves a trace of itself.
        assert advantages[4:7].abs().max() <= (1e-6 if name == "optimal_token_baseline" else 0.0)
    if name in ("grpo", "rloo", "gpg", "optimal_token_baseline", "opo"):
        torch.testing.assert_close(advantages[:4].sum(), torch.zeros((), dtype=F64), rtol=0, atol=1e-6)
    assert advantages[:4].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("score", [0.35, 0.1, -1 / 3, 1e6 + 0.7])
@pytest.mark.parametrize("size", [2, 3, 7, 8])
@pytest.mark.parametrize("name", ["grpo", "grpo_passk", "rloo", "opo", "gpg", "reinforce_plus_plus_baseline", "gdpo"])
def test_equal_rewards_give_exactly_zero(name, size, score, dtype, estimate):
    """Eight rewards of .35 in float32 must not give .029."""
    rewards = torch.zeros(size, 3, dtype=dtype)
    rewards[:, 2] = score
    advantages, _ = estimate(name, rewards, torch.ones(size, 3), [0] * size)
    assert advantages.dtype == dtype
    assert not advantages.any()


def test_equal_rewards_of_rollouts_in_unlike_numbers_of_rows_give_exactly_zero():
    rewards = torch.full((8, 1), 0.35, dtype=F64)
    advantages, _ = grpo(rewards, torch.ones(8, 1), groups=[0] * 8, rollouts=[0, 0, 0, 1, 1, 2, 3, 3])
    assert not advantages.any()


@pytest.mark.parametrize("name", GROUP_ESTIMATORS)
def test_a_row_without_policy_tokens_leaves_its_group(name, estimate):
    """H-18: whatever its reward, its siblings do not move and it gets 0."""
    mask = torch.tensor([[0, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0]])
    results = []
    for lost in (100.0, -3.0, float("nan")):
        rewards = torch.tensor([[0, 0, 0, lost], [0, 1, 0, lost], [0, 0, 0, lost]], dtype=F64)
        scores = {"all": torch.tensor([lost, 1, 0], dtype=F64)}
        results.append(estimate(name, rewards, mask, list("ggg"), reward_scores=scores)[0])
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])
    assert not results[0][0].any()
    alone, _ = estimate(name, rewards[1:], mask[1:], list("gg"), reward_scores={"all": scores["all"][1:]})
    torch.testing.assert_close(results[0][1:], alone)


def test_a_row_without_policy_tokens_gives_the_checked_values():
    """H-18."""
    mask = torch.tensor([[0, 0, 0], [1, 1, 0], [1, 1, 1]])
    rewards = torch.tensor([[0, 0, 100.0], [0, 1, 0], [0, 0, 0]])
    advantages, _ = grpo(rewards, mask, groups=list("ggg"), norm_adv_by_std_in_grpo=False)
    assert advantages.tolist() == [[0, 0, 0], [0.5, 0.5, 0], [-0.5, -0.5, -0.5]]


@pytest.mark.parametrize("name", ["grpo", "grpo_passk", "rloo", "gpg"])
def test_a_rollout_of_several_rows_counts_once(name, estimate):
    """H-20: X (reward 1) in three rows, Y (reward 0) in one."""
    rewards, mask = outcome([1.0, 1, 1, 0])
    split, _ = estimate(name, rewards, mask, list("gggg"), list("XXXY"))
    whole, _ = estimate(name, rewards[2:], mask[2:], list("gg"), list("XY"))
    torch.testing.assert_close(split[2:], whole)
    torch.testing.assert_close(split[0], split[2])
    torch.testing.assert_close(split[1], split[2])


def test_a_rollout_of_several_rows_gives_the_checked_values():
    """H-20: baseline .5."""
    rewards, mask = outcome([1.0, 1, 1, 0])
    advantages, _ = grpo(rewards, mask, groups=list("gggg"), rollouts=list("XXXY"), norm_adv_by_std_in_grpo=False)
    assert advantages[:, 0].tolist() == [0.5, 0.5, 0.5, -0.5]


def test_rollout_labels_are_read_within_their_group():
    rewards, mask = outcome([1.0, 0, 3, 0])
    named = grpo(rewards, mask, groups=list("aabb"), rollouts=[0, 1, 0, 1])[0]
    assert torch.equal(named, grpo(rewards, mask, groups=list("aabb"))[0])


def test_leave_one_out_has_no_division_by_a_deviation():
    """H-21: 1 0 0 0 is of order 1, and the pair with a standard deviation cannot be asked for."""
    rewards, mask = outcome([1.0, 0, 0, 0])
    advantages, _ = rloo(rewards, mask, groups=[0] * 4)
    torch.testing.assert_close(advantages[:, 0], torch.tensor([1, -1 / 3, -1 / 3, -1 / 3], dtype=F64))
    assert set(keywords(rloo)) == {"groups", "rollouts"}


@pytest.mark.parametrize("name", ["grpo", "grpo_passk", "rloo", "opo", "gpg", "optimal_token_baseline"])
def test_group_advantages_are_not_whitened_again(name, estimate):
    """H-22: a second group cannot change the first one's advantages, as whitening over the batch would."""
    rewards, mask = outcome([1.0, 0, 0.5, 4, 1, 9])
    both, _ = estimate(name, rewards, mask, list("aaabbb"))
    # gpg scales by the share of scores that are not 0, over the batch: 5 of 6 against 2 of 3.
    factor = (6 / 5) / (3 / 2) if name == "gpg" else 1.0
    torch.testing.assert_close(both[:3], estimate(name, rewards[:3], mask[:3], list("aaa"))[0] * factor)


@pytest.mark.parametrize("name", GROUP_ESTIMATORS)
@pytest.mark.parametrize("rollouts", [None, list("XYZ")])
def test_a_group_of_one_gets_zero_with_one_warning(name, rollouts, estimate):
    """A-108: the same choice in every estimator."""
    rewards, mask = outcome([3.0, 1, 2], [2, 3, 4])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        advantages, _ = estimate(name, rewards, mask, list("xyy"), rollouts)
    assert [item.category for item in caught] == [SingletonGroupWarning]
    assert not advantages[0].any()
    assert torch.isfinite(advantages).all()
    assert advantages[1:].any()


@pytest.mark.parametrize("name", GROUP_ESTIMATORS)
def test_one_rollout_in_two_rows_is_a_group_of_one(name, estimate):
    rewards, mask = outcome([3.0, 1, 2], [2, 3, 4])
    with pytest.warns(SingletonGroupWarning):
        advantages, _ = estimate(name, rewards, mask, list("xxx"), list("AAA"))
    assert not advantages.any()


def test_passk_rewards_only_the_lead_of_the_best():
    scores = [1.0, 4, 2, 7, 7, 1]
    rewards, mask = outcome(scores)
    advantages, returns = grpo_passk(rewards, mask, groups=list("aaabbb"))
    std = torch.tensor(scores[:3], dtype=F64).std().item()
    expected = torch.zeros(6, dtype=F64)
    expected[1] = (4 - 2) / (std + 1e-6)
    torch.testing.assert_close(advantages[:, 0], expected)
    assert torch.equal(advantages, returns)
    plain, _ = grpo_passk(rewards, mask, groups=list("aaabbb"), norm_adv_by_std_in_grpo=False)
    assert plain[:, 0].tolist() == [0, 2, 0, 0, 0, 0]


def test_reinforce_plus_plus_baseline_whitens_the_centred_scores():
    rewards, mask = outcome([1.0, 0, 4, 2], [1, 2, 3, 4])
    advantages, _ = reinforce_plus_plus_baseline(rewards, mask, groups=list("aabb"))
    centred = torch.tensor([0.5, -0.5, 1, -1], dtype=F64)[:, None].expand(4, 4)
    torch.testing.assert_close(advantages, masked_whiten(centred, mask))


def test_remax_subtracts_the_greedy_score():
    rewards = torch.tensor([[1.0, 0, 2], [0, 5, 0]], dtype=F64)
    mask = torch.tensor([[1, 1, 1], [1, 0, 1]])
    advantages, returns = remax(rewards, mask, reward_baselines=torch.tensor([1.0, 2], dtype=F64))
    assert returns.tolist() == [[3, 2, 2], [0, 0, 0]]
    assert advantages.tolist() == [[2, 1, 1], [-2, 0, -2]]


def test_opo_of_equal_lengths_is_dr_grpo():
    rewards, mask = outcome([1.0, 0, 4], [2, 2, 2])
    plain, _ = grpo(rewards, mask, groups=[0] * 3, norm_adv_by_std_in_grpo=False)
    torch.testing.assert_close(opo(rewards, mask, groups=[0] * 3)[0], plain)


def test_gpg_without_any_score_is_zero():
    rewards, mask = outcome([0.0, 0, 0])
    assert not gpg(rewards, mask, groups=[0] * 3)[0].any()


def test_gdpo_normalises_each_reward_on_its_own():
    rewards, mask = outcome([0.0] * 4, [2, 3, 1, 4])
    scores = {"right": torch.tensor([1.0, 0, 1, 0], dtype=F64), "short": torch.tensor([100.0, 300, 0, 20], dtype=F64)}
    advantages, _ = gdpo(rewards, mask, groups=list("aabb"), reward_scores=scores, weights={"right": 1.0, "short": 0.5})
    parts = [grpo(outcome(list(s), [2, 3, 1, 4])[0], mask, groups=list("aabb"))[0] for s in scores.values()]
    torch.testing.assert_close(advantages, masked_whiten(parts[0] + 0.5 * parts[1], mask))
    one, _ = gdpo(rewards, mask, groups=list("aabb"), reward_scores={"right": scores["right"]})
    torch.testing.assert_close(one, masked_whiten(parts[0], mask))


def test_gdpo_refuses_weights_that_do_not_name_the_rewards():
    rewards, mask = outcome([0.0, 1])
    scores = {"right": torch.zeros(2)}
    with pytest.raises(ArgumentError, match="weights names"):
        gdpo(rewards, mask, groups=[0, 0], reward_scores=scores, weights={"rihgt": 1.0})
    with pytest.raises(ArgumentError, match="empty"):
        gdpo(rewards, mask, groups=[0, 0], reward_scores={})


def test_optimal_token_baseline_tail_past_the_second_longest_is_zero():
    rewards, mask = outcome([1.0, 0, 2], [2, 4, 3])
    log_probs = torch.full((3, 4), -1.0, dtype=F64)
    advantages, returns = optimal_token_baseline(
        rewards, mask, groups=[0] * 3, log_probs=log_probs, sum_pi_squared=torch.full((3, 4), 0.5, dtype=F64)
    )
    assert advantages[1, 3] == 0
    assert returns.tolist() == [[1, 1, 0, 0], [0, 0, 0, 0], [2, 2, 2, 0]]
    # With one weight for all, the baseline is the mean over the rows that reach the position.
    torch.testing.assert_close(advantages[:, 2], torch.tensor([0, -1, 1], dtype=F64), rtol=0, atol=1e-7)
    torch.testing.assert_close(advantages[:, 0], torch.tensor([0, -1, 1], dtype=F64), rtol=0, atol=1e-7)
