"""The validation pass over batches of different data sources."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from ostinato.ppo.dump import RolloutDump
from ostinato.ppo.testing import make_tokenizer
from ostinato.ppo.validation import Validation, _statistics
from ostinato.protocol import DataProto


def scored(source, scores, **extra):
    rows = len(scores)
    return DataProto.from_dict(
        tensors={"token_level_scores": torch.tensor(scores)[:, None].float()},
        non_tensors={
            "uid": [f"{source}-{row}" for row in range(rows)],
            "data_source": [source] * rows,
            "reward/score": np.asarray(scores, dtype=np.float64),
            **{f"reward/{name}": np.asarray(values) for name, values in extra.items()},
        },
    )


def test_validation_statistics_over_batches_with_unlike_results():
    metrics = _statistics([scored("a", [1.0, 0.0], acc=[1.0, 0.0]), scored("b", [0.5, 0.5, 0.5])])
    assert metrics["val-core/a/acc/mean@1"].value == 0.5
    assert metrics["val-core/b/reward/mean@1"].value == 0.5
    assert metrics["val-aux/a/reward/mean@1"].value == pytest.approx(0.5)
    assert "val-core/b/acc/mean@1" not in metrics


def test_validation_statistics_vote_by_prediction():
    part = scored("a", [1.0, 1.0, 0.0], pred=np.array(["7", "7", "3"], dtype=object))
    part.non_tensor_batch["uid"][:] = "a-0"
    metrics = _statistics([part, scored("b", [1.0])])
    assert metrics["val-core/a/reward/maj@3"].value > metrics["val-core/a/reward/mean@3"].value


def test_validation_rows_of_all_batches_draw_from_streams_of_their_own():
    """A stream is keyed by step and rollout_id, so no two rows of one validation may have the same one."""
    seen: list[int] = []

    class Actor:
        def generate_sequences(self, prompts):
            seen.extend(prompts.non_tensor_batch["rollout_id"].tolist())
            mask = torch.ones(len(prompts), 2, dtype=torch.int64)
            return prompts.union(DataProto.from_dict({"responses": mask, "response_mask": mask}))

    def prompts(count):
        ids = torch.ones(count, 3, dtype=torch.int64)
        return DataProto.from_dict(
            {"input_ids": ids, "attention_mask": ids, "position_ids": ids},
            {"uid": [f"{count}-{row}" for row in range(count)], "data_source": ["a"] * count},
        )

    def reward(batch):
        return DataProto.from_dict({"token_level_scores": torch.ones(len(batch), 2) / 2})

    validation = Validation.__new__(Validation)
    validation.loader, validation.n, validation.num_samples = [prompts(3), prompts(2)], 2, 0  # pyright: ignore[reportAttributeAccessIssue]
    validation.dump = None
    metrics = validation.run(7, Actor(), reward)
    assert sorted(seen) == list(range(10))
    assert metrics["val-core/a/reward/mean@2"].value == 1.0


def test_validation_answers_are_dumped_where_asked(tmp_path):
    """All batches of a validation in one file; what the statistics do not read is fetched for it."""
    tokenizer = make_tokenizer()

    class Actor:
        def generate_sequences(self, prompts):
            words = torch.full((len(prompts), 2), 6)
            mask = torch.ones(len(prompts), 5, dtype=torch.int64)
            return prompts.drop(["attention_mask"]).union(
                DataProto.from_dict(
                    {"prompts": prompts.batch["input_ids"], "responses": words, "response_mask": mask[:, :2],
                     "attention_mask": mask}
                )
            )  # fmt: skip

    def prompts(count):
        ids = torch.full((count, 3), 7)
        return DataProto.from_dict(
            {"input_ids": ids, "attention_mask": ids // 7, "position_ids": ids},
            {"uid": [f"{count}-{row}" for row in range(count)], "data_source": ["a"] * count,
             "reward_model": [{"ground_truth": "w9"}] * count},
        )  # fmt: skip

    def reward(batch):
        return DataProto.from_dict({"token_level_scores": torch.ones(len(batch), 2) / 2})

    validation = Validation.__new__(Validation)
    validation.loader, validation.n, validation.num_samples = [prompts(3), prompts(2)], 2, 0  # pyright: ignore[reportAttributeAccessIssue]
    validation.dump = RolloutDump(tmp_path, tokenizer)
    validation.run(7, Actor(), reward)
    rows = [json.loads(line) for line in (tmp_path / "7.jsonl").read_text().splitlines()]
    assert len(rows) == 10
    assert rows[0] == {
        "input": "w1 w1 w1", "output": "w0 w0", "gts": "w9", "score": 1.0, "step": 7, "uid": "3-0", "rollout_id": 0,
        "data_source": "a", "response_mask": [1, 1],
    }  # fmt: skip
