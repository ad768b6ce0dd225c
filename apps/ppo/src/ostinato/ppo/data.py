"""From prompts to the batches of numbered steps, and from generated rows back to their prompts.

schedule = Schedule(config.data, tokenizer, config.trainer)
for step, batch in schedule.steps():
    batch = rollouts(batch, n)
    batch = follow(batch, generate(batch.select(columns.PROMPT)))
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch.utils.data import Sampler
from torchdata.stateful_dataloader import StatefulDataLoader

from ostinato.ppo.errors import DataError
from ostinato.ppo.prompts import PromptDataset, load_tokenizer, pad_token_id
from ostinato.protocol import DataProto, columns
from ostinato.rollout.assemble import rollout_ids

__all__ = [
    "EpochBatches",
    "PromptDataset",
    "PromptLoader",
    "Schedule",
    "follow",
    "load_tokenizer",
    "pad_token_id",
    "rollouts",
]

logger = logging.getLogger(__name__)


class EpochBatches(Sampler[list[tuple[int, int]]]):
    """The batches of one epoch, as (epoch, index) pairs: a function of the seed and the epoch alone.

    Args:
        num_rows: rows of the data set.
        batch_size: rows of a batch.
        shuffle: a new order each epoch, else the files' order.
        seed: of the order.
        drop_last: leave out a last batch that is not full.
    """

    def __init__(self, num_rows: int, batch_size: int, *, shuffle: bool, seed: int, drop_last: bool) -> None:
        self.num_rows, self.batch_size, self.shuffle, self.seed, self.drop_last = (
            num_rows, batch_size, shuffle, seed, drop_last)  # fmt: skip
        self.epoch = 0

    def __len__(self) -> int:
        full, rest = divmod(self.num_rows, self.batch_size)
        return full if self.drop_last or rest == 0 else full + 1

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        order = range(self.num_rows)
        if self.shuffle:
            order = np.random.default_rng([self.seed, self.epoch]).permutation(self.num_rows).tolist()
        for start in range(0, len(self) * self.batch_size, self.batch_size):
            yield [(self.epoch, index) for index in order[start : start + self.batch_size]]


def _as_it_is(batch: Any) -> Any:
    return batch


class PromptLoader:
    """Batches of a data set, epoch by epoch, that can be continued anywhere.

    Args:
        dataset: the prompts.
        batch_size: prompts of a batch.
        shuffle: a new order each epoch.
        seed: of that order.
        drop_last: leave out a last batch that is not full. Training does: an optimizer step's arithmetic (mini-batches,
            ranks) is checked for full batches. With shuffling, other rows are left out each epoch; without, the same.

    Raises:
        DataError: `drop_last` and the data set has fewer rows than a batch.
    """

    def __init__(
        self, dataset: PromptDataset, batch_size: int, *, shuffle: bool = False, seed: int = 0, drop_last: bool = False
    ) -> None:
        if drop_last and batch_size > len(dataset):
            raise DataError(
                f"data.train_batch_size is {batch_size}, but {', '.join(dataset.files)} gives {len(dataset)} prompts; "
                f"set data.train_batch_size to at most {len(dataset)}"
            )
        self.dataset = dataset
        self.batches = EpochBatches(len(dataset), batch_size, shuffle=shuffle, seed=seed, drop_last=drop_last)
        self.epoch, self.position = 0, 0
        with warnings.catch_warnings():  # the library calls something of torch that torch has deprecated
            warnings.filterwarnings("ignore", message="'set_vital' is deprecated")
            # A generator of its own: a loader draws a seed when it starts, and must not move the global one.
            self._loader = StatefulDataLoader(
                dataset, batch_sampler=self.batches, collate_fn=_as_it_is, generator=torch.Generator()
            )

    def __len__(self) -> int:
        """Batches an epoch."""
        return len(self.batches)

    def __iter__(self) -> Iterator[DataProto]:
        """The batches that this epoch still has; then the next epoch begins."""
        self.batches.epoch = self.epoch
        for batch in self._loader:
            self.position += 1
            yield batch
        self.epoch, self.position = self.epoch + 1, 0

    def state_dict(self) -> dict[str, Any]:
        """Where the loader stands, and what it runs over."""
        return {
            "epoch": self.epoch,
            "position": self.position,
            "loader": self._loader.state_dict() if 0 < self.position < len(self) else None,
            "data": self._identity(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where a state was taken: the batches that come are those that had not come.

        Raises:
            DataError: the state is of other data, or of another batch size, seed or order.
        """
        mine, theirs = self._identity(), state["data"]
        changed = [name for name in mine if mine[name] != theirs.get(name)]
        if changed:
            raise DataError(_other_run(changed, theirs, mine))
        self.epoch, self.position = state["epoch"], state["position"]
        if self.position == len(self):  # saved at an epoch's end: nothing of it is left
            self.epoch, self.position = self.epoch + 1, 0
        elif self.position:
            self.batches.epoch = self.epoch
            self._loader.load_state_dict(state["loader"])

    def _identity(self) -> dict[str, Any]:
        batches = self.batches
        return {
            "prompts": len(self.dataset),
            "batch_size": batches.batch_size,
            "shuffle": batches.shuffle,
            "seed": batches.seed,
            "fingerprint": self.dataset.fingerprint(),
        }


_SETTINGS = {"batch_size": "data.train_batch_size", "shuffle": "data.shuffle", "seed": "data.seed"}


def _other_run(changed: list[str], theirs: Mapping[str, Any], mine: Mapping[str, Any]) -> str:
    """Why a loader's state is not this run's: by the settings' keys where they alone changed, and not the data."""
    told = "; ".join(f"{_SETTINGS.get(name, name)}: {theirs.get(name)!r} then, {mine[name]!r} now" for name in changed)
    if not set(changed) <= set(_SETTINGS):
        return (
            f"the checkpoint was written over other training data ({told}): set it back, or start anew with "
            "trainer.resume_mode=disable"
        )
    back = " ".join(f"{_SETTINGS[name]}={theirs.get(name)!r}" for name in changed)
    return (
        f"the checkpoint was written with another setting ({told}), and its place in the training data counts for that "
        f"one alone: resume with {back}, or start anew with trainer.resume_mode=disable"
    )


class Schedule:
    """Numbers the steps of a run and gives each its batch.

    Args:
        data: the `data` section: files, `train_batch_size`, `shuffle`, `seed`, …
        tokenizer: a Hugging Face tokenizer.
        trainer: the `trainer` section: `total_epochs`, `total_training_steps` (counts instead of the epochs where it is
            set).

    Attributes:
        step: the last step that was given out; 0 before the first.
        total_steps: the run's last step.
    """

    def __init__(self, data: Any, tokenizer: Any, trainer: Any) -> None:
        self.data = PromptLoader(
            PromptDataset.from_config(data, tokenizer),
            data.train_batch_size,
            shuffle=data.shuffle,
            seed=data.seed,
            drop_last=True,
        )
        self.step = 0
        limit = trainer.total_training_steps
        self.total_steps = trainer.total_epochs * len(self.data) if limit is None else limit
        left_out = self.num_prompts - len(self.data) * data.train_batch_size
        if left_out:
            logger.info(
                "%d of %d prompts do not fill a batch and are left out of each epoch", left_out, self.num_prompts
            )

    @property
    def num_prompts(self) -> int:
        """Prompts of the training data, after filtering."""
        return len(self.data.dataset)

    @property
    def steps_per_epoch(self) -> int:
        """Steps of one pass over the training data."""
        return len(self.data)

    def steps(self) -> Iterator[tuple[int, DataProto]]:
        """Yield the steps that are still to do, each with its batch.

        A state taken while a step is under way counts it as done.

        Yields:
            The step's number, from 1, and its prompts; `meta_info` holds `global_step` and `epoch` (from 0).
        """
        while self.step < self.total_steps:
            for batch in self.data:
                self.step += 1
                yield self.step, batch.with_meta(global_step=self.step, epoch=self.data.epoch)
                if self.step >= self.total_steps:
                    return

    def state_dict(self) -> dict[str, Any]:
        """The step and where the data stands."""
        return {"step": self.step, "data": self.data.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue after the step at which a state was taken.

        Raises:
            DataError: the training data is not what it was.
        """
        self.data.load_state_dict(state["data"])
        self.step = state["step"]


def rollouts(batch: DataProto, n: int, first: int = 0) -> DataProto:
    """Repeat each prompt n times, copies next to each other, and number the rows of the step.

    Args:
        batch: B prompts.
        n: responses for each.
        first: the first row's number; rows of one step that are numbered alike draw alike.

    Returns:
        B·n rows with the column `rollout_id` (B·n,) int64: first, first + 1, …
    """
    repeated = batch.repeat(n, interleave=True)
    numbers = first + np.arange(len(repeated), dtype=np.int64)
    return repeated.union(DataProto.from_dict(non_tensors={"rollout_id": numbers}))


def follow(batch: DataProto, generated: DataProto) -> DataProto:
    """Put generated rows and what is known of their prompts together.

    A rollout may come back as several rows, in any order; rows are matched by `rollout_id`.

    Args:
        batch: the rows that were asked, from `rollouts`.
        generated: what the rollout returned.

    Returns:
        One row for each generated row: all of its columns, and those of `batch` that it does not have; metrics of both.

    Raises:
        DataError: a generated row answers no row of the batch, or a row of the batch has no answer.
    """
    asked, answered = rollout_ids(batch), rollout_ids(generated)
    order = np.argsort(asked, kind="stable")
    place = np.searchsorted(asked[order], answered)
    found = place < len(asked)
    found[found] = asked[order][place[found]] == answered[found]
    if not found.all():
        strays = answered[~found][:5].tolist()
        raise DataError(f"generated rows have rollout_id {strays}, which the batch does not have")
    missing = np.setdiff1d(asked, answered)
    if len(missing):
        raise DataError(
            f"{len(missing)} of {len(asked)} rollouts came back without a row (rollout_id {missing[:5].tolist()}); a "
            "rollout engine must return each, an aborted one with finish_reason 'abort'"
        )
    replaced = [name for name in batch.columns if name in generated.columns or name in columns.PROMPT]
    return batch.drop(replaced)[order[place]].with_meta(metrics=batch.metrics).union(generated)
