"""The device mesh: which ranks share one copy of the model, and which hold replicas."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ostinato.controller.topology import Coordinates
from ostinato.workers.fsdp.errors import FsdpConfigError, ProcessGroupMissingError

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


def coordinates() -> Coordinates:
    """This rank's place: every rank trains on its own rows, replicas too."""
    return Coordinates(dp_rank=dist.get_rank(), dp_size=dist.get_world_size())
