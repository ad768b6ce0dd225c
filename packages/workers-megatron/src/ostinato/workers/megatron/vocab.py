"""Log-probabilities, entropies and Σπ² of logits whose vocabulary is dealt over tensor-parallel ranks.

No rank ever sees the others' logits: each adds up its own part of the softmax, and (N,) sums are exchanged.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

CHUNK_ELEMENTS = 1 << 26
"""Logits that are widened to float32 at a time: 256 MiB."""


def vocab_parallel_outputs(
    logits: torch.Tensor,
    labels: torch.Tensor,
    temperature: float,
    *,
    first: int,
    vocab_size: int,
    group: dist.ProcessGroup,
    entropy: bool = False,
    sum_pi_squared: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """What the whole vocabulary's softmax says, from one rank's columns; collective over `group`.

    With z = logits / temperature, log Z = log Σ exp z and p = exp(z − log Z):
    log_probs = z[label] − log Z, entropy = log Z − Σ p·z, sum_pi_squared = Σ p².

    Args:
        logits: (N, V_local) this rank's columns.
        labels: (N,) int64 token ids of the whole vocabulary.
        temperature: what logits are divided by.
        first: token id of this rank's first column.
        vocab_size: tokens of the vocabulary; columns from there on are padding and have no part in the softmax.
        group: the tensor-parallel ranks.
        entropy: whether to give entropies too.
        sum_pi_squared: whether to give Σp² too, without a gradient.

    Returns:
        Three tensors (N,) float32, the same on every rank of the group; those not asked for are None. Gradients flow
        into `logits` from the first two.
    """
    padding = max(first + logits.shape[1] - vocab_size, 0)
    log_probs, entropies, squares = _VocabParallel.apply(
        logits, labels, temperature, first, padding, group, entropy, sum_pi_squared
    )
    return log_probs, entropies if entropy else None, squares if sum_pi_squared else None


class _VocabParallel(torch.autograd.Function):
    """The three quantities and the gradients of the first two, in chunks of positions; logits are kept as they came.

    ∂ log_probs / ∂ logits = (1[label] − p) / T;  ∂ entropy / ∂ logits = −p·(z − log Z + entropy) / T.
    """

    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        labels: torch.Tensor,
        temperature: float,
        first: int,
        padding: int,
        group: dist.ProcessGroup,
        entropy: bool,
        sum_pi_squared: bool,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        columns = logits.shape[1] - min(padding, logits.shape[1])
        kept = logits[:, :columns]
        if columns:
            largest = kept.amax(dim=1).float() / temperature
        else:
            largest = logits.new_full((logits.shape[0],), float("-inf"), dtype=torch.float32)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
        local = labels - first
        mine = (local >= 0) & (local < columns)
        index = torch.where(mine, local, 0)
        # What is exchanged in one sum: Σexp, the label's logit, Σexp·z, Σexp².
        total = largest.new_zeros(4, logits.shape[0])
        for part in _chunks(logits) if columns else ():
            shifted = (kept[part].float() / temperature).sub_(largest[part, None])
            total[1, part] = torch.where(mine[part], shifted.gather(1, index[part, None])[:, 0], 0.0)
            exp = shifted.exp()
            total[0, part] = exp.sum(1)
            if entropy:
                total[2, part] = shifted.mul_(exp).sum(1)
            if sum_pi_squared:
                total[3, part] = exp.square_().sum(1)
        dist.all_reduce(total, group=group)
        log_z = total[0].log()
        entropies = log_z - total[2] / total[0]
        ctx.save_for_backward(logits, largest + log_z, entropies, index, mine)
        ctx.temperature, ctx.columns, ctx.entropy = temperature, columns, entropy
        ctx.set_materialize_grads(False)
        return total[1] - log_z, entropies, total[3] / total[0].square()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        logits, log_z, entropies, index, mine = ctx.saved_tensors
        columns = slice(0, ctx.columns)
        gradient = torch.zeros_like(logits)
        for part in _chunks(logits) if ctx.columns else ():
            log_p = (logits[part, columns].float() / ctx.temperature).sub_(log_z[part, None])
            p = log_p.exp()
            dz = torch.zeros_like(p) if grads[0] is None else p * -grads[0][part, None]
            if grads[0] is not None:
                dz.scatter_add_(1, index[part, None], torch.where(mine[part], grads[0][part], 0.0)[:, None])
            if ctx.entropy and grads[1] is not None:
                dz -= log_p.add_(entropies[part, None]).mul_(p).mul_(grads[1][part, None])
            gradient[part, columns] = (dz / ctx.temperature).to(gradient.dtype)
        return gradient, None, None, None, None, None, None, None


def _chunks(logits: torch.Tensor) -> Iterator[slice]:
    rows = max(CHUNK_ELEMENTS // logits.shape[1], 1)
    for start in range(0, logits.shape[0], rows):
        yield slice(start, start + rows)
