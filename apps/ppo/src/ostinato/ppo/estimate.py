"""From scores to advantages, on the driver: rollout correction, KL in the reward, the advantage estimator.

Everything here is a function of `ostinato.algos` over a handful of `(B, R)` columns; this module chooses and names.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import numpy as np
import torch

from ostinato.algos import (
    AdaptiveKLController,
    FixedKLController,
    get_adv_estimator,
    kl_penalty,
    masked_mean,
    place_outcome,
    rewards_with_kl,
    rollout_correction,
)
from ostinato.ppo.config import AlgorithmConfig, RolloutCorrectionConfig
from ostinato.ppo.errors import RewardError
from ostinato.ppo.rewards.manager import EXTRA
from ostinato.protocol import DataProto, Metric

READS = (
    "response_mask",
    "token_level_scores",
    "old_log_probs",
    "ref_log_prob",
    "values",
    "reward_baselines",
    "sum_pi_squared",
    "uid",
    "rollout_id",
)


def correct(batch: DataProto, correction: RolloutCorrectionConfig) -> DataProto:
    """Account for the gap between the policy that sampled and the one that is trained from.

    Args:
        batch: the scored rows; reads `old_log_probs`, `rollout_log_probs`, `response_mask`.
        correction: importance weights and rejection; with neither, nothing but the metrics is new.

    Returns:
        The batch with `training/rollout_probs_diff_*` and `rollout_corr/*` metrics, taken before any cut; with
        importance weights also `rollout_is_weights (B, R)`; with rejection a smaller `response_mask`. Scores stay as
        they were given, those of rejected tokens too: they say how well the policy answers.
    """
    data = batch.get(["old_log_probs", "rollout_log_probs", "response_mask"]).batch
    mask = data["response_mask"]
    result = rollout_correction(data["old_log_probs"], data["rollout_log_probs"], mask, **asdict(correction))
    metrics = {name: Metric.mean(float(value), weight=float(mask.sum())) for name, value in result.metrics.items()}
    changed = {} if result.weights is None else {"rollout_is_weights": result.weights}
    if correction.rollout_rs is not None:
        changed |= {"response_mask": result.response_mask}
    batch = batch.drop([name for name in changed if name in batch.columns])
    return batch.union(DataProto.from_dict(tensors=changed, meta_info={"metrics": metrics}))


def gathered(scores: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Move what rejected tokens scored to the last token that is left of their row.

    Args:
        scores: (B, R), 0 where the rollout's own mask is 0.
        mask: (B, R) what rejection has left of that mask.

    Returns:
        (B, R), exactly 0 under the mask; a row of which nothing is left has nothing.
    """
    left = mask.bool()
    lost = torch.where(left, 0.0, scores).sum(-1)
    return torch.where(left, scores, 0.0) + place_outcome(lost, mask)


class Estimate:
    """Turns a scored batch into `token_level_rewards`, `advantages` and `returns`.

    Args:
        algorithm: the run's `algorithm` section.
    """

    def __init__(self, algorithm: AlgorithmConfig) -> None:
        self.algorithm = algorithm
        self.estimator = get_adv_estimator(algorithm.adv_estimator)
        self.wanted = set(inspect.signature(self.estimator).parameters)
        self.rewards = [f"{EXTRA}{key}" for key in algorithm.gdpo_reward_keys] if "reward_scores" in self.wanted else []
        control = algorithm.kl_ctrl
        if control.type == "adaptive":
            self.kl = AdaptiveKLController(control.kl_coef, control.target_kl, control.horizon)
        else:
            self.kl = FixedKLController(control.kl_coef)

    def __call__(self, batch: DataProto) -> DataProto:
        """Estimate advantages.

        Args:
            batch: the scored rows; reads those of `READS` that are there, and for `gdpo` the reward function's result
                columns. A row without such a result (its call failed) counts as 0.

        Returns:
            `token_level_rewards`, `advantages`, `returns`, all (B, R) float32 and 0 under the mask.
        """
        data = batch.get([*(name for name in READS if name in batch.columns), *self.rewards])
        rewards, metrics = data.batch["token_level_scores"], {}
        if self.algorithm.rollout_correction.rollout_rs is not None:
            rewards = gathered(rewards, data.batch["response_mask"])
        if self.algorithm.use_kl_in_reward:
            rewards, metrics = self._penalised(data, rewards)
        advantages, returns = self.estimator(**self._arguments(data, rewards))
        tensors = {"token_level_rewards": rewards, "advantages": advantages, "returns": returns}
        return DataProto.from_dict(
            tensors={name: value.to(torch.float32) for name, value in tensors.items()}, meta_info={"metrics": metrics}
        )

    def _penalised(self, data: DataProto, scores: torch.Tensor) -> tuple[torch.Tensor, dict[str, Metric]]:
        kind, beta = self.algorithm.kl_penalty, self.kl.value
        mask, old, reference = (data.batch[name] for name in ("response_mask", "old_log_probs", "ref_log_prob"))
        rewards = rewards_with_kl(scores, old, reference, mask, beta, kind)
        kl = float(masked_mean(kl_penalty(old, reference, kind, mask), mask))
        self.kl.update(kl, len(mask))
        metrics = {"actor/reward_kl_penalty": Metric.mean(kl), "actor/reward_kl_penalty_coeff": Metric.mean(beta)}
        return rewards, metrics

    def _arguments(self, data: DataProto, rewards: torch.Tensor) -> dict[str, Any]:
        """The inputs that the estimator's signature names, out of what there is."""
        algorithm, columns = self.algorithm, data.non_tensor_batch
        keys, weights = algorithm.gdpo_reward_keys, algorithm.gdpo_reward_weights
        there = {
            "token_level_rewards": rewards,
            "response_mask": data.batch["response_mask"],
            "values": data.batch.get("values"),
            "reward_baselines": data.batch.get("reward_baselines"),
            "log_probs": data.batch.get("old_log_probs"),
            "sum_pi_squared": data.batch.get("sum_pi_squared"),
            "groups": columns["uid"].tolist(),
            "rollouts": columns["rollout_id"].tolist(),
            "gamma": algorithm.gamma,
            "lam": algorithm.lam,
            "norm_adv_by_std_in_grpo": algorithm.norm_adv_by_std_in_grpo,
            "reward_scores": {key: _numbers(columns, f"{EXTRA}{key}") for key in keys if self.rewards},
            "weights": dict(zip(keys, weights, strict=True)) if weights else None,
        }
        return {name: value for name, value in there.items() if name in self.wanted}

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs: the KL controller's coefficient."""
        return self.kl.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back what `state_dict` gave."""
        self.kl.load_state_dict(state)


def _numbers(columns: Mapping[str, np.ndarray], name: str) -> torch.Tensor:
    """A result column (B,) as numbers, 0 where a row has none.

    Raises:
        RewardError: the column holds texts.
    """
    column = columns[name]
    if column.dtype == object:
        raise RewardError(
            f"algorithm.gdpo_reward_keys: the reward function's {name.removeprefix(EXTRA)!r} is no number"
        )
    return torch.from_numpy(np.nan_to_num(column, nan=0.0))
