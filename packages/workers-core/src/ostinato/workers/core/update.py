"""The one update loop, for actor and critic and for every engine: epochs, mini-batches, micro-batches, one step each.

Everything that a gradient is divided by is counted over the whole mini-batch on all ranks before the first micro-batch
runs, so neither the micro-batch size nor the token budget nor the number of ranks changes a gradient. Metrics follow
the same rule: a rank reports its share or its weighted mean, and merging the ranks gives the global value.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from ostinato.protocol import DataProto, Metric
from ostinato.workers.core.engine import LossFn, StepStats, TrainEngine
from ostinato.workers.core.errors import BatchError
from ostinato.workers.core.limits import BatchLimit
from ostinato.workers.core.microbatch import PackedRows, largest_over_ranks, pack
from ostinato.workers.core.scoring import log_probs_of, planned, token_columns

logger = logging.getLogger(__name__)

Reduce = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Counts:
    """What one mini-batch holds, over all ranks.

    Attributes:
        num_tokens: tokens whose `response_mask` is 1.
        num_sequences: rows with at least one such token.
    """

    num_tokens: float
    num_sequences: float


@dataclass(frozen=True)
class MicroStats:
    """What one micro-batch reports; detached scalars on the engine's device.

    Attributes:
        shares: parts of aggregated quantities, already divided by the mini-batch's global count: they add up.
        token_sums: sums over this micro-batch's policy tokens, to become token means.
        num_tokens: how many policy tokens that were.
    """

    shares: dict[str, torch.Tensor]
    token_sums: dict[str, torch.Tensor]
    num_tokens: torch.Tensor


@dataclass(frozen=True)
class MiniBatch:
    """This rank's part of one mini-batch, on its way to a step.

    Attributes:
        engine: holds the model as it is now.
        rows: the rows.
        plan: rows of each micro-batch.
        temperature: of the distribution that the responses were sampled from.
        seed: another number for each step of a run, the same on every rank.
    """

    engine: TrainEngine
    rows: DataProto
    plan: list[list[int]]
    temperature: float
    seed: int

    def pack(self, rows: DataProto) -> PackedRows:
        """Pack some of the rows for the engine."""
        return pack(rows, temperature=self.temperature, device=self.engine.device)

    def log_probs(self) -> torch.Tensor | None:
        """Log-probabilities (b, R) under the current weights, by a forward pass; None where the rank sees none."""
        columns = token_columns(self.engine, self.rows, self.pack, log_probs_of, plan=self.plan)
        return None if columns is None else columns["log_probs"]


class Objective(Protocol):
    """What is trained for: the loss of one role."""

    @property
    def prefix(self) -> str:
        """What its metric names begin with (`actor`, `critic`)."""
        ...

    @property
    def entropy(self) -> bool:
        """Whether the loss needs the entropy of each position."""
        ...

    def prepare(self, mini_batch: MiniBatch) -> DataProto:
        """Return its rows with the columns that depend on the whole mini-batch; called right before its step."""
        ...

    def loss(self, counts: Counts) -> LossFn[MicroStats]:
        """Make the closure that turns a micro-batch's outputs into its share of the loss."""
        ...


def update(
    engine: TrainEngine,
    batch: DataProto,
    objective: Objective,
    *,
    num_mini_batches: int,
    epochs: int,
    limit: BatchLimit,
    temperature: float = 1.0,
) -> dict[str, Metric]:
    """Train on the rows of one trainer step.

    Args:
        engine: holds the model; its parameters and optimizer are on the device.
        batch: this rank's rows; the int64 column `mini_batch` says how they are cut (`split_mini_batches`), without it
            they are cut into consecutive pieces.
        objective: the loss.
        num_mini_batches: optimizer steps an epoch; the same on every rank.
        epochs: passes over the rows.
        limit: size of a micro-batch.
        temperature: of the distribution that the responses were sampled from.

    Returns:
        This rank's metrics; merged over the data-parallel ranks they are those of the whole batch.

    Raises:
        BatchError: the rows cannot be cut as asked.
    """
    minis = split_mini_batches(batch, num_mini_batches, engine.reduce)
    counts = global_counts(minis, engine.reduce)
    plans = [planned(engine, mini, limit) for mini in minis]
    tally = Tally(objective.prefix)
    seed = int(batch.meta_info.get("global_step", 0)) * epochs * len(minis)
    for epoch in range(epochs):
        for index, (rows, count, plan) in enumerate(zip(minis, counts, plans, strict=True)):
            if count.num_tokens == 0:
                # An AdamW step without a gradient would still decay the weights and follow old momentum.
                logger.warning("mini-batch %d holds no policy token on any rank; it makes no step", index)
                tally.skip()
                continue
            mini = MiniBatch(engine, rows, plan, temperature, seed + epoch * len(minis) + index)
            prepared = objective.prepare(mini)
            packed = [mini.pack(prepared[group]) for group in plan]
            reports = engine.forward_backward(packed, objective.loss(count), entropy=objective.entropy)
            tally.add(reports or [], engine.optimizer_step())
    return tally.metrics()


def split_mini_batches(batch: DataProto, num_mini_batches: int, reduce: Reduce) -> list[DataProto]:
    """Cut this rank's rows into mini-batches, equally many on every rank; some may hold no row of this rank.

    The column `mini_batch` may be finer than what is asked for (one cut serves actor and critic): of M numbers, those
    from n·M/m up to (n + 1)·M/m form mini-batch n of m.

    Args:
        batch: this rank's rows.
        num_mini_batches: how many; no more than the column tells apart, where there is one.
        reduce: sums over the ranks.

    Returns:
        The mini-batches in order.

    Raises:
        BatchError: `num_mini_batches` is below 1, or an entry of `mini_batch` is negative.
    """
    if num_mini_batches < 1:
        raise BatchError(f"update: num_mini_batches must be at least 1, got {num_mini_batches}")
    if "mini_batch" not in batch.columns:
        return batch.chunk(num_mini_batches)
    assert batch.batch is not None, "mini_batch is a tensor column"
    index = batch.batch["mini_batch"]
    if len(index) and int(index.min()) < 0:
        raise BatchError(f"update: column 'mini_batch' counts from 0, got {int(index.min())}")
    cut = largest_over_ranks(int(index.max()) + 1 if len(index) else 0, reduce)
    count = min(num_mini_batches, cut)
    number = index * count // max(cut, 1)
    return [batch[(number == k).nonzero().flatten().tolist()] for k in range(count)]


def global_counts(minis: Sequence[DataProto], reduce: Reduce) -> list[Counts]:
    """Count policy tokens and rows that have any, for each mini-batch over all ranks, in one reduction.

    Args:
        minis: this rank's part of each mini-batch, with `response_mask` (b, R).
        reduce: sums over the ranks.

    Returns:
        One entry a mini-batch, equal on all ranks.
    """
    local = torch.zeros(len(minis), 2, dtype=torch.float64)
    for i, mini in enumerate(minis):
        if mini.batch is None or "response_mask" not in mini.columns:
            raise BatchError(f"update: column 'response_mask' is missing; the rows hold {sorted(mini.columns)}")
        mask = mini.batch["response_mask"].to(torch.bool)
        local[i, 0] = mask.sum()
        local[i, 1] = mask.any(dim=1).sum()
    return [Counts(float(tokens), float(sequences)) for tokens, sequences in reduce(local).tolist()]


@dataclass
class Tally:
    """Adds up what micro-batches and steps report, without waiting for the device before the end.

    Attributes:
        prefix: what metric names begin with.
    """

    prefix: str
    _reports: list[list[MicroStats]] = field(default_factory=list)
    _steps: list[StepStats] = field(default_factory=list)
    _num_empty: int = 0

    def add(self, reports: Sequence[MicroStats], step: StepStats) -> None:
        """Take in one mini-batch: its micro-batches' reports and its step."""
        self._reports.append(list(reports))
        self._steps.append(step)
        if step.skipped:
            logger.warning(
                "%s: gradient norm %s is not finite; the step changed no weight", self.prefix, step.grad_norm
            )

    def skip(self) -> None:
        """Take in a mini-batch that made no step."""
        self._num_empty += 1

    def metrics(self) -> dict[str, Metric]:
        """Return this rank's metrics.

        A share is summed over micro-batches and ranks and averaged over steps; a token mean is weighted by tokens; norm
        and rate are the same on every rank.
        """
        result: dict[str, Metric] = {}
        reports = [report for step in self._reports for report in step]
        if reports:
            for name, total in _totals([report.shares for report in reports]).items():
                result[f"{self.prefix}/{name}"] = Metric.sum(total / len(self._steps))
            tokens = float(torch.stack([report.num_tokens for report in reports]).sum())
            for name, total in _totals([report.token_sums for report in reports]).items():
                result[f"{self.prefix}/{name}"] = Metric.mean(total / tokens if tokens else 0.0, weight=tokens)
        norms = [step.grad_norm for step in self._steps if not step.skipped]
        if self._steps:
            norm = sum(norms) / len(norms) if norms else math.nan
            result[f"{self.prefix}/grad_norm"] = Metric.mean(norm)
            result[f"{self.prefix}/lr"] = Metric.mean(self._steps[-1].lr)
        skipped = self._num_empty + len(self._steps) - len(norms)
        result[f"{self.prefix}/skipped_steps"] = Metric.max(float(skipped))
        return result


def _totals(reports: Sequence[dict[str, torch.Tensor]]) -> dict[str, float]:
    return {name: float(torch.stack([report[name].double() for report in reports]).sum()) for name in reports[0]}
