"""A model from a Hugging Face folder, built on Megatron-Core and laid out over its ranks.

Every rank builds the pieces of the model that its stage holds and reads from the folder what it keeps, one weight after
another. Megatron-Core is imported here, when an engine is built, and not before.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from ostinato.workers.core.config import ModelConfig
from ostinato.workers.core.engine import Head
from ostinato.workers.core.value_head import fresh_value_head
from ostinato.workers.megatron.architecture import Architecture
from ostinato.workers.megatron.attention import RowAttention, runs_kernel, switches_kept
from ostinato.workers.megatron.config import MegatronConfig, layout_problems
from ostinato.workers.megatron.errors import MegatronConfigError, ModelLoadError
from ostinato.workers.megatron.folder import Folder
from ostinato.workers.megatron.heads import PackedRotary, ValueHead
from ostinato.workers.megatron.mapping import TE_NAMES, Part, padded_vocab, split, table
from ostinato.workers.megatron.parallel import import_megatron
from ostinato.workers.megatron.training import ddp_config, wrap
from ostinato.workers.megatron.transformer import transformer_config, uses_transformer_engine

logger = logging.getLogger(__name__)

_LAYER = re.compile(r"decoder\.layers\.(\d+)\.")
_EXPERT = re.compile(r"local_experts\.(\d+)\.")


@dataclass(frozen=True)
class Built:
    """One model on this rank.

    Attributes:
        architecture: its shape.
        head: what it ends in.
        transformer: Megatron's TransformerConfig.
        chunks: the pieces that this stage holds, wrapped for training where they are trained; one unless interleaved.
        parts: every parameter of the whole model.
        parameters: name in the whole model -> this rank's tensor, for the parts that lie here.
        rows: how packed rows run: TransformerEngine's `thd`, PyTorch's `kernel`, or under a `mask`.
    """

    architecture: Architecture
    head: Head
    transformer: Any
    chunks: list[Any]
    parts: list[Part]
    parameters: dict[str, nn.Parameter]
    rows: Literal["thd", "kernel", "mask"]

    @property
    def modules(self) -> list[Any]:
        """The pieces without their wrappers."""
        return [bare(chunk) for chunk in self.chunks]


def bare(module: Any) -> Any:
    """A GPTModel without the wrappers around it."""
    while hasattr(module, "module"):
        module = module.module
    return module


def build_model(
    a: Architecture,
    model: ModelConfig,
    head: Head,
    config: MegatronConfig,
    device: torch.device,
    *,
    trainable: bool,
) -> Built:
    """Build this rank's pieces of a model and read their weights; collective over all ranks.

    Args:
        a: the model's shape.
        model: the folder, and how the model is run.
        head: what it ends in.
        config: the layout; Megatron's groups are made for it.
        device: where the pieces lie afterwards.
        trainable: False freezes them, and makes a trained value head compulsory.

    Raises:
        MegatronConfigError: The layout does not fit the model.
        ModelLoadError: The folder does not hold such a model.
        TransformerEngineMissingError: See `uses_transformer_engine`.
    """
    state = import_megatron("parallel_state")
    for key, text in layout_problems(
        config,
        torch.distributed.get_world_size(),
        num_heads=a.num_heads,
        num_kv_heads=a.num_kv_heads,
        num_layers=a.num_layers,
        num_experts=a.num_experts,
    ):
        raise MegatronConfigError(f"megatron.{key}: {text}")
    te = uses_transformer_engine(config)
    transformer = transformer_config(a, config, model, device, te=te, trainable=trainable)
    ddp = ddp_config(config) if trainable else None
    virtual = config.virtual_pipeline_model_parallel_size
    with nullcontext() if te else switches_kept():
        pieces = [
            _piece(a, head, transformer, te, stage if virtual else None, state.get_tensor_model_parallel_world_size())
            for stage in range(virtual or 1)
        ]
    rows: Literal["thd", "kernel", "mask"] = "thd" if te else "kernel" if runs_kernel(transformer, device) else "mask"
    for piece in pieces:
        if rows == "kernel":
            _take_kernel(piece)
        piece.to(device)
        piece.requires_grad_(trainable)
    parts = table(a, head)
    parameters = whole_names(pieces, a)
    _read_weights(a, model, parts, parameters, require_head=not trainable)
    chunks = [wrap(piece, transformer, ddp, index) for index, piece in enumerate(pieces)]
    # A wrapper may have replaced a parameter's tensor (bf16, buffers); the names are read anew.
    return Built(a, head, transformer, chunks, parts, whole_names([bare(chunk) for chunk in chunks], a), rows)


def _take_kernel(piece: Any) -> None:
    for layer in piece.decoder.layers:
        layer.self_attention.core_attention = RowAttention(layer.self_attention.core_attention)


def _piece(a: Architecture, head: Head, transformer: Any, te: bool, virtual_stage: int | None, tp: int) -> nn.Module:
    state, specs = import_megatron("parallel_state"), import_megatron("models.gpt.gpt_layer_specs")
    spec = specs.get_gpt_decoder_block_spec(
        transformer, use_transformer_engine=te, normalization="RMSNorm", vp_stage=virtual_stage
    )
    where = {"ignore_virtual": False, "vp_stage": virtual_stage}
    last = state.is_pipeline_last_stage(**where)
    piece = import_megatron("models.gpt.gpt_model").GPTModel(
        config=transformer,
        transformer_layer_spec=spec,
        vocab_size=padded_vocab(a, tp),
        max_sequence_length=a.max_positions,
        pre_process=state.is_pipeline_first_stage(**where),
        post_process=last,
        share_embeddings_and_output_weights=a.tied,
        vp_stage=virtual_stage,
        **a.rope,
    )
    if last and head == "value":
        piece.output_layer = ValueHead(a.hidden_size, transformer)
    elif last:
        # The output layer is given the positions that are asked about, gathered already.
        piece.output_layer.allreduce_dgrad = tp > 1
        piece.output_layer.sequence_parallel = False
    piece.rotary_pos_emb = PackedRotary(piece.rotary_pos_emb)
    return piece


def whole_names(pieces: Sequence[nn.Module], a: Architecture) -> dict[str, nn.Parameter]:
    """This rank's parameters under the names of `mapping.table`.

    Args:
        pieces: GPTModels, which number layers and experts from 0 each.
        a: the model's shape.
    """
    state = import_megatron("parallel_state")
    experts = a.num_experts // state.get_expert_model_parallel_world_size() if a.num_experts else 0
    first_expert = state.get_expert_model_parallel_rank() * experts

    def names() -> Iterator[tuple[str, nn.Parameter]]:
        for piece in pieces:
            layers: Any = piece.decoder.layers  # pyright: ignore[reportAttributeAccessIssue]
            for name, parameter in piece.named_parameters():
                whole = name
                if found := _LAYER.match(name):
                    whole = f"decoder.layers.{layers[int(found[1])].layer_number - 1}.{name[found.end() :]}"
                whole = _EXPERT.sub(lambda found: f"local_experts.{first_expert + int(found[1])}.", whole)
                for theirs, ours in TE_NAMES.items():
                    whole = whole.replace(theirs, ours)
                yield whole, parameter

    return dict(names())


def _read_weights(
    a: Architecture,
    model: ModelConfig,
    parts: Sequence[Part],
    parameters: dict[str, nn.Parameter],
    *,
    require_head: bool,
) -> None:
    """Fill this rank's parameters from the folder. Every rank looks for all names, so that all learn of a missing one.

    Raises:
        ModelLoadError: A weight is missing on either side, or no head is there and one is required.
    """
    state, folder = import_megatron("parallel_state"), Folder(model.path)
    where = f"model.path {model.path}"
    unknown = parameters.keys() - {part.name for part in parts}
    if unknown:
        raise ModelLoadError(f"{where}: Megatron's model has parameters without a source: {sorted(unknown)}")
    missing = [name for part in parts for name, _ in part.hf if name not in folder]
    fresh_head = missing == ["score.weight"]
    if fresh_head and require_head:
        raise ModelLoadError(
            f"{where}: expected a trained head `score.weight`, found none. Give the folder of a sequence classifier "
            "with one label."
        )
    if missing and not fresh_head:
        raise ModelLoadError(f"{where}: weights are missing from the folder: {missing[:5]} …")
    if "score.bias" in folder and any(part.hf[0][0] == "score.weight" for part in parts):
        raise ModelLoadError(f"{where}: its head has a bias (score.bias), and this engine's has none.")
    if fresh_head:
        logger.info("%s has no value head; a fresh one starts near 0.", model.path)
    with torch.no_grad():
        for part in parts:
            parameter = parameters.get(part.name)
            if parameter is None:
                continue
            if fresh_head and part.hf[0][0] == "score.weight":
                parameter.copy_(fresh_value_head(a.hidden_size))
                continue
            rank, size = shard_of(part, state)
            tensors = [folder.read(name, shape) for name, shape in part.hf]
            parameter.copy_(split(part, tensors, a, rank, size))


def shard_of(part: Part, state: Any) -> tuple[int, int]:
    """This rank's number among those that share a part, and how many they are."""
    if part.kind == "copy":
        return 0, 1
    if part.expert is not None:
        return state.get_expert_tensor_parallel_rank(), state.get_expert_tensor_parallel_world_size()
    return state.get_tensor_model_parallel_rank(), state.get_tensor_model_parallel_world_size()
