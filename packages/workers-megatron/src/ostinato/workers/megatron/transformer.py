"""What Megatron-Core is told about a model: its TransformerConfig, and whose layers it is made of."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch.nn import functional

from ostinato.workers.core.config import ModelConfig
from ostinato.workers.megatron.architecture import Architecture
from ostinato.workers.megatron.config import MegatronConfig, check_entries
from ostinato.workers.megatron.errors import MegatronConfigError, TransformerEngineMissingError
from ostinato.workers.megatron.parallel import import_megatron


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
    for key, got, without in (
        ("sequence_parallel", config.sequence_parallel, False),
        ("context_parallel_size", config.context_parallel_size, 1),
    ):
        if got != without and not chosen:
            raise TransformerEngineMissingError(
                f"megatron.{key}={got}: "
                f"needs TransformerEngine, whose layers are not {'chosen' if installed else 'installed'}: "
                "Megatron-Core's own norms know no sequence parallelism and its own attention no context parallelism. "
                f"pip install 'transformer-engine[pytorch]' (a GPU host), or set it to {without}"
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

    Args:
        a: the model's shape.
        config: the layout, and the entries that the user sets.
        model: whether layers are recomputed.
        device: where it runs.
        te: whether the layers are TransformerEngine's.
        trainable: whether it is trained; only then anything is recomputed.

    Raises:
        MegatronConfigError: An override names no entry of TransformerConfig, or Megatron refuses its value.
    """
    cls = import_megatron("transformer.transformer_config").TransformerConfig
    overrides = _overrides(config, cls)
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
    try:
        return cls(**(entries | overrides))
    except (ValueError, TypeError, AssertionError, NotImplementedError) as error:
        raise MegatronConfigError(
            f"megatron: Megatron's TransformerConfig refuses it ({type(error).__name__}: {error}); "
            f"override_transformer_config is {config.override_transformer_config}"
        ) from error


def _overrides(config: MegatronConfig, cls: type[Any]) -> dict[str, Any]:
    """The entries of TransformerConfig that the user sets, each with the type that Megatron wants."""
    key, overrides = "megatron.override_transformer_config", dict(config.override_transformer_config)
    check_entries(key, overrides, cls)
    if "attention_backend" in overrides:
        value, backends = overrides["attention_backend"], import_megatron("transformer.enums").AttnBackend
        if value not in (*backends, *backends.__members__):
            names = ", ".join(backends.__members__)
            raise MegatronConfigError(f"{key}.attention_backend: expected one of {names}, got {value!r}")
        overrides["attention_backend"] = backends.__members__.get(value, value)
    return overrides


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
