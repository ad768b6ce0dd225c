"""What runs in SGLang's scheduler processes: taking weights out of shared memory, and drawing by a row's seed."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch

from ostinato.rollout.buckets import checksum
from ostinato.rollout.copy_plan import CopyPlan, merged

if TYPE_CHECKING:
    from ostinato.rollout.base import Bucket, TensorSpec

LOADER = f"{__name__}.take"
"""How `update_weights_from_tensor` names the loader here (`custom_weight_loader`, `load_format`)."""

_MASK = 0xFFFFFFFF
_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
_MIX = (0xBF58476D1CE4E5B9 - (1 << 64), 0x94D049BB133111EB - (1 << 64))
_BLOCK = 512
_BELOW_ONE = 1.0 - 2.0**-52


# --- weights ---


def manifest(bucket: Bucket, offsets: Sequence[int], *, begins: bool) -> str:
    """The line that travels with a piece of shared memory and says which weights lie in it.

    Args:
        bucket: names and tensors.
        offsets: where each one starts, in bytes.
        begins: whether it is the first of a load.
    """
    entries = [
        (name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape), offset)
        for (name, tensor), offset in zip(bucket, offsets, strict=True)
    ]
    return json.dumps({"kind": "weights", "begins": begins, "entries": entries})


def last_line(names: Sequence[str]) -> str:
    """The line that ends a load of these weights."""
    return json.dumps({"kind": "end", "names": list(names)})


def checksum_line(specs: dict[str, TensorSpec]) -> str:
    """The line that asks for a checksum of each of these weights, written into the tensor that travels with it."""
    entries = [(name, str(spec.dtype).removeprefix("torch."), list(spec.shape)) for name, spec in specs.items()]
    return json.dumps({"kind": "checksums", "entries": entries})


@dataclass
class _Loads:
    """What is known about the loads of one model."""

    plan: CopyPlan
    recorded: bool = False


_Entry = tuple[str, str, list[int], int]

_LOADS: WeakKeyDictionary[torch.nn.Module, _Loads] = WeakKeyDictionary()


def take(model: Any, named_tensors: Sequence[tuple[str, torch.Tensor]]) -> None:
    """SGLang's custom weight loader: obey lines of `manifest`, `last_line` and `checksum_line`.

    The first whole load goes through the model's own `load_weights` and is watched; later ones repeat its copies. All
    copies have ended on return, so that the sender may use the memory again.
    """
    for line, tensor in named_tensors:
        message = json.loads(line)
        if message["kind"] == "weights":
            _take_weights(model, message, tensor)
        elif message["kind"] == "end":
            _end(model, message["names"])
        else:
            _write_checksums(model, message["entries"], tensor)
    device = next(model.parameters()).device
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _take_weights(model: Any, message: dict[str, Any], memory: torch.Tensor) -> None:
    if message["begins"]:
        loads = _LOADS.setdefault(model, _Loads(CopyPlan(model)))
        if loads.recorded:
            loads.plan.begin()
        else:
            # One that was given up half way is watched anew.
            loads.plan = CopyPlan(model)
    loads = _LOADS[model]
    bucket = list(_views(message["entries"], memory))
    with torch.no_grad():
        if loads.recorded and not loads.plan.reason:
            loads.plan.repeat(bucket)
        elif loads.recorded:
            model.load_weights(iter(bucket))
        else:
            loads.plan.record(bucket, model.load_weights)


def _views(
    entries: Sequence[tuple[str, str, list[int], int]], memory: torch.Tensor
) -> Iterator[tuple[str, torch.Tensor]]:
    for name, dtype_name, shape, offset in entries:
        dtype = getattr(torch, dtype_name)
        num_bytes = math.prod(shape) * dtype.itemsize
        yield name, memory[offset : offset + num_bytes].view(dtype).view(shape)


def _end(model: Any, names: Sequence[str]) -> None:
    loads = _LOADS[model]
    if not loads.recorded:
        loads.recorded = True
        loads.plan.complete(names)


def _write_checksums(model: Any, entries: Sequence[tuple[str, str, list[int]]], out: torch.Tensor) -> None:
    from ostinato.rollout.backends.sglang_versions import tensor_parallel_group

    loads = _LOADS.get(model)
    if loads is None or not loads.recorded or loads.plan.reason:
        reason = loads.plan.reason if loads is not None and loads.plan.reason else "no weights have come"
        raise RuntimeError(f"weights cannot be read back: {reason}")
    group = tensor_parallel_group()
    for place, (name, dtype_name, shape) in enumerate(entries):
        full, held = loads.plan.gathered(name, shape, getattr(torch, dtype_name))
        out[place] = checksum(full if group is None else merged(full, held, group))


# --- sampling ---


def _shifted(words: torch.Tensor, bits: int) -> torch.Tensor:
    """A logical shift to the right of 64-bit words that are kept as int64."""
    return (words >> bits) & ((1 << (64 - bits)) - 1)


def uniforms(seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """One number a row, by SplitMix64: the output number `positions` of the generator that starts at `seeds`.

    Args:
        seeds: (B,) int64.
        positions: (B,) integers, the place of the token in its sequence.

    Returns:
        (B,) float64 in (0, 1), both ends excluded.

    Source: Steele, Lea, Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014, figure 17.
    """
    words = seeds + (positions.to(torch.int64) + 1) * _GOLDEN
    words = (words ^ _shifted(words, 30)) * _MIX[0]
    words = (words ^ _shifted(words, 27)) * _MIX[1]
    words = words ^ _shifted(words, 31)
    return (_shifted(words, 12).to(torch.float64) + 0.5) / 2.0**52


def invert(weights: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """Tokens by inversion of the cumulative distribution; sums in float64, first over blocks, then within one block.

    Args:
        weights: (B,V) float32, not negative, not all 0 in a row; they need not sum to 1.
        numbers: (B,) float64 in (0, 1).

    Returns:
        (B,) int64; a token of weight 0 is never drawn. A row with NaN gives any token.
    """
    size = weights.shape[1]
    whole = size // _BLOCK * _BLOCK
    sums = weights[:, :whole].unflatten(1, (-1, _BLOCK)).sum(-1, dtype=torch.float64)
    if whole < size:
        sums = torch.cat([sums, weights[:, whole:].sum(-1, dtype=torch.float64, keepdim=True)], -1)
    cumulative = sums.cumsum(-1)
    total = cumulative[:, -1:]
    target = torch.minimum(numbers[:, None] * total, total * _BELOW_ONE)
    block = torch.searchsorted(cumulative, target, right=True).clamp_(max=sums.shape[1] - 1)
    rest = target - (cumulative.gather(1, block) - sums.gather(1, block))
    places = block * _BLOCK + torch.arange(_BLOCK, device=weights.device)
    inside = weights.gather(1, places.clamp(max=size - 1)).to(torch.float64) * (places < size)
    inside = inside.cumsum(-1)
    # The two ways of summing differ in the last bits: stay strictly within the block, at a token that has weight.
    rest = torch.minimum(rest.clamp_(min=0.0), inside[:, -1:] * _BELOW_ONE)
    return (block * _BLOCK + torch.searchsorted(inside, rest, right=True)).squeeze(-1).clamp_(max=size - 1)


def draw(
    probabilities: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    restrict: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
) -> torch.Tensor:
    """Tokens of a batch, each by its own seed and place; other rows of the batch do not matter.

    SGLang's own draw by seed adds Gumbel noise of 32 bits, which is infinite for one token in 2**32 whatever its
    probability; and it knows no `min_p`.

    Args:
        probabilities: (B,V) float32.
        seeds: (B,) int64.
        positions: (B,) integers.
        restrict: `top_k`, `top_p` and `min_p` (B,) of each row; None draws from all tokens.

    Returns:
        (B,) int32.
    """
    numbers = uniforms(seeds, positions)
    if restrict is None:
        return invert(probabilities, numbers).to(torch.int32)
    top_k, top_p, min_p = (column.view(-1, 1) for column in restrict)
    weights, tokens = probabilities.sort(dim=-1, descending=True, stable=True)
    before = weights.cumsum(-1) - weights
    rank = torch.arange(weights.shape[1], device=weights.device)
    keep = (rank < top_k) & (before <= top_p) & (weights >= weights[:, :1] * min_p)
    chosen = invert(torch.where(keep, weights, 0.0), numbers)
    return tokens.gather(1, chosen[:, None]).squeeze(1).to(torch.int32)
