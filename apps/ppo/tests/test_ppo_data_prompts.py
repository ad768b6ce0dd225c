"""Prompts: templates, filter, truncation, padding."""

from __future__ import annotations

import json
import logging
import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from ostinato.ppo import prompts
from ostinato.ppo.data import PromptDataset, load_tokenizer, pad_token_id
from ostinato.ppo.errors import DataError
from ostinato.ppo.prompts import truncate
from ostinato.ppo.testing import WORDS, chat, make_tokenizer, words, write_prompts, write_rows
from ostinato.protocol import DataProto


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return make_tokenizer()


def uids(batch: DataProto) -> list[str]:
    return batch.non_tensor_batch["uid"].tolist()


def test_prompts_are_left_padded_with_what_the_rollout_sends(tmp_path: Path, tokenizer: PreTrainedTokenizerFast):
    file = write_prompts(tmp_path / "a.parquet", [2, 4])
    batch = PromptDataset(file, tokenizer, max_prompt_length=8).rows([1, 0])
    ids = {name: batch.batch[name].tolist() for name in ("input_ids", "attention_mask", "position_ids")}
    w = WORDS.index("w0")
    assert ids["input_ids"] == [[1, 1, 3, w + 1, w + 2, w + 3, w + 4, 4], [1, 1, 1, 1, 3, w, w + 1, 4]]
    assert ids["attention_mask"] == [[0, 0, 1, 1, 1, 1, 1, 1], [0, 0, 0, 0, 1, 1, 1, 1]]
    assert ids["position_ids"] == [[0, 0, 0, 1, 2, 3, 4, 5], [0, 0, 0, 0, 0, 1, 2, 3]]
    assert {batch.batch[name].dtype for name in ids} == {torch.int64}
    assert set(batch.columns) == {*ids, "uid", "data_source", "reward_model", "extra_info", "raw_prompt"}


def test_prompts_carry_what_belongs_to_them(tmp_path: Path, tokenizer: PreTrainedTokenizerFast):
    row = {"prompt": chat("w1"), "data_source": "s", "reward_model": {"ground_truth": "7"}, "extra_info": {"index": 3}}
    batch = PromptDataset(write_rows(tmp_path / "a.parquet", [row]), tokenizer).rows([0], epoch=2)
    found = {name: column[0] for name, column in batch.non_tensor_batch.items()}
    assert found == {
        "uid": "2:0", "data_source": "s", "reward_model": {"ground_truth": "7"}, "extra_info": {"index": 3},
        "raw_prompt": chat("w1"),
    }  # fmt: skip


def test_prompts_without_further_columns_work(tmp_path: Path, tokenizer: PreTrainedTokenizerFast):
    """R-322: extra_info missing; the data source is then the file's name."""
    batch = PromptDataset(write_prompts(tmp_path / "mine.parquet", [2]), tokenizer).rows([0])
    assert batch.non_tensor_batch["data_source"].tolist() == ["mine"]
    assert batch.non_tensor_batch["extra_info"].tolist() == [None]


@pytest.mark.parametrize(
    ("how", "kept"), [("left", [3, 4, 5, 6]), ("right", [1, 2, 3, 4]), ("middle", [1, 2, 5, 6]), ("error", None)]
)
def test_truncation_cuts_the_named_end(how: Any, kept: list[int] | None):
    """H-39: ids 1..6, max 4."""
    if kept is None:
        with pytest.raises(DataError, match=r"6 tokens, data\.max_prompt_length is 4"):
            truncate([1, 2, 3, 4, 5, 6], 4, how)
    else:
        assert list(truncate([1, 2, 3, 4, 5, 6], 4, how)) == kept


@given(st.integers(0, 30), st.integers(1, 20), st.sampled_from(["left", "right", "middle"]))
def test_truncation_keeps_order_and_length(length: int, limit: int, how: Any):
    kept = list(truncate(list(range(length)), limit, how))
    assert len(kept) == min(length, limit)
    assert kept == sorted(set(kept))
    if length <= limit:
        assert kept == list(range(length))


@pytest.mark.parametrize("how", ["left", "right", "middle"])
def test_truncation_cuts_ids_mask_and_positions_alike(tmp_path: Path, tokenizer: PreTrainedTokenizerFast, how: Any):
    """H-39, H-41: the ids that the engine gets are the padded ids without padding."""
    file = write_prompts(tmp_path / "a.parquet", [6, 1])
    dataset = PromptDataset(file, tokenizer, max_prompt_length=5, truncation=how)
    batch = dataset.rows([0, 1])
    for row in range(2):
        mask = batch.batch["attention_mask"][row].bool()
        assert batch.batch["input_ids"][row][mask].tolist() == dataset.token_ids[row].tolist()
        assert batch.batch["position_ids"][row][mask].tolist() == list(range(len(dataset.token_ids[row])))
    whole = [3, *(WORDS.index(f"w{number}") for number in range(6)), 4]
    assert dataset.token_ids[0].tolist() == list(truncate(whole, 5, how))


def test_truncation_error_names_the_row(tmp_path: Path, tokenizer: PreTrainedTokenizerFast):
    file = write_prompts(tmp_path / "a.parquet", [2, 7])
    with pytest.raises(DataError, match=r"row 1 of .*a\.parquet: a prompt has 9 tokens, data\.max_prompt_length is 8"):
        PromptDataset(file, tokenizer, max_prompt_length=8)


def test_filter_counts_what_the_rollout_sends(tmp_path: Path, tokenizer: PreTrainedTokenizerFast):
    """H-40: 10-token text, 8-token tool schema, limit 16: filtered out, 20 with the template's own two."""
    tools = [{"type": "function", "function": {"name": "f"}}]
    rows = [{"prompt": chat(words(10)), "tools": json.dumps(tools)}, {"prompt": chat(words(10)), "tools": None}]
    dataset = PromptDataset(
        write_rows(tmp_path / "a.parquet", rows), tokenizer, max_prompt_length=16, filter_overlong_prompts=True
    )
    assert dataset.lengths == [20, 12]
    assert uids(dataset.rows([0])) == ["1"]


@pytest.mark.parametrize("limit", [11, 12, 13])
def test_filter_is_exact_at_the_limit_generation_prompt_included(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast, limit: int, caplog: pytest.LogCaptureFixture
):
    """H-40."""
    caplog.set_level(logging.INFO)
    file = write_prompts(tmp_path / "a.parquet", [10, 3])
    dataset = PromptDataset(file, tokenizer, max_prompt_length=limit, filter_overlong_prompts=True)
    assert len(dataset) == (1 if limit < 12 else 2)
    assert ("1 of 2 prompts have more than 11 tokens" in caplog.text) == (limit < 12)


def test_filter_that_leaves_nothing_is_an_error(tmp_path: Path, tokenizer: PreTrainedTokenizerFast):
    with pytest.raises(DataError, match="no prompt is left of 1 rows"):
        PromptDataset(
            write_prompts(tmp_path / "a.parquet", [9]), tokenizer, max_prompt_length=4, filter_overlong_prompts=True
        )


def test_pad_is_eos_where_the_tokenizer_has_none_and_masks_come_from_lengths(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    """H-42: warned once; an eos inside the prompt is a token like any other."""
    monkeypatch.setattr(prompts, "_warned_pad", set())
    without = make_tokenizer(pad_token=None)
    file = write_rows(tmp_path / "a.parquet", [{"prompt": chat("<eos> w1 <eos>")}])
    for _ in range(2):
        batch = PromptDataset(file, without, max_prompt_length=8).rows([0])
    eos = WORDS.index("<eos>")
    assert batch.batch["input_ids"].tolist() == [[eos, eos, eos, 3, eos, WORDS.index("w1"), eos, 4]]
    assert batch.batch["attention_mask"].tolist() == [[0, 0, 0, 1, 1, 1, 1, 1]]
    assert [record.getMessage() for record in caplog.records if "pad" in record.getMessage()] == [
        "the tokenizer of 'tiny-model' has no pad token; its eos token pads"
    ]
    assert without.pad_token_id is None  # the tokenizer is left as it is


def test_tokenizer_without_pad_and_eos_is_refused():
    with pytest.raises(DataError, match="neither a pad nor an eos token"):
        pad_token_id(make_tokenizer(pad_token=None, eos_token=None))


def test_messages_without_a_chat_template_are_refused(tmp_path: Path):
    """H-43: the error names the column and the model."""
    file = write_prompts(tmp_path / "a.parquet", [2])
    with pytest.raises(DataError, match=r"column 'prompt' holds chat messages, but .* of 'tiny-model' has no chat"):
        PromptDataset(file, make_tokenizer(chat_template=None))


def test_plain_text_needs_no_template(tmp_path: Path):
    file = write_rows(tmp_path / "a.parquet", [{"question": "w1 w2"}])
    dataset = PromptDataset(file, make_tokenizer(chat_template=None), prompt_key="question")
    assert dataset.token_ids[0].tolist() == [WORDS.index("w1"), WORDS.index("w2")]
    assert dataset.rows([0]).non_tensor_batch["raw_prompt"].tolist() == ["w1 w2"]


def test_template_options_and_refusals_reach_the_template(tmp_path: Path):
    template = "{% if raise %}{{ raise_exception('not like this') }}{% endif %}{{ word }} w1"
    strict = make_tokenizer(chat_template=template)
    file = write_prompts(tmp_path / "a.parquet", [2])
    dataset = PromptDataset(file, strict, chat_template_kwargs={"word": "w9"})
    assert dataset.token_ids[0].tolist() == [WORDS.index("w9"), WORDS.index("w1")]
    with pytest.raises(DataError, match=r"column 'prompt': the chat template of 'tiny-model' refuses .*not like this"):
        PromptDataset(file, strict, chat_template_kwargs={"raise": True})


def test_keys_that_parquet_fills_with_none_do_not_reach_the_template(tmp_path: Path):
    rows = [{"prompt": [{"role": "user", "content": "w1"}, {"role": "assistant", "content": "w2", "note": "w3"}]}]
    template = "{% for message in messages %}{{ message.note is defined }} {% endfor %}"
    dataset = PromptDataset(write_rows(tmp_path / "a.parquet", rows), make_tokenizer(chat_template=template))
    assert len(dataset.token_ids[0]) == 2


@pytest.mark.parametrize(
    ("rows", "error"),
    [([{"text": "w1"}], "has no column 'prompt' .*it has text"), ([{"prompt": ""}], "row 0: .*has no tokens")],
)
def test_unusable_files_are_refused(tmp_path: Path, tokenizer: PreTrainedTokenizerFast, rows: Any, error: str):
    with pytest.raises(DataError, match=error):
        PromptDataset(write_rows(tmp_path / "a.parquet", rows), tokenizer)


def test_files_that_are_none_are_refused(tmp_path: Path, tokenizer: PreTrainedTokenizerFast):
    with pytest.raises(DataError, match="there is no file"):
        PromptDataset(str(tmp_path / "none.parquet"), tokenizer)
    (tmp_path / "text.parquet").write_text("not parquet at all")
    with pytest.raises(DataError, match="cannot be read as parquet"):
        PromptDataset(str(tmp_path / "text.parquet"), tokenizer)


def test_several_files_and_a_maximum(tmp_path: Path, tokenizer: PreTrainedTokenizerFast):
    files = [write_prompts(tmp_path / f"{name}.parquet", [2, 2]) for name in "ab"]
    dataset = PromptDataset(files, tokenizer, max_samples=3)
    assert dataset.rows([0, 1, 2]).non_tensor_batch["data_source"].tolist() == ["a", "a", "b"]
    assert uids(dataset.rows([2])) == ["2"]


def test_load_tokenizer_names_what_is_missing(tmp_path: Path, tokenizer: PreTrainedTokenizerFast):
    tokenizer.save_pretrained(tmp_path / "model")
    model = SimpleNamespace(resolved_tokenizer_path=str(tmp_path / "model"), trust_remote_code=False)
    assert load_tokenizer(model).pad_token_id == 1
    model.resolved_tokenizer_path = str(tmp_path / "none")
    with pytest.raises(DataError, match="no tokenizer could be loaded from"):
        load_tokenizer(model)


REAL = Path(os.environ.get("OSTINATO_GSM8K", Path(__file__).parents[3].parent / "shared" / "data" / "gsm8k"))


@pytest.mark.skipif(not (REAL / "train.jsonl").is_file(), reason="the real set is not here (OSTINATO_GSM8K)")
def test_gsm8k_is_read_in_seconds(tmp_path: Path, tokenizer: PreTrainedTokenizerFast, caplog: pytest.LogCaptureFixture):
    from ostinato.ppo.prepare import gsm8k

    caplog.set_level(logging.INFO)
    gsm8k.prepare(tmp_path, REAL)
    start = time.monotonic()
    dataset = PromptDataset(str(tmp_path / "train.parquet"), tokenizer)
    assert time.monotonic() - start < 30
    assert len(dataset) == 7473
    assert "tokenised 7473 prompts in" in caplog.text
