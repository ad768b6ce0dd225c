"""From packed rows to what Megatron's model is called with, and from its hidden states to what it says.

TransformerEngine's attention takes packed rows as they are (`thd`), and so does `RowAttention` in Megatron's own layers
(`kernel`). Where that does not run, Megatron's own attention takes a mask (`mask`): packed rows become one sequence
under a block-diagonal mask, whose cost grows with the square of the pack.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch

from ostinato.algos import token_log_probs, token_log_probs_and_entropy, token_sum_pi_squared
from ostinato.workers.core.engine import Head, TokenOutputs
from ostinato.workers.core.head_answers import head_answers, named_answers
from ostinato.workers.core.microbatch import PackedRows
from ostinato.workers.megatron.parallel import import_megatron
from ostinato.workers.megatron.vocab import vocab_parallel_outputs

Rows = Literal["thd", "kernel", "mask", "padded"]
"""How rows lie before the attention; the last one is a padded batch."""


@dataclass(frozen=True)
class Layout:
    """How micro-batches are laid out for the model.

    Attributes:
        head: "lm" or "value".
        vocab_size: tokens, without padding.
        rows: how rows lie before the attention.
        tp: tensor-parallel size.
        cp: context-parallel size.
        sequence_parallel: whether hidden states come dealt over the tensor-parallel ranks.
        fused: whether log-probabilities are taken from the hidden states in chunks, so that logits never exist; only
            where one rank has the whole vocabulary.
    """

    head: Head
    vocab_size: int
    rows: Rows
    tp: int
    cp: int
    sequence_parallel: bool
    fused: bool = False

    @property
    def multiple(self) -> int:
        """What the length of every row must be a multiple of."""
        return (self.tp if self.sequence_parallel else 1) * (2 * self.cp if self.cp > 1 else 1)


@dataclass(frozen=True)
class Inputs:
    """Arguments of the model for one micro-batch, and where its predicting positions are in its output.

    Attributes:
        arguments: of GPTModel's forward.
        rotary: position ids and the longest row, for `PackedRotary`; None where Megatron counts from 0 itself.
        predict: (N,) positions in the flattened output, (S·b) in the order (position, row).
    """

    arguments: dict[str, Any]
    rotary: tuple[torch.Tensor, int] | None
    predict: torch.Tensor


def model_inputs(packed: PackedRows, layout: Layout) -> Inputs:
    """Lay one micro-batch out.

    A micro-batch without tokens runs one token that nothing reads, because other ranks wait in the same collectives.
    """
    if layout.rows == "padded":
        return _padded(packed, layout)
    if layout.rows == "thd":
        return _thd(packed, layout)
    return _kernel(packed) if layout.rows == "kernel" else _masked(packed)


def _masked(packed: PackedRows) -> Inputs:
    ids, positions, _ = _tokens(packed)
    # A row begins where positions restart; True in the mask means: not seen.
    row = (positions == 0).cumsum(0)
    order = torch.arange(len(ids), device=ids.device)
    hidden = (row[:, None] != row[None, :]) | (order[None, :] > order[:, None])
    arguments = {"input_ids": ids[None], "position_ids": positions[None], "attention_mask": hidden[None, None]}
    return Inputs(arguments, (positions, max(packed.max_seqlen, 1)), packed.predict)


def _kernel(packed: PackedRows) -> Inputs:
    """Packed rows for `RowAttention`: one sequence to Megatron, with boundaries that only the attention reads."""
    ids, positions, cu_seqlens = _tokens(packed)
    longest = max(packed.max_seqlen, 1)
    arguments = {
        "input_ids": ids[None],
        "position_ids": positions[None],
        "attention_mask": None,
        "packed_seq_params": _boundaries("sbhd", cu_seqlens, longest),
    }
    return Inputs(arguments, (positions, longest), packed.predict)


def _boundaries(qkv_format: str, cu_seqlens: torch.Tensor, longest: int) -> Any:
    rows = cu_seqlens.to(torch.int32)
    return import_megatron("packed_seq_params").PackedSeqParams(
        qkv_format=qkv_format,
        cu_seqlens_q=rows,
        cu_seqlens_kv=rows,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
    )


def _padded(packed: PackedRows, layout: Layout) -> Inputs:
    cu_seqlens = packed.cu_seqlens.to(torch.int64)
    num_rows = max(len(cu_seqlens) - 1, 1)
    width = -(-max(packed.max_seqlen, 1) // layout.multiple) * layout.multiple
    tokens = torch.arange(packed.input_ids.numel(), device=packed.input_ids.device)
    row = torch.bucketize(tokens, cu_seqlens[1:], right=True)
    column = packed.position_ids
    ids = packed.input_ids.new_zeros(num_rows, width)
    ids[row, column] = packed.input_ids
    positions = torch.arange(width, device=ids.device)
    # Padding is on the right, so a causal mask keeps it from every token that counts.
    future = positions[None, :] > positions[:, None]
    mask = future.expand(num_rows, 1, width, width)
    arguments = {"input_ids": ids, "position_ids": positions.expand(num_rows, width), "attention_mask": mask}
    return Inputs(arguments, None, column[packed.predict] * num_rows + row[packed.predict])


def _thd(packed: PackedRows, layout: Layout) -> Inputs:
    """Packed rows for TransformerEngine, each padded to `layout.multiple` and dealt over context-parallel ranks.

    Padding stands at the end of its row and belongs to it: causal attention does not look there, and nobody reads what
    comes out. Between rows it would be nobody's, and what TransformerEngine leaves there as a gradient is undefined.
    """
    ids, positions, cu_seqlens = _tokens(packed)
    if layout.multiple == 1:
        arguments = {
            "input_ids": ids[None],
            "position_ids": positions[None],
            "attention_mask": None,
            "packed_seq_params": _boundaries("thd", cu_seqlens, max(packed.max_seqlen, 1)),
        }
        return Inputs(arguments, None, packed.predict)
    lengths = cu_seqlens.diff()
    padded = (lengths + layout.multiple - 1) // layout.multiple * layout.multiple
    starts = torch.cat([padded.new_zeros(1), padded.cumsum(0)])
    row = torch.bucketize(torch.arange(len(ids), device=ids.device), cu_seqlens[1:], right=True)
    place = starts[row] + positions
    total = int(starts[-1])
    wide_ids, wide_positions = ids.new_zeros(total), positions.new_zeros(total)
    wide_ids[place], wide_positions[place] = ids, positions
    params = _boundaries("thd", starts, int(padded.max()))
    if layout.cp > 1:
        mine = _context_rows(starts, layout.cp, import_megatron("parallel_state").get_context_parallel_rank())
        wide_ids, wide_positions = wide_ids[mine], wide_positions[mine]
    arguments = {
        "input_ids": wide_ids[None],
        "position_ids": wide_positions[None],
        "attention_mask": None,
        "packed_seq_params": params,
    }
    return Inputs(arguments, None, place[packed.predict])


def _tokens(packed: PackedRows) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    if packed.input_ids.numel():
        return packed.input_ids, packed.position_ids, packed.cu_seqlens.to(torch.int64)
    one = packed.input_ids.new_zeros(1)
    return one, one, torch.tensor([0, 1], device=one.device)


def _context_rows(starts: torch.Tensor, size: int, rank: int) -> torch.Tensor:
    """Positions (T/size,) of the whole pack that a context-parallel rank runs.

    They are the `rank`-th of each row's 2·size pieces and the one as far from the end, so that causal attention costs
    every rank the same.
    """
    pieces = []
    for begin, end in zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True):
        piece = (end - begin) // (2 * size)
        for number in (rank, 2 * size - 1 - rank):
            pieces.append(torch.arange(begin + number * piece, begin + (number + 1) * piece, device=starts.device))
    return torch.cat(pieces)


class OutputReader:
    """Reads the model's last hidden states at the predicting positions only; handed to GPTModel as a hook.

    Args:
        layout: of the micro-batch.
        inputs: of the micro-batch.
        packed: the micro-batch.
        entropy: whether `layout.fused` answers with the entropy too.
        sum_pi_squared: whether it answers with Σπ² too, without a gradient.
    """

    def __init__(
        self,
        layout: Layout,
        inputs: Inputs,
        packed: PackedRows,
        *,
        entropy: bool = False,
        sum_pi_squared: bool = False,
    ) -> None:
        self.layout = layout
        self.inputs = inputs
        self.packed = packed
        self.entropy = entropy
        self.sum_pi_squared = sum_pi_squared

    def __call__(
        self, *, hidden_states: torch.Tensor, output_layer: Any, output_weight: torch.Tensor | None, **_: Any
    ) -> torch.Tensor:
        """What `token_outputs` reads, (N, ·), from hidden states (S, b, H): logits, values, or answers."""
        layout = self.layout
        if layout.sequence_parallel:
            # What follows is the same on every rank of the group, or sums its own gradient over it.
            hidden_states = import_megatron("tensor_parallel").gather_from_sequence_parallel_region(
                hidden_states, tensor_parallel_output_grad=False
            )
        flat = hidden_states.flatten(0, 1)
        if layout.cp > 1:
            flat = gather_context(flat, self.inputs, layout)
        chosen = flat[self.inputs.predict]
        if layout.fused:
            out = self._answers(chosen, output_layer.weight if output_weight is None else output_weight)
        else:
            out = output_layer(chosen[:, None], weight=output_weight)[0][:, 0]
        return _EqualShare.apply(out, layout.cp) if layout.cp > 1 else out

    def _answers(self, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Log-probabilities, then entropies and Σπ² where they are wanted, (N, k) float32."""
        answers = head_answers(
            hidden,
            weight,
            self.packed.labels,
            self.packed.temperature,
            entropy=self.entropy,
            sum_pi_squared=self.sum_pi_squared,
        )
        return torch.stack(answers, dim=1)


def gather_context(local: torch.Tensor, inputs: Inputs, layout: Layout) -> torch.Tensor:
    """The whole pack's hidden states (T, H) from the context-parallel ranks' (T/cp, H); collective.

    Every rank then computes the same loss, and gradients of parameters are summed over these ranks. So the output layer
    gets a cp-th of the loss's gradient on each of them (`_EqualShare`), and what goes back to the tokens that a rank
    alone has run is multiplied by cp again.
    """
    state = import_megatron("parallel_state")
    params = inputs.arguments["packed_seq_params"]
    starts = params.cu_seqlens_q.to(torch.int64)
    places = torch.cat([_context_rows(starts, layout.cp, rank) for rank in range(layout.cp)])
    whole = _GatherSlices.apply(local, state.get_context_parallel_group())
    return torch.empty_like(whole).index_copy(0, places, whole)


class _EqualShare(torch.autograd.Function):
    """The logits; backward divides by the number of ranks that have the same."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, size: int) -> torch.Tensor:
        ctx.size = size
        return logits.view_as(logits)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0] / ctx.size, None


class _GatherSlices(torch.autograd.Function):
    """All ranks' rows one after another; backward takes this rank's own, whole again."""

    @staticmethod
    def forward(ctx: Any, local: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.rank, ctx.size = torch.distributed.get_rank(group), torch.distributed.get_world_size(group)
        whole = local.new_empty(local.shape[0] * ctx.size, *local.shape[1:])
        torch.distributed.all_gather_into_tensor(whole, local.contiguous(), group=group)
        return whole

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0].chunk(ctx.size)[ctx.rank] * ctx.size, None


def token_outputs(
    out: torch.Tensor, packed: PackedRows, layout: Layout, *, entropy: bool, sum_pi_squared: bool
) -> TokenOutputs:
    """What the model says at the N positions, float32, the same on every tensor-parallel rank.

    Args:
        out: of `OutputReader`: logits (N, V_local) of this rank's columns, values (N, 1), or answers.
        packed: the micro-batch.
        layout: how it was run.
        entropy: whether to compute the entropy too ("lm" only).
        sum_pi_squared: whether to compute Σπ² too, without a gradient ("lm" only).
    """
    if layout.head == "value":
        return TokenOutputs(values=out[:, 0].float())
    if layout.fused:
        return named_answers(out, entropy=entropy, sum_pi_squared=sum_pi_squared)
    logits = out
    if layout.tp > 1:
        state = import_megatron("parallel_state")
        log_probs, entropies, squares = vocab_parallel_outputs(
            logits,
            packed.labels,
            packed.temperature,
            first=state.get_tensor_model_parallel_rank() * logits.shape[1],
            vocab_size=layout.vocab_size,
            group=state.get_tensor_model_parallel_group(),
            entropy=entropy,
            sum_pi_squared=sum_pi_squared,
        )
        return TokenOutputs(log_probs=log_probs, entropy=entropies, sum_pi_squared=squares)
    squares = token_sum_pi_squared(logits.detach(), packed.temperature) if sum_pi_squared else None
    if not entropy:
        log_probs = token_log_probs(logits, packed.labels, packed.temperature)
        return TokenOutputs(log_probs=log_probs, sum_pi_squared=squares)
    log_probs, entropies = token_log_probs_and_entropy(logits, packed.labels, packed.temperature)
    return TokenOutputs(log_probs=log_probs, entropy=entropies, sum_pi_squared=squares)
