"""Log-probabilities and entropies of tokens from hidden states and the LM head, without the logits.

Each chunk's logits are made, read and dropped; the backward pass makes them once more. Memory beyond inputs and
gradients is one chunk and a float32 accumulator of the head's gradient.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from ostinato.algos._first_order import first_order
from ostinato.algos._typing import HeadWeight, Hidden, PositionFloats, PositionLabels
from ostinato.algos.errors import ShapeError
from ostinato.algos.logprob import (
    check_positions,
    chunk_gradient,
    chunk_rows,
    chunk_statistics,
    chunk_sum_pi_squared,
    compute_dtype,
    part_of,
)


def _matmul_dtype(hidden: Tensor) -> torch.dtype:
    device = hidden.device.type
    # Autocast leaves float64 alone.
    wide = hidden.dtype == torch.float64
    if not wide and torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    return hidden.dtype


def _without_autocast(device: str) -> AbstractContextManager[object]:
    # The dtypes inside are chosen by hand. The meta device has no autocast to turn off.
    return torch.autocast(device, enabled=False) if torch.amp.is_autocast_available(device) else nullcontext()


def _halves_on_a_gpu(a: Tensor) -> bool:
    return a.is_cuda and a.dtype in (torch.bfloat16, torch.float16)


def _product(a: Tensor, b: Tensor) -> Tensor:
    """The matrix product; a GPU hands the float32 sums of halves over unrounded."""
    return torch.mm(a, b, out_dtype=torch.float32) if _halves_on_a_gpu(a) else a @ b


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """Add a @ b to the total; of halves on a GPU without a float32 product in between."""
    if _halves_on_a_gpu(a) and total.dtype == torch.float32:
        torch.addmm(total, a, b, out_dtype=torch.float32, out=total)  # pyright: ignore[reportCallIssue]
    else:
        total += _product(a, b)


class _FromHidden(torch.autograd.Function):
    """(hidden, weight, labels) -> (log-probabilities, entropies), chunked in both directions."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, temperature: float, rows: int, entropy: bool
    ) -> tuple[Tensor, Tensor]:
        dtype = _matmul_dtype(hidden)
        head = weight.to(dtype)
        log_probs = hidden.new_zeros(hidden.shape[0], dtype=torch.promote_types(dtype, torch.float32))
        entropies = torch.zeros_like(log_probs)
        with _without_autocast(hidden.device.type):
            for start in range(0, hidden.shape[0], rows):
                part = slice(start, start + rows)
                logits = _product(hidden[part].to(dtype), head.T)
                chosen, some_entropies = chunk_statistics(logits, labels[part], temperature, entropy)
                if chosen is not None:
                    log_probs[part] = chosen
                if some_entropies is not None:
                    entropies[part] = some_entropies
        ctx.save_for_backward(hidden, weight, labels, entropies if entropy else None)
        ctx.temperature, ctx.rows, ctx.dtype = temperature, rows, dtype
        ctx.set_materialize_grads(False)
        return log_probs, entropies

    @staticmethod
    @first_order
    def backward(ctx: Any, grad_log_probs: Tensor | None, grad_entropies: Tensor | None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        hidden, weight, labels, entropies = ctx.saved_tensors
        if entropies is None:
            grad_entropies = None
        want_hidden, want_weight = ctx.needs_input_grad[:2]
        grad_hidden = torch.empty_like(hidden) if want_hidden else None
        # The sum over chunks would lose its small terms in half precision.
        grad_weight = torch.zeros_like(weight, dtype=compute_dtype(weight)) if want_weight else None
        head = weight.to(ctx.dtype)
        with _without_autocast(hidden.device.type):
            for start in range(0, hidden.shape[0], ctx.rows):
                part = slice(start, start + ctx.rows)
                rows = hidden[part].to(ctx.dtype)
                dz = chunk_gradient(
                    _product(rows, head.T),
                    labels[part],
                    ctx.temperature,
                    part_of(grad_log_probs, part),
                    part_of(entropies, part),
                    part_of(grad_entropies, part),
                    ctx.dtype,
                )
                if grad_hidden is not None:
                    grad_hidden[part] = dz @ head
                if grad_weight is not None:
                    _add_product(grad_weight, dz.T, rows)
        return grad_hidden, None if grad_weight is None else grad_weight.to(weight.dtype), None, None, None, None


def _check_weight(where: str, hidden: Tensor, weight: Tensor) -> None:
    if weight.dim() != 2 or weight.shape[1] != hidden.shape[1]:
        raise ShapeError(
            f"{where}: weight must be (V, {hidden.shape[1]}), vocabulary by hidden size; got {tuple(weight.shape)}"
        )


def _apply(
    where: str,
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    temperature: float,
    chunk_size: int | None,
    entropy: bool,
) -> tuple[Tensor, Tensor]:
    check_positions(where, hidden, labels, temperature)
    _check_weight(where, hidden, weight)
    rows = chunk_rows(chunk_size, weight.shape[0])
    return _FromHidden.apply(hidden, weight, labels, temperature, rows, entropy)


def token_log_probs_from_hidden(
    hidden: Hidden,
    weight: HeadWeight,
    labels: PositionLabels,
    temperature: float = 1.0,
    *,
    chunk_size: int | None = None,
) -> PositionFloats:
    """`token_log_probs(hidden @ weight.T, labels, temperature)` without the logits, in both directions.

    The product is taken in the dtype of `hidden` (the autocast dtype where autocast is on), as the model's own head
    would; everything after it in float32. On a GPU the logits of half-precision operands are not rounded back to half.

    Args:
        hidden: (N, D) last hidden states at the predicting positions.
        weight: (V, D) of the LM head.
        labels: (N,) int64 token ids in 0..V−1.
        temperature: T, above 0.
        chunk_size: positions a chunk; None bounds a chunk at 64 MiB of float32.

    Returns:
        (N,) in nats, float32 (float64 for float64 hidden states). Gradients reach hidden and weight.

    Raises:
        ShapeError: hidden, weight and labels do not fit.
        ArgumentError: the temperature or the chunk size is out of range.
    """
    return _apply("token_log_probs_from_hidden", hidden, weight, labels, temperature, chunk_size, False)[0]


def token_log_probs_and_entropy_from_hidden(
    hidden: Hidden,
    weight: HeadWeight,
    labels: PositionLabels,
    temperature: float = 1.0,
    *,
    chunk_size: int | None = None,
) -> tuple[PositionFloats, PositionFloats]:
    """`token_log_probs_and_entropy(hidden @ weight.T, labels, temperature)` without the logits, in both directions.

    Args:
        hidden: (N, D) last hidden states at the predicting positions.
        weight: (V, D) of the LM head.
        labels: (N,) int64 token ids in 0..V−1.
        temperature: T, above 0.
        chunk_size: positions a chunk; None bounds a chunk at 64 MiB of float32.

    Returns:
        (N,) log-probabilities and (N,) entropies, in nats, float32 (float64 for float64 hidden states).

    Raises:
        ShapeError: hidden, weight and labels do not fit.
        ArgumentError: the temperature or the chunk size is out of range.
    """
    return _apply("token_log_probs_and_entropy_from_hidden", hidden, weight, labels, temperature, chunk_size, True)


@torch.no_grad()
def token_sum_pi_squared_from_hidden(
    hidden: Hidden, weight: HeadWeight, temperature: float = 1.0, *, chunk_size: int | None = None
) -> PositionFloats:
    """`token_sum_pi_squared(hidden @ weight.T, temperature)` without the logits; no gradient.

    Args:
        hidden: (N, D) last hidden states at the predicting positions.
        weight: (V, D) of the LM head.
        temperature: T, above 0.
        chunk_size: positions a chunk; None bounds a chunk at 64 MiB of float32.

    Returns:
        (N,) between 1/V and 1, float32 (float64 for float64 hidden states).

    Raises:
        ShapeError: hidden and weight do not fit.
        ArgumentError: the temperature or the chunk size is out of range.
    """
    where = "token_sum_pi_squared_from_hidden"
    check_positions(where, hidden, None, temperature)
    _check_weight(where, hidden, weight)
    dtype = _matmul_dtype(hidden)
    head = weight.to(dtype)
    out = hidden.new_empty(hidden.shape[0], dtype=torch.promote_types(dtype, torch.float32))
    rows = chunk_rows(chunk_size, weight.shape[0])
    with _without_autocast(hidden.device.type):
        for start in range(0, hidden.shape[0], rows):
            part = slice(start, start + rows)
            out[part] = chunk_sum_pi_squared(_product(hidden[part].to(dtype), head.T), temperature)
    return out
