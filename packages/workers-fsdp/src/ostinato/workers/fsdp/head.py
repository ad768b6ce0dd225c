"""A language model's head that answers with log-probabilities, entropies and Σπ² in place of logits.

They are computed inside the head module's own forward: that is where FSDP has the head's weight gathered, and from
where it reduces its gradient, tied to the embeddings or not.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers.modeling_outputs import BaseModelOutputWithPast

from ostinato.workers.core.head_answers import head_answers

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Question:
    """What one pass through the head is asked.

    Attributes:
        positions: (N,) int64, places in the flattened hidden states.
        labels: (N,) int64, the token asked about at each place.
        temperature: what logits are divided by.
        entropy: whether the entropies are wanted.
        sum_pi_squared: whether Σπ² is wanted; it carries no gradient.
    """

    positions: torch.Tensor
    labels: torch.Tensor
    temperature: float
    entropy: bool = False
    sum_pi_squared: bool = False


class TokenHead(nn.Linear):
    """`nn.Linear` that answers a question while one is asked, and gives logits otherwise."""

    _question: Question | None = None

    @contextmanager
    def asked(self, question: Question) -> Iterator[None]:
        """Answer this question inside.

        `forward` then gives (1, N, k) float32: log-probabilities, then entropies and Σπ² where they are wanted.
        """
        self._question = question
        try:
            yield
        finally:
            self._question = None

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Logits of hidden states (…, D), or the answers to the question."""
        question = self._question
        if question is None:
            return super().forward(input)
        hidden = input.flatten(0, -2)[question.positions]
        weight = self.weight
        if self.bias is not None:
            hidden = torch.cat([hidden, hidden.new_ones(hidden.shape[0], 1)], dim=1)
            weight = torch.cat([weight, self.bias[:, None]], dim=1)
        answers = head_answers(
            hidden,
            weight,
            question.labels,
            question.temperature,
            entropy=question.entropy,
            sum_pi_squared=question.sum_pi_squared,
        )
        # Stacked as it leaves, not viewed: FSDP hangs a hook on what a module returns.
        return torch.stack([answer[None] for answer in answers], dim=-1)


def fuse_head(module: nn.Module) -> bool:
    """Make a language model's head a `TokenHead`, where the model gives its head's output away as it is.

    Args:
        module: The whole model on the meta device, before it is sharded.

    Returns:
        Whether it was done; not where the head is no plain linear layer (an adapter on it, say), or where the model
        changes its logits afterwards (a soft cap, a scale).
    """
    head: Any = module.get_output_embeddings()  # pyright: ignore[reportCallIssue, reportAttributeAccessIssue]
    if type(head) is not nn.Linear:
        why = f"its head is {type(head).__name__}"
    elif not _gives_away(module, head):
        why = "it does not give its head's output away as it is"
    else:
        head.__class__ = TokenHead
        return True
    logger.info("%s keeps its logits in memory: %s", type(module).__name__, why)
    return False


class _BodyOutput(BaseModelOutputWithPast):
    """Hidden states, and None for whatever else a model's head looks for in its body's output."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return None


def _gives_away(module: nn.Module, head: nn.Linear) -> bool:
    """Run what the model does around its body and head on stand-ins, and see whether the head's output comes out."""
    prefix = getattr(module, "base_model_prefix", "")
    body = getattr(module, prefix, None) if prefix else None
    if body is None:
        return False
    marker = torch.empty(1, 1, 3, device="meta")
    hidden: Any = torch.empty(1, 1, head.in_features, device="meta")
    body.forward = lambda *_, **__: _BodyOutput(last_hidden_state=hidden)
    head.forward = lambda *_, **__: marker  # pyright: ignore[reportAttributeAccessIssue]
    try:
        ids = torch.zeros(1, 1, dtype=torch.int64, device="meta")
        return module(input_ids=ids, use_cache=False).logits is marker
    except Exception as error:  # a model of unknown make: its own path is the one that is known to work
        logger.info("%s: its head could not be tried (%s)", type(module).__name__, error)
        return False
    finally:
        del body.forward, head.forward


def token_head(module: nn.Module) -> TokenHead | None:
    """The model's head where `fuse_head` has made it answer questions."""
    find = getattr(module, "get_output_embeddings", None)
    head = find() if find is not None else None
    return head if isinstance(head, TokenHead) else None
