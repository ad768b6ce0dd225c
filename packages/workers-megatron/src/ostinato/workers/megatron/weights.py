"""The model's weights under their Hugging Face names, put together from tensor, pipeline and expert ranks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from ostinato.rollout.base import TensorSpec
from ostinato.workers.megatron.build import Built, shard_of
from ostinato.workers.megatron.mapping import Part, merge
from ostinato.workers.megatron.offload import HostCopies
from ostinato.workers.megatron.parallel import import_megatron


def stages_of(built: Built) -> dict[str, int]:
    """Name of each part -> the first stage that holds it; collective over all ranks."""
    stage = import_megatron("parallel_state").get_pipeline_model_parallel_rank()
    held: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(held, (stage, list(built.parameters)))
    return {name: stage for stage, names in sorted(held, reverse=True) for name in names}


class MegatronWeightSource:
    """A `WeightSource` over Megatron's shards.

    A weight that is tied to another appears once, under the folder's name. Padding of the vocabulary is left out.

    Args:
        built: the model.
        stages: of `stages_of`.
        host: where offloaded parameters lie.
        device: where full tensors are put together.
        dtype: of the tensors that `weights` gives.
    """

    def __init__(
        self, built: Built, stages: dict[str, int], host: HostCopies, device: torch.device, dtype: torch.dtype
    ) -> None:
        self._built = built
        self._stages = stages
        self._host = host
        self._device = device
        self._dtype = dtype
        self._state = import_megatron("parallel_state")

    def specs(self) -> dict[str, TensorSpec]:
        """Full shape and type of every weight, in the order of `weights`."""
        return {
            name: TensorSpec(shape=shape, dtype=self._dtype)
            for part in self._built.parts
            if part.exported
            for name, shape in part.hf
        }

    @torch.no_grad()
    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Give one weight after another; collective over the ranks that share a copy of the model.

        Parameters may lie on the device or in host memory. The tensors of at most one Megatron parameter are held at a
        time.
        """
        for part in self._built.parts:
            if part.exported:
                yield from zip((name for name, _ in part.hf), self._whole(part), strict=True)

    def _whole(self, part: Part) -> list[torch.Tensor]:
        """The folder's tensors of a part, on every rank."""
        state, stage = self._state, self._stages[part.name]
        whole: list[torch.Tensor] | None = None
        if state.get_pipeline_model_parallel_rank() == stage:
            whole = self._gathered(part) if part.name in self._built.parameters else None
            experts = state.get_expert_model_parallel_world_size()
            if part.expert is not None and experts > 1:
                owner = part.expert * experts // self._built.architecture.num_experts
                whole = self._sent(part, whole, state.get_expert_model_parallel_group(), owner)
        if state.get_pipeline_model_parallel_world_size() > 1:
            whole = self._sent(part, whole, state.get_pipeline_model_parallel_group(), stage)
        assert whole is not None, f"{part.name} lies on no rank"
        return whole

    def _gathered(self, part: Part) -> list[torch.Tensor]:
        """Put the tensor-parallel ranks' pieces together; they are cast before they travel."""
        parameter = self._built.parameters[part.name]
        piece = self._host.read(parameter.detach()).to(device=self._device, dtype=self._dtype)
        _, size = shard_of(part, self._state)
        if size == 1:
            # What is given away must not be the parameter itself.
            return merge(part, [piece.clone() if part.kind == "copy" else piece], self._built.architecture)
        group = (
            self._state.get_expert_tensor_parallel_group()
            if part.expert is not None
            else self._state.get_tensor_model_parallel_group()
        )
        flat = piece.new_empty(size * piece.numel())
        dist.all_gather_into_tensor(flat, piece.contiguous().flatten(), group=group)
        return merge(part, [one.view(piece.shape) for one in flat.chunk(size)], self._built.architecture)

    def _sent(
        self, part: Part, whole: list[torch.Tensor] | None, group: dist.ProcessGroup, owner: int
    ) -> list[torch.Tensor]:
        """Send the tensors from one rank of a group to the others."""
        if whole is None:
            whole = [torch.empty(shape, dtype=self._dtype, device=self._device) for _, shape in part.hf]
        for index, tensor in enumerate(whole):
            whole[index] = tensor.contiguous()
            dist.broadcast(whole[index], src=dist.get_global_rank(group, owner), group=group)
        return whole
