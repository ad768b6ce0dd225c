"""Rollout dumps: what stands in a row, and what a folder that cannot be written costs."""

from __future__ import annotations

import json
import logging
from typing import Any

import numpy as np
import pytest
import torch

from ostinato.ppo.config import TrainerConfig
from ostinato.ppo.dump import RolloutDump, observers
from ostinato.ppo.testing import make_tokenizer
from ostinato.protocol import DataProto


def rolled_out(**more: Any) -> DataProto:
    """Two rows, P = 3, R = 4: prompts of 2 and 3 tokens, responses of 4 (two of them a tool's) and 0."""
    words = torch.tensor([[1, 6, 7], [8, 9, 10]])
    return DataProto.from_dict(
        tensors={
            "prompts": words,
            "responses": torch.tensor([[11, 12, 13, 2], [1, 1, 1, 1]]),
            "attention_mask": torch.tensor([[0, 1, 1, 1, 1, 1, 1], [1, 1, 1, 0, 0, 0, 0]]),
            "response_mask": torch.tensor([[1, 0, 0, 1], [0, 0, 0, 0]]),
            "token_level_scores": torch.tensor([[0.0, 0, 0, 0.1], [0, 0, 0, 0]]),
            "old_log_probs": torch.tensor([[-0.1, 0, 0, -1.5], [0, 0, 0, 0]]),
            "advantages": torch.ones(2, 4),
            **more.pop("tensors", {}),
        },
        non_tensors={
            "uid": ["a", "b"],
            "rollout_id": np.arange(2),
            "reward_model": [{"ground_truth": np.asarray([7, 8])}, {"ground_truth": "x"}],
            **more,
        },
        meta_info={"global_step": 3},
    )


def dumped(folder: Any, batch: DataProto) -> list[dict[str, Any]]:
    RolloutDump(folder, make_tokenizer())(batch)
    return [json.loads(line) for line in (folder / "3.jsonl").read_text(encoding="utf-8").splitlines()]


def test_dump_of_a_step_holds_texts_scores_and_lists(tmp_path):
    first, second = dumped(tmp_path / "made" / "here", rolled_out(tensors={"reward_baselines": torch.tensor([0.5, 0])}))
    assert first == {
        "input": "w0 w1", "output": "w5 w6 w7", "gts": [7, 8], "score": 0.1, "step": 3, "uid": "a", "rollout_id": 0,
        "reward_baseline": 0.5, "response_mask": [1, 0, 0, 1], "old_log_probs": [-0.1, 0.0, 0.0, -1.5],
    }  # fmt: skip
    assert (second["input"], second["output"], second["response_mask"]) == ("w2 w3 w4", "", [])
    assert [path.name for path in (tmp_path / "made" / "here").iterdir()] == ["3.jsonl"]


@pytest.mark.parametrize("text", ["é 漢字 \n \u2028 \U0001f600", "half a pair \ud800", '"quoted"\\', "\x00"])
def test_dump_keeps_what_the_reward_function_returned(tmp_path, text):
    said = np.array([text, None], dtype=object)
    first, second = dumped(tmp_path, rolled_out(**{"reward/pred": said, "reward/acc": np.array([np.nan, 1.0])}))
    assert (first["pred"], first["acc"]) == (text, None)
    assert (second["pred"], second["acc"]) == (None, 1.0)


def test_dump_keeps_its_own_score_where_the_function_has_a_key_of_that_name(tmp_path):
    """`reward/score` is the score before a manager shaped it; training takes the shaped one."""
    first, _ = dumped(tmp_path, rolled_out(**{"reward/score": np.array([1.0, 0.0]), "reward/step": np.ones(2)}))
    assert (first["score"], first["step"]) == (0.1, 3)


def test_dump_of_no_rows_is_an_empty_file(tmp_path):
    assert dumped(tmp_path, rolled_out()[[]]) == []


def test_dump_replaces_the_file_of_a_step_that_is_done_again(tmp_path):
    RolloutDump(tmp_path, make_tokenizer())(rolled_out())
    assert len(dumped(tmp_path, rolled_out()[:1])) == 1


def test_dump_that_cannot_be_written_costs_one_warning(tmp_path, caplog):
    (tmp_path / "taken").write_text("")
    dump = RolloutDump(tmp_path / "taken", make_tokenizer())
    with caplog.at_level(logging.WARNING):
        dump(rolled_out())
        dump(rolled_out())
    assert len(caplog.records) == 1
    assert str(tmp_path / "taken") in caplog.text


def test_dump_reads_no_other_columns():
    seen: list[str] = []

    class Remote(DataProto):
        def get(self, columns=None):
            seen.extend(columns or ())
            raise FileNotFoundError

    batch = rolled_out()
    remote = Remote(batch.batch, batch.non_tensor_batch, batch.meta_info)
    with pytest.raises(FileNotFoundError):
        RolloutDump("/nowhere", make_tokenizer())(remote)
    assert "advantages" not in seen
    assert {"prompts", "uid", "old_log_probs"} <= set(seen)


def test_nothing_is_dumped_unless_asked():
    assert observers(TrainerConfig(), make_tokenizer()) == {}
    assert list(observers(TrainerConfig(rollout_data_dir="folder"), make_tokenizer())) == ["dump_rollout_generations"]
