"""The reward of a batch: responses become texts, texts become scores, scores go on the last policy token."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import numpy as np
import torch

from ostinato.algos import place_outcome
from ostinato.ppo.closing import Closing
from ostinato.ppo.errors import RewardError
from ostinato.ppo.rewards.errors import ScorerError
from ostinato.ppo.rewards.pool import Outcome, ScorerPool
from ostinato.ppo.rewards.recipe import Recipe, Row, RowBatch
from ostinato.protocol import DataProto, Metric

logger = logging.getLogger(__name__)

READS = ("responses", "response_mask", "data_source", "reward_model")
READS_OPTIONAL = ("extra_info", "finish_reason")

EXTRA = "reward/"
"""Before the name of a column that holds what a reward function returned beside the score."""

MAX_KEYS = 256
"""Keys that the results of a batch may have."""


class Reward(Protocol):
    """What the loop calls to score a batch."""

    def __call__(self, batch: DataProto) -> DataProto:
        """Return the column `token_level_scores` (B, R) for a batch of responses."""
        ...

    def close(self) -> None:
        """End what scores; called once, at the end of the run."""
        ...


ManagerFactory = Callable[[Any, Any], Reward]
"""`(config, tokenizer) -> Reward`: how a reward manager is made; a class with that `__init__` is one."""

M = TypeVar("M", bound=ManagerFactory)

_MANAGERS: dict[str, ManagerFactory] = {}


def register_reward_manager(name: str) -> Callable[[M], M]:
    """Decorator: make a reward manager known as `name`, a value of `reward_manager.name`.

    A manager is called with a batch and returns `token_level_scores`; it runs in the process of the loop, so it keeps
    its own time limits (`ScorerPool` has them).

    Raises:
        ScorerError: another manager has the name.
    """

    def add(factory: M) -> M:
        held = _MANAGERS.get(name)
        if held is not None and (held.__module__, held.__qualname__) != (factory.__module__, factory.__qualname__):
            raise ScorerError(f"reward manager {name!r} is {held.__module__}.{held.__qualname__}; take another name")
        _MANAGERS[name] = factory
        return factory

    return add


def reward_managers() -> list[str]:
    """The registered reward managers, sorted."""
    return sorted(_MANAGERS)


def build_reward(config: Any, tokenizer: Any, groups: Mapping[str, Any]) -> Reward:
    """Return the reward of a run: the reward model's where `reward_model.enable` is set, else the reward manager's.

    Args:
        config: the run's configuration.
        tokenizer: the policy's tokenizer.
        groups: worker groups by role.
    """
    if config.reward_model.enable:
        if config.custom_reward_function.path is not None:
            logger.warning("reward_model.enable=True: custom_reward_function.path is not used")
        return ModelReward(groups["reward_model"])
    name = config.reward_manager.name
    if name not in _MANAGERS:
        known = ", ".join(reward_managers())
        raise ScorerError(f"reward_manager.name: expected one of {known}, got {name!r}")
    return _MANAGERS[name](config, tokenizer)


class ModelReward:
    """The score of a reward model.

    Args:
        group: a worker group with `compute_rm_score`.
    """

    def __init__(self, group: Any) -> None:
        self._group = group

    def __call__(self, batch: DataProto) -> DataProto:
        """Score a batch; returns `token_level_scores`."""
        return self._group.compute_rm_score(batch)

    def close(self) -> None:
        """Do nothing: the group belongs to the backend."""


@register_reward_manager("naive")
class RewardFunction(Closing):
    """The score of a Python function, row by row: the scorer of the row's data source, or a user's own.

    Args:
        config: a run's configuration, or its section `custom_reward_function`: `path`, `name`, `reward_kwargs`,
            `timeout_seconds`, `num_processes`, `on_error`, `default_score`.
        tokenizer: turns responses into texts.

    Raises:
        ScorerError: the section names a file or function that is not there.
    """

    _told_of_keys = False

    whole = False
    """Whether the function is called once, with all rows of a batch."""

    def __init__(self, config: Any, tokenizer: Any) -> None:
        section = getattr(config, "custom_reward_function", config)
        self._tokenizer = tokenizer
        self.default = float(getattr(section, "default_score", 0.0))
        self.pool = ScorerPool(
            Recipe(path=section.path, name=section.name, kwargs=dict(section.reward_kwargs or {}), whole=self.whole),
            num_workers=1 if self.whole else getattr(section, "num_processes", None),
            timeout=getattr(section, "timeout_seconds", 30.0),
            default=self.default,
            on_error=getattr(section, "on_error", "default"),
        )

    def __call__(self, batch: DataProto) -> DataProto:
        """Score a batch.

        Only tokens that the policy sampled are turned into text. A row whose generation was aborted
        (`finish_reason == "abort"`) is not scored and gets the default.

        Args:
            batch: reads `responses` (B, R), `response_mask` (B, R), `data_source`, `reward_model` (holds
                `ground_truth`), and where they are there `extra_info` and `finish_reason`.

        Returns:
            `token_level_scores` (B, R) float32: the score on each row's last policy token, 0 elsewhere. Non-tensor:
            `reward/score` (B,), and `reward/KEY` for each further key of the results (NaN or None in rows without it).
            Metrics: `reward/errors` (rows without a score of their own), `reward/timeouts` (those of them that ran out
            of time), `reward/aborted`, and `reward/KEY/mean` for each numeric key.

        Raises:
            RewardError: a column is missing, a data source has no scorer, or a row failed and `on_error` is `raise`.
        """
        data = self._read(batch)
        assert data.batch is not None
        mask = data.batch["response_mask"].bool()
        finish = data.non_tensor_batch.get("finish_reason")
        aborted = np.zeros(len(data), dtype=bool) if finish is None else np.asarray(finish == "abort", dtype=bool)
        scored = np.flatnonzero(~aborted)
        outcomes = [Outcome(self.default)] * len(data)
        for number, outcome in zip(scored, self.outcomes(self._rows(data, mask, scored)), strict=True):
            outcomes[number] = outcome
        scores = np.asarray([outcome.score for outcome in outcomes], dtype=np.float64)
        extra = self._limited(extra_columns(outcomes))
        shaped = self.shaped(scores, mask.sum(-1).cpu().numpy() * ~aborted, extra)
        return DataProto.from_dict(
            tensors={"token_level_scores": place_outcome(torch.from_numpy(shaped).float(), mask.cpu())},
            non_tensors={f"{EXTRA}score": scores, **{f"{EXTRA}{key}": column for key, column in extra.items()}},
            meta_info={"metrics": self._metrics(outcomes, extra, aborted)},
        )

    def _limited(self, extra: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """The result columns, at most `MAX_KEYS` of them."""
        if len(extra) <= MAX_KEYS:
            return extra
        if not self._told_of_keys:
            self._told_of_keys = True
            logger.warning(
                "the reward function's results of one batch have %d different keys (%s, …); the first %d by name are "
                "kept. A key is a column and a metric: put what differs from row to row into a value",
                len(extra), ", ".join(repr(key[:40]) for key in list(extra)[:3]), MAX_KEYS,
            )  # fmt: skip
        return dict(list(extra.items())[:MAX_KEYS])

    def outcomes(self, rows: Sequence[Row]) -> list[Outcome]:
        """Score rows: one outcome a row, in their order."""
        return self.pool.score(rows)

    def shaped(self, scores: np.ndarray, lengths: np.ndarray, extra: dict[str, np.ndarray]) -> np.ndarray:
        """Make of each row's score what it is rewarded with.

        Args:
            scores: (B,) float64.
            lengths: (B,) int64, policy tokens of each response; 0 for an aborted one.
            extra: result columns by key; a manager may add its own.

        Returns:
            (B,) float64; here the scores.
        """
        return scores

    def _read(self, batch: DataProto) -> DataProto:
        missing = [name for name in READS if name not in batch.columns]
        if missing:
            raise RewardError(
                f"the reward needs the columns {', '.join(READS)}; missing: {', '.join(missing)}. data_source and "
                "reward_model come from the data files (reward_model holds ground_truth)"
            )
        return batch.get([*READS, *(name for name in READS_OPTIONAL if name in batch.columns)])

    def _rows(self, data: DataProto, mask: torch.Tensor, numbers: np.ndarray) -> list[Row]:
        """What the scorers get of the rows to score."""
        assert data.batch is not None
        responses, valid = data.batch["responses"].cpu().numpy(), mask.cpu().numpy()
        sampled = [responses[number][valid[number]].tolist() for number in numbers]
        texts = self._tokenizer.batch_decode(sampled, skip_special_tokens=True)
        columns = data.non_tensor_batch
        sources, models = columns["data_source"][numbers], columns["reward_model"][numbers]
        infos: Any = columns["extra_info"][numbers] if "extra_info" in columns else [None] * len(numbers)
        return [
            Row(str(source), text, _ground_truth(model), info)
            for source, text, model, info in zip(sources, texts, models, infos, strict=True)
        ]

    def _metrics(
        self, outcomes: Sequence[Outcome], extra: Mapping[str, np.ndarray], aborted: np.ndarray
    ) -> dict[str, Metric]:
        failures = [outcome.failure for outcome in outcomes if outcome.failure is not None]
        metrics = {
            "reward/errors": Metric.sum(len(failures)),
            "reward/timeouts": Metric.sum(failures.count("timeout")),
            "reward/aborted": Metric.sum(int(aborted.sum())),
        }
        for key, column in extra.items():
            if column.dtype != object and (valid := column[np.isfinite(column)]).size:
                metrics[f"reward/{key}/mean"] = Metric.mean(float(valid.mean()), weight=valid.size)
        return metrics

    def close(self) -> None:
        """End the scoring processes."""
        self.pool.close()


@register_reward_manager("batch")
class BatchReward(RewardFunction):
    """The score of a user's function that is called once for all rows of a batch.

    `compute_score(data_sources, solution_strs, ground_truths, extra_infos)` gets lists and returns one result a row.
    The call has one time limit (`timeout_seconds`); where it fails, every row gets the default and is counted.
    """

    whole = True

    def outcomes(self, rows: Sequence[Row]) -> list[Outcome]:
        """Score all rows in one call."""
        if not rows:
            return []
        (outcome,) = self.pool.score([RowBatch(tuple(rows))])
        if outcome.failure is not None:
            return [outcome] * len(rows)
        return list(outcome.parts)


@register_reward_manager("dapo")
class DapoReward(RewardFunction):
    """Row by row, with a penalty on overlong responses.

    Beside the function's results there are the columns `reward/overlong_penalty` and `reward/overlong` (1 where there
    is a penalty), and `reward/acc`, the score without it, where the function gives none.

    Args:
        config: a run's configuration; also reads `reward_manager.overlong_buffer` and `data.max_response_length`.
        tokenizer: turns responses into texts.
    """

    def __init__(self, config: Any, tokenizer: Any) -> None:
        super().__init__(config, tokenizer)
        self.buffer = config.reward_manager.overlong_buffer
        self.limit = config.data.max_response_length

    def shaped(self, scores: np.ndarray, lengths: np.ndarray, extra: dict[str, np.ndarray]) -> np.ndarray:
        """The scores with the penalty; see `overlong_penalty`."""
        penalty = overlong_penalty(lengths, self.limit, self.buffer.len, self.buffer.penalty_factor)
        extra.setdefault("acc", scores)
        extra |= {"overlong_penalty": penalty, "overlong": (penalty < 0).astype(np.float64)}
        return scores + penalty


def overlong_penalty(lengths: np.ndarray, limit: int, buffer: int, factor: float) -> np.ndarray:
    """What a response loses for its length: min(0, −f·(length − (limit − buffer))/buffer).

    Args:
        lengths: (B,) int64, policy tokens of each response.
        limit: most tokens of a response.
        buffer: so many tokens before the limit the penalty begins, to grow evenly up to f at the limit.
        factor: f, at least 0.

    Returns:
        (B,) float64, between −f and 0.

    Source:
        Yu et al. 2025 (DAPO, arXiv 2503.14476), eq. 13, without its last case: no response exceeds the limit.
    """
    return np.minimum(0.0, -factor * (lengths - (limit - buffer)) / buffer)


def _ground_truth(reward_model: Any) -> Any:
    if not isinstance(reward_model, Mapping) or "ground_truth" not in reward_model:
        raise RewardError(
            f"the column reward_model must hold an object with 'ground_truth' in each row; got {reward_model!r}"
        )
    return reward_model["ground_truth"]


def extra_columns(outcomes: Sequence[Outcome]) -> dict[str, np.ndarray]:
    """Turn what the functions returned beside the score into columns.

    Args:
        outcomes: B rows.

    Returns:
        For each key (B,): float64 with NaN in rows without it, or object with None in rows without it where any row
        holds a text.
    """
    keys = sorted({key for outcome in outcomes for key in outcome.extra})
    columns: dict[str, np.ndarray] = {}
    for key in keys:
        values = [outcome.extra.get(key) for outcome in outcomes]
        if any(isinstance(value, str) for value in values):
            column = np.empty(len(values), dtype=object)
            column[:] = values
        else:
            column = np.asarray([np.nan if value is None else value for value in values], dtype=np.float64)
        columns[key] = column
    return columns
