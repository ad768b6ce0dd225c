"""The resumable loader, the schedule, rollouts and what follows them."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedTokenizerFast

from ostinato.ppo.data import PromptDataset, PromptLoader, Schedule, follow, rollouts
from ostinato.ppo.errors import DataError
from ostinato.ppo.testing import make_tokenizer, write_prompts
from ostinato.protocol import DataProto, columns


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return make_tokenizer()


def section(files: str | list[str], **keys: Any) -> SimpleNamespace:
    defaults = {
        "train_files": [files] if isinstance(files, str) else files, "val_files": [], "prompt_key": "prompt",
        "train_batch_size": 2, "max_prompt_length": 8, "filter_overlong_prompts": False, "truncation": "error",
        "shuffle": True, "seed": 1, "train_max_samples": -1, "val_max_samples": -1, "apply_chat_template_kwargs": {},
    }  # fmt: skip
    return SimpleNamespace(**(defaults | keys))


def trainer(total_epochs: int = 1, total_training_steps: int | None = None) -> SimpleNamespace:
    return SimpleNamespace(total_epochs=total_epochs, total_training_steps=total_training_steps)


def uids(batch: DataProto) -> list[str]:
    return batch.non_tensor_batch["uid"].tolist()


# --- the loader and the schedule -------------------------------------------------------------------------------------


def test_each_epoch_is_a_seeded_permutation_of_its_own(tmp_path: Path, tokenizer: PreTrainedTokenizerFast):
    file = write_prompts(tmp_path / "a.parquet", [2] * 8)

    def epochs(seed: int, shuffle: bool = True) -> list[list[str]]:
        loader = PromptLoader(PromptDataset(file, tokenizer), 2, shuffle=shuffle, seed=seed)
        return [[uid for batch in loader for uid in uids(batch)] for _ in range(3)]

    first = epochs(1)
    for number, epoch in enumerate(first):
        assert sorted(epoch) == [f"{number}:{row}" for row in range(8)]
    orders = [[uid.split(":")[1] for uid in epoch] for epoch in first]
    assert orders[0] != orders[1] != orders[2]
    assert epochs(1) == first
    assert epochs(2) != first
    assert [uid.split(":")[1] for epoch in epochs(1, shuffle=False) for uid in epoch] == list("01234567") * 3


def test_loader_leaves_the_global_random_state_alone(tmp_path: Path, tokenizer: PreTrainedTokenizerFast):
    loader = PromptLoader(PromptDataset(write_prompts(tmp_path / "a.parquet", [2] * 4), tokenizer), 2, shuffle=True)
    before = torch.get_rng_state(), np.random.get_state()[1].tolist()
    list(loader)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert np.random.get_state()[1].tolist() == before[1]


def test_incomplete_batches_are_left_out_of_training_and_kept_in_validation(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast
):
    dataset = PromptDataset(write_prompts(tmp_path / "a.parquet", [2] * 7), tokenizer)
    assert [len(batch) for batch in PromptLoader(dataset, 3, drop_last=True)] == [3, 3]
    assert [len(batch) for batch in PromptLoader(dataset, 3)] == [3, 3, 1]
    assert [len(batch) for batch in PromptLoader(dataset, 100)] == [7]


def test_batch_larger_than_the_data_is_refused_with_both_numbers(tmp_path: Path, tokenizer: PreTrainedTokenizerFast):
    data = section(write_prompts(tmp_path / "a.parquet", [2] * 3), train_batch_size=4)
    with pytest.raises(DataError, match=r"train_batch_size is 4, but .* gives 3 prompts; set .* at most 3"):
        Schedule(data, tokenizer, trainer())


def schedule_of(tmp_path: Path, tokenizer: Any, rows: int, planned: SimpleNamespace, **keys: Any) -> Schedule:
    path = tmp_path / f"rows{rows}.parquet"
    file = str(path) if path.exists() else write_prompts(path, [2] * rows)
    return Schedule(section(file, **keys), tokenizer, planned)


def test_schedule_gives_as_many_steps_as_planned(tmp_path: Path, tokenizer: PreTrainedTokenizerFast):
    """H-62: two steps planned, two given out, numbered 1 and 2."""
    schedule = schedule_of(tmp_path, tokenizer, 4, trainer())
    seen = [(step, batch.meta_info["global_step"], batch.meta_info["epoch"]) for step, batch in schedule.steps()]
    assert seen == [(1, 1, 0), (2, 2, 0)]
    assert (schedule.step, schedule.total_steps, schedule.num_prompts, schedule.steps_per_epoch) == (2, 2, 4, 2)


@pytest.mark.parametrize(
    ("planned", "epochs"),
    [(trainer(2), [0, 0, 1, 1]), (trainer(5, 1), [0]), (trainer(1, 5), [0, 0, 1, 1, 2]), (trainer(3, 4), [0, 0, 1, 1])],
)
def test_schedule_counts_steps_where_they_are_given_else_epochs(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast, planned: SimpleNamespace, epochs: list[int]
):
    schedule = schedule_of(tmp_path, tokenizer, 5, planned)
    assert [batch.meta_info["epoch"] for _, batch in schedule.steps()] == epochs


@pytest.mark.parametrize("stop", range(11))
def test_resumed_schedule_gives_the_steps_that_were_not_given(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast, stop: int
):
    """H-70, H-68, H-63: stopped in the middle of an epoch, at its end, at the budget, or before the first step."""
    planned = trainer(3, 10)
    whole = [(step, uids(batch)) for step, batch in schedule_of(tmp_path, tokenizer, 8, planned).steps()]
    assert len(whole) == 10
    first = schedule_of(tmp_path, tokenizer, 8, planned)
    state = first.state_dict()
    for step, _ in first.steps():
        state = json.loads(json.dumps(first.state_dict()))  # it is plain, and taken while the step is under way
        if step == stop:
            break
    if stop == 0:
        state = schedule_of(tmp_path, tokenizer, 8, planned).state_dict()
    again = schedule_of(tmp_path, tokenizer, 8, planned)
    again.load_state_dict(state)
    assert again.step == stop
    rest = [(step, uids(batch)) for step, batch in again.steps()]
    assert rest == whole[stop:]
    assert again.step == 10


def test_mid_epoch_resume_gives_the_rows_not_yet_seen(tmp_path: Path, tokenizer: PreTrainedTokenizerFast):
    """H-70: 8 rows, batch 2, shuffle, stop after 1: the remaining 6 are those not yet seen."""
    first = schedule_of(tmp_path, tokenizer, 8, trainer())
    _, batch = next(iter(first.steps()))
    again = schedule_of(tmp_path, tokenizer, 8, trainer())
    again.load_state_dict(first.state_dict())
    rest = [uid for _, later in again.steps() for uid in uids(later)]
    assert Counter(uids(batch) + rest) == Counter(f"0:{row}" for row in range(8))


def test_resume_at_an_epochs_end_goes_on_with_the_next(tmp_path: Path, tokenizer: PreTrainedTokenizerFast):
    """H-68: 4 steps an epoch, 2 epochs, save at 4, resume: 4 more."""
    first = schedule_of(tmp_path, tokenizer, 8, trainer(2))
    for step, _ in first.steps():
        if step == 4:
            break
    again = schedule_of(tmp_path, tokenizer, 8, trainer(2))
    again.load_state_dict(first.state_dict())
    assert [(step, batch.meta_info["epoch"]) for step, batch in again.steps()] == [(5, 1), (6, 1), (7, 1), (8, 1)]


def test_resume_at_the_budget_does_nothing(tmp_path: Path, tokenizer: PreTrainedTokenizerFast):
    """H-63: budget reached: no step, final step unchanged; a longer run goes on."""
    first = schedule_of(tmp_path, tokenizer, 8, trainer(9, 3))
    assert len(list(first.steps())) == 3
    for budget, more in ((3, 0), (2, 0), (5, 2)):
        again = schedule_of(tmp_path, tokenizer, 8, trainer(9, budget))
        again.load_state_dict(first.state_dict())
        assert len(list(again.steps())) == more
        assert again.step == 3 + more


def test_resume_twice_is_like_resuming_once(tmp_path: Path, tokenizer: PreTrainedTokenizerFast):
    whole = [uids(batch) for _, batch in schedule_of(tmp_path, tokenizer, 8, trainer(2)).steps()]
    seen, state = [], None
    for _ in range(8):
        schedule = schedule_of(tmp_path, tokenizer, 8, trainer(2))
        if state is not None:
            schedule.load_state_dict(state)
        _, batch = next(iter(schedule.steps()))
        seen.append(uids(batch))
        state = schedule.state_dict()
    assert seen == whole


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"train_batch_size": 4}, r"another setting \(data.train_batch_size: 2 then, 4 now\).*train_batch_size=2,"),
        ({"seed": 2, "shuffle": False}, r"\(data.shuffle: True then, False now; data.seed: 1 then, 2 now\)"),
        ({"rows": 10}, r"other training data \(prompts: 8 then, 10 now"),
        ({"rows": 10, "seed": 2}, r"other training data \(prompts: 8 then, 10 now; data.seed: 1 then"),
    ],
)
def test_resume_over_other_data_or_with_other_settings_is_refused(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast, change: dict[str, Any], told: str
):
    """What changed is told by its key, and not as the data where that is the same."""
    state = schedule_of(tmp_path, tokenizer, 8, trainer()).state_dict()
    keys = dict(change)
    other = schedule_of(tmp_path, tokenizer, keys.pop("rows", 8), trainer(), **keys)
    with pytest.raises(DataError, match=f"{told}.*resume_mode=disable"):
        other.load_state_dict(state)


# --- rollouts and follow ---------------------------------------------------------------------------------------------


def asked(tmp_path: Path, tokenizer: Any, n: int) -> DataProto:
    dataset = PromptDataset(write_prompts(tmp_path / "asked.parquet", [2, 3]), tokenizer, max_prompt_length=6)
    return rollouts(dataset.rows([0, 1]), n)


def answered(batch: DataProto, order: list[int]) -> DataProto:
    """What a rollout gives back: its own prompt columns, longer ones, and the names of the rows."""
    prompts = batch.select(columns.PROMPT)[order]
    ids = torch.cat([prompts.batch["input_ids"], torch.arange(len(order))[:, None]], 1)
    tensors = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "position_ids": torch.zeros_like(ids),
               "responses": ids[:, -1:]}  # fmt: skip
    return DataProto.from_dict(tensors, prompts.non_tensor_batch, {"metrics": {}})


def test_rollouts_repeat_prompts_side_by_side_and_number_the_rows(tmp_path: Path, tokenizer: PreTrainedTokenizerFast):
    batch = asked(tmp_path, tokenizer, 3)
    assert uids(batch) == ["0", "0", "0", "1", "1", "1"]
    assert batch.non_tensor_batch["rollout_id"].tolist() == [0, 1, 2, 3, 4, 5]
    assert batch.non_tensor_batch["rollout_id"].dtype == np.int64
    assert set(columns.PROMPT) <= set(batch.columns)


@pytest.mark.parametrize("order", [[0, 1, 2, 3], [3, 2, 1, 0], [0, 0, 0, 1, 2, 2, 3], [2, 0, 3, 1, 0]])
def test_follow_finds_each_rows_prompt(tmp_path: Path, tokenizer: PreTrainedTokenizerFast, order: list[int]):
    """A rollout may come back as several rows, in any order."""
    batch = asked(tmp_path, tokenizer, 2)
    generated = answered(batch, order)
    both = follow(batch, generated)
    assert len(both) == len(order)
    assert both.non_tensor_batch["rollout_id"].tolist() == order
    assert uids(both) == [str(number // 2) for number in order]
    expected = [batch.non_tensor_batch["raw_prompt"][number] for number in order]
    assert both.non_tensor_batch["raw_prompt"].tolist() == expected
    assert torch.equal(both.batch["input_ids"], generated.batch["input_ids"])
    assert set(both.columns) == set(batch.columns) | {"responses"}


def test_follow_takes_rollout_ids_of_either_kind(tmp_path: Path, tokenizer: PreTrainedTokenizerFast):
    batch = asked(tmp_path, tokenizer, 2)
    generated = answered(batch, [1, 0, 3, 2]).drop(["rollout_id"])
    tensor = DataProto.from_dict(tensors={"rollout_id": torch.tensor([1, 0, 3, 2])})
    assert uids(follow(batch, generated.union(tensor))) == ["0", "0", "1", "1"]


def test_follow_refuses_strays_and_losses(tmp_path: Path, tokenizer: PreTrainedTokenizerFast):
    batch = asked(tmp_path, tokenizer, 2)
    with pytest.raises(DataError, match=r"1 of 4 rollouts came back without a row \(rollout_id \[2\]\)"):
        follow(batch, answered(batch, [0, 1, 3]))
    with pytest.raises(DataError, match=r"rollout_id \[3\], which the batch does not have"):
        follow(batch[[0, 1, 2]], answered(batch, [0, 1, 2, 3]))
