"""From scores to advantages: what an estimator is given, and ReMax's greedy pass."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ostinato.algos import adv_estimators, get_adv_estimator, keywords
from ostinato.ppo.baseline import GreedyBaseline
from ostinato.ppo.config import AlgorithmConfig, PpoConfig, RolloutCorrectionConfig
from ostinato.ppo.data import follow, rollouts
from ostinato.ppo.errors import RewardError
from ostinato.ppo.estimate import Estimate, correct
from ostinato.ppo.metrics import batch_metrics
from ostinato.ppo.sections import OFFERED
from ostinato.protocol import DataProto, Metric, columns

MASK = torch.tensor([[1, 1, 1, 0], [1, 1, 0, 0], [1, 1, 1, 1], [1, 0, 0, 0]])


def scored(**tensors) -> DataProto:
    scores = torch.tensor([1.0, 0.0, 0.5, 2.0])
    last = MASK.cumsum(-1).argmax(-1)
    token_scores = torch.zeros(MASK.shape).scatter(1, last[:, None], scores[:, None])
    return DataProto.from_dict(
        {"response_mask": MASK, "token_level_scores": token_scores, "old_log_probs": -MASK.float(), **tensors},
        {"uid": ["p", "p", "q", "q"], "rollout_id": [0, 1, 2, 3]},
    )


def test_estimate_offers_what_it_says():
    algorithm = AlgorithmConfig(adv_estimator="grpo")
    estimate = Estimate(algorithm)
    estimate.wanted = {*OFFERED, "token_level_rewards", "response_mask"}
    given = estimate._arguments(scored(), torch.zeros(MASK.shape))
    assert set(given) == estimate.wanted


@pytest.mark.parametrize("name", adv_estimators())
def test_every_estimator_can_be_given_what_it_needs(name: str):
    assert {word for word, needed in keywords(get_adv_estimator(name)).items() if needed} <= set(OFFERED)


def test_estimate_remax_subtracts_the_rows_baseline():
    batch = scored(reward_baselines=torch.tensor([0.5, 0.5, 1.0, 1.0]))
    result = Estimate(AlgorithmConfig(adv_estimator="remax"))(batch)
    assert result.batch["advantages"][:, 0].tolist() == [0.5, -0.5, -0.5, 1.0]
    assert bool((result.batch["advantages"][MASK == 0] == 0).all())


def test_estimate_optimal_token_baseline_reads_the_squared_probabilities():
    squares = torch.rand(MASK.shape) * MASK
    result = Estimate(AlgorithmConfig(adv_estimator="optimal_token_baseline"))(scored(sum_pi_squared=squares))
    expected, _ = get_adv_estimator("optimal_token_baseline")(
        scored().batch["token_level_scores"],
        MASK,
        groups=["p", "p", "q", "q"],
        log_probs=-MASK.float(),
        sum_pi_squared=squares,
    )
    assert torch.equal(result.batch["advantages"], expected)


@pytest.mark.parametrize("name", adv_estimators())
def test_config_asks_the_actor_for_squared_probabilities_only_where_they_are_read(name: str):
    config = PpoConfig.from_mapping({"algorithm": {"adv_estimator": name}})
    assert config.actor_rollout_ref.actor.sum_pi_squared == (name == "optimal_token_baseline")


@pytest.mark.parametrize("use_kl", [False, True])
def test_rejection_changes_what_is_trained_on_and_not_how_good_the_answers_were(use_kl: bool):
    """Row 0 loses its last token, row 1 all of them: both count in critic/score, row 1 in no statistic of training."""
    gap = torch.tensor([[0.0, 0, 3, 0], [3, 3, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0]])
    attention = torch.cat([torch.ones(4, 1, dtype=torch.int64), MASK], -1)
    batch = scored(rollout_log_probs=-MASK.float() - gap, attention_mask=attention, ref_log_prob=-MASK.float())
    rejection = RolloutCorrectionConfig(rollout_rs="token_k1", rollout_rs_threshold="0.5_2.0")
    algorithm = AlgorithmConfig(
        adv_estimator="grpo", norm_adv_by_std_in_grpo=False, rollout_correction=rejection, use_kl_in_reward=use_kl
    )
    corrected = correct(batch, rejection)
    assert corrected.batch["response_mask"].sum(-1).tolist() == [2, 0, 4, 1]
    estimated = corrected.union(Estimate(algorithm)(corrected))
    # The outcome of row 0 goes to the last token that is left of it.
    assert estimated.batch["token_level_rewards"][0].tolist() == [0, 1, 0, 0]
    assert estimated.batch["advantages"][:, 0].tolist() == [0, 0, -0.75, 0.75]
    found = {name: metric.value for name, metric in batch_metrics(estimated, 4).items()}
    assert found["critic/score/mean"] == pytest.approx((1 + 0 + 0.5 + 2) / 4)
    assert found["critic/rewards/mean"] == pytest.approx((1 + 0.5 + 2) / 3)


def test_rejection_of_all_rows_leaves_the_scores():
    batch = scored(rollout_log_probs=-5.0 * MASK, attention_mask=torch.ones(4, 5, dtype=torch.int64))
    rejection = RolloutCorrectionConfig(rollout_rs="sequence_k1", rollout_rs_threshold="2.0")
    corrected = correct(batch, rejection)
    estimated = corrected.union(
        Estimate(AlgorithmConfig(adv_estimator="grpo", rollout_correction=rejection))(corrected)
    )
    found = batch_metrics(estimated, 4)
    assert found["critic/score/mean"].value == pytest.approx(3.5 / 4)
    assert "critic/rewards/mean" not in found
    assert not estimated.batch["advantages"].any()


def test_estimate_gdpo_counts_a_failed_row_as_zero_and_refuses_texts():
    estimate = Estimate(AlgorithmConfig(adv_estimator="gdpo", gdpo_reward_keys=["a"]))
    values = DataProto.from_dict(non_tensors={"reward/a": np.asarray([1.0, np.nan, 0.5, 2.0])})
    zeros = DataProto.from_dict(non_tensors={"reward/a": np.asarray([1.0, 0.0, 0.5, 2.0])})
    found = estimate(scored().union(values)).batch["advantages"]
    assert bool(torch.isfinite(found).all())
    assert torch.equal(found, estimate(scored().union(zeros)).batch["advantages"])
    texts = DataProto.from_dict(non_tensors={"reward/a": np.asarray(["x", "y", "z", None], dtype=object)})
    with pytest.raises(RewardError, match="'a' is no number"):
        estimate(scored().union(texts))


# --- the greedy pass -----------------------------------------------------------------------------------------------


def prompts(count: int = 2, width: int = 3) -> DataProto:
    ids = torch.arange(count * width).reshape(count, width)
    ones = torch.ones_like(ids)
    return DataProto.from_dict(
        {"input_ids": ids, "attention_mask": ones, "position_ids": ones.cumsum(1) - 1},
        {"uid": [f"u{row}" for row in range(count)], "data_source": ["s"] * count, "reward_model": [{}] * count},
        {"global_step": 3, "epoch": 0},
    )


class Actor:
    """Answers in a fixed way; rows come back in reverse, and one rollout as two rows where it is told so."""

    def __init__(self, twice: int | None = None) -> None:
        self.calls: list[DataProto] = []
        self.twice = twice

    def generate_sequences(self, asked: DataProto) -> DataProto:
        self.calls.append(asked)
        rows = list(range(len(asked)))[::-1] + ([self.twice] if self.twice is not None else [])
        some = asked[rows]
        ids = some.batch["input_ids"]
        responses = torch.full((len(rows), 2), 7)
        whole = torch.cat([ids, responses], 1)
        tensors = {
            "prompts": ids,
            "responses": responses,
            "input_ids": whole,
            "attention_mask": torch.ones_like(whole),
            "position_ids": torch.ones_like(whole).cumsum(1) - 1,
            "response_mask": torch.ones_like(responses),
            "rollout_log_probs": torch.zeros(len(rows), 2),
        }
        keep = {name: some.non_tensor_batch[name] for name in ("uid", "rollout_id") if name in some.non_tensor_batch}
        return DataProto.from_dict(tensors, keep, {"metrics": {"timing_s/update_weights": Metric.max(1.0)}})


def reward(batch: DataProto) -> DataProto:
    """The prompt's first token, at the last policy token."""
    scores = torch.zeros(batch.batch["response_mask"].shape)
    scores[:, -1] = batch.batch["prompts"][:, 0].float()
    return DataProto.from_dict(
        {"token_level_scores": scores},
        {"reward/score": scores[:, -1].numpy()},
        {"metrics": {"reward/errors": Metric.sum(1), "reward/score/mean": Metric.mean(0.0)}},
    )


def test_greedy_baseline_leaves_its_column_and_no_other():
    """H-37: one greedy response a prompt; batch columns afterwards = before + baseline."""
    actor, batch = Actor(), prompts(2)
    after = batch.union(GreedyBaseline(actor, reward)(batch))
    assert set(after.columns) == {*batch.columns, "reward_baselines"}
    assert len(after) == len(batch)
    assert torch.equal(after.batch["input_ids"], batch.batch["input_ids"])
    assert after.batch["reward_baselines"].tolist() == [0.0, 3.0]
    (asked,) = actor.calls
    assert len(asked) == 2
    assert asked.meta_info["greedy"] is True
    assert asked.meta_info["global_step"] == 3
    assert "greedy" not in after.meta_info
    assert set(after.metrics) == {"reward/errors", "reward_baseline/mean"}


def test_greedy_baseline_reaches_every_sample_of_its_prompt():
    actor, batch = Actor(), prompts(3)
    batch = rollouts(batch.union(GreedyBaseline(actor, reward)(batch)), 2)
    batch = follow(batch, actor.generate_sequences(batch.select(columns.PROMPT)))
    assert batch.batch["reward_baselines"].tolist() == batch.batch["prompts"][:, 0].float().tolist()
    assert batch.metrics["reward_baseline/mean"].weight == 3


def test_greedy_baseline_of_a_rollout_of_several_rows_is_their_mean():
    baseline = GreedyBaseline(Actor(twice=1), reward)(prompts(3)).batch["reward_baselines"]
    assert baseline.tolist() == [0.0, 3.0, 6.0]


def test_greedy_baseline_is_scored_by_the_reward_model_where_there_is_one():
    """H-37: the configured reward, whatever it is, sees the greedy rows whole."""
    from ostinato.ppo.rewards.manager import ModelReward

    class Group:
        def compute_rm_score(self, batch: DataProto) -> DataProto:
            assert {"input_ids", "attention_mask", "response_mask"} <= set(batch.columns)
            return DataProto.from_dict({"token_level_scores": torch.ones(len(batch), 2)})

    assert GreedyBaseline(Actor(), ModelReward(Group()))(prompts(2)).batch["reward_baselines"].tolist() == [2.0, 2.0]
