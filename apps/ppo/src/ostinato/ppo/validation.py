"""The validation pass: every validation prompt is answered and scored, and the scores become statistics."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import numpy as np

from ostinato.ppo.config import PpoConfig
from ostinato.ppo.data import PromptDataset, PromptLoader, follow, rollouts
from ostinato.ppo.rewards.manager import EXTRA
from ostinato.ppo.validate import SCORE, validation_metrics
from ostinato.protocol import DataProto, Metric, columns

logger = logging.getLogger(__name__)

PREDICTION = "pred"
"""Key under which a reward function may return the answer that it read; answers that read alike vote together."""


class Validation:
    """Answers and scores the validation prompts, `val_kwargs.n` times each, sampled as `val_kwargs` says.

    Args:
        config: the run's configuration.
        tokenizer: the policy's tokenizer.
    """

    def __init__(self, config: PpoConfig, tokenizer: Any) -> None:
        dataset = PromptDataset.from_config(config.data, tokenizer, validation=True)
        self.loader = PromptLoader(dataset, config.data.val_batch_size or len(dataset))
        self.n = config.actor_rollout_ref.rollout.val_kwargs.n
        self.num_samples = config.trainer.log_val_generations
        self.tokenizer = tokenizer

    def run(self, step: int, actor: Any, reward: Callable[[DataProto], DataProto]) -> dict[str, Metric]:
        """Validate the actor as it is now.

        Args:
            step: the step that it has just finished; also keys the random streams where validation samples.
            actor: the actor's group.
            reward: scores answers.

        Returns:
            `val-core/*` and `val-aux/*`.
        """
        parts = []
        for batch in self.loader:
            batch = rollouts(batch.with_meta(global_step=step, validate=True), self.n)
            batch = follow(batch, actor.generate_sequences(batch.select(columns.PROMPT)))
            batch = batch.union(reward(batch))
            parts.append(batch.get([name for name in batch.columns if name in _READS or name.startswith(EXTRA)]))
        scored = DataProto.concat([part.with_meta(metrics={}) for part in parts])
        for text in self.samples(scored):
            logger.info("validation after step %d: %s", step, text)
        return _statistics(scored)

    def samples(self, scored: DataProto) -> list[str]:
        """The first `trainer.log_val_generations` answers as text, each with its score."""
        scores = _row_scores(scored)
        responses, mask = scored.batch["responses"], scored.batch["response_mask"].bool()
        return [
            f"[{scores[row]:.3g}] {self.tokenizer.decode(responses[row][mask[row]].tolist())}"
            for row in range(min(self.num_samples, len(scored)))
        ]


_READS = ("uid", "data_source", "token_level_scores", "responses", "response_mask")


def _row_scores(scored: DataProto) -> np.ndarray:
    return scored.batch["token_level_scores"].sum(-1).double().numpy()


def _statistics(scored: DataProto) -> dict[str, Metric]:
    extra = {
        name.removeprefix(EXTRA): values for name, values in scored.non_tensor_batch.items() if name.startswith(EXTRA)
    }
    numbers = {name: values for name, values in extra.items() if values.dtype != object and name != "score"}
    return validation_metrics(
        scored.non_tensor_batch["data_source"].tolist(),
        scored.non_tensor_batch["uid"].tolist(),
        {SCORE: _row_scores(scored), **numbers},
        extra[PREDICTION].tolist() if PREDICTION in extra else None,
    )
