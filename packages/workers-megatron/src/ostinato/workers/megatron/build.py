"""A model from a Hugging Face folder, built on Megatron-Core and laid out over its ranks.

Every rank builds the pieces of the model that its stage holds and reads from the folder what it keeps, one weight after
another. Megatron-Core is imported here, when an engine is built, and not before.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, fields
from difflib import get_close_matches
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Literal

import torch
from torch import nn
from torch.nn import functional

from ostinato.workers.core.config import ModelConfig
from ostinato.workers.core.engine import Head
from ostinato.workers.core.value_head import fresh_value_head
from ostinato.workers.megatron.architecture import Architecture
from ostinato.workers.megatron.attention import RowAttention, runs_kernel, switches_kept
from ostinato.workers.megatron.config import MegatronConfig, layout_problems
from ostinato.workers.megatron.errors import (
    MegatronConfigError,
    ModelLoadError,
    TransformerEngineMissingError,
)
from ostinato.workers.megatron.folder import Folder
from ostinato.workers.megatron.heads import PackedRotary, ValueHead
from ostinato.workers.megatron.mapping import OUTPUT, TE_NAMES, Part, padded_vocab, split, table
from ostinato.workers.megatron.parallel import import_megatron
from ostinato.workers.megatron.training import wrap

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
    chunks: list[nn.Module]
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


def compute_dtype(config: MegatronConfig, device: torch.device) -> torch.dtype:
    """Type of the matrix products and of the model's own weights."""
    if config.dtype == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return torch.bfloat16 if config.dtype == "bf16" else torch.float32


def uses_transformer_engine(config: MegatronConfig) -> bool:
    """Whether layers are TransformerEngine's: where it is installed, unless `transformer_impl` says `local`.

    Raises:
        TransformerEngineMissingError: Something is asked for that only TransformerEngine has, or the one that is
            installed cannot be imported.
    """
    asked = config.override_transformer_config.get("transformer_impl")
    installed = find_spec("transformer_engine") is not None
    if asked == "transformer_engine" and not installed:
        raise TransformerEngineMissingError(
            "megatron.override_transformer_config.transformer_impl: transformer_engine is not installed; "
            "pip install 'transformer-engine[pytorch]', or set it to local"
        )
    chosen = installed if asked is None else asked == "transformer_engine"
    needs = {
        "megatron.sequence_parallel=True": config.sequence_parallel,
        f"megatron.context_parallel_size={config.context_parallel_size}": config.context_parallel_size > 1,
    }
    for key, wanted in needs.items():
        if wanted and not chosen:
            raise TransformerEngineMissingError(
                f"{key}: needs TransformerEngine, whose layers are {'not chosen' if installed else 'not installed'}: "
                "Megatron-Core's own norms know no sequence parallelism and its own attention no context parallelism. "
                "pip install 'transformer-engine[pytorch]' (a GPU host), or set it to "
                f"{'False' if 'sequence' in key else 1}"
            )
    if chosen:
        try:
            import_module("transformer_engine.pytorch")
        except Exception as error:  # a build for another torch, CUDA or Python fails in its own way
            raise TransformerEngineMissingError(
                f"transformer_engine is installed but cannot be imported ({type(error).__name__}: {error}). Install "
                "one that fits this torch, or set megatron.override_transformer_config.transformer_impl to local"
            ) from error
    return chosen


def transformer_config(
    a: Architecture, config: MegatronConfig, model: ModelConfig, device: torch.device, *, te: bool, trainable: bool
) -> Any:
    """Megatron's TransformerConfig for a model.

    Losses come divided by global counts, so the schedule and the gradient buffers must divide by nothing:
    `calculate_per_token_loss`, with token counts of 0, does that. Fusions that need kernels of Apex are off.

    Raises:
        MegatronConfigError: An override names no entry of TransformerConfig.
    """
    cls = import_megatron("transformer.transformer_config").TransformerConfig
    known = {entry.name for entry in fields(cls)}
    overrides = dict(config.override_transformer_config)
    for name in overrides:
        if name not in known:
            near = get_close_matches(name, sorted(known), n=1)
            raise MegatronConfigError(
                f"megatron.override_transformer_config.{name}: Megatron's TransformerConfig has no such entry"
                + (f"; did you mean {near[0]}?" if near else "")
            )
    if isinstance(overrides.get("attention_backend"), str):
        overrides["attention_backend"] = import_megatron("transformer.enums").AttnBackend[
            overrides["attention_backend"]
        ]
    dtype = compute_dtype(config, device)
    if trainable and model.enable_gradient_checkpointing and "recompute_granularity" not in overrides:
        overrides |= {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    entries: dict[str, Any] = {
        "num_layers": a.num_layers,
        "hidden_size": a.hidden_size,
        "ffn_hidden_size": a.intermediate_size,
        "num_attention_heads": a.num_heads,
        "num_query_groups": a.num_kv_heads,
        "kv_channels": a.head_dim,
        "layernorm_epsilon": a.norm_eps,
        "normalization": "RMSNorm",
        "qk_layernorm": a.qk_norm,
        "add_bias_linear": False,
        "add_qkv_bias": a.qkv_bias,
        "gated_linear_unit": True,
        "activation_func": functional.silu,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "attention_softmax_in_fp32": True,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype == torch.bfloat16,
        "perform_initialization": False,
        "use_cpu_initialization": device.type == "cpu",
        "calculate_per_token_loss": True,
        "variable_seq_lengths": True,
        "moe_token_dispatcher_type": "alltoall",  # the one that takes ranks with different numbers of tokens
        "deallocate_pipeline_outputs": True,
        "gradient_accumulation_fusion": False,
        "apply_rope_fusion": te,  # otherwise thd loops over rows, with two waits for the device a layer
        "transformer_impl": "transformer_engine" if te else "local",
        "sequence_parallel": config.sequence_parallel,
        **{name: size for name, size in config.sizes.items() if size is not None},
    }
    if a.num_experts:
        entries |= _mixture_entries(a)
    return cls(**(entries | overrides))


def _mixture_entries(a: Architecture) -> dict[str, Any]:
    """No auxiliary loss: the loss is the one that the closure returns."""
    dense = set(a.dense_layers)
    return {
        "num_moe_experts": a.num_experts,
        "moe_router_topk": a.experts_per_token,
        "moe_ffn_hidden_size": a.expert_size,
        "moe_router_pre_softmax": not a.normed_weights,
        "moe_router_load_balancing_type": "none",
        "moe_router_dtype": "fp32",
        "moe_aux_loss_coeff": 0.0,
        "moe_grouped_gemm": False,
        "moe_layer_freq": [int(layer not in dense) for layer in range(a.num_layers)],
    }


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
    chunks = [wrap(piece, transformer, config, index, trainable) for index, piece in enumerate(pieces)]
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
    """This rank's parameters under the names of `mapping.table`."""
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
    """Fill this rank's parameters from the folder.

    Raises:
        ModelLoadError: A weight is missing on either side, or no head is there and one is required.
    """
    state, folder = import_megatron("parallel_state"), Folder(model.path)
    unknown = parameters.keys() - {part.name for part in parts}
    if unknown:
        raise ModelLoadError(f"model.path {model.path}: Megatron's model has parameters without a source: {unknown}")
    # Every rank looks for all names, so that all of them learn of a missing one.
    missing = [name for part in parts for name, _ in part.hf if name not in folder and name != "score.weight"]
    if missing:
        raise ModelLoadError(f"model.path {model.path}: weights are missing from the folder: {missing[:5]} …")
    if "score.bias" in folder and any(part.hf[0][0] == "score.weight" for part in parts):
        raise ModelLoadError(f"model.path {model.path}: its head has a bias (score.bias), and this engine's has none.")
    with torch.no_grad():
        for part in parts:
            parameter = parameters.get(part.name)
            if parameter is None:
                continue
            if part.hf[0][0] == "score.weight" and "score.weight" not in folder:
                if require_head:
                    raise ModelLoadError(
                        f"model.path {model.path}: expected a trained head `score.weight`, found none. Give the folder "
                        "of a sequence classifier with one label."
                    )
                logger.info("%s has no value head; a fresh one starts near 0.", model.path)
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


__all__ = ["OUTPUT", "Built", "bare", "build_model", "compute_dtype", "shard_of", "whole_names"]
