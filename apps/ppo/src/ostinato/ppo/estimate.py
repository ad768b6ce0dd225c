"""From scores to advantages, on the driver: KL in the reward, rollout correction, the advantage estimator.

Everything here is a pure function of `ostinato.algos` over a handful of `(B, R)` columns; this module only chooses and
names.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch

from ostinato.algos import (
    AdaptiveKLController,
    FixedKLController,
    get_adv_estimator,
    kl_penalty,
    masked_mean,
    rewards_with_kl,
)
from ostinato.ppo.config import AlgorithmConfig
from ostinato.protocol import DataProto, Metric

READS = ("response_mask", "token_level_scores", "old_log_probs", "ref_log_prob", "values", "uid", "rollout_id")


class Estimate:
    """Turns a scored batch into `token_level_rewards`, `advantages` and `returns`.

    Args:
        algorithm: the run's `algorithm` section.
    """

    def __init__(self, algorithm: AlgorithmConfig) -> None:
        self.algorithm = algorithm
        self.estimator = get_adv_estimator(algorithm.adv_estimator)
        self.wanted = set(inspect.signature(self.estimator).parameters)
        control = algorithm.kl_ctrl
        if control.type == "adaptive":
            self.kl = AdaptiveKLController(control.kl_coef, target=control.target_kl, horizon=control.horizon)
        else:
            self.kl = FixedKLController(control.kl_coef)

    def __call__(self, batch: DataProto) -> DataProto:
        """Estimate advantages.

        Args:
            batch: the scored rows; reads `token_level_scores`, `response_mask`, `uid`, `rollout_id`, and where they are
                there `values`, `old_log_probs`, `ref_log_prob`.

        Returns:
            `token_level_rewards`, `advantages`, `returns`, all (B, R) float32 and 0 under the mask.
        """
        data = batch.get([name for name in READS if name in batch.columns])
        columns, mask, metrics = data.batch, data.batch["response_mask"], {}
        rewards = columns["token_level_scores"]
        if self.algorithm.use_kl_in_reward:
            rewards, metrics = self._penalise(columns, mask)
        advantages, returns = self.estimator(**self._arguments(data, rewards, mask))
        tensors = {"token_level_rewards": rewards, "advantages": advantages, "returns": returns}
        return DataProto.from_dict(
            tensors={name: value.to(torch.float32) for name, value in tensors.items()}, meta_info={"metrics": metrics}
        )

    def _penalise(self, columns: Any, mask: torch.Tensor) -> tuple[torch.Tensor, dict[str, Metric]]:
        kind, beta = self.algorithm.kl_penalty, self.kl.value
        old, reference = columns["old_log_probs"], columns["ref_log_prob"]
        rewards = rewards_with_kl(columns["token_level_scores"], old, reference, mask, beta, kind)
        kl = float(masked_mean(kl_penalty(old, reference, kind), mask))
        self.kl.update(kl, len(mask))
        metrics = {"actor/reward_kl_penalty": Metric.mean(kl), "actor/reward_kl_penalty_coeff": Metric.mean(beta)}
        return rewards, metrics

    def _arguments(self, data: DataProto, rewards: torch.Tensor, mask: torch.Tensor) -> dict[str, Any]:
        """The inputs that the estimator's signature names, out of what there is."""
        algorithm = self.algorithm
        there = {
            "token_level_rewards": rewards,
            "response_mask": mask,
            "values": data.batch.get("values"),
            "groups": data.non_tensor_batch["uid"].tolist(),
            "rollouts": data.non_tensor_batch["rollout_id"].tolist(),
            "gamma": algorithm.gamma,
            "lam": algorithm.lam,
            "norm_adv_by_std_in_grpo": algorithm.norm_adv_by_std_in_grpo,
        }
        return {name: value for name, value in there.items() if name in self.wanted}

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs: the KL controller's coefficient."""
        return self.kl.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back what `state_dict` gave."""
        self.kl.load_state_dict(state)
