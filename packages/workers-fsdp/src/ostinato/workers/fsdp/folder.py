"""A model's folder read one tensor at a time, so that not even the rank that reads it ever holds the whole model."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from ostinato.workers.core.weight_index import SAFETENSORS_INDEX, WHOLE, find_index, read_index
from ostinato.workers.fsdp.lora import folder_name, is_adapter

logger = logging.getLogger(__name__)

Read = Callable[[str], torch.Tensor]
"""From a parameter's or buffer's name in the model to its value, in host memory and in the folder's type."""


def loose_tensors(module: nn.Module) -> Iterator[tuple[nn.Module, str, str]]:
    """Buffers, and tensors that a module keeps as plain attributes: (owner, attribute, full name)."""
    for prefix, child in module.named_modules():
        for name in [*child._buffers, *(key for key, value in vars(child).items() if isinstance(value, torch.Tensor))]:
            if getattr(child, name) is not None:
                yield child, name, f"{prefix}.{name}"


def folder_tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    """What the model's folder holds, and adapters, by name in the model.

    Parameters, a tied one once, and the buffers that are no function of the config (a router's correction).
    """
    kept = {
        f"{prefix}.{name}".removeprefix("."): buffer
        for prefix, child in module.named_modules()
        for name, buffer in child._buffers.items()
        if buffer is not None and name not in child._non_persistent_buffers_set
    }
    return {**dict(module.named_parameters()), **kept}


def open_folder(path: str, module: nn.Module, made: Read | None = None) -> Read | None:
    """A reader of single tensors, where the folder holds the model's parameters one for one.

    Args:
        path: the folder.
        module: the model on the meta device, before it is sharded.
        made: gives the parameters that the folder may lack, and raises KeyError for all others.

    Returns:
        None where the whole model has to be made from the folder: weights under other names or in another arrangement
        than the model has them, quantised or missing ones, no safetensors, buffers that only the model itself can make.
    """
    config: Any = module.config
    if getattr(config, "quantization_config", None) is not None:
        return None
    try:
        files = _files(Path(path))
        names = {
            name: _single(module, name, parameter)
            for name, parameter in module.named_parameters()
            if not is_adapter(name)
        }
        buffers = _buffers(module)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, SafetensorError) as error:
        logger.info("%s is loaded whole: %s", path, error)
        return None
    shapes = {name: tuple(parameter.shape) for name, parameter in module.named_parameters()}

    def read(name: str) -> torch.Tensor:
        if name in buffers:
            return buffers[name]
        if names[name] not in files:
            assert made is not None, "checked below"
            return made(name)
        with safe_open(files[names[name]], framework="pt") as file:
            return file.get_tensor(names[name])

    for name, stored in names.items():
        if stored in files:
            with safe_open(files[stored], framework="pt") as file:
                shape = tuple(file.get_slice(stored).get_shape())
            if shape != shapes[name]:
                return None
        elif made is None or not _makes(made, name):
            logger.info("%s is loaded whole: it holds no %s", path, stored)
            return None
    return read


def _files(folder: Path) -> dict[str, Path]:
    """Which file holds which tensor, in the form that transformers loads."""
    whole, index = folder / WHOLE[0], folder / SAFETENSORS_INDEX
    if find_index(folder) == index:
        return read_index(index)
    with safe_open(whole, framework="pt") as file:
        return dict.fromkeys(file.keys(), whole)


def _single(module: nn.Module, name: str, parameter: torch.Tensor) -> str:
    """The folder's name of a parameter that it holds as it is.

    Raises:
        ValueError: it holds it in another form.
    """
    stored = revert_weight_conversion(cast(PreTrainedModel, module), {folder_name(name): parameter})
    (key,) = stored
    if stored[key] is not parameter:
        raise ValueError(f"{name} is arranged otherwise")
    return key


def _buffers(module: nn.Module) -> dict[str, torch.Tensor]:
    """Values of the buffers that no folder holds (rotary frequencies): their modules are made once more.

    Raises:
        TypeError: a module cannot be made from the model's config alone.
        AttributeError: a module does not keep that config.
        ValueError: a buffer is one that the folder holds (a router's correction).
    """
    values: dict[str, torch.Tensor] = {}
    made: dict[int, nn.Module] = {}
    for owner, attribute, name in loose_tensors(module):
        if attribute in owner._buffers and attribute not in owner._non_persistent_buffers_set:
            raise ValueError(f"{name} is a buffer with a value of its own")
        if id(owner) not in made:
            if "config" not in inspect.signature(type(owner).__init__).parameters:
                raise TypeError(f"{type(owner).__name__} is not made from a config")
            made[id(owner)] = type(owner)(config=cast(Any, owner).config)
        values[name] = getattr(made[id(owner)], attribute)
    return values


def _makes(made: Read, name: str) -> bool:
    try:
        made(name)
    except KeyError:
        return False
    return True
