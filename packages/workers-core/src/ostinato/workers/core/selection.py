"""Tokens that a policy loss treats apart, chosen over a whole mini-batch and all ranks."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ostinato.protocol import DataProto
from ostinato.workers.core.engine import TrainEngine
from ostinato.workers.core.errors import BatchError

Selector = Callable[..., torch.Tensor]


def with_selected(engine: TrainEngine, rows: DataProto, log_probs: torch.Tensor, selector: Selector) -> DataProto:
    """Add the column `selected` (b, R) bool.

    Every rank sees the policy tokens of all ranks, in rank and row order, so all make the same choice and it does not
    depend on micro-batches.

    Args:
        engine: gives the ranks.
        rows: this rank's part of the mini-batch, with `advantages` and `response_mask` (b, R).
        log_probs: (b, R) of the current policy.
        selector: `(log_probs, advantages, response_mask) -> mask`, all of one shape.

    Returns:
        The rows with the column.

    Raises:
        BatchError: there are no advantages.
    """
    if rows.batch is None or "advantages" not in rows.columns:
        raise BatchError(f"update: column 'advantages' is missing; the rows hold {sorted(rows.columns)}")
    mask = rows.batch["response_mask"].to(torch.bool)
    own = torch.stack([log_probs[mask].double(), rows.batch["advantages"][mask].double()])
    place = engine.coordinates
    sizes = torch.zeros(place.dp_size, dtype=torch.float64)
    sizes[place.dp_rank] = own.shape[1]
    ends = engine.reduce(sizes).cumsum(0).long().tolist()
    begin, end = ends[place.dp_rank] - own.shape[1], ends[place.dp_rank]
    everyone = torch.zeros(2, ends[-1], dtype=torch.float64)
    everyone[:, begin:end] = own
    everyone = engine.reduce(everyone)
    chosen = selector(everyone[0], everyone[1], torch.ones(ends[-1], dtype=torch.bool))
    selected = torch.zeros_like(mask).masked_scatter(mask, chosen[begin:end])
    return rows.union(DataProto.from_dict({"selected": selected}))
