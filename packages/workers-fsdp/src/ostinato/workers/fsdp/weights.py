"""The model's weights under their Hugging Face names, gathered one after another."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from ostinato.rollout.base import TensorSpec
from ostinato.workers.core.config import ModelConfig
from ostinato.workers.fsdp.errors import CheckpointError, ModelLoadError
from ostinato.workers.fsdp.folder import folder_tensors
from ostinato.workers.fsdp.lora import FOLDER, adapters_of, folder_name, is_adapter, merge, write_adapter


def reshard_all(units: Sequence[FSDPModule]) -> None:
    """Free every gathered weight.

    After a forward without backward the root keeps its weights gathered, as plain parameters; anything that reads
    shards needs this first.
    """
    for unit in units:
        unit.reshard()


def gather(parameter: torch.Tensor, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """The full tensor of a sharded parameter, cast before it is gathered; collective.

    Args:
        parameter: On the device or in host memory; a buffer, which every rank has in full, is copied.
        device: Where the result lies.
        dtype: Type of the result, and of what travels.
    """
    if not isinstance(parameter, DTensor):
        return parameter.detach().to(device=device, dtype=dtype, copy=True)
    shard = parameter.to_local().detach()
    part = shard.to(device=device, dtype=dtype)
    if parameter.device_mesh.size() == 1:
        # One rank holds everything already; what is given away must not be the parameter itself.
        return part.clone() if part is shard else part
    if parameter.device_mesh.ndim == 1 and parameter.placements == (Shard(0),):
        return _gather_rows(part, parameter)
    cast_parameter = DTensor.from_local(
        part,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
    full = cast_parameter.full_tensor()
    return full.clone() if full.data_ptr() == shard.data_ptr() else full


def _gather_rows(part: torch.Tensor, parameter: DTensor) -> torch.Tensor:
    """What `full_tensor` does for rows in equal chunks, the last ones shorter, at a tenth of its cost on the host."""
    group = parameter.device_mesh.get_group()
    rows = -(-parameter.shape[0] // parameter.device_mesh.size())
    if part.shape[0] < rows:
        part = torch.cat([part, part.new_zeros(rows - part.shape[0], *part.shape[1:])])
    full = part.new_empty(rows * parameter.device_mesh.size(), *part.shape[1:])
    dist.all_gather_into_tensor(full, part.contiguous(), group=group)
    return full[: parameter.shape[0]]


class FsdpWeightSource:
    """A `WeightSource` over a sharded model.

    A weight that is tied to another appears once, under the name that the model's folder has for it. Where transformers
    keeps several of the folder's tensors as one (the experts of a mixture), they are taken apart again. An adapter
    comes merged into its weight.

    Args:
        module: The sharded model.
        units: Its sharded modules, the root last.
        device: Where full tensors are gathered.
        dtype: Type of the weights that are given; buffers keep theirs.
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
            name: torch.empty(tensor.shape, dtype=self._dtype_of(tensor), device="meta")
            for name, tensor in folder_tensors(module).items()
            if not is_adapter(name)
        }
        self._adapters = adapters_of(module)
        self._names = {name: tuple(self._in_folder(name, tensor)) for name, tensor in meta.items()}
        # Most weights are whole tensors of the folder; asking transformers about each one anew takes longer than
        # gathering it.
        self._plain = {
            name: names[0]
            for name, names in self._names.items()
            if len(names) == 1 and self._in_folder(name, meta[name])[names[0]] is meta[name]
        }
        whole = {folder_name(name): tensor for name, tensor in meta.items()}
        together = revert_weight_conversion(cast(PreTrainedModel, module), whole)
        if {name for names in self._names.values() for name in names} != set(together):
            raise ModelLoadError(
                f"FsdpWeightSource: {type(module).__name__} keeps its weights in a form that cannot be taken apart one "
                "by one; this model cannot be handed to a rollout engine."
            )
        self._specs = {
            name: TensorSpec(shape=tuple(together[name].shape), dtype=together[name].dtype)
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
        # No `no_grad` around a yield: the one who asks for weights would be under it too.
        for name, tensor in folder_tensors(self._module).items():
            if is_adapter(name):
                continue
            full = self._full(tensor, self._dtype_of(tensor))
            if name in self._adapters:
                adapter = self._adapters[name]
                a, b = (self._full(part, torch.float32) for part in (adapter.a, adapter.b))
                full = merge(full, a, b, adapter)
            if name in self._plain:
                yield self._plain[name], full
            else:
                yield from self._in_folder(name, full).items()
            del full  # before the next one is gathered

    def _dtype_of(self, tensor: torch.Tensor) -> torch.dtype:
        """A buffer keeps its own type: what it holds is not computed with like a weight."""
        return self._dtype if isinstance(tensor, nn.Parameter) else tensor.dtype

    def _full(self, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return gather(tensor, self._device, dtype)

    def _in_folder(self, name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
        return revert_weight_conversion(cast(PreTrainedModel, self._module), {folder_name(name): tensor})


def save_adapter(path: Path, module: nn.Module, model: ModelConfig, device: torch.device) -> None:
    """Write the adapter beside a checkpoint, in PEFT's format; collective, rank 0 writes.

    Args:
        path: The checkpoint's folder.
        module: The sharded model, resharded.
        model: What the adapter is for.
        device: Where tensors are gathered.

    Raises:
        CheckpointError: It cannot be written; raised on every rank.
    """
    tensors = {
        name: gather(parameter, device, parameter.dtype)
        for name, parameter in module.named_parameters()
        if parameter.requires_grad
    }
    failure: list[CheckpointError | None] = [None]
    if dist.get_rank() == 0:
        try:
            write_adapter(path / FOLDER, tensors, model, module)
        except CheckpointError as error:
            failure = [error]
    dist.broadcast_object_list(failure, src=0)
    if failure[0] is not None:
        raise failure[0]
