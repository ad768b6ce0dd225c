"""Configuration of the Megatron engine; the key names are the field's (`actor.megatron.*`)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from difflib import get_close_matches
from typing import Any

from ostinato.workers.megatron.errors import MegatronConfigError

DTYPES = ("auto", "fp32", "bf16")
IMPLEMENTATIONS = ("local", "transformer_engine")
OWNED = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "virtual_pipeline_model_parallel_size",
    "context_parallel_size",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
    "sequence_parallel",
    "calculate_per_token_loss",
    "variable_seq_lengths",
    "params_dtype",
    "bf16",
    "fp16",
)
"""Entries of Megatron's TransformerConfig that have a key of their own here, or that the engine's contract fixes."""


@dataclass(frozen=True)
class MegatronConfig:
    """How one model lies on its ranks: rank = tp + tp_size · (cp + cp_size · (dp + dp_size · pp)).

    Attributes:
        tensor_model_parallel_size: ranks that share each layer's matrices.
        pipeline_model_parallel_size: stages that the layers are dealt over.
        virtual_pipeline_model_parallel_size: pieces of the model a stage holds (interleaved schedule); null for one.
        context_parallel_size: ranks that share each sequence. Needs TransformerEngine.
        expert_model_parallel_size: data-parallel ranks that a mixture's experts are dealt over.
        expert_tensor_parallel_size: ranks that share each expert's matrices; null: as the other layers.
        sequence_parallel: split what lies between the matrices over the tensor-parallel ranks too. Needs
            TransformerEngine.
        use_distributed_optimizer: split the optimizer's state over the data-parallel ranks.
        param_offload: keep parameters in host memory between the calls that need them.
        grad_offload: free the gradient buffers whenever parameters or optimizer state leave the device.
        optimizer_offload: keep the optimizer's state in host memory between updates.
        dtype: type of the matrix products and of the weights that are handed on; `auto` is bf16 on a GPU and fp32 on a
            CPU. The optimizer's own weights are fp32.
        seed: of Megatron's random streams. Nothing here draws from them: dropout is off.
        override_transformer_config: entries of Megatron's TransformerConfig, for instance `recompute_granularity`,
            `recompute_method`, `recompute_num_layers`, `attention_backend`, `transformer_impl` (`local` or
            `transformer_engine`), `moe_token_dispatcher_type`.
        override_ddp_config: entries of Megatron's DistributedDataParallelConfig.
    """

    tensor_model_parallel_size: int = 1
    pipeline_model_parallel_size: int = 1
    virtual_pipeline_model_parallel_size: int | None = None
    context_parallel_size: int = 1
    expert_model_parallel_size: int = 1
    expert_tensor_parallel_size: int | None = None
    sequence_parallel: bool = False
    use_distributed_optimizer: bool = True
    param_offload: bool = False
    grad_offload: bool = False
    optimizer_offload: bool = False
    dtype: str = "auto"
    seed: int = 42
    override_transformer_config: dict[str, Any] = field(default_factory=dict)
    override_ddp_config: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Check every value that can be checked without a model and without ranks.

        Raises:
            MegatronConfigError: A value cannot be used; the text names the key.
        """
        for name, value in self.sizes.items():
            optional = name in ("virtual_pipeline_model_parallel_size", "expert_tensor_parallel_size")
            if not (type(value) is int and value >= 1) and not (optional and value is None):
                expected = "a whole number, at least 1" + (", or null" if optional else "")
                raise MegatronConfigError(f"megatron.{name}: expected {expected}, got {value!r}")
        if self.dtype not in DTYPES:
            raise MegatronConfigError(f"megatron.dtype: expected one of {', '.join(DTYPES)}, got {self.dtype!r}")
        implementation = self.override_transformer_config.get("transformer_impl", "local")
        if implementation not in IMPLEMENTATIONS:
            raise MegatronConfigError(
                "megatron.override_transformer_config.transformer_impl: expected one of "
                f"{', '.join(IMPLEMENTATIONS)}, got {implementation!r}"
            )
        for name in OWNED:
            if name in self.override_transformer_config:
                raise MegatronConfigError(
                    f"megatron.override_transformer_config.{name}: the engine sets this itself; "
                    + (f"use megatron.{name}" if hasattr(self, name) else "leave it out")
                )

    @property
    def model_size(self) -> int:
        """Ranks that share one copy of the model's dense layers, context-parallel ranks included."""
        return self.tensor_model_parallel_size * self.pipeline_model_parallel_size * self.context_parallel_size

    @property
    def sizes(self) -> dict[str, Any]:
        """What Megatron's process groups follow from; engines of one process must agree about these."""
        names = (
            "tensor_model_parallel_size",
            "pipeline_model_parallel_size",
            "virtual_pipeline_model_parallel_size",
            "context_parallel_size",
            "expert_model_parallel_size",
            "expert_tensor_parallel_size",
        )
        return {name: getattr(self, name) for name in names}


def as_megatron_config(value: MegatronConfig | Mapping[str, Any] | None) -> MegatronConfig:
    """The engine's config from what a role worker passes on.

    Raises:
        MegatronConfigError: A key is unknown; the text names the nearest one.
    """
    from ostinato.workers.core.limits import engine_config  # workers.core imports torch; this module does not

    return engine_config(MegatronConfig, value, "megatron", MegatronConfigError)


def layout_problems(
    config: MegatronConfig,
    ranks: int,
    *,
    num_heads: int | None = None,
    num_kv_heads: int | None = None,
    num_layers: int | None = None,
    num_experts: int | None = None,
) -> list[tuple[str, str]]:
    """What of a layout does not fit a number of ranks and a model, with the numbers that would; nothing is imported.

    Args:
        config: the layout.
        ranks: processes of the role.
        num_heads: attention heads of the model; what is None is not checked.
        num_kv_heads: key and value heads.
        num_layers: decoder layers.
        num_experts: experts of a mixture; 0 for a dense model.

    Returns:
        (key below `megatron`, text) of each fault; empty where the layout fits. A size that is advised leads to no
        other fault.
    """
    model = (num_heads, num_kv_heads, num_layers, num_experts)
    faults = list(_faults(config, ranks, *model))
    problems: list[tuple[str, str]] = []
    for key, text in faults:
        if key not in ("sequence_parallel", "virtual_pipeline_model_parallel_size"):  # they say what to set
            others = {name for name, _ in faults} - {key}
            fits = [
                size
                for size in divisors(ranks)
                if {name for name, _ in _faults(replace(config, **{key: size}), ranks, *model)} <= others
            ]
            text += f"; take one of {fits}" if fits else "; change the other sizes first"
        problems.append((key, text))
    return problems


def _faults(
    config: MegatronConfig,
    ranks: int,
    num_heads: int | None,
    num_kv_heads: int | None,
    num_layers: int | None,
    num_experts: int | None,
) -> Iterator[tuple[str, str]]:
    """What does not fit, each with the key that is to be changed; without the sizes that would fit."""
    tp, pp, cp = config.tensor_model_parallel_size, config.pipeline_model_parallel_size, config.context_parallel_size
    virtual = config.virtual_pipeline_model_parallel_size
    if virtual is not None and pp < 3:
        text = f"{virtual} pieces a stage need three stages or more (between two, what goes forward and what goes back"
        text += f" would meet), and pipeline_model_parallel_size={pp}; set it to null"
        yield "virtual_pipeline_model_parallel_size", text
    if config.sequence_parallel and tp == 1:
        text = "True splits over tensor-parallel ranks, and tensor_model_parallel_size=1; set it to False"
        yield "sequence_parallel", text
    for what, number in (("attention heads", num_heads), ("key/value heads", num_kv_heads)):
        if number and number % tp:
            yield "tensor_model_parallel_size", f"{tp} does not divide the model's {number} {what}"
            break
    pieces = pp * (virtual or 1)
    if num_layers and num_layers % pieces:
        text = f"{pieces} pieces (stages × virtual stages) do not divide the model's {num_layers} layers"
        yield "pipeline_model_parallel_size", text
    if ranks % config.model_size:
        key = "tensor_model" if ranks % tp else "pipeline_model" if ranks % (tp * pp) else "context"
        text = f"tp {tp} × pp {pp} × cp {cp} = {config.model_size} ranks do not divide {ranks}"
        yield f"{key}_parallel_size", text
    if num_experts and tp > 1 and not config.sequence_parallel:
        text = f"Megatron-Core trains a mixture at tensor_model_parallel_size={tp} with True only (TransformerEngine)"
        yield "sequence_parallel", f"{text}; set it to True, or take tp 1 and expert_model_parallel_size"
    yield from _expert_faults(config, ranks, num_experts)


def _expert_faults(config: MegatronConfig, ranks: int, num_experts: int | None) -> Iterator[tuple[str, str]]:
    size, pp = config.expert_model_parallel_size, config.pipeline_model_parallel_size
    expert_tp = config.expert_tensor_parallel_size or config.tensor_model_parallel_size
    block = expert_tp * size * pp
    text = f"expert tp {expert_tp} × ep {size} × pp {pp} = {block} ranks do not divide {ranks}"
    if size > 1 and num_experts == 0:
        yield "expert_model_parallel_size", f"{size} deals experts over ranks, and the model has none"
    elif num_experts and num_experts % size:
        yield "expert_model_parallel_size", f"{size} does not divide the model's {num_experts} experts"
    elif config.expert_tensor_parallel_size and ranks % (expert_tp * pp):
        yield "expert_tensor_parallel_size", text
    elif ranks % block and size > 1:
        yield "expert_model_parallel_size", text


def check_entries(key: str, entries: Iterable[str], cls: type[Any]) -> None:
    """Refuse entries that a config of Megatron's own does not have.

    Args:
        key: where they were set.
        entries: their names.
        cls: Megatron's dataclass.

    Raises:
        MegatronConfigError: There is no such entry; the text names the nearest one.
    """
    known = sorted(entry.name for entry in fields(cls))
    for name in entries:
        if name not in known:
            near = get_close_matches(name, known, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise MegatronConfigError(f"{key}.{name}: Megatron's {cls.__name__} has no such entry{hint}")


def foreign_settings(model: Any, optim: Any | None) -> list[tuple[str, str]]:
    """Settings of a role that this engine does not have: (key below the role, text); empty where there are none.

    Args:
        model: the role's ModelConfig.
        optim: its OptimConfig; None where nothing is trained.
    """
    asked: list[tuple[str, Any, str]] = []
    if model.lora_rank:
        asked.append(("model.lora_rank", model.lora_rank, "0"))
    if model.enable_activation_offload:
        asked.append(("model.enable_activation_offload", True, "False"))
    if model.use_liger:
        asked.append(("model.use_liger", True, "False"))
    if optim is not None and optim.optimizer != "AdamW":
        asked.append(("optim.optimizer", optim.optimizer, "AdamW"))
    text = "the Megatron engine has no such thing; set it to {}, or take strategy=fsdp"
    return [(key, f"{got}, but " + text.format(instead)) for key, got, instead in asked]


def divisors(number: int) -> list[int]:
    """All divisors, in order."""
    return [size for size in range(1, number + 1) if number % size == 0]
