"""Every estimator against a slow reference in plain Python loops, on ragged batches with tool-token gaps."""

from __future__ import annotations

import math

import pytest
import torch

from ostinato.algos import adv_estimators, get_adv_estimator, keywords

pytestmark = pytest.mark.filterwarnings("ignore::ostinato.algos.SingletonGroupWarning")


def ragged_batch(seed):
    """Random rows: unlike lengths, tool gaps, some rows without any policy token, groups of unlike sizes."""
    generator = torch.Generator().manual_seed(seed)

    def integers(low, high, size):
        return torch.randint(low, high, (size,), generator=generator).tolist()

    num_rows, width = integers(2, 14, 1)[0], integers(1, 18, 1)[0]
    lengths = integers(0, width + 1, num_rows)
    mask = torch.arange(width) < torch.tensor(lengths)[:, None]
    mask &= torch.rand(num_rows, width, generator=generator) < 0.7
    groups = [f"prompt-{label}" for label in integers(0, 5, num_rows)]
    rollouts = integers(0, 4, num_rows) if seed % 2 else None

    def floats():
        x = torch.randn(num_rows, width, generator=generator, dtype=torch.float64)
        return torch.where(mask, x, math.nan)

    rewards = floats()
    if seed % 3 == 0:
        rewards = torch.where(mask, (rewards > 0).double(), math.nan)
    log_probs = -floats().abs()
    return {
        "rewards": rewards,
        "mask": mask.int(),
        "groups": groups,
        "rollouts": rollouts,
        "values": floats(),
        "log_probs": log_probs,
        "sum_pi_squared": torch.rand(num_rows, width, generator=generator, dtype=torch.float64),
        "reward_baselines": torch.randn(num_rows, generator=generator, dtype=torch.float64),
        "reward_scores": {
            "right": torch.randn(num_rows, generator=generator, dtype=torch.float64),
            "short": 50 * torch.randn(num_rows, generator=generator, dtype=torch.float64),
        },
        "weights": {"right": 1.0, "short": 0.3},
        "gamma": [1.0, 0.9, 0.5][seed % 3],
        "lam": [0.95, 1.0, 0.0, 0.6][seed % 4],
        "norm_adv_by_std_in_grpo": seed % 5 != 0,
        "epsilon": 1e-6,
    }


def policy_positions(batch):
    return [[t for t, on in enumerate(row) if on] for row in batch["mask"].tolist()]


def empty_like(batch):
    return [[0.0] * batch["mask"].shape[1] for _ in batch["groups"]]


def mean(numbers):
    return math.fsum(numbers) / len(numbers)


def sample_std(numbers):
    center = mean(numbers)
    return math.sqrt(math.fsum((x - center) ** 2 for x in numbers) / (len(numbers) - 1))


def whiten(table, places):
    numbers = [table[i][t] for i, t in places]
    out = [[0.0] * len(row) for row in table]
    if len(numbers) < 2:
        return out
    center, spread = mean(numbers), sample_std(numbers)
    for i, t in places:
        out[i][t] = (table[i][t] - center) / math.sqrt(spread**2 + 1e-8)
    return out


def to_go(batch, gamma):
    rewards, out = batch["rewards"].tolist(), empty_like(batch)
    for i, positions in enumerate(policy_positions(batch)):
        running = 0.0
        for t in reversed(positions):
            running = rewards[i][t] + gamma * running
            out[i][t] = running
    return out


def slow_gae(batch):
    rewards, values = batch["rewards"].tolist(), batch["values"].tolist()
    advantages, returns = empty_like(batch), empty_like(batch)
    places = []
    for i, positions in enumerate(policy_positions(batch)):
        next_value = running = 0.0
        for t in reversed(positions):
            delta = rewards[i][t] + batch["gamma"] * next_value - values[i][t]
            running = delta + batch["gamma"] * batch["lam"] * running
            next_value = values[i][t]
            advantages[i][t], returns[i][t] = running, running + next_value
            places.append((i, t))
    return whiten(advantages, places), returns


def slow_reinforce_plus_plus(batch):
    returns = to_go(batch, batch["gamma"])
    places = [(i, t) for i, positions in enumerate(policy_positions(batch)) for t in positions]
    return whiten(returns, places), returns


def slow_remax(batch):
    returns, baselines = to_go(batch, 1.0), batch["reward_baselines"].tolist()
    advantages = empty_like(batch)
    for i, positions in enumerate(policy_positions(batch)):
        for t in positions:
            advantages[i][t] = returns[i][t] - baselines[i]
    return advantages, returns


def row_scores(batch):
    rewards = batch["rewards"].tolist()
    return [math.fsum(rewards[i][t] for t in positions) for i, positions in enumerate(policy_positions(batch))]


def group_units(batch):
    """group label -> rollout -> its rows with a policy token."""
    table = {}
    for i, positions in enumerate(policy_positions(batch)):
        if positions:
            rollout = i if batch["rollouts"] is None else batch["rollouts"][i]
            table.setdefault(batch["groups"][i], {}).setdefault(rollout, []).append(i)
    return table


def tile(batch, by_row):
    out = empty_like(batch)
    for i, positions in enumerate(policy_positions(batch)):
        for t in positions:
            out[i][t] = by_row.get(i, 0.0)
    return out


def each_group(batch, scores):
    """Yield (rows, scores of the rollouts, rollouts) of every group of at least two rollouts."""
    for units in group_units(batch).values():
        if len(units) >= 2:
            rows = [i for members in units.values() for i in members]
            yield rows, [mean([scores[i] for i in members]) for members in units.values()], list(units.values())


def normalised(batch, scores):
    out = {}
    for rows, unit_scores, _ in each_group(batch, scores):
        scale = sample_std(unit_scores) + batch["epsilon"] if batch["norm_adv_by_std_in_grpo"] else 1.0
        for i in rows:
            out[i] = (scores[i] - mean(unit_scores)) / scale
    return out


def twice(table):
    return table, table


def slow_grpo(batch):
    return twice(tile(batch, normalised(batch, row_scores(batch))))


def slow_grpo_passk(batch):
    out = {}
    for _, unit_scores, units in each_group(batch, row_scores(batch)):
        ranked = sorted(unit_scores, reverse=True)
        scale = sample_std(unit_scores) + batch["epsilon"] if batch["norm_adv_by_std_in_grpo"] else 1.0
        best = unit_scores.index(ranked[0])
        for i in units[best]:
            out[i] = (ranked[0] - ranked[1]) / scale
    return twice(tile(batch, out))


def slow_rloo(batch):
    scores, out = row_scores(batch), {}
    for rows, unit_scores, _ in each_group(batch, scores):
        n = len(unit_scores)
        for i in rows:
            out[i] = scores[i] * n / (n - 1) - mean(unit_scores) * n / (n - 1)
    return twice(tile(batch, out))


def slow_reinforce_plus_plus_baseline(batch):
    scores, out = row_scores(batch), {}
    for rows, unit_scores, _ in each_group(batch, scores):
        for i in rows:
            out[i] = scores[i] - mean(unit_scores)
    return twice(whiten(tile(batch, out), counted_places(batch, out)))


def counted_places(batch, by_row):
    return [(i, t) for i, positions in enumerate(policy_positions(batch)) if i in by_row for t in positions]


def slow_opo(batch):
    scores, lengths, out = row_scores(batch), [len(p) for p in policy_positions(batch)], {}
    for rows, _, _ in each_group(batch, scores):
        baseline = math.fsum(lengths[i] * scores[i] for i in rows) / sum(lengths[i] for i in rows)
        for i in rows:
            out[i] = scores[i] - baseline
    return twice(tile(batch, out))


def slow_gpg(batch):
    scores, out = row_scores(batch), {}
    units = [mean([scores[i] for i in rows]) for group in group_units(batch).values() for rows in group.values()]
    alpha = len(units) / max(sum(score != 0 for score in units), 1)
    for rows, unit_scores, _ in each_group(batch, scores):
        for i in rows:
            out[i] = alpha * (scores[i] - mean(unit_scores))
    return twice(tile(batch, out))


def slow_gdpo(batch):
    out = {}
    for name, scores in batch["reward_scores"].items():
        for i, advantage in normalised(batch, scores.tolist()).items():
            out[i] = out.get(i, 0.0) + batch["weights"][name] * advantage
    return twice(whiten(tile(batch, out), counted_places(batch, out)))


def slow_optimal_token_baseline(batch):
    returns, positions = to_go(batch, 1.0), policy_positions(batch)
    log_probs, squares = batch["log_probs"].tolist(), batch["sum_pi_squared"].tolist()
    cumulative = empty_like(batch)
    for i, row in enumerate(positions):
        running = 0.0
        for t in row:
            running += 1 - 2 * math.exp(log_probs[i][t]) + squares[i][t]
            cumulative[i][t] = running
    advantages = empty_like(batch)
    for _, _, units in each_group(batch, [0.0] * len(positions)):
        lengths = sorted((max(len(positions[i]) for i in rows) for rows in units), reverse=True)
        for k in range(lengths[1]):
            top = bottom = 0.0
            for rows in units:
                for i in rows:
                    if k < len(positions[i]):
                        weight = cumulative[i][positions[i][k]] / len(rows)
                        top += returns[i][positions[i][k]] * weight
                        bottom += weight
            for rows in units:
                for i in rows:
                    if k < len(positions[i]):
                        t = positions[i][k]
                        advantages[i][t] = returns[i][t] - top / (bottom + 1e-8)
    return advantages, returns


SLOW = {name.removeprefix("slow_"): fn for name, fn in globals().items() if name.startswith("slow_")}


def test_every_estimator_has_a_slow_reference():
    assert set(SLOW) == set(adv_estimators())


@pytest.mark.parametrize("seed", range(24))
@pytest.mark.parametrize("name", sorted(SLOW))
def test_estimator_equals_its_loop(name, seed):
    batch = ragged_batch(seed)
    fn = get_adv_estimator(name)
    given = {key: batch[key] for key in keywords(fn)}
    got = fn(batch["rewards"], batch["mask"], **given)
    for tensor, expected in zip(got, SLOW[name](batch), strict=True):
        reference = torch.tensor(expected, dtype=torch.float64).view_as(tensor)
        torch.testing.assert_close(tensor, reference, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", sorted(SLOW))
def test_estimator_in_float32_is_close_to_its_loop(name):
    batch = ragged_batch(4)
    fn = get_adv_estimator(name)
    given = {key: batch[key] for key in keywords(fn)}
    single = {key: value.float() if torch.is_tensor(value) else value for key, value in given.items()}
    got = fn(batch["rewards"].float(), batch["mask"], **single)
    for tensor, expected in zip(got, SLOW[name](batch), strict=True):
        assert tensor.dtype == torch.float32
        torch.testing.assert_close(tensor, torch.tensor(expected).view_as(tensor), rtol=2e-5, atol=2e-5)
