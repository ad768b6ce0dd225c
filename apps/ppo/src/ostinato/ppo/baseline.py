"""The greedy pass of ReMax: what the configured reward gives the likeliest response to each prompt."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from ostinato.ppo.data import follow, rollouts
from ostinato.protocol import DataProto, Metric, columns
from ostinato.rollout.assemble import rollout_ids

FAILURES = ("reward/errors", "reward/timeouts")


class GreedyBaseline:
    """Answers each prompt once, greedily, and keeps nothing of the answer but its score.

    Args:
        actor: the actor's group; called as it is called for samples, so with the same weights.
        reward: scores the answers: the same that scores the samples, a function or a reward model.
    """

    def __init__(self, actor: Any, reward: Callable[[DataProto], DataProto]) -> None:
        self.actor = actor
        self.reward = reward

    def __call__(self, prompts: DataProto) -> DataProto:
        """Score the greedy response to each prompt.

        Args:
            prompts: B prompts with `columns.PROMPT` (`rollout_id` excepted) and what the reward reads of them.

        Returns:
            `reward_baselines` (B,) float32 and nothing else; of several rows of one response the mean. Metrics:
            `reward_baseline/mean`, and the reward's failures.
        """
        asked = rollouts(prompts.with_meta(metrics={}), 1)
        generated = self.actor.generate_sequences(asked.select(columns.PROMPT).with_meta(greedy=True))
        answered = follow(asked, generated)
        scored = self.reward(answered)
        scores = scored.get(["token_level_scores"]).batch["token_level_scores"].sum(-1).double().cpu().numpy()
        place = rollout_ids(answered)
        rows = np.bincount(place, minlength=len(prompts))
        baselines = np.bincount(place, weights=scores, minlength=len(prompts)) / np.maximum(rows, 1)
        metrics = {name: scored.metrics[name] for name in FAILURES if name in scored.metrics}
        if len(baselines):
            metrics["reward_baseline/mean"] = Metric.mean(float(baselines.mean()), weight=len(baselines))
        return DataProto.from_dict(
            tensors={"reward_baselines": torch.from_numpy(baselines).float()}, meta_info={"metrics": metrics}
        )
