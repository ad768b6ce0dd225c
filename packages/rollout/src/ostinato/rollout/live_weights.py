"""A transformers model's live parameters under the names that its folder has for them.

Transformers may keep several tensors of a folder as one parameter (the experts of a mixture), or under another name.
Weights travel under the folder's names, which every engine knows; here each such name becomes a view of a parameter.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers.core_model_loading import revert_weight_conversion

from ostinato.rollout.base import TensorSpec
from ostinato.rollout.buckets import checksum
from ostinato.rollout.errors import WeightMismatchError


@dataclass(frozen=True)
class Place:
    """Where a weight of the folder lies: a strided view of a parameter.

    Attributes:
        parameter: the module's name for the parameter.
        shape: of the view.
        stride: of the view, in elements.
        offset: of its first element, in elements.
    """

    parameter: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


def _strided_place(parameter: str, name: str, positions: torch.Tensor) -> Place:
    """The view whose elements are the parameter's elements at `positions`."""
    shape = tuple(positions.shape)
    corner = positions[(0,) * len(shape)]
    stride = tuple(
        int(positions.select(dim, 1)[(0,) * (len(shape) - 1)] - corner) if size > 1 else 1
        for dim, size in enumerate(shape)
    )
    offset = int(corner)
    steps = [torch.arange(size) * step for size, step in zip(shape, stride, strict=True)]
    expected = torch.full((), offset)
    for dim, step in enumerate(steps):
        expected = expected + step.view(-1, *[1] * (len(shape) - dim - 1))
    if not torch.equal(expected, positions):
        raise WeightMismatchError(
            f"hf rollout: {name} is not a strided part of the parameter {parameter}, so it cannot be loaded in place. "
            "Take another rollout engine for this model.",
            unexpected=(name,),
        )
    return Place(parameter, shape, stride, offset)


def _places_of(model: Any, name: str, shape: torch.Size) -> dict[str, Place]:
    """The folder's names for the parts of one parameter, and where each part lies in it."""
    probe = torch.empty(shape, device="meta")
    renamed = revert_weight_conversion(model, {name: probe})
    if len(renamed) == 1 and next(iter(renamed.values())) is probe:
        return {next(iter(renamed)): Place(name, tuple(shape), probe.stride(), 0)}
    # The values are rearranged: sending positions through the same operations tells where each one goes.
    positions = revert_weight_conversion(model, {name: torch.arange(shape.numel()).view(shape)})
    return {folder_name: _strided_place(name, folder_name, part) for folder_name, part in positions.items()}


class LiveWeights:
    """The parameters and persistent buffers of one model, each memory once.

    Args:
        model: a transformers model; on the meta device where only `specs` is wanted.
    """

    def __init__(self, model: Any):
        owners: dict[int, str] = {}
        self._tensors: dict[str, torch.Tensor] = {}
        self._places: dict[str, Place] = {}
        self._tied: dict[str, str] = {}
        known_as: dict[str, list[str]] = {}
        for name, tensor in model.state_dict(keep_vars=True).items():
            owner = owners.setdefault(id(tensor), name)
            places = _places_of(model, name, tensor.shape)
            if owner == name:
                self._tensors[name] = tensor
                known_as[name] = list(places)
            else:
                self._tied.update(zip(places, known_as[owner], strict=True))
            self._places.update(places)
        self._shapes = {name: tensor.shape for name, tensor in self._tensors.items()}

    def specs(self) -> dict[str, TensorSpec]:
        """Name, full shape, dtype and ties of every weight, in the model's order."""
        return {
            name: TensorSpec(place.shape, self._owner(name).dtype, self._tied.get(name))
            for name, place in self._places.items()
        }

    def _owner(self, name: str) -> torch.Tensor:
        return self._tensors[self._places[self._tied.get(name, name)].parameter]

    def view(self, name: str) -> torch.Tensor:
        """The live memory of one weight."""
        place = self._places[self._tied.get(name, name)]
        return self._tensors[place.parameter].detach().as_strided(place.shape, place.stride, place.offset)

    def load(self, name: str, tensor: torch.Tensor) -> None:
        """Copy a full tensor into its place, cast to the model's dtype.

        Args:
            name: of the weight.
            tensor: of the shape that `specs` tells.
        """
        self.view(name).copy_(tensor)

    def checksums(self) -> dict[str, int]:
        """A checksum of every weight, each memory once."""
        return {name: checksum(self.view(name)) for name in self._places if name not in self._tied}

    def num_bytes(self) -> int:
        """What the weights take up now."""
        return sum(tensor.untyped_storage().nbytes() for tensor in self._tensors.values())

    def allocate(self, device: torch.device) -> None:
        """Take memory again for what was dropped; its content is undefined."""
        for name, tensor in self._tensors.items():
            if tensor.shape != self._shapes[name]:
                tensor.data = torch.empty(self._shapes[name], dtype=tensor.dtype, device=device)

    def drop(self) -> None:
        """Give the memory back; the parameters stay as objects."""
        for tensor in self._tensors.values():
            tensor.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)


def model_specs(model_config: Any, dtype: torch.dtype, *, trust_remote_code: bool = False) -> dict[str, TensorSpec]:
    """The weights of a model under the names of its folder, without any memory for them.

    Args:
        model_config: of transformers.
        dtype: what an engine keeps them in, but for buffers (a router's correction): those travel in float32, for
            engines keep them in that, and transformers in what the model happens to be made in.
        trust_remote_code: run code that comes with the model.
    """
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(model_config, dtype=dtype, trust_remote_code=trust_remote_code)
    for buffer in model.buffers():
        if buffer.is_floating_point():
            buffer.data = buffer.data.float()
    return LiveWeights(model).specs()
