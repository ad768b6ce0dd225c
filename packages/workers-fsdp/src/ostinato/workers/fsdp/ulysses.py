"""Ulysses sequence parallelism: the tokens of a micro-batch lie on several ranks, attention sees whole heads.

The ranks of a group get the same rows. Each runs an equal, consecutive part of the packed tokens through embeddings,
MLPs and head. Around attention an all-to-all turns parts of the tokens with all heads into all tokens with a part of
the heads, and back. What the model says is gathered at the end, so that every rank of the group computes the same loss;
its gradient reaches each rank's own tokens alone, and the sum over ranks is the whole gradient, once.

Source: Jacobs et al. 2023, DeepSpeed-Ulysses.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.function import once_differentiable

from ostinato.workers.core.microbatch import PackedRows
from ostinato.workers.fsdp.errors import FsdpConfigError

KEY = "ulysses_sequence_parallel_size"
GROUP = "sequence_group"
"""Name under which the attention gets the group."""


def check_model(module: nn.Module, size: int, attention: str, varlen: str) -> None:
    """Refuse a model whose heads cannot be divided over `size` ranks.

    Args:
        module: The model.
        size: Ranks that share the tokens of a micro-batch.
        attention: What the model runs.
        varlen: The attention that can be divided.

    Raises:
        FsdpConfigError: The text names sizes that would work.
    """
    if attention != varlen:
        raise FsdpConfigError(
            f"{KEY}={size}: expected a model with plain causal attention over packed rows, got {type(module).__name__} "
            f"with attn_implementation={attention}. Leave {KEY} at 1 (with model.use_remove_padding=True and without "
            "override_config.attn_implementation, models with plain attention are run so)."
        )
    config: Any = module.config
    config = config.get_text_config()
    heads = int(config.num_attention_heads)
    kv_heads = int(getattr(config, "num_key_value_heads", None) or heads)
    if not _divides(size, heads, kv_heads):
        fitting = [other for other in range(1, heads + 1) if _divides(other, heads, kv_heads)]
        raise FsdpConfigError(
            f"{KEY}={size}: expected a number that divides the {heads} attention heads, and divides or is a multiple "
            f"of the {kv_heads} key/value heads; these do: {', '.join(map(str, fitting))}."
        )


def _divides(size: int, heads: int, kv_heads: int) -> bool:
    return heads % size == 0 and (kv_heads % size == 0 or size % kv_heads == 0)


@dataclass(frozen=True)
class Slice:
    """This rank's part of a packed micro-batch.

    Attributes:
        input_ids: (t,) int64, t tokens on every rank of the group; the last ranks may hold padding.
        position_ids: (t,) int64, of the rows they belong to.
        cu_seqlens: (b + 1,) or (b + 2,) int32 over the tokens of all ranks; padding is a row of its own.
        max_seqlen: Tokens of the longest row, padding included.
        positions: (n,) int64 in [0, t), those of `predict` that lie here.
        labels: (n,) int64, their labels.
        counts: How many such positions each rank of the group holds, in order.
    """

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    cu_seqlens: torch.Tensor
    max_seqlen: int
    positions: torch.Tensor
    labels: torch.Tensor
    counts: list[int]


def slice_rows(packed: PackedRows, group: dist.ProcessGroup) -> Slice:
    """Cut a packed micro-batch into equal parts, padded at the end to a multiple of the group's size."""
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    num_tokens = packed.input_ids.numel()
    share = max(-(-num_tokens // size), 1)
    padding = share * size - num_tokens
    cu_seqlens, position_ids = packed.cu_seqlens, packed.position_ids
    if padding:
        cu_seqlens = torch.cat([cu_seqlens, cu_seqlens.new_full((1,), share * size)])
        position_ids = torch.cat([position_ids, torch.arange(padding, device=position_ids.device)])
    input_ids = torch.nn.functional.pad(packed.input_ids, (0, padding))
    begin = rank * share
    owner = packed.predict // share
    here = owner == rank
    return Slice(
        input_ids=input_ids[begin : begin + share],
        position_ids=position_ids[begin : begin + share],
        cu_seqlens=cu_seqlens,
        max_seqlen=max(packed.max_seqlen, padding),
        positions=packed.predict[here] - begin,
        labels=packed.labels[here],
        counts=torch.bincount(owner, minlength=size).tolist(),
    )


class _Exchange(torch.autograd.Function):
    """All-to-all of equal blocks along the first dimension; its own transpose."""

    @staticmethod
    def forward(ctx: Any, blocks: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return _all_to_all(blocks, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return _all_to_all(grad_outputs[0], ctx.group), None


def _all_to_all(blocks: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    blocks = blocks.contiguous()
    out = torch.empty_like(blocks)
    dist.all_to_all_single(out, blocks, group=group)
    return out


def heads_of_all_tokens(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """From all heads of this rank's tokens to this rank's heads of all tokens.

    Args:
        x: (1, H, t, D). Where H is smaller than the group, each head is repeated until there is one a rank.
        group: s ranks.

    Returns:
        (1, max(H, s) / s, s·t, D).
    """
    size = dist.get_world_size(group)
    if x.shape[1] < size:
        x = x.repeat_interleave(size // x.shape[1], dim=1)
    _, heads, share, width = x.shape
    blocks = _Exchange.apply(x.reshape(size, heads // size, share, width), group)
    return blocks.transpose(0, 1).reshape(1, heads // size, size * share, width)


def tokens_with_all_heads(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """The way back: from this rank's heads of all tokens (1, s·t, H/s, D) to all heads of its tokens (1, t, H, D)."""
    size = dist.get_world_size(group)
    _, tokens, heads, width = x.shape
    blocks = _Exchange.apply(x.reshape(size, tokens // size, heads, width), group)
    return blocks.transpose(0, 1).reshape(1, tokens // size, size * heads, width)


class _Gather(torch.autograd.Function):
    """Pieces of all ranks, one after another; the gradient of a rank is that of its own piece."""

    @staticmethod
    def forward(ctx: Any, piece: torch.Tensor, counts: list[int], group: dist.ProcessGroup) -> torch.Tensor:
        rank, most = dist.get_rank(group), max(counts)
        ctx.begin, ctx.end = sum(counts[:rank]), sum(counts[: rank + 1])
        padded = piece.new_zeros(most, piece.shape[1])
        padded[: piece.shape[0]] = piece
        everyone = piece.new_empty(len(counts) * most, piece.shape[1])
        dist.all_gather_into_tensor(everyone, padded, group=group)
        pieces = everyone.reshape(len(counts), most, piece.shape[1])
        return torch.cat([part[:count] for part, count in zip(pieces, counts, strict=True)])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return grad_outputs[0][ctx.begin : ctx.end], None, None


def gather_answers(answers: torch.Tensor, counts: list[int], group: dist.ProcessGroup) -> torch.Tensor:
    """What all ranks of a group say, in the order of the packed tokens.

    Args:
        answers: (n, k) of this rank.
        counts: n of every rank.
        group: The ranks.

    Returns:
        (N, k), the same on every rank; gradients flow into this rank's own rows.
    """
    return _Gather.apply(answers, counts, group)
