"""Whether a model keeps packed rows apart: tried where its family is not known to.

Attention is told where a row begins. A recurrence, a convolution over tokens, a bias by distance or a mask in chunks
may know nothing of it, and gives numbers that look like any others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ostinato.protocol import DataProto
from ostinato.workers.core.flops import GATED
from ostinato.workers.core.microbatch import PackedRows, pack
from ostinato.workers.fsdp.attention import VARLEN, registered_name
from ostinato.workers.fsdp.errors import ModelLoadError

LENGTHS = ((8, 8, 8), (5, 8, 11))
"""Tokens of three rows, two times: as many in all, and the second row, which is the same, stands elsewhere."""

LEAST, LEAST_IN_HALF = 1e-4, 0.02
"""What counts, as a share of what other rows differ by, in float32 and in half precision; rounding stays below."""


def known_apart(module: nn.Module) -> bool:
    """Whether every layer mixes tokens by plain attention that is told where rows begin."""
    config: Any = module.config
    known = config.get_text_config().model_type in GATED
    return known and config._attn_implementation in ("sdpa", registered_name(VARLEN))


def check_apart(
    module: nn.Module, answers: Callable[[PackedRows], torch.Tensor], device: torch.device, dtype: torch.dtype
) -> None:
    """Refuse a model that says something else of a packed row where it stands between other rows.

    Args:
        module: The model.
        answers: Runs it on a pack of three rows, (3, R); collective.
        device: Where packs must lie.
        dtype: Of the forward pass.

    Raises:
        ModelLoadError: Rows see each other; the text says how to run the model.
    """
    config: Any = module.config
    config = config.get_text_config()
    packs = [_three_rows(lengths, config.vocab_size, device) for lengths in LENGTHS]
    one, other = (answers(packed).double() for packed in packs)
    shortest = min(map(min, LENGTHS)) - 1
    found = torch.stack([(one[1] - other[1]).norm(), (one[0] - other[0])[:shortest].norm()])
    dist.all_reduce(found, op=dist.ReduceOp.MAX)  # rounding may differ between ranks, what follows from it may not
    change, scale = found.tolist()
    chunked = "chunked_attention" in (getattr(config, "layer_types", None) or ())
    if chunked or change > (LEAST if dtype == torch.float32 else LEAST_IN_HALF) * scale:
        raise ModelLoadError(
            f"model.use_remove_padding=True: a {config.model_type} model does not keep packed rows apart: what it "
            f"says of a row depends on the rows around it ({change:.1e}, where other rows differ by {scale:.1e}"
            f"{'; and its attention counts chunks from the first of all tokens' if chunked else ''}). Set "
            "model.use_remove_padding=False."
        )


def _three_rows(lengths: Sequence[int], vocab_size: int, device: torch.device) -> PackedRows:
    """Rows of one prompt token each; the second begins with the same tokens whatever the lengths."""
    width = max(map(max, LENGTHS))
    starts = (lengths[0], 100, 2 * lengths[0])
    ids = torch.stack([torch.arange(start, start + width) % vocab_size for start in starts])
    mask = (torch.arange(width) < torch.tensor(lengths)[:, None]).long()
    tensors = {"input_ids": ids, "attention_mask": mask, "response_mask": mask[:, 1:]}
    return pack(DataProto.from_dict(tensors=tensors), device=device)
