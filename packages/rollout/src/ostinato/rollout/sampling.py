"""From logits and one uniform number a row to a token and its log-probability."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

    from ostinato.rollout.config import SamplingParams

_BELOW_ONE = 1.0 - 2.0**-52


def token_filter(sampling: SamplingParams) -> Callable[[torch.Tensor], torch.Tensor] | None:
    """What `top_k`, `top_p` and `min_p` do to temperature-scaled logits, or None where they do nothing.

    The rules are transformers' own, so that validation means what users of that library expect.

    Returns:
        A function from (B,V) logits to (B,V) logits with -inf at tokens that may not be drawn.
    """
    if sampling.greedy or (sampling.top_p == 1 and sampling.top_k <= 0 and sampling.min_p == 0):
        return None
    from transformers import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    warpers = []
    if sampling.top_k > 0:
        warpers.append(TopKLogitsWarper(top_k=sampling.top_k))
    if sampling.top_p < 1:
        warpers.append(TopPLogitsWarper(top_p=sampling.top_p))
    if sampling.min_p > 0:
        warpers.append(MinPLogitsWarper(min_p=sampling.min_p))

    def apply(logits: torch.Tensor) -> torch.Tensor:
        for warper in warpers:
            logits = warper(None, logits)  # pyright: ignore[reportArgumentType]  # these rules read no input ids
        return logits

    return apply


def draw(scaled: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """Tokens by inversion of the cumulative distribution: the first whose cumulative share exceeds the uniform number.

    One number decides one token, so a row's sample does not depend on the other rows of its batch.

    Args:
        scaled: (B,V) float32 logits; -inf marks tokens that are never drawn.
        uniforms: (B,) float64 in (0, 1).

    Returns:
        (B,) int64.
    """
    weights = (scaled - scaled.amax(-1, keepdim=True)).exp_()
    cumulative = weights.cumsum(-1, dtype=torch.float64)
    total = cumulative[:, -1:]
    # Strictly below the total, so that rounding never points behind the last possible token.
    target = torch.minimum(uniforms[:, None] * total, total * _BELOW_ONE)
    return torch.searchsorted(cumulative, target, right=True).squeeze(-1)


def sample(
    logits: torch.Tensor,
    uniforms: torch.Tensor | None,
    sampling: SamplingParams,
    restrict: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One token a row, and log softmax(logits / temperature) at it.

    Args:
        logits: (B,V), any float dtype; computed in float32.
        uniforms: (B,) float64 in (0, 1); unused (may be None) where sampling is greedy.
        sampling: temperature and greed.
        restrict: what `token_filter` gives; it restricts what is drawn, not the log-probability.

    Returns:
        Tokens (B,) int64 and log-probabilities (B,) float32. A row whose logits are not numbers has a NaN.
    """
    scaled = logits.float()
    if sampling.log_prob_temperature != 1.0:
        scaled = scaled / sampling.log_prob_temperature
    if sampling.greedy:
        tokens = scaled.argmax(-1)
    else:
        assert uniforms is not None, "sampling needs a number a row"
        tokens = draw(scaled if restrict is None else restrict(scaled), uniforms)
        # NaN logits point nowhere; the log-probability below carries the NaN to the check of the caller.
        tokens = tokens.clamp_(max=logits.shape[-1] - 1)
    chosen = scaled.gather(-1, tokens[:, None]).squeeze(-1)
    return tokens, chosen - scaled.logsumexp(-1)
