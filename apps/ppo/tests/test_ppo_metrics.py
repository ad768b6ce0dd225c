"""The metrics of a step, from its batch and its clock."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from ostinato.ppo.metrics import (
    batch_metrics,
    explained_variance,
    length_metrics,
    seqlen_metrics,
    spread,
    timing_metrics,
)
from ostinato.protocol import DataProto, Metric, merge_metrics


def values(metrics: dict[str, Metric]) -> dict[str, Any]:
    return {name: metric.value for name, metric in metrics.items()}


def scored_batch() -> DataProto:
    """Two rows, prompt width 3, response width 4; tool output in the second row."""
    mask = torch.tensor([[1, 1, 0, 0], [1, 0, 1, 0]])
    tokens = torch.arange(8.0).reshape(2, 4)
    return DataProto.from_dict(
        tensors={
            "attention_mask": torch.tensor([[0, 1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 1, 0]]),
            "response_mask": mask,
            "token_level_scores": torch.tensor([[0.0, 1, 0, 0], [0, 0, 3, 0]]),
            "token_level_rewards": torch.tensor([[-1.0, 1, 0, 0], [0, 0, 3, 0]]),
            "advantages": torch.where(mask.bool(), tokens, 99),
            "returns": torch.where(mask.bool(), tokens, torch.nan),
            "values": torch.where(mask.bool(), tokens * 2, -99),
        },
        meta_info={"epoch": 2, "metrics": {"reward/errors": Metric.sum(3)}},
    )


def test_batch_metrics_read_off_a_hand_table():
    found = values(batch_metrics(scored_batch(), max_response_length=3))
    assert found == pytest.approx(
        {
            "critic/score/mean": 2, "critic/score/max": 3, "critic/score/min": 1,
            "critic/rewards/mean": 1.5, "critic/rewards/max": 3, "critic/rewards/min": 0,
            "critic/advantages/mean": 2.75, "critic/advantages/max": 6, "critic/advantages/min": 0,
            "critic/returns/mean": 2.75, "critic/returns/max": 6, "critic/returns/min": 0,
            "critic/values/mean": 5.5, "critic/values/max": 12, "critic/values/min": 0,
            "critic/vf_explained_var": 0.0,
            "prompt_length/mean": 2.5, "prompt_length/max": 3, "prompt_length/min": 2, "prompt_length/clip_ratio": 0.5,
            "response_length/mean": 2.5, "response_length/max": 3, "response_length/min": 2,
            "response_length/clip_ratio": 0.5, "response/aborted_ratio": 0,
            "perf/total_num_tokens": 10, "training/epoch": 2, "reward/errors": 3,
        }
    )  # fmt: skip


def test_batch_metrics_leave_out_what_is_not_there():
    batch = scored_batch().select(["attention_mask", "response_mask"])
    found = batch_metrics(batch, max_response_length=4)
    assert not any(name.startswith("critic/") for name in found)
    assert "response_length/mean" in found


def test_batch_metrics_of_parts_merge_to_those_of_the_whole():
    """H-77: .8 over 100 and .6 over 200 give .6667: each mean carries what it was taken over."""
    batch = scored_batch()
    parts = [batch_metrics(batch[[row]].with_meta(metrics={}), 3) for row in range(2)]
    whole = values(batch_metrics(batch.with_meta(metrics={}), 3))
    merged = values(merge_metrics(*parts))
    del whole["critic/vf_explained_var"], merged["critic/vf_explained_var"]
    assert merged == pytest.approx(whole)
    assert values(merge_metrics({"a": Metric.mean(0.8, 100)}, {"a": Metric.mean(0.6, 200)}))["a"] == pytest.approx(
        2 / 3
    )


def test_clip_ratio_counts_what_the_context_cut():
    """H-45: context 8, response limit 6, prompts 2 3 4, none ends: lengths 6 5 4, all cut."""
    reasons = np.asarray(["length"] * 3, dtype=object)
    found = values(
        length_metrics(
            torch.tensor([2, 3, 4]), torch.tensor([6, 5, 4]), prompt_limit=8, response_limit=6, finish_reason=reasons
        )
    )
    assert found["response_length/clip_ratio"] == 1.0
    assert found["response_length/mean"] == 5
    assert found["prompt_length/clip_ratio"] == 0.0


def test_response_that_ends_at_the_limit_is_not_cut():
    reasons = np.asarray(["stop", "length", "abort"], dtype=object)
    lengths = torch.tensor([6, 6, 1])
    found = values(length_metrics(lengths, lengths, prompt_limit=9, response_limit=6, finish_reason=reasons))
    assert found["response_length/clip_ratio"] == pytest.approx(1 / 3)
    assert found["response/aborted_ratio"] == pytest.approx(1 / 3)
    without = values(length_metrics(lengths, lengths, prompt_limit=9, response_limit=6))
    assert without["response_length/clip_ratio"] == pytest.approx(2 / 3)


def test_empty_batches_give_no_lengths():
    empty = torch.zeros(0, dtype=torch.int64)
    assert length_metrics(empty, empty, prompt_limit=1, response_limit=1) == {}
    assert spread("x", torch.zeros(0)) == {}


def test_explained_variance_limits():
    returns = torch.tensor([1.0, 2, 3])
    assert explained_variance(returns, returns) == 1
    assert explained_variance(returns + 5, returns) == 1
    assert explained_variance(torch.zeros(3), returns) == 0
    assert explained_variance(-returns, returns) == -3
    assert explained_variance(returns, torch.ones(3)) == 0
    assert explained_variance(returns[:1], returns[:1]) == 0


def test_sequence_lengths_by_rank():
    found = values(seqlen_metrics(np.asarray([1, 2, 3, 10]), 2, balanced=np.asarray([10, 1, 2, 3])))
    assert found == {
        "global_seqlen/min": 3, "global_seqlen/max": 13, "global_seqlen/minmax_diff": 10,
        "global_seqlen/balanced_min": 5, "global_seqlen/balanced_max": 11, "global_seqlen/mean": 8,
    }  # fmt: skip


def test_timing_metrics_count_the_whole_step():
    found = values(
        timing_metrics(
            {"gen": 2.0, "update_actor": 3.0, "step": 10.0}, num_tokens=4000, num_response_tokens=1000, num_processes=4
        )
    )
    assert found == pytest.approx(
        {
            "timing_s/gen": 2, "timing_s/update_actor": 3, "timing_s/step": 10,
            "timing_per_token_ms/gen": 2.0, "timing_per_token_ms/update_actor": 0.75, "timing_per_token_ms/step": 2.5,
            "perf/time_per_step": 10, "perf/throughput": 100,
        }
    )  # fmt: skip


def test_timing_metrics_without_tokens():
    found = timing_metrics({"step": 1.0}, num_tokens=0, num_response_tokens=0, num_processes=1)
    assert set(found) == {"timing_s/step", "perf/time_per_step"}
