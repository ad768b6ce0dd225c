"""What a language model's head says at some positions, straight from the hidden states; for engines.

The answers are computed in chunks, forward and backward, so the (N, V) logits never exist.
"""

from __future__ import annotations

from typing import Any

import torch

from ostinato.algos import (
    token_log_probs_and_entropy_from_hidden,
    token_log_probs_from_hidden,
    token_sum_pi_squared_from_hidden,
)
from ostinato.workers.core.engine import TokenOutputs

GPU_CHUNK_ELEMENTS = 1 << 27
"""Logits of a chunk on a GPU. They are many: each chunk reads and writes the float32 gradient of the whole head."""


def chunk_rows(weight: torch.Tensor) -> int:
    """Positions of a chunk: logits of 64 MiB in float32 on the host, of 512 MiB on a GPU.

    Args:
        weight: (V, D), the head's.
    """
    elements = GPU_CHUNK_ELEMENTS if weight.is_cuda else GPU_CHUNK_ELEMENTS // 8
    return max(elements // weight.shape[0], 1)


def head_answers(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    temperature: float,
    *,
    entropy: bool,
    sum_pi_squared: bool,
) -> list[torch.Tensor]:
    """Log-probabilities, then entropies and Σπ² where they are wanted; (N,) float32 each.

    Args:
        hidden: (N, D), last hidden states at the predicting positions; N may be 0.
        weight: (V, D), the head's.
        labels: (N,) int64, the token asked about at each position.
        temperature: what logits are divided by.
        entropy: whether the entropies are wanted.
        sum_pi_squared: whether Σπ² is wanted; it carries no gradient.
    """
    rows = chunk_rows(weight)
    read = token_log_probs_and_entropy_from_hidden if entropy else token_log_probs_from_hidden
    result: Any = read(hidden, weight, labels, temperature, chunk_size=rows)
    answers = list(result) if entropy else [result]
    if sum_pi_squared:
        answers.append(token_sum_pi_squared_from_hidden(hidden, weight, temperature, chunk_size=rows))
    return [answer.float() for answer in answers]


def named_answers(answers: torch.Tensor, *, entropy: bool, sum_pi_squared: bool) -> TokenOutputs:
    """The columns of stacked answers by their names.

    Args:
        answers: (N, k), what `head_answers` gives, one column each.
        entropy: whether there are entropies.
        sum_pi_squared: whether there is Σπ².
    """
    columns = iter(answers.unbind(1))
    return TokenOutputs(
        log_probs=next(columns),
        entropy=next(columns) if entropy else None,
        sum_pi_squared=next(columns) if sum_pi_squared else None,
    )
