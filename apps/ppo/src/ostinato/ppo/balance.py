"""Which rows go to which rank, and into which mini-batch.

Mini-batches are cut from the driver's row order before rows are dealt to ranks, so the rows of an optimizer step, and
with them its gradient, do not depend on how many ranks there are.
"""

from __future__ import annotations

import numpy as np
import torch

from ostinato.ppo.metrics import seqlen_metrics
from ostinato.protocol import DataProto
from ostinato.protocol.partition import balanced_partition


def balance(batch: DataProto, dp_size: int, num_mini_batches: int, *, enabled: bool = True) -> DataProto:
    """Order rows so that every rank gets about the same number of tokens in every mini-batch.

    Rows of mini-batch k are rows `k*B/M … (k+1)*B/M` of the batch as it came. Each mini-batch is dealt over the ranks
    by length (longest first, to the rank with the least, within the sizes that `chunk(dp_size)` will give), and the
    column `mini_batch` says which step a row belongs to. Tokens stand for the cost: dealt by the operations of a 1.5B
    model, the dearest of 8 ranks would have 1 % less to do with 64 rows of up to 8,192 tokens, 3 % with 32,768.

    Args:
        batch: B rows with `attention_mask (B, P+R)`.
        dp_size: data-parallel ranks that the batch will be split over.
        num_mini_batches: optimizer steps an epoch (M).
        enabled: False leaves the rows in order (`trainer.balance_batch=False`) and adds no column.

    Returns:
        The same rows, reordered, with `mini_batch (B,) int64`, and `global_seqlen/*` metrics.
    """
    lengths = batch.get(["attention_mask"]).batch["attention_mask"].sum(-1).cpu().numpy()
    if not enabled:
        return batch.with_meta(metrics={**batch.metrics, **seqlen_metrics(lengths, dp_size)})
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
    metrics = seqlen_metrics(lengths, dp_size, lengths[order])
    return batch.reorder(order).union(column).with_meta(metrics={**batch.metrics, **metrics})
