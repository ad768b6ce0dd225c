"""From per-token values to one number, divided by global counts."""

from __future__ import annotations

import torch
from torch import Tensor

from ostinato.algos._checks import check_positive, check_same_shape, check_token_floats
from ostinato.algos._typing import IntScalar, Scalar, TokenFloats, TokenMask
from ostinato.algos.errors import unknown_name
from ostinato.algos.masked import is_valid, masked_mean, masked_sum

AGGREGATION_MODES = (
    "token-mean",
    "token-sum",
    "seq-mean-token-sum",
    "seq-mean-token-sum-norm",
    "seq-mean-token-mean",
)


def count_valid(mask: TokenMask) -> tuple[IntScalar, IntScalar]:
    """Count what the aggregation modes divide by.

    Args:
        mask: (B, R); not 0 = valid.

    Returns:
        Number of valid tokens and number of rows with at least one, int64 scalars on the mask's device. Summed over
        the micro-batches and ranks of a mini-batch they are the global counts that `aggregate` takes.
    """
    valid = is_valid(mask)
    return valid.sum(), valid.any(-1).sum()


def _divide(total: Tensor, count: float | Tensor) -> Tensor:
    count = torch.as_tensor(count, device=total.device)
    # Nothing valid anywhere: the sum is 0, and so is the result.
    return total / torch.where(count > 0, count, torch.ones_like(count))


def aggregate(
    values: TokenFloats,
    mask: TokenMask,
    mode: str,
    *,
    num_tokens: float | Tensor | None = None,
    num_sequences: float | Tensor | None = None,
    scale_factor: float | None = None,
) -> Scalar:
    """Reduce per-token values to a scalar.

    With x the values, m the mask, L_i the valid tokens of row i, T and S the counts of tokens and sequences:

    - `token-mean`: Σ x·m / T
    - `token-sum`: Σ x·m
    - `seq-mean-token-sum`: Σ_i Σ_t x·m / S
    - `seq-mean-token-sum-norm`: Σ_i Σ_t x·m / (S·scale)
    - `seq-mean-token-mean`: Σ_i (Σ_t x·m / L_i) / S

    T and S are the counts of the whole mini-batch, over all its micro-batches and ranks; the sum of the results of the
    parts is then the result of the whole, however the rows are split.

    Args:
        values: (B, R) floating; masked entries may hold anything, they get no gradient.
        mask: (B, R); not 0 = valid. Rows without a valid token are no sequence.
        mode: one of `AGGREGATION_MODES` (`actor.loss_agg_mode`).
        num_tokens: T; None counts this mask.
        num_sequences: S; None counts this mask.
        scale_factor: the fixed length of `seq-mean-token-sum-norm` (`actor.loss_scale_factor`); None takes R, the
            padded width, which must then be the same in every part.

    Returns:
        Scalar, at least float32; 0 where nothing is valid.

    Raises:
        UnknownNameError: no such mode; the text lists the known ones.
        ShapeError: the shapes differ or are not (B, R).
        ArgumentError: scale_factor is not above 0.

    Source:
        token-mean: Yu et al. 2025 (DAPO, arXiv 2503.14476), eq. 8. seq-mean-token-mean: Shao et al. 2024 (GRPO, arXiv
        2402.03300), eq. 3. seq-mean-token-sum-norm: Liu et al. 2025 (Dr. GRPO, arXiv 2503.20783), section 3.
    """
    if mode not in AGGREGATION_MODES:
        raise unknown_name("loss_agg_mode", mode, AGGREGATION_MODES)
    check_token_floats("aggregate", "values", values)
    check_same_shape("aggregate", values=values, mask=mask)
    own_tokens, own_sequences = count_valid(mask)
    tokens = own_tokens if num_tokens is None else num_tokens
    sequences = own_sequences if num_sequences is None else num_sequences
    if mode == "token-mean":
        return _divide(masked_sum(values, mask), tokens)
    if mode == "token-sum":
        return masked_sum(values, mask)
    if mode == "seq-mean-token-sum":
        return _divide(masked_sum(values, mask), sequences)
    if mode == "seq-mean-token-mean":
        return _divide(masked_mean(values, mask, dim=-1).sum(), sequences)
    scale = max(values.shape[-1], 1) if scale_factor is None else scale_factor
    check_positive("aggregate", scale_factor=scale)
    return _divide(masked_sum(values, mask), sequences) / scale
