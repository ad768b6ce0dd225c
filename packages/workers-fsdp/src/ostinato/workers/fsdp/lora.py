"""Low-rank adapters: PEFT's layers inside the model, trained alone.

The reference policy is the same model with the adapter off. A rollout engine gets the adapter merged into the weights
that it belongs to, under the folder's names. On disk the adapter has PEFT's own format.
"""

from __future__ import annotations

import importlib.util
import math
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ostinato.workers.core.config import ModelConfig
from ostinato.workers.core.engine import Head
from ostinato.workers.fsdp.errors import CheckpointError, FsdpConfigError

FOLDER = "lora_adapter"
"""Where the adapter lies inside a checkpoint."""

_NAME = "default"
_SEED = 20261
_VALUE_HEAD = "score"
_INSTALL = "pip install 'ostinato-workers-fsdp[lora]'"


def add_adapter(module: nn.Module, model: ModelConfig, head: Head) -> None:
    """Put adapters into a model without storage and freeze everything else; a value head is trained in full.

    Args:
        module: The whole model on the meta device, before it is sharded.
        model: `lora_rank`, `lora_alpha`, `target_modules`, `exclude_modules`.
        head: "lm" or "value".

    Raises:
        FsdpConfigError: PEFT is not installed, or the targets are not modules that can have an adapter.
    """
    if importlib.util.find_spec("peft") is None:
        raise FsdpConfigError(f"model.lora_rank={model.lora_rank}: adapters need PEFT, which is missing: {_INSTALL}")
    from peft import inject_adapter_in_model

    module.requires_grad_(False)
    try:
        with torch.device("meta"):
            inject_adapter_in_model(_peft_config(model, head), module, _NAME)
    except ValueError as error:
        raise FsdpConfigError(f"model.target_modules={model.target_modules!r}: {error}") from error
    _check_targets(module, model)
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(is_adapter(name) or (head == "value" and name.startswith(f"{_VALUE_HEAD}.")))


def _peft_config(model: ModelConfig, head: Head) -> Any:
    from peft import LoraConfig

    def listed(value: Any) -> Any:
        return value if value is None or isinstance(value, str) else list(value)

    excluded = listed(model.exclude_modules)
    if head == "value":
        if isinstance(excluded, str):
            raise FsdpConfigError(
                f"critic.model.exclude_modules={excluded!r}: expected a list of names for a model with a value head, "
                "which is itself left out"
            )
        excluded = [*(excluded or []), _VALUE_HEAD]
    return LoraConfig(
        r=model.lora_rank,
        lora_alpha=model.lora_alpha,
        target_modules=listed(model.target_modules),
        exclude_modules=excluded,
        lora_dropout=0.0,
        bias="none",
        # PEFT knows a value head as a classifier of tokens, which it loads in full from the adapter's file.
        task_type="CAUSAL_LM" if head == "lm" else "TOKEN_CLS",
        modules_to_save=None,
        base_model_name_or_path=model.path,
    )


def _check_targets(module: nn.Module, model: ModelConfig) -> None:
    from peft.tuners.lora import Linear

    embeddings: Any = module.get_input_embeddings()  # pyright: ignore[reportCallIssue, reportAttributeAccessIssue]
    for name, layer in _layers(module):
        base = layer.get_base_layer()
        if not isinstance(layer, Linear) or base.weight is getattr(embeddings, "weight", None):
            raise FsdpConfigError(
                f"model.target_modules={model.target_modules!r}: {name} is {type(base).__name__}"
                f"{' and shares its weight with the embeddings' if isinstance(layer, Linear) else ''}; an adapter goes "
                "on linear layers that share their weight with no other. Name it in model.exclude_modules."
            )


def _layers(module: nn.Module) -> list[tuple[str, Any]]:
    """Every layer that has an adapter."""
    if not any(".lora_" in name for name, _ in module.named_parameters()):
        return []  # PEFT need not be there, and takes long to import
    from peft.tuners.lora import LoraLayer

    return [(name, child) for name, child in module.named_modules() if isinstance(child, LoraLayer)]


def keep_frozen_in(module: nn.Module, dtype: torch.dtype) -> None:
    """Store what is not trained in the type of the forward pass: a more exact copy of it would never be read.

    Args:
        module: The model on the meta device, before it is sharded.
        dtype: Of the forward pass.
    """
    for parameter in module.parameters():
        if not parameter.requires_grad:
            parameter.data = parameter.data.to(dtype)


def is_adapter(name: str) -> bool:
    """Whether a parameter is an adapter's, by its name in the model."""
    return ".lora_A." in name or ".lora_B." in name


def folder_name(name: str) -> str:
    """The name of a weight of the folder from its name in a model with adapters."""
    return name.replace(".base_layer.", ".")


def first_value(name: str, like: torch.Tensor) -> torch.Tensor:
    """An adapter's first value, the same on every rank and in every run: PEFT's, from a seed of its own.

    A is uniform in ±1/√(inputs), B is 0, so that the model begins as its folder has it.

    Args:
        name: The parameter's name.
        like: Gives shape and type; may be on the meta device.
    """
    value = torch.zeros(like.shape, dtype=torch.float32)
    if ".lora_A." in name:
        generator = torch.Generator().manual_seed(_SEED + zlib.crc32(name.encode()))
        nn.init.kaiming_uniform_(value, a=math.sqrt(5), generator=generator)
    return value.to(like.dtype)


@contextmanager
def without_adapter(module: nn.Module) -> Iterator[None]:
    """Inside, the model is the one of its folder. For passes without gradients."""
    layers = [layer for _, layer in _layers(module)]
    for layer in layers:
        # PEFT's own switch also freezes the parameters, which FSDP has laid out as trained ones.
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


@dataclass(frozen=True)
class Adapter:
    """One weight's adapter.

    Attributes:
        a: (r, inputs).
        b: (outputs, r).
        factor: of B·A, `lora_alpha / r`.
        turned: The weight is (inputs, outputs), as GPT-2 has them.
    """

    a: nn.Parameter
    b: nn.Parameter
    factor: float
    turned: bool


def adapters_of(module: nn.Module) -> dict[str, Adapter]:
    """The adapter of each weight that has one, by the weight's name in the model."""
    return {
        f"{name}.base_layer.weight": Adapter(
            layer.lora_A[_NAME].weight, layer.lora_B[_NAME].weight, layer.scaling[_NAME], layer.fan_in_fan_out
        )
        for name, layer in _layers(module)
    }


def merge(weight: torch.Tensor, a: torch.Tensor, b: torch.Tensor, adapter: Adapter) -> torch.Tensor:
    """W + factor · B · A, in float32, in W's type.

    Args:
        weight: (outputs, inputs), or the other way round where it is turned.
        a: A in full, float32.
        b: B in full, float32.
        adapter: What they are of.
    """
    left, right = (a.T, b.T) if adapter.turned else (b, a)
    return torch.addmm(weight.to(torch.float32), left, right, alpha=adapter.factor).to(weight.dtype)


def write_adapter(path: Path, tensors: Mapping[str, torch.Tensor], model: ModelConfig, module: nn.Module) -> None:
    """Write an adapter as `PeftModel.from_pretrained` reads it.

    Args:
        path: The folder to make.
        tensors: The trained parameters in full, by their names in the model.
        model: Rank, alpha and the folder that the adapter is for.
        module: The model, which knows where its adapters are.

    Raises:
        CheckpointError: It cannot be written.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    trained_whole = sorted({name.split(".")[0] for name in tensors if not is_adapter(name)})
    config = _peft_config(model, "value" if trained_whole else "lm")
    # What was adapted, by full name, so that loading does not depend on how a rule is read.
    config.target_modules = sorted(name for name, _ in _layers(module))
    config.exclude_modules, config.inference_mode = None, True
    config.modules_to_save = trained_whole or None
    state = {
        f"base_model.model.{name.replace(f'.{_NAME}.', '.')}": tensor.detach().cpu().contiguous()
        for name, tensor in tensors.items()
    }
    try:
        path.mkdir(parents=True, exist_ok=True)
        save_file(state, path / "adapter_model.safetensors", metadata={"format": "pt"})
        config.save_pretrained(str(path))
    except (OSError, SafetensorError) as error:  # safetensors' error for a full disk is no OSError
        raise CheckpointError(f"the adapter {path} cannot be written: {error}") from error
