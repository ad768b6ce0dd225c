"""From packed rows to what the model says at the predicting positions."""

from __future__ import annotations

import inspect

import torch
from torch import nn

from ostinato.algos import token_log_probs, token_log_probs_and_entropy, token_sum_pi_squared
from ostinato.workers.core.engine import Head, TokenOutputs
from ostinato.workers.core.microbatch import PackedRows


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
) -> tuple[TokenOutputs, torch.Tensor]:
    """Run one micro-batch through the model.

    Args:
        module: The sharded model.
        head: "lm" for log-probabilities, "value" for a scalar at every position.
        packed: The micro-batch; T tokens, N predicting positions, both may be 0.
        entropy: Whether to compute the entropy too ("lm" only).
        sum_pi_squared: Whether to compute Σπ² too, without a gradient ("lm" only).
        padded: Run the rows as a padded batch, for a model whose attention cannot keep packed rows apart.

    Returns:
        The outputs at the N positions in float32, and a scalar that is exactly 0 and depends on the whole model. Adding
        it to a loss makes backward reach every parameter, whatever the loss reads.
    """
    logits = _padded_logits(module, packed) if padded else _packed_logits(module, packed, head)
    zero = logits[:0].float().sum()
    if head == "value":
        return TokenOutputs(values=logits[:, 0].float()), zero
    squares = token_sum_pi_squared(logits.detach(), packed.temperature) if sum_pi_squared else None
    if not entropy:
        log_probs = token_log_probs(logits, packed.labels, packed.temperature)
        return TokenOutputs(log_probs=log_probs, sum_pi_squared=squares), zero
    log_probs, entropies = token_log_probs_and_entropy(logits, packed.labels, packed.temperature)
    return TokenOutputs(log_probs=log_probs, entropy=entropies, sum_pi_squared=squares), zero


def _packed_logits(module: nn.Module, packed: PackedRows, head: Head) -> torch.Tensor:
    """Logits (N, V) of one sequence that holds all rows.

    Rows are told apart by their position ids, which restart at 0: no attention mask and no cache, or transformers lets
    rows see each other. A micro-batch without tokens runs one token that nothing reads, because the other ranks are
    waiting in the same collectives.
    """
    input_ids, position_ids, cu_seqlens = packed.input_ids, packed.position_ids, packed.cu_seqlens
    if input_ids.numel() == 0:
        input_ids = position_ids = input_ids.new_zeros(1)
        cu_seqlens = torch.tensor([0, 1], dtype=torch.int32, device=input_ids.device)
    selects = head == "lm" and selects_logits(module)
    logits = module(
        input_ids=input_ids[None],
        position_ids=position_ids[None],
        attention_mask=None,
        use_cache=False,
        # Read by attentions that want boundaries in place of a mask; the others ignore them.
        cu_seq_lens_q=cu_seqlens,
        cu_seq_lens_k=cu_seqlens,
        max_length_q=max(packed.max_seqlen, 1),
        max_length_k=max(packed.max_seqlen, 1),
        **({"logits_to_keep": packed.predict} if selects else {}),
    ).logits[0]
    return logits if selects else logits[packed.predict]


def _padded_logits(module: nn.Module, packed: PackedRows) -> torch.Tensor:
    """Logits (N, V) of a right-padded batch with an attention mask."""
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
    logits = module(input_ids=input_ids, attention_mask=attention_mask, use_cache=False).logits
    return logits[row[packed.predict], column[packed.predict]]
