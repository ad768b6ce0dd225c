"""Log-probabilities, entropies and Σπ² of logits whose vocabulary is dealt over tensor-parallel ranks.

No rank ever sees the others' logits: each adds up its own part of the softmax, and (N,) sums are exchanged.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist


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
    """The three quantities and the gradients of the first two.

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
        scaled = logits.float() / temperature
        columns = scaled.shape[1] - min(padding, scaled.shape[1])
        scaled[:, columns:] = float("-inf")
        largest = scaled.new_full((scaled.shape[0],), float("-inf")) if columns == 0 else scaled.amax(dim=1)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
        shifted = scaled.sub_(largest[:, None])
        exp = shifted.exp()
        local = labels - first
        mine = (local >= 0) & (local < columns)
        index = torch.where(mine, local, 0)
        chosen = shifted.gather(1, index[:, None])[:, 0]
        # What is exchanged in one sum: Σexp, the label's logit, Σexp·z, Σexp².
        own = [exp.sum(1), torch.where(mine, chosen, 0.0)]
        own.append((exp[:, :columns] * shifted[:, :columns]).sum(1) if entropy else torch.zeros_like(largest))
        own.append(exp.square().sum(1) if sum_pi_squared else torch.zeros_like(largest))
        total = torch.stack(own)
        dist.all_reduce(total, group=group)
        log_z = total[0].log()
        entropies = log_z - total[2] / total[0]
        ctx.save_for_backward(shifted, log_z, entropies, index, mine)
        ctx.temperature, ctx.columns, ctx.dtype, ctx.entropy = temperature, columns, logits.dtype, entropy
        ctx.set_materialize_grads(False)
        return total[1] - log_z, entropies, total[3] / total[0].square()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        shifted, log_z, entropies, index, mine = ctx.saved_tensors
        log_p = shifted - log_z[:, None]
        p = log_p.exp()
        grad = torch.zeros_like(p)
        if grads[0] is not None:
            grad -= p * grads[0][:, None]
            grad.scatter_add_(1, index[:, None], torch.where(mine, grads[0], 0.0)[:, None])
        if ctx.entropy and grads[1] is not None:
            kept = slice(0, ctx.columns)
            grad[:, kept] -= p[:, kept] * (log_p[:, kept] + entropies[:, None]) * grads[1][:, None]
        return (grad / ctx.temperature).to(ctx.dtype), None, None, None, None, None, None, None
