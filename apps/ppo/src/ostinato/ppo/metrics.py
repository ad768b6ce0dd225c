"""The numbers of a step that can be read off its batch and its clock.

Pure functions; each value says how it reduces, and a mean carries what it was taken over (rows or tokens).
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from ostinato.protocol import DataProto, Metric

READS = (
    "attention_mask",
    "response_mask",
    "token_level_scores",
    "token_level_rewards",
    "advantages",
    "returns",
    "values",
    "finish_reason",
)
"""Columns that `batch_metrics` reads; those that are not there leave their metrics out."""


def batch_metrics(batch: DataProto, max_response_length: int) -> dict[str, Metric]:
    """Return the metrics of a scored batch, with those that its stages have already put into its `meta_info`.

    Args:
        batch: B rows; reads `READS`. Responses fill the last columns of `attention_mask (B, P+R)`.
        max_response_length: tokens after which a response counts as cut off, where no `finish_reason` says so.

    Returns:
        `response_length/*`, `prompt_length/*`, `response/aborted_ratio`, `perf/total_num_tokens`,
        `critic/score/*` over rows as they were scored, `critic/rewards/*` over the rows of which rejection has left a
        token, `critic/{advantages,returns,values}/*` over policy tokens, `critic/vf_explained_var`, `training/epoch`,
        and the batch's own.
    """
    data = batch.get([name for name in READS if name in batch.columns])
    assert data.batch is not None
    attention, mask = data.batch["attention_mask"].bool(), data.batch["response_mask"].bool()
    width = attention.shape[1] - mask.shape[1]
    metrics = dict(batch.metrics)
    metrics |= length_metrics(
        attention[:, :width].sum(-1),
        attention[:, width:].sum(-1),
        prompt_limit=width,
        response_limit=max_response_length,
        finish_reason=data.non_tensor_batch.get("finish_reason"),
    )
    metrics["perf/total_num_tokens"] = Metric.sum(int(attention.sum()))
    if (tokens := data.batch.get("token_level_scores")) is not None:
        # Not under the mask: rejection makes it smaller, but the policy's answer was as good as it was.
        metrics |= spread("critic/score", tokens.sum(-1))
    if (tokens := data.batch.get("token_level_rewards")) is not None:
        metrics |= spread("critic/rewards", torch.where(mask, tokens, 0).sum(-1)[mask.any(-1)])
    for name in ("advantages", "returns", "values"):
        if (tokens := data.batch.get(name)) is not None:
            metrics |= spread(f"critic/{name}", tokens[mask])
    values, returns = data.batch.get("values"), data.batch.get("returns")
    if values is not None and returns is not None:
        explained = explained_variance(values[mask], returns[mask])
        metrics["critic/vf_explained_var"] = Metric.mean(explained, weight=int(mask.sum()))
    if "epoch" in batch.meta_info:
        metrics["training/epoch"] = Metric.max(batch.meta_info["epoch"])
    return metrics


def spread(name: str, values: torch.Tensor) -> dict[str, Metric]:
    """Return mean, max and min of values.

    Args:
        name: what comes before `/mean`, `/max`, `/min`.
        values: (N,) any number type; an empty one gives no metric.
    """
    if values.numel() == 0:
        return {}
    values = values.double()
    return {
        f"{name}/mean": Metric.mean(values.mean(), weight=values.numel()),
        f"{name}/max": Metric.max(values.max()),
        f"{name}/min": Metric.min(values.min()),
    }


def length_metrics(
    prompt_lengths: torch.Tensor,
    response_lengths: torch.Tensor,
    *,
    prompt_limit: int,
    response_limit: int,
    finish_reason: np.ndarray | None = None,
) -> dict[str, Metric]:
    """Return `prompt_length/*`, `response_length/*` and `response/aborted_ratio`.

    A response counts as cut off where its `finish_reason` is `length`: the context may end before the response limit.
    Without that column, where it is as long as the limit.

    Args:
        prompt_lengths: (B,) tokens.
        response_lengths: (B,) tokens, tool output included.
        prompt_limit: tokens of a prompt at most.
        response_limit: tokens of a response at most.
        finish_reason: (B,) object, `stop`, `length` or `abort`.
    """
    rows = len(response_lengths)
    if rows == 0:
        return {}
    if finish_reason is None:
        cut, aborted = (response_lengths >= response_limit).cpu().numpy(), (response_lengths == 0).cpu().numpy()
    else:
        cut, aborted = finish_reason == "length", finish_reason == "abort"
    return {
        **spread("prompt_length", prompt_lengths),
        **spread("response_length", response_lengths),
        "prompt_length/clip_ratio": Metric.mean((prompt_lengths >= prompt_limit).double().mean(), weight=rows),
        "response_length/clip_ratio": Metric.mean(float(np.mean(cut)), weight=rows),
        "response/aborted_ratio": Metric.mean(float(np.mean(aborted)), weight=rows),
    }


def explained_variance(values: torch.Tensor, returns: torch.Tensor) -> float:
    """Return how much of the returns' variance the values explain: 1 − var(returns − values) / var(returns).

    Args:
        values: (N,) the critic's.
        returns: (N,) what they were to predict.

    Returns:
        At most 1; 0 where the returns do not vary or there are fewer than two.
    """
    if values.numel() < 2:
        return 0.0
    returns = returns.double()
    variance = returns.var()
    return float(1 - (returns - values.double()).var() / variance) if variance > 0 else 0.0


def seqlen_metrics(lengths: np.ndarray, num_ranks: int, balanced: np.ndarray | None = None) -> dict[str, Metric]:
    """Return `global_seqlen/*`: tokens a rank, as the rows came and as they were dealt.

    Args:
        lengths: (B,) tokens of each row, in the order in which they came.
        num_ranks: ranks that the rows are split over, in order, sizes differing by at most one.
        balanced: (B,) the same lengths in the order in which they are dealt; None where that is the same.
    """
    before = np.asarray([part.sum() for part in np.array_split(lengths, num_ranks)])
    after = before if balanced is None else np.asarray([part.sum() for part in np.array_split(balanced, num_ranks)])
    values = {
        "min": before.min(),
        "max": before.max(),
        "minmax_diff": before.max() - before.min(),
        "balanced_min": after.min(),
        "balanced_max": after.max(),
        "mean": before.mean(),
    }
    return {f"global_seqlen/{name}": Metric.mean(float(value)) for name, value in values.items()}


def timing_metrics(
    timings: Mapping[str, float], *, num_tokens: float, num_response_tokens: float, num_processes: int
) -> dict[str, Metric]:
    """Return `timing_s/*`, `timing_per_token_ms/*` and what follows from the whole step's time.

    Args:
        timings: seconds by stage; `step` is the whole step, with everything in it.
        num_tokens: tokens of prompts and responses.
        num_response_tokens: tokens of responses; `gen` is counted against these.
        num_processes: GPUs, or processes on a CPU.

    Returns:
        Besides the timings `perf/time_per_step` and `perf/throughput` (tokens / (seconds × processes)).
    """
    metrics = {f"timing_s/{name}": Metric.mean(seconds) for name, seconds in timings.items()}
    for name, seconds in timings.items():
        tokens = num_response_tokens if name == "gen" else num_tokens
        if tokens > 0:
            metrics[f"timing_per_token_ms/{name}"] = Metric.mean(1000 * seconds / tokens)
    step = timings.get("step", 0.0)
    if step > 0:
        metrics["perf/time_per_step"] = Metric.mean(step)
        if num_tokens > 0:
            metrics["perf/throughput"] = Metric.mean(num_tokens / (step * num_processes))
    return metrics
