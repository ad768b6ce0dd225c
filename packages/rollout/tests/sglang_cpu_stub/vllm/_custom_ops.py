"""The three functions of vLLM that SGLang's layers call on a CPU."""

from __future__ import annotations

import torch


def rms_norm(out: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> None:
    """Write x / rms(x) * weight into `out`; computed in float32."""
    wide = x.float()
    out.copy_((wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon)).to(x.dtype) * weight)


def fused_add_rms_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, epsilon: float) -> None:
    """Add x to the residual and normalise the sum into `x`, both in place."""
    residual.add_(x)
    rms_norm(x, residual.clone(), weight, epsilon)


def rotary_embedding(
    positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    head_size: int,
    cos_sin_cache: torch.Tensor,
    is_neox: bool,
) -> None:
    """Rotate query and key in place, the two halves of a head against each other."""
    assert is_neox, "the interleaved form is not needed here"
    cos, sin = cos_sin_cache[positions.flatten()].chunk(2, -1)
    for tensor in (query, key):
        heads = tensor.view(tensor.shape[0], -1, head_size)
        rotated = heads[..., : 2 * cos.shape[-1]]
        c, s = cos[:, None].to(rotated.dtype), sin[:, None].to(rotated.dtype)
        first, second = rotated.chunk(2, -1)
        heads[..., : rotated.shape[-1]] = torch.cat([first * c - second * s, second * c + first * s], -1)
