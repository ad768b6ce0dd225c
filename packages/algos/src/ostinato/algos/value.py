"""The critic: which of its outputs belong to the response, and its loss."""

from __future__ import annotations

import torch
from torch import Tensor

from ostinato.algos._checks import check_not_negative, check_same_shape
from ostinato.algos._typing import TokenFloats, TokenMask
from ostinato.algos.errors import ShapeError
from ostinato.algos.masked import is_valid, zero_masked


def response_states(outputs: Tensor, response_length: int) -> Tensor:
    """Outputs of the states from which the response tokens were sampled.

    The output at position p belongs to the state after token p. Response token j (position P + j of a row of P prompt
    and R response tokens) was sampled in the state before it, position P + j − 1. The response mask needs no shift.

    Args:
        outputs: (B, P+R, ...) one output a position, prompts left-padded and responses right-padded.
        response_length: R.

    Returns:
        (B, R, ...) a view.

    Raises:
        ShapeError: there is no position before the first response token.
    """
    if not 0 <= response_length < outputs.shape[1]:
        raise ShapeError(
            f"response_states: outputs has {outputs.shape[1]} positions, which cannot hold a prompt and "
            f"{response_length} response tokens; pass the outputs of prompt and response together"
        )
    start = outputs.shape[1] - response_length - 1
    return outputs[:, start : start + response_length]


def value_loss(
    values: TokenFloats,
    returns: TokenFloats,
    old_values: TokenFloats,
    response_mask: TokenMask,
    cliprange_value: float | None = 0.5,
) -> tuple[TokenFloats, TokenFloats]:
    """Clipped squared error of the critic, per token.

    0.5·max((v − R)², (clip(v, old − c, old + c) − R)²)

    Args:
        values: (B, R) current values; masked entries may hold anything.
        returns: (B, R) targets; no gradient.
        old_values: (B, R) values at rollout time; no gradient.
        response_mask: (B, R).
        cliprange_value: c, in units of the value; None leaves the clip out.

    Returns:
        (B, R) loss and (B, R) indicator, 1 where the clipped error is the larger one (gradient 0 there); both exactly
        0 under the mask.

    Raises:
        ShapeError: the shapes differ.
        ArgumentError: cliprange_value is negative or not finite.

    Source:
        Schulman et al. 2017 (PPO, arXiv 1707.06347), eq. 9, with the value clip of the authors' code.
    """
    check_same_shape("value_loss", values=values, returns=returns, old_values=old_values, response_mask=response_mask)
    valid = is_valid(response_mask)
    v = zero_masked(values, valid)
    target = zero_masked(returns.detach(), valid)
    old = zero_masked(old_values.detach(), valid)
    error = (v - target).square()
    if cliprange_value is None:
        return zero_masked(0.5 * error, valid), torch.zeros_like(error).detach()
    check_not_negative("value_loss", cliprange_value=cliprange_value)
    clipped_error = (torch.clamp(v, old - cliprange_value, old + cliprange_value) - target).square()
    is_clipped = clipped_error > error
    loss = 0.5 * torch.where(is_clipped, clipped_error, error)
    return zero_masked(loss, valid), zero_masked(is_clipped.to(loss.dtype), valid)
