"""From packed rows to what the model says at the predicting positions."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ostinato.algos import token_log_probs, token_log_probs_and_entropy, token_sum_pi_squared
from ostinato.workers.core.engine import Head, TokenOutputs
from ostinato.workers.core.head_answers import named_answers
from ostinato.workers.core.microbatch import PackedRows
from ostinato.workers.fsdp.head import Question, token_head
from ostinato.workers.fsdp.ulysses import GROUP, gather_answers, slice_rows


@dataclass(frozen=True)
class Layout:
    """One micro-batch as the model is fed with it.

    Attributes:
        inputs: what the model is called with.
        positions: (N,) int64, where the positions asked about lie in the model's flattened tokens.
        labels: (N,) int64, the token asked about at each of them.
        counts: positions of every rank that shares the micro-batch; None where one rank has all of it.
    """

    inputs: dict[str, Any]
    positions: torch.Tensor
    labels: torch.Tensor
    counts: list[int] | None = None


def selects_logits(module: nn.Module) -> bool:
    """Whether the model can run its head at chosen positions only (`logits_to_keep`)."""
    return "logits_to_keep" in inspect.signature(module.forward).parameters


def token_outputs(
    module: nn.Module,
    head: Head,
    packed: PackedRows,
    *,
    entropy: bool,
    sum_pi_squared: bool = False,
    padded: bool = False,
    group: dist.ProcessGroup | None = None,
) -> tuple[TokenOutputs, torch.Tensor]:
    """Run one micro-batch through the model.

    Args:
        module: The sharded model.
        head: "lm" for log-probabilities, "value" for a scalar at every position.
        packed: The micro-batch; T tokens, N predicting positions, both may be 0.
        entropy: Whether to compute the entropy too ("lm" only).
        sum_pi_squared: Whether to compute Σπ² too, without a gradient ("lm" only).
        padded: Run the rows as a padded batch, for a model whose attention cannot keep packed rows apart.
        group: Ranks that have the same micro-batch and share its tokens; None: this rank alone has it.

    Returns:
        The outputs at the N positions in float32, and a scalar that is exactly 0 and depends on the whole model. Adding
        it to a loss makes backward reach every parameter, whatever the loss reads.
    """
    if group is not None:
        layout = sliced_layout(packed, group)
    else:
        layout = padded_layout(packed) if padded else packed_layout(packed)
    question = Question(layout.positions, layout.labels, packed.temperature, entropy, sum_pi_squared)
    fused = token_head(module) if head == "lm" else None
    if head == "value":
        answers = module(**layout.inputs).logits.flatten(0, 1)[layout.positions].float()
    elif fused is not None:
        with fused.asked(question):
            answers = module(**layout.inputs).logits[0]
    else:
        answers = _from_logits(module, layout, question)
    if group is not None and layout.counts is not None:
        answers = gather_answers(answers, layout.counts, group)
    return _named(answers, head, question), answers[:0].sum()


def _named(answers: torch.Tensor, head: Head, question: Question) -> TokenOutputs:
    if head == "value":
        return TokenOutputs(values=answers[:, 0])
    return named_answers(answers, entropy=question.entropy, sum_pi_squared=question.sum_pi_squared)


def _from_logits(module: nn.Module, layout: Layout, question: Question) -> torch.Tensor:
    """What `TokenHead` answers, (N, k), from a model that gives logits."""
    rows = layout.inputs["input_ids"].shape[0]
    if rows == 1 and selects_logits(module):
        logits = module(**layout.inputs, logits_to_keep=layout.positions).logits[0]
    else:
        logits = module(**layout.inputs).logits.flatten(0, 1)[layout.positions]
    if question.entropy:
        answers = [*token_log_probs_and_entropy(logits, question.labels, question.temperature)]
    else:
        answers = [token_log_probs(logits, question.labels, question.temperature)]
    if question.sum_pi_squared:
        answers.append(token_sum_pi_squared(logits.detach(), question.temperature))
    return torch.stack(answers, dim=-1).float()


def packed_layout(packed: PackedRows) -> Layout:
    """One sequence that holds all rows.

    A micro-batch without tokens runs one token that nothing reads, because the other ranks are waiting in the same
    collectives.
    """
    input_ids, position_ids, cu_seqlens = packed.input_ids, packed.position_ids, packed.cu_seqlens
    if input_ids.numel() == 0:
        input_ids = position_ids = input_ids.new_zeros(1)
        cu_seqlens = torch.tensor([0, 1], dtype=torch.int32, device=input_ids.device)
    inputs = _one_sequence(input_ids, position_ids, cu_seqlens, packed.max_seqlen)
    return Layout(inputs, packed.predict, packed.labels)


def sliced_layout(packed: PackedRows, group: dist.ProcessGroup) -> Layout:
    """This rank's part of one sequence that holds all rows; the attention gets the boundaries of the whole."""
    part = slice_rows(packed, group)
    inputs = _one_sequence(part.input_ids, part.position_ids, part.cu_seqlens, part.max_seqlen)
    return Layout(inputs | {GROUP: group}, part.positions, part.labels, part.counts)


def _one_sequence(
    input_ids: torch.Tensor, position_ids: torch.Tensor, cu_seqlens: torch.Tensor, longest: int
) -> dict[str, Any]:
    """Inputs of a model that reads rows one after another.

    Rows are told apart by their position ids, which restart at 0: no attention mask and no cache, or transformers lets
    rows see each other. Attentions that want boundaries in place of a mask read the last four; others ignore them.
    """
    return {
        "input_ids": input_ids[None],
        "position_ids": position_ids[None],
        "attention_mask": None,
        "use_cache": False,
        "cu_seq_lens_q": cu_seqlens,
        "cu_seq_lens_k": cu_seqlens,
        "max_length_q": max(longest, 1),
        "max_length_k": max(longest, 1),
    }


def padded_layout(packed: PackedRows) -> Layout:
    """A right-padded batch with an attention mask."""
    cu_seqlens = packed.cu_seqlens.to(torch.int64)
    num_rows, width = max(len(cu_seqlens) - 1, 1), max(packed.max_seqlen, 1)
    tokens = torch.arange(packed.input_ids.numel(), device=packed.input_ids.device)
    row = torch.bucketize(tokens, cu_seqlens[1:], right=True)
    column = packed.position_ids
    input_ids = packed.input_ids.new_zeros(num_rows, width)
    attention_mask = packed.input_ids.new_zeros(num_rows, width)
    input_ids[row, column] = packed.input_ids
    attention_mask[row, column] = 1
    # A row without any token would be a softmax over nothing; its one stand-in token is read by nobody.
    attention_mask[:, 0] = 1
    inputs = {"input_ids": input_ids, "attention_mask": attention_mask, "use_cache": False}
    return Layout(inputs, row[packed.predict] * width + column[packed.predict], packed.labels)
