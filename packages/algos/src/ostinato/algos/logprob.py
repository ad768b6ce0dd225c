"""Log-probabilities and entropies of tokens from logits, without a float32 copy of the logits.

Both directions go through the positions in chunks. Only the logits as they came and at most one number a position are
kept for the backward pass, which writes the one tensor that it has to return: the gradient in the logits' own dtype.
`fused.py` does the same from hidden states, where the logits never exist as a whole.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ostinato.algos._checks import check_positive
from ostinato.algos._first_order import first_order
from ostinato.algos._one_pass import in_one_pass
from ostinato.algos._typing import Logits, PositionFloats, PositionLabels
from ostinato.algos.errors import ArgumentError, ShapeError

CHUNK_ELEMENTS = 1 << 24
"""Entries of a (positions, vocabulary) chunk: 64 MiB in float32."""


def compute_dtype(x: Tensor) -> torch.dtype:
    """Float32 for half precision, else the tensor's own dtype."""
    return torch.promote_types(x.dtype, torch.float32)


def chunk_rows(chunk_size: int | None, vocab_size: int) -> int:
    """How many positions a chunk has."""
    if chunk_size is None:
        return max(CHUNK_ELEMENTS // max(vocab_size, 1), 1)
    if chunk_size < 1:
        raise ArgumentError(f"chunk_size must be at least 1 position, got {chunk_size}")
    return chunk_size


def check_positions(where: str, rows: Tensor, labels: Tensor | None, temperature: float) -> None:
    """Refuse what is not (N, ·) with (N,) labels and a temperature above 0."""
    check_positive(where, temperature=temperature)
    if rows.dim() != 2:
        raise ShapeError(f"{where}: expected (N, ·), positions by vocabulary or hidden size; got {tuple(rows.shape)}")
    if labels is not None and labels.shape != rows.shape[:1]:
        raise ShapeError(
            f"{where}: labels must be ({rows.shape[0]},), one a position; they have shape {tuple(labels.shape)}"
        )


def scaled_log_softmax(logits: Tensor, temperature: float) -> Tensor:
    """Log-probabilities (n, V) of a chunk in the compute dtype, the logits divided by the temperature first."""
    wide = logits.to(compute_dtype(logits))
    return (wide if temperature == 1.0 else wide / temperature).log_softmax(-1)


@in_one_pass
def chunk_statistics(
    logits: Tensor, labels: Tensor | None, temperature: float, entropy: bool
) -> tuple[Tensor | None, Tensor | None]:
    """Of logits (n, V): the labels' log-probabilities and the entropies, (n,) each in the compute dtype."""
    log_p = scaled_log_softmax(logits, temperature)
    chosen = None if labels is None else log_p.gather(-1, labels[:, None]).squeeze(-1)
    if not entropy:
        return chosen, None
    p = log_p.exp()
    # A logit of −inf is a token outside of the vocabulary: it adds 0, not 0·inf. What is no number stays none.
    return chosen, -torch.where(p == 0, p.new_zeros(()), p * log_p).sum(-1)


@in_one_pass
def chunk_gradient(
    logits: Tensor,
    labels: Tensor | None,
    temperature: float,
    grad_log_probs: Tensor | None,
    entropies: Tensor | None,
    grad_entropies: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """Gradient of logits (n, V): g·(onehot − p)/T for log-probabilities, −g·p·(log p + H)/T for entropies."""
    log_p = scaled_log_softmax(logits, temperature)
    gradient = log_p.exp()
    surprise = None
    if grad_entropies is not None and entropies is not None:
        surprise = torch.where(gradient > 0, log_p + entropies[:, None], log_p.new_zeros(()))
        surprise *= gradient * grad_entropies[:, None]
    chosen = None if labels is None else grad_log_probs
    # A chunk is as large as memory allows: every pass over it counts.
    gradient *= 0.0 if chosen is None else -chosen[:, None]
    if chosen is not None and labels is not None:
        gradient = _add_at(gradient, labels, chosen.to(gradient.dtype))
    if surprise is not None:
        gradient = gradient - surprise
    return (gradient if temperature == 1.0 else gradient / temperature).to(dtype)


def _add_at(rows: Tensor, columns: Tensor, values: Tensor) -> Tensor:
    """Add a value to one column of each row; `rows` is used up."""
    if torch.compiler.is_compiling():  # scattered, it would be written out and read once more
        here = torch.arange(rows.shape[1], device=rows.device) == columns[:, None]
        return rows + torch.where(here, values[:, None], 0.0)
    return rows.scatter_add_(-1, columns[:, None], values[:, None])


@in_one_pass
def chunk_sum_pi_squared(logits: Tensor, temperature: float) -> Tensor:
    """Σ π² of logits (n, V), (n,) in the compute dtype."""
    return scaled_log_softmax(logits, temperature).exp().square().sum(-1)


def part_of(tensor: Tensor | None, part: slice) -> Tensor | None:
    """A chunk of what may not be there."""
    return None if tensor is None else tensor[part]


class _FromLogits(torch.autograd.Function):
    """(logits, labels) -> (log-probabilities, entropies), chunked in both directions."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, labels: Tensor | None, temperature: float, rows: int, entropy: bool
    ) -> tuple[Tensor, Tensor]:
        log_probs = logits.new_zeros(logits.shape[0], dtype=compute_dtype(logits))
        entropies = torch.zeros_like(log_probs)
        for start in range(0, logits.shape[0], rows):
            part = slice(start, start + rows)
            chosen, some_entropies = chunk_statistics(logits[part], part_of(labels, part), temperature, entropy)
            if chosen is not None:
                log_probs[part] = chosen
            if some_entropies is not None:
                entropies[part] = some_entropies
        ctx.save_for_backward(logits, labels, entropies if entropy else None)
        ctx.temperature, ctx.rows = temperature, rows
        ctx.set_materialize_grads(False)
        return log_probs, entropies

    @staticmethod
    @first_order
    def backward(ctx: Any, grad_log_probs: Tensor | None, grad_entropies: Tensor | None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        logits, labels, entropies = ctx.saved_tensors
        gradient = torch.empty_like(logits)
        for start in range(0, logits.shape[0], ctx.rows):
            part = slice(start, start + ctx.rows)
            gradient[part] = chunk_gradient(
                logits[part],
                part_of(labels, part),
                ctx.temperature,
                part_of(grad_log_probs, part),
                part_of(entropies, part),
                part_of(grad_entropies, part),
                gradient.dtype,
            )
        return gradient, None, None, None, None


def token_log_probs(
    logits: Logits, labels: PositionLabels, temperature: float = 1.0, *, chunk_size: int | None = None
) -> PositionFloats:
    """Log-probability of each position's label under the temperature-scaled distribution.

    log p = l_y/T − logsumexp(l/T), accumulated in float32 and relative to the largest logit.

    Args:
        logits: (N, V) of any floating dtype; −inf takes a token out of the vocabulary.
        labels: (N,) int64 token ids in 0..V−1.
        temperature: T, above 0; the one that the tokens were sampled with.
        chunk_size: positions a chunk; None bounds a chunk at 64 MiB of float32.

    Returns:
        (N,) in nats, float32 (float64 for float64 logits).

    Raises:
        ShapeError: logits are not (N, V) or labels not (N,).
        ArgumentError: the temperature or the chunk size is out of range.
    """
    check_positions("token_log_probs", logits, labels, temperature)
    return _FromLogits.apply(logits, labels, temperature, chunk_rows(chunk_size, logits.shape[1]), False)[0]


def token_entropy(logits: Logits, temperature: float = 1.0, *, chunk_size: int | None = None) -> PositionFloats:
    """Entropy of the temperature-scaled distribution at each position.

    H = logsumexp(z) − Σ softmax(z)·z with z = l/T, accumulated in float32; differentiable.

    Args:
        logits: (N, V) of any floating dtype; −inf takes a token out of the vocabulary.
        temperature: T, above 0.
        chunk_size: positions a chunk; None bounds a chunk at 64 MiB of float32.

    Returns:
        (N,) in nats, float32 (float64 for float64 logits).

    Raises:
        ShapeError: logits are not (N, V).
        ArgumentError: the temperature or the chunk size is out of range.
    """
    check_positions("token_entropy", logits, None, temperature)
    return _FromLogits.apply(logits, None, temperature, chunk_rows(chunk_size, logits.shape[1]), True)[1]


def token_log_probs_and_entropy(
    logits: Logits, labels: PositionLabels, temperature: float = 1.0, *, chunk_size: int | None = None
) -> tuple[PositionFloats, PositionFloats]:
    """`token_log_probs` and `token_entropy` in one pass in each direction.

    Args:
        logits: (N, V) of any floating dtype; −inf takes a token out of the vocabulary.
        labels: (N,) int64 token ids in 0..V−1.
        temperature: T, above 0.
        chunk_size: positions a chunk; None bounds a chunk at 64 MiB of float32.

    Returns:
        (N,) log-probabilities and (N,) entropies, in nats, float32 (float64 for float64 logits).

    Raises:
        ShapeError: logits are not (N, V) or labels not (N,).
        ArgumentError: the temperature or the chunk size is out of range.
    """
    check_positions("token_log_probs_and_entropy", logits, labels, temperature)
    return _FromLogits.apply(logits, labels, temperature, chunk_rows(chunk_size, logits.shape[1]), True)


@torch.no_grad()
def token_sum_pi_squared(logits: Logits, temperature: float = 1.0, *, chunk_size: int | None = None) -> PositionFloats:
    """Σ π² over the vocabulary at each position, for `optimal_token_baseline`.

    Σ π² with π = softmax(l/T); no gradient.

    Args:
        logits: (N, V) of any floating dtype; −inf takes a token out of the vocabulary.
        temperature: T, above 0.
        chunk_size: positions a chunk; None bounds a chunk at 64 MiB of float32.

    Returns:
        (N,) between 1/V and 1, float32 (float64 for float64 logits).

    Raises:
        ShapeError: logits are not (N, V).
        ArgumentError: the temperature or the chunk size is out of range.
    """
    check_positions("token_sum_pi_squared", logits, None, temperature)
    out = logits.new_empty(logits.shape[0], dtype=compute_dtype(logits))
    rows = chunk_rows(chunk_size, logits.shape[1])
    for start in range(0, logits.shape[0], rows):
        part = slice(start, start + rows)
        out[part] = chunk_sum_pi_squared(logits[part], temperature)
    return out


def full_kl(
    logits: Logits, ref_logits: Logits, temperature: float = 1.0, *, chunk_size: int | None = None
) -> PositionFloats:
    """KL(π ‖ ref) over the whole vocabulary at each position.

    Σ p·(log p − log q) with p, q the temperature-scaled distributions; the KL kind `full`. Chunks are recomputed in the
    backward pass. A token of probability 0 under π adds 0.

    Args:
        logits: (N, V) of the policy.
        ref_logits: (N, V) of the reference; no gradient.
        temperature: T, above 0, of both.
        chunk_size: positions a chunk; None bounds a chunk at 64 MiB of float32.

    Returns:
        (N,) in nats, 0 or more, float32 (float64 for float64 logits).

    Raises:
        ShapeError: the logits are not (N, V) of one shape.
        ArgumentError: the temperature or the chunk size is out of range.
    """
    check_positions("full_kl", logits, None, temperature)
    if logits.shape != ref_logits.shape:
        raise ShapeError(f"full_kl: logits are {tuple(logits.shape)}, ref_logits {tuple(ref_logits.shape)}; same shape")
    return _FullKL.apply(logits, ref_logits, temperature, chunk_rows(chunk_size, logits.shape[1]))


class _FullKL(torch.autograd.Function):
    """Chunked Σ p·(log p − log q); dKL/dz_j = p_j·(log p_j − log q_j − KL)."""

    @staticmethod
    def _terms(logits: Tensor, ref_logits: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        log_p = scaled_log_softmax(logits, temperature)
        log_q = scaled_log_softmax(ref_logits, temperature)
        p = log_p.exp()
        return p, torch.where(p > 0, log_p - log_q, p.new_zeros(()))

    @staticmethod
    def forward(ctx: Any, logits: Tensor, ref_logits: Tensor, temperature: float, rows: int) -> Tensor:
        kl = logits.new_empty(logits.shape[0], dtype=compute_dtype(logits))
        for start in range(0, logits.shape[0], rows):
            part = slice(start, start + rows)
            p, gap = _FullKL._terms(logits[part], ref_logits[part], temperature)
            kl[part] = (p * gap).sum(-1).clamp(min=0)
        ctx.save_for_backward(logits, ref_logits, kl)
        ctx.temperature, ctx.rows = temperature, rows
        return kl

    @staticmethod
    @first_order
    def backward(ctx: Any, *grad_outputs: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        (grad,) = grad_outputs
        logits, ref_logits, kl = ctx.saved_tensors
        gradient = torch.empty_like(logits)
        for start in range(0, logits.shape[0], ctx.rows):
            part = slice(start, start + ctx.rows)
            p, gap = _FullKL._terms(logits[part], ref_logits[part], ctx.temperature)
            gradient[part] = p * (gap - kl[part, None]) * (grad[part, None] / ctx.temperature)
        return gradient, None, None, None
