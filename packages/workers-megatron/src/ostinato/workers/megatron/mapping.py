"""Between the weights of a Hugging Face folder and Megatron's parameters: one table for both directions.

A `Part` is one Megatron parameter of the whole model and the folder's tensors that it is made of. `split` cuts the
folder's tensors for one tensor-parallel rank, `merge` puts the ranks' pieces together again.

| kind | Megatron's tensor | of the ranks |
|---|---|---|
| copy | the folder's | every rank has all of it |
| row | the folder's | columns are dealt |
| qkv | for each key/value head: its query heads, the key, the value | heads are dealt |
| gate_up | the gate's rows above the up-projection's | rows of both are dealt |
| vocab | the folder's, padded with zero rows | rows are dealt |
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from ostinato.workers.core.engine import Head
from ostinato.workers.megatron.architecture import Architecture

Kind = Literal["copy", "row", "qkv", "gate_up", "vocab"]
Shape = tuple[int, ...]

EMBEDDING = "embedding.word_embeddings.weight"
OUTPUT = "output_layer.weight"
TE_NAMES = {
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "pre_mlp_layernorm.weight",
}
"""TransformerEngine keeps a norm inside the matrix that follows it; name there -> name in the local spec."""


@dataclass(frozen=True)
class Part:
    """One parameter of the whole model, wherever it lies.

    Attributes:
        name: Megatron's name in the local spec, with the layer's and the expert's number in the whole model.
        kind: how the two sides differ.
        hf: name and full shape of the folder's tensors it is made of, in order.
        expert: the expert's number, for the parameter of one.
        exported: False for a second copy of a weight that another part hands on.
    """

    name: str
    kind: Kind
    hf: tuple[tuple[str, Shape], ...]
    expert: int | None = None
    exported: bool = True


def padded_vocab(architecture: Architecture, tp: int) -> int:
    """Rows of the embedding: the vocabulary, padded so that every tensor-parallel rank has equally many."""
    return -(-architecture.vocab_size // tp) * tp


def table(a: Architecture, head: Head) -> list[Part]:
    """All parameters of a model, in the order of its Hugging Face module."""
    wide = (a.vocab_size, a.hidden_size)
    embed = (("model.embed_tokens.weight", wide),)
    parts = [Part(EMBEDDING, "vocab", embed)]
    for layer in range(a.num_layers):
        parts += _attention(a, layer)
        parts += _dense(a, layer) if not a.num_experts or layer in a.dense_layers else _experts(a, layer)
        for ours, theirs in (("input_layernorm", "input_layernorm"), ("pre_mlp_layernorm", "post_attention_layernorm")):
            hf = ((f"model.layers.{layer}.{theirs}.weight", (a.hidden_size,)),)
            parts.append(Part(f"decoder.layers.{layer}.{ours}.weight", "copy", hf))
    parts.append(Part("decoder.final_layernorm.weight", "copy", (("model.norm.weight", (a.hidden_size,)),)))
    if head == "value":
        parts.append(Part(OUTPUT, "copy", (("score.weight", (1, a.hidden_size)),)))
    elif a.tied:
        parts.append(Part(OUTPUT, "vocab", embed, exported=False))
    else:
        parts.append(Part(OUTPUT, "vocab", (("lm_head.weight", wide),)))
    return parts


def _attention(a: Architecture, layer: int) -> list[Part]:
    ours, theirs = f"decoder.layers.{layer}.self_attention", f"model.layers.{layer}.self_attn"
    rows = {"q": a.num_heads * a.head_dim, "k": a.num_kv_heads * a.head_dim, "v": a.num_kv_heads * a.head_dim}
    weights = tuple((f"{theirs}.{x}_proj.weight", (size, a.hidden_size)) for x, size in rows.items())
    parts = [Part(f"{ours}.linear_qkv.weight", "qkv", weights)]
    if a.qkv_bias:
        biases = tuple((f"{theirs}.{x}_proj.bias", (size,)) for x, size in rows.items())
        parts.append(Part(f"{ours}.linear_qkv.bias", "qkv", biases))
    output = ((f"{theirs}.o_proj.weight", (a.hidden_size, rows["q"])),)
    parts.append(Part(f"{ours}.linear_proj.weight", "row", output))
    if a.qk_norm:
        for x in ("q", "k"):
            hf = ((f"{theirs}.{x}_norm.weight", (a.head_dim,)),)
            parts.append(Part(f"{ours}.{x}_layernorm.weight", "copy", hf))
    return parts


def _mlp(ours: str, theirs: str, width: int, inner: int, expert: int | None = None) -> list[Part]:
    gate_up = tuple((f"{theirs}.{x}_proj.weight", (inner, width)) for x in ("gate", "up"))
    down = ((f"{theirs}.down_proj.weight", (width, inner)),)
    return [
        Part(f"{ours}.linear_fc1.weight", "gate_up", gate_up, expert),
        Part(f"{ours}.linear_fc2.weight", "row", down, expert),
    ]


def _dense(a: Architecture, layer: int) -> list[Part]:
    return _mlp(f"decoder.layers.{layer}.mlp", f"model.layers.{layer}.mlp", a.hidden_size, a.intermediate_size)


def _experts(a: Architecture, layer: int) -> list[Part]:
    ours, theirs = f"decoder.layers.{layer}.mlp", f"model.layers.{layer}.mlp"
    router = ((f"{theirs}.gate.weight", (a.num_experts, a.hidden_size)),)
    parts = [Part(f"{ours}.router.weight", "copy", router)]
    for e in range(a.num_experts):
        expert = f"{ours}.experts.local_experts.{e}"
        parts += _mlp(expert, f"{theirs}.experts.{e}", a.hidden_size, a.expert_size, e)
    return parts


def split(part: Part, tensors: Sequence[torch.Tensor], a: Architecture, rank: int, size: int) -> torch.Tensor:
    """One tensor-parallel rank's piece of a parameter.

    Args:
        part: which parameter.
        tensors: the folder's tensors, as `part.hf` names them, whole.
        a: the model.
        rank: which piece.
        size: of how many.

    Returns:
        Megatron's tensor on that rank.
    """
    if part.kind == "copy":
        return tensors[0]
    if part.kind == "row":
        return tensors[0].chunk(size, dim=1)[rank]
    if part.kind == "gate_up":
        return torch.cat([tensor.chunk(size)[rank] for tensor in tensors])
    if part.kind == "vocab":
        rows = padded_vocab(a, size)
        missing = tensors[0].new_zeros(rows - a.vocab_size, *tensors[0].shape[1:])
        return torch.cat([tensors[0], missing]).chunk(size)[rank]
    by_head = [tensor.unflatten(0, (a.num_kv_heads, -1)) for tensor in tensors]
    return torch.cat(by_head, dim=1).chunk(size)[rank].flatten(0, 1)


def merge(part: Part, pieces: Sequence[torch.Tensor], a: Architecture) -> list[torch.Tensor]:
    """The folder's tensors from all tensor-parallel pieces; undoes `split`.

    Args:
        part: which parameter.
        pieces: what each rank holds, in rank order; one piece for what every rank holds whole.
        a: the model.

    Returns:
        As `part.hf` names them, in new memory or the pieces' own.
    """
    if part.kind == "copy":
        return [pieces[0]]
    if part.kind == "row":
        return [torch.cat(list(pieces), dim=1)]
    if part.kind == "gate_up":
        halves = [piece.chunk(2) for piece in pieces]
        return [torch.cat([half[i] for half in halves]) for i in range(2)]
    whole = torch.cat(list(pieces))
    if part.kind == "vocab":
        return [whole[: a.vocab_size]]
    queries = a.num_heads // a.num_kv_heads * a.head_dim
    by_head = whole.unflatten(0, (a.num_kv_heads, -1)).split([queries, a.head_dim, a.head_dim], dim=1)
    return [tensor.flatten(0, 1).contiguous() for tensor in by_head]
