"""The device mesh: which ranks share one copy of the model, and which hold replicas."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ostinato.controller.topology import Coordinates
from ostinato.workers.fsdp.errors import FsdpConfigError, ProcessGroupMissingError
from ostinato.workers.fsdp.ulysses import KEY

SHARD = "shard"
REPLICATE = "replicate"


def training_device() -> torch.device:
    """Where this rank trains: the current CUDA device where the default process group speaks NCCL, else the CPU.

    Raises:
        ProcessGroupMissingError: There is no default process group.
    """
    if not dist.is_initialized():
        raise ProcessGroupMissingError(
            "FsdpEngine.build: expected an initialised default process group, found none. A Worker makes it with "
            "`self.init_process_group(device_type)`; outside a worker call torch.distributed.init_process_group "
            "first (at world size 1 too)."
        )
    if "nccl" in str(dist.get_backend_config()):
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def build_mesh(device_type: str, fsdp_size: int) -> DeviceMesh:
    """A mesh over all ranks: one dimension, or (replicate, shard) where `fsdp_size` is smaller than the world.

    Args:
        device_type: "cpu" or "cuda".
        fsdp_size: Ranks that share one copy of the model; -1 for all.

    Raises:
        FsdpConfigError: The world size is no multiple of `fsdp_size`.
    """
    world_size = dist.get_world_size()
    if fsdp_size == -1 or fsdp_size >= world_size:
        return init_device_mesh(device_type, (world_size,), mesh_dim_names=(SHARD,))
    if world_size % fsdp_size:
        raise FsdpConfigError(
            f"fsdp_config.fsdp_size: expected a divisor of the world size {world_size}, got {fsdp_size}. "
            "Use -1 to shard over all ranks."
        )
    shape = (world_size // fsdp_size, fsdp_size)
    return init_device_mesh(device_type, shape, mesh_dim_names=(REPLICATE, SHARD))


def shard_group(mesh: DeviceMesh) -> dist.ProcessGroup:
    """The ranks that share one copy of the model with this one."""
    return mesh.get_group(SHARD)


@dataclass(frozen=True)
class Rows:
    """Which rows a rank trains on, and who shares them.

    Attributes:
        coordinates: Its data-parallel place: ranks that share a micro-batch's tokens share it, the first one answers.
        data: One rank of every such group, this one's column; sums over rows go over these.
        sequence: The ranks that share the tokens of this one's micro-batches; None where it has them alone.
    """

    coordinates: Coordinates
    data: dist.ProcessGroup | None
    sequence: dist.ProcessGroup | None


def divide_rows(device_type: str, sequence_size: int) -> Rows:
    """Divide the ranks into groups of neighbours that share the tokens of a micro-batch; collective.

    Args:
        device_type: "cpu" or "cuda".
        sequence_size: Ranks of a group. With 1 every rank trains on its own rows, replicas too.

    Raises:
        FsdpConfigError: The world size is no multiple of it.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if world_size % sequence_size:
        raise FsdpConfigError(f"{KEY}: expected a divisor of the world size {world_size}, got {sequence_size}.")
    dp_rank, place = divmod(rank, sequence_size)
    coordinates = Coordinates(dp_rank, world_size // sequence_size, answers=place == 0, cp_rank=place)
    if sequence_size == 1:
        return Rows(coordinates, None, None)
    mesh = init_device_mesh(
        device_type, (world_size // sequence_size, sequence_size), mesh_dim_names=("data", "sequence")
    )
    return Rows(coordinates, mesh.get_group("data"), mesh.get_group("sequence"))
