"""The validation pass: every validation prompt is answered and scored, and the scores become statistics."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ostinato.ppo.config import PpoConfig
from ostinato.ppo.data import PromptDataset, PromptLoader, follow, rollouts
from ostinato.ppo.dump import RolloutDump
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
        folder = config.trainer.validation_data_dir
        self.dump = None if folder is None else RolloutDump(folder, tokenizer)

    def run(self, step: int, actor: Any, reward: Callable[[DataProto], DataProto]) -> dict[str, Metric]:
        """Validate the actor as it is now.

        Args:
            step: the step that it has just finished; also keys the random streams where validation samples.
            actor: the actor's group.
            reward: scores answers.

        Returns:
            `val-core/*` and `val-aux/*`.
        """
        parts, asked = [], 0
        for batch in self.loader:
            batch = rollouts(batch.with_meta(global_step=step, validate=True), self.n, first=asked)
            asked += len(batch)
            batch = follow(batch, actor.generate_sequences(batch.select(columns.PROMPT)))
            batch = batch.union(reward(batch))
            reads = [name for name in batch.columns if name in _READS or name.startswith(EXTRA)]
            parts.append(batch.get(list(dict.fromkeys(reads + (self.dump.reads(batch) if self.dump else [])))))
        if self.dump:
            self.dump.write(step, parts)
        if self.num_samples:
            for text in self.samples(parts[0]):
                logger.info("validation after step %d: %s", step, text)
        return _statistics(parts)

    def samples(self, scored: DataProto) -> list[str]:
        """The first `trainer.log_val_generations` answers as text, each with its score."""
        scores = _row_scores(scored)
        responses, mask = scored.batch["responses"], scored.batch["response_mask"].bool()
        return [
            f"[{scores[row]:.3g}] {self.tokenizer.decode(responses[row][mask[row]].tolist())}"
            for row in range(min(self.num_samples, len(scored)))
        ]


_SCORE = f"{EXTRA}score"
_READS = ("uid", "data_source", "token_level_scores", "responses", "response_mask")


def _row_scores(scored: DataProto) -> np.ndarray:
    return scored.batch["token_level_scores"].sum(-1).double().numpy()


def _statistics(parts: Sequence[DataProto]) -> dict[str, Metric]:
    """Statistics over all batches, which need not have the same result columns: data sources may differ."""
    names = dict.fromkeys(name for part in parts for name in part.columns if name.startswith(EXTRA))
    extra = {name.removeprefix(EXTRA): [_values(part, name) for part in parts] for name in names if name != _SCORE}
    numbers = {name: np.concatenate(values) for name, values in extra.items() if all(v.dtype != object for v in values)}
    return validation_metrics(
        [source for part in parts for source in part.non_tensor_batch["data_source"]],
        [uid for part in parts for uid in part.non_tensor_batch["uid"]],
        {SCORE: np.concatenate([_row_scores(part) for part in parts]), **numbers},
        np.concatenate(extra[PREDICTION]).tolist() if PREDICTION in extra else None,
    )


def _values(part: DataProto, name: str) -> np.ndarray:
    """A result column, or NaN where this batch has none."""
    return part.non_tensor_batch[name] if name in part.columns else np.full(len(part), np.nan)
