"""The model's weights under their Hugging Face names, gathered one after another."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import cast

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from ostinato.rollout.base import TensorSpec
from ostinato.workers.fsdp.errors import ModelLoadError


def reshard_all(units: Sequence[FSDPModule]) -> None:
    """Free every gathered weight.

    After a forward without backward the root keeps its weights gathered, as plain parameters; anything that reads
    shards needs this first.
    """
    for unit in units:
        unit.reshard()


def gather(parameter: DTensor, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """The full tensor of a sharded parameter, cast before it is gathered; collective.

    Args:
        parameter: On the device or in host memory.
        device: Where the result lies.
        dtype: Type of the result, and of what travels.
    """
    shard = parameter.to_local().detach()
    part = shard.to(device=device, dtype=dtype)
    cast_parameter = DTensor.from_local(
        part,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
    full = cast_parameter.full_tensor()
    # One rank holds everything already; what is given away must not be the parameter itself.
    return full.clone() if full.data_ptr() == shard.data_ptr() else full


class FsdpWeightSource:
    """A `WeightSource` over a sharded model.

    A weight that is tied to another appears once, under the name that the model's folder has for it. Where transformers
    keeps several of the folder's tensors as one (the experts of a mixture), they are taken apart again.

    Args:
        module: The sharded model.
        units: Its sharded modules, the root last.
        device: Where full tensors are gathered.
        dtype: Type of the floating-point tensors that `weights` gives.
    """

    def __init__(
        self, module: nn.Module, units: Sequence[FSDPModule], device: torch.device, dtype: torch.dtype
    ) -> None:
        self._module = module
        self._units = units
        self._device = device
        self._dtype = dtype
        reshard_all(units)
        meta = {
            name: torch.empty(parameter.shape, dtype=dtype, device="meta")
            for name, parameter in module.named_parameters()
        }
        self._names = {name: tuple(self._in_folder(name, tensor)) for name, tensor in meta.items()}
        together = revert_weight_conversion(cast(PreTrainedModel, module), dict(meta))
        if {name for names in self._names.values() for name in names} != set(together):
            raise ModelLoadError(
                f"FsdpWeightSource: {type(module).__name__} keeps its weights in a form that cannot be taken apart one "
                "by one; this model cannot be handed to a rollout engine."
            )
        self._specs = {
            name: TensorSpec(shape=tuple(together[name].shape), dtype=dtype)
            for names in self._names.values()
            for name in names
        }

    def specs(self) -> dict[str, TensorSpec]:
        """Full shape and type of every weight, in the order of `weights`."""
        return dict(self._specs)

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Gather and give one weight after another; collective over the ranks that share a copy of the model.

        Parameters may lie on the device or in host memory. At most one gathered parameter is held at a time.
        """
        reshard_all(self._units)
        with torch.no_grad():
            for name, parameter in self._module.named_parameters():
                full = gather(cast(DTensor, parameter), self._device, self._dtype)
                yield from self._in_folder(name, full).items()

    def _in_folder(self, name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
        return revert_weight_conversion(cast(PreTrainedModel, self._module), {name: tensor})
