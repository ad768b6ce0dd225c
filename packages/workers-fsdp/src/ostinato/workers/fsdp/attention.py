"""Attention over packed rows whose cost grows with the rows' lengths, not with the length of the pack.

transformers' own `sdpa` keeps packed rows apart with a dense T × T mask and computes all of it. `varlen` does no work
between rows: half precision on a GPU hands the boundaries to a kernel (`ostinato.workers.core.row_attention`), anything
else runs rows of like length as one padded batch.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from ostinato.workers.core.row_attention import KERNEL_WIDTH, attend_within_rows
from ostinato.workers.fsdp.errors import ModelLoadError
from ostinato.workers.fsdp.ulysses import heads_of_all_tokens, tokens_with_all_heads

VARLEN = "varlen"
_REGISTERED = "ostinato_varlen"
_HALF = (torch.bfloat16, torch.float16)


def registered_name(name: str) -> str:
    """The name under which transformers knows an attention; `varlen` is registered there when first asked for."""
    if name != VARLEN:
        return name
    AttentionInterface.register(_REGISTERED, varlen_attention)
    return _REGISTERED


def choose_attention(module: nn.Module, requested: str | None) -> str:
    """The attention of a model that runs packed rows, as transformers knows it.

    Args:
        module: The model, on any device.
        requested: `override_config.attn_implementation`; None leaves the choice to this function: `varlen` where the
            model's attention is the plain one, else `dense_attention`.
    """
    if requested is not None:
        return registered_name(requested)
    return registered_name(VARLEN) if has_plain_attention(module) else dense_attention(module)


def dense_attention(module: nn.Module) -> str:
    """The faster of the attentions with a mask that a model has; some have no `sdpa`, some have nothing to choose."""
    return "sdpa" if getattr(module, "_supports_sdpa", False) else "eager"


def has_plain_attention(module: nn.Module) -> bool:
    """Whether every layer's attention is causal softmax attention, at most with a sliding window."""
    if not getattr(module, "_supports_flash_attn", False):
        return False
    config: Any = module.config
    config = config.get_text_config()
    head_size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    kinds = set(getattr(config, "layer_types", None) or ())
    return (
        getattr(config, "attn_logit_softcapping", None) is None
        and getattr(config, "kv_lora_rank", None) is None
        and kinds <= {"full_attention", "sliding_attention"}
        and head_size <= KERNEL_WIDTH
        and not any(name.endswith("sinks") for name, _ in module.named_parameters())
    )


def varlen_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    cu_seq_lens_q: torch.Tensor | None = None,
    max_length_q: int | None = None,
    sequence_group: dist.ProcessGroup | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Causal attention inside each row, with transformers' calling convention.

    Half precision on a GPU runs `attend_within_rows`; anything else runs rows of like length together.

    Args:
        module: The attention layer; only for error texts.
        query: (1, H, T, D), all rows of a pack.
        key: (1, G, T, D), H a multiple of G.
        value: (1, G, T, D).
        attention_mask: None; rows are told apart by `cu_seq_lens_q`.
        scaling: Factor of the scores; None is 1/sqrt(D).
        sliding_window: How many tokens back a token sees, itself included; None is all.
        cu_seq_lens_q: (b + 1,) int32, where each row begins; the last entry is T.
        max_length_q: Length of the longest row.
        sequence_group: Ranks that hold the other tokens of the pack, in equal consecutive parts; T is then this rank's
            part, and `cu_seq_lens_q` ends at the number of tokens of all. None: T is all.
        others: What layers pass to every attention. A changed score (soft cap, sinks) is refused.

    Returns:
        (1, T, H, D), and None where other attentions give their weights.
    """
    refused = [name for name in ("softcap", "s_aux", "position_bias") if others.get(name) is not None]
    if refused or attention_mask is not None or cu_seq_lens_q is None or max_length_q is None:
        why = f"{type(module).__name__} needs {refused[0]}" if refused else "rows came without their boundaries"
        raise ModelLoadError(
            f"attn_implementation={VARLEN}: {why}, which this attention does not do. Set "
            "model.override_config.attn_implementation=sdpa."
        )
    if sequence_group is not None:
        query, key, value = (heads_of_all_tokens(x, sequence_group) for x in (query, key, value))
    out = _within_rows(query, key, value, scaling, sliding_window, cu_seq_lens_q, max_length_q)
    return out if sequence_group is None else tokens_with_all_heads(out, sequence_group), None


def _within_rows(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scaling: float | None,
    sliding_window: int | None,
    cu_seqlens: torch.Tensor,
    longest: int,
) -> torch.Tensor:
    """`varlen_attention` where one rank has all tokens of its heads."""
    if query.device.type == "cuda" and query.dtype in _HALF:
        q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
        return attend_within_rows(q, k, v, cu_seqlens, longest, scale=scaling, window=sliding_window)[None]
    return _padded(query, key, value, scaling, sliding_window, cu_seqlens)


def _padded(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scaling: float | None,
    sliding_window: int | None,
    cu_seqlens: torch.Tensor,
) -> torch.Tensor:
    """Rows of like length as one padded batch; padding stands behind a row, where causal attention does not look."""
    groups = query.shape[1] // key.shape[1]
    heads = [x[0].transpose(0, 1) for x in (query, key, value)]  # (T, heads, D)
    starts, lengths = cu_seqlens[:-1].to(torch.int64), cu_seqlens.diff().to(torch.int64)
    places, parts = [], []
    for rows in _like_lengths(lengths.tolist()):
        index = torch.tensor(rows, device=lengths.device)
        width = int(lengths[index].max())
        column = torch.arange(width, device=lengths.device)
        inside = column < lengths[index][:, None]
        place = torch.where(inside, starts[index][:, None] + column, starts[index][:, None])
        q, k, v = (x[place].transpose(1, 2) for x in heads)  # (rows, heads, width, D)
        k, v = (x.repeat_interleave(groups, dim=1) for x in (k, v))
        mask = None
        if sliding_window is not None and 0 < sliding_window < width:
            gap = column[:, None] - column
            mask = (gap >= 0) & (gap < sliding_window)
        out = scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, scale=scaling)
        parts.append(out.transpose(1, 2)[inside])
        places.append(place[inside])
    packed = torch.cat(parts)
    return torch.empty_like(packed).index_copy(0, torch.cat(places), packed)[None]


def _like_lengths(lengths: list[int]) -> list[list[int]]:
    """Group rows so that none is padded to more than 1.25 times its length; rows without tokens are left out."""
    groups: list[list[int]] = []
    for row in sorted((row for row, length in enumerate(lengths) if length), key=lambda row: -lengths[row]):
        if groups and lengths[groups[-1][0]] <= 1.25 * lengths[row]:
            groups[-1].append(row)
        else:
            groups.append([row])
    return groups
