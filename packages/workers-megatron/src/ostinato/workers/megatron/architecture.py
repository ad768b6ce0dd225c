"""What a Hugging Face folder's configuration means in Megatron's terms."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ostinato.rollout.model_config import read_model_config
from ostinato.workers.core.config import ModelConfig
from ostinato.workers.core.engine import Head
from ostinato.workers.megatron.errors import ModelLoadError

MODEL_TYPES = ("llama", "qwen2", "qwen3", "qwen3_moe")
"""Families whose layers are mapped."""

LLAMA3_ROPE = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""What Megatron's own scaled rotary embedding takes for granted."""

_CLASSIFIER_ENDINGS = ("ForSequenceClassification", "ForTokenClassification", "RewardModel")


@dataclass(frozen=True)
class Architecture:
    """The shape of one model.

    Attributes:
        model_type: the family, as transformers calls it.
        vocab_size: tokens, without padding.
        hidden_size: width.
        num_layers: decoder layers.
        num_heads: query heads.
        num_kv_heads: key and value heads.
        head_dim: width of a head.
        intermediate_size: inner width of a dense layer's MLP.
        norm_eps: epsilon of the norms.
        qkv_bias: whether query, key and value have a bias.
        qk_norm: whether queries and keys are normed, head by head.
        tied: whether the output layer is the embedding; False for a value head.
        max_positions: longest sequence.
        rope: base, kind and scaling of the rotary embedding.
        num_experts: experts of a mixture's layer; 0 for a dense model.
        experts_per_token: how many of them a token goes to.
        expert_size: inner width of an expert.
        normed_weights: whether the weights of a token's experts add up to 1.
        dense_layers: layers of a mixture that have a dense MLP.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    norm_eps: float
    qkv_bias: bool
    qk_norm: bool
    tied: bool
    max_positions: int
    rope: dict[str, Any]
    num_experts: int = 0
    experts_per_token: int = 0
    expert_size: int = 0
    normed_weights: bool = True
    dense_layers: tuple[int, ...] = ()


def read_architecture(model: ModelConfig, head: Head) -> Architecture:
    """The architecture of a folder, with `override_config` applied.

    Raises:
        ModelLoadError: The family is not mapped, or the model has a part that is not.
    """
    if not model.path:
        raise ModelLoadError("model.path: expected a Hugging Face folder or name, got nothing.")
    config: Any = read_model_config(model.path, model.override_config, trust_remote_code=model.trust_remote_code)
    if config.model_type not in MODEL_TYPES:
        raise _refused(model, f"model type '{config.model_type}'", f"mapped are {', '.join(MODEL_TYPES)}")
    if config.hidden_act != "silu":
        raise _refused(model, f"hidden_act '{config.hidden_act}'", "mapped is silu")
    if any(kind != "full_attention" for kind in getattr(config, "layer_types", None) or ()) or (
        getattr(config, "use_sliding_window", False) and getattr(config, "sliding_window", None)
    ):
        raise _refused(model, "sliding-window attention", "switch it off with model.override_config, or use fsdp")
    if getattr(config, "mlp_bias", False) or (config.model_type == "llama" and config.attention_bias):
        raise _refused(model, "a bias in its projections", "mapped are biases of query, key and value alone")
    classifier = any(name.endswith(_CLASSIFIER_ENDINGS) for name in config.architectures or ())
    if head == "value" and classifier and config.num_labels != 1:
        raise ModelLoadError(
            f"model.path {model.path}: expected a classifier with 1 label, got {config.num_labels}. "
            "A value head or reward model gives one number a token."
        )
    heads = config.num_attention_heads
    mixture = _mixture(config) if config.model_type == "qwen3_moe" else {}
    return Architecture(
        model_type=config.model_type,
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        num_layers=config.num_hidden_layers,
        num_heads=heads,
        num_kv_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
        intermediate_size=config.intermediate_size,
        norm_eps=config.rms_norm_eps,
        qkv_bias=config.model_type == "qwen2" or bool(getattr(config, "attention_bias", False)),
        qk_norm=config.model_type in ("qwen3", "qwen3_moe"),
        tied=bool(config.tie_word_embeddings) and head == "lm",
        max_positions=config.max_position_embeddings,
        rope=_rope(model, config),
        **mixture,
    )


def _mixture(config: Any) -> dict[str, Any]:
    every, dense = config.decoder_sparse_step, set(config.mlp_only_layers or ())
    return {
        "num_experts": config.num_experts,
        "experts_per_token": config.num_experts_per_tok,
        "expert_size": config.moe_intermediate_size,
        "normed_weights": bool(config.norm_topk_prob),
        "dense_layers": tuple(i for i in range(config.num_hidden_layers) if i in dense or (i + 1) % every),
    }


def _rope(model: ModelConfig, config: Any) -> dict[str, Any]:
    """Keyword arguments of GPTModel for the rotary embedding."""
    settings = dict(getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {})
    base = settings.get("rope_theta", getattr(config, "rope_theta", 10000.0))
    kind = settings.get("rope_type", "default")
    arguments: dict[str, Any] = {"position_embedding_type": "rope", "rotary_base": base}
    if kind == "linear":
        arguments["seq_len_interpolation_factor"] = float(settings["factor"])
    elif kind == "llama3" and all(settings.get(name) == value for name, value in LLAMA3_ROPE.items()):
        arguments |= {"rope_scaling": True, "rope_scaling_factor": float(settings["factor"])}
    elif kind != "default":
        raise _refused(
            model, f"rotary scaling {settings}", "mapped are default, linear, and llama3 with its own bounds"
        )
    if settings.get("partial_rotary_factor", 1.0) != 1.0:
        raise _refused(model, "a partial rotary embedding", "mapped are whole ones")
    return arguments


def _refused(model: ModelConfig, what: str, instead: str) -> ModelLoadError:
    return ModelLoadError(
        f"model.path {model.path}: it has {what}, which the Megatron engine does not map; {instead}. "
        "strategy=fsdp runs every model of transformers."
    )
