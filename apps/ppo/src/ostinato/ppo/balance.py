"""Which rows go to which rank, and into which mini-batch.

Mini-batches are cut from the driver's row order before rows are dealt to ranks, so the rows of an optimizer step, and with
them its gradient, do not depend on how many ranks there are.
"""

from __future__ import annotations

import numpy as np
import torch

from ostinato.protocol import DataProto, Metric
from ostinato.protocol.partition import balanced_partition


def balance(batch: DataProto, dp_size: int, num_mini_batches: int, *, enabled: bool = True) -> DataProto:
    """Order rows so that every rank gets about the same number of tokens in every mini-batch.

    Rows of mini-batch k are rows `k*B/M … (k+1)*B/M` of the batch as it came. Each mini-batch is dealt over the ranks by
    length (longest first, to the rank with the least, within the sizes that `chunk(dp_size)` will give), and the column
    `mini_batch` says which step a row belongs to.

    Args:
        batch: B rows with `attention_mask (B, P+R)`.
        dp_size: data-parallel ranks that the batch will be split over.
        num_mini_batches: optimizer steps an epoch (M).
        enabled: False leaves the rows in order (`trainer.balance_batch=False`) and adds no column.

    Returns:
        The same rows, reordered, with `mini_batch (B,) int64`, and `global_seqlen/*` metrics.
    """
    lengths = batch.get(["attention_mask"]).batch["attention_mask"].sum(-1).cpu().numpy()
    before = _loads(lengths, dp_size)
    if not enabled:
        return batch.with_meta(metrics={**batch.metrics, **_metrics(before, before)})
    owner = np.arange(len(lengths)) % dp_size  # which rank each place is dealt to: sizes as `chunk(dp_size)` makes them
    mini = np.repeat(np.arange(num_mini_batches), [len(part) for part in np.array_split(lengths, num_mini_batches)])
    shares: list[list[int]] = [[] for _ in range(dp_size)]
    for step in range(num_mini_batches):
        rows = np.flatnonzero(mini == step)
        sizes = np.bincount(owner[rows], minlength=dp_size).tolist()
        for rank, part in enumerate(balanced_partition(lengths[rows].tolist(), dp_size, sizes=sizes)):
            shares[rank] += sorted(rows[part].tolist())
    order = np.concatenate([np.asarray(share, dtype=np.int64) for share in shares])
    column = DataProto.from_dict(tensors={"mini_batch": torch.from_numpy(mini[order])})
    metrics = _metrics(before, _loads(lengths[order], dp_size))
    return batch.reorder(order).union(column).with_meta(metrics={**batch.metrics, **metrics})


def _loads(lengths: np.ndarray, dp_size: int) -> list[int]:
    """Tokens a rank when rows are split in this order."""
    return [int(part.sum()) for part in np.array_split(lengths, dp_size)]


def _metrics(before: list[int], after: list[int]) -> dict[str, Metric]:
    values = {
        "min": min(before),
        "max": max(before),
        "minmax_diff": max(before) - min(before),
        "balanced_min": min(after),
        "balanced_max": max(after),
        "mean": sum(before) / len(before),
    }
    return {f"global_seqlen/{name}": Metric.mean(float(value)) for name, value in values.items()}
