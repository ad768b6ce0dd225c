"""Megatron's process groups, made from the default process group; this rank's place in them."""

from __future__ import annotations

import importlib
from typing import Any

import torch
import torch.distributed as dist

from ostinato.controller.topology import Coordinates
from ostinato.workers.megatron.config import MegatronConfig, layout_problems
from ostinato.workers.megatron.errors import (
    DeviceError,
    LayoutConflictError,
    MegatronConfigError,
    MegatronMissingError,
    ProcessGroupMissingError,
)

_SIZES: dict[str, Any] = {}
"""What this process's Megatron groups were made for; Megatron keeps one set of groups a process."""

_WORLD: list[Any] = []
"""The default process group that they were made from; a run that is over leaves groups of one that is gone."""


def import_megatron(name: str) -> Any:
    """Import a module of Megatron-Core.

    Raises:
        MegatronMissingError: It is not installed.
    """
    try:
        return importlib.import_module(f"megatron.core.{name}")
    except ImportError as error:
        if (error.name or "").split(".")[0] != "megatron":
            raise
        raise MegatronMissingError(
            f"MegatronEngine: Megatron-Core is not installed ({error}); pip install 'megatron-core>=0.19'"
        ) from error


def training_device() -> torch.device:
    """Where this rank trains: the current CUDA device where the default process group speaks NCCL, else the CPU.

    Raises:
        ProcessGroupMissingError: There is no default process group.
        DeviceError: It is the CPU, and Megatron-Core has not been made to run there.
    """
    if not dist.is_initialized():
        raise ProcessGroupMissingError(
            "MegatronEngine.build: expected an initialised default process group, found none. A Worker makes it with "
            "`self.init_process_group(device_type)`; outside a worker call torch.distributed.init_process_group first."
        )
    if "nccl" in str(dist.get_backend_config()):
        return torch.device("cuda", torch.cuda.current_device())
    if import_megatron("parallel_state").torch is torch:
        raise DeviceError(
            "MegatronEngine.build: expected a GPU, got a process group for the CPU. Megatron-Core calls torch.cuda "
            "wherever it runs. For a trial on a CPU call ostinato.workers.megatron.testing.cpu.install() in every "
            "worker first (the README shows how, with model.external_lib); to train on a CPU use strategy=fsdp."
        )
    return torch.device("cpu")


def initialize(config: MegatronConfig, device: torch.device) -> None:
    """Make Megatron's groups over all ranks, or check that those of this process fit; collective.

    Raises:
        MegatronConfigError: The sizes do not divide the number of ranks.
        LayoutConflictError: Another engine of this process has other sizes.
    """
    for key, text in layout_problems(config, dist.get_world_size()):
        raise MegatronConfigError(f"megatron.{key}: {text}")
    state = import_megatron("parallel_state")
    if _WORLD and _WORLD[0] is not dist.group.WORLD:
        shutdown()
    if state.model_parallel_is_initialized():
        if config.sizes != _SIZES:
            other = {name: size for name, size in config.sizes.items() if size != _SIZES.get(name)}
            raise LayoutConflictError(
                f"MegatronEngine.build: Megatron-Core keeps one layout a process, and an engine of this process has "
                f"{ {name: _SIZES.get(name) for name in other} }, not {other}. Give actor, ref and critic the same "
                "parallel sizes, or another pool of GPUs."
            )
        return
    state.initialize_model_parallel(**config.sizes, create_gloo_process_groups=False)
    _SIZES.update(config.sizes)
    _WORLD[:] = [dist.group.WORLD]
    streams = import_megatron("tensor_parallel.random")
    if not streams.get_cuda_rng_tracker().is_initialized():
        with torch.random.fork_rng([device] if device.type == "cuda" else []):  # it seeds torch's own streams as well
            streams.model_parallel_cuda_manual_seed(config.seed)


def made_for() -> dict[str, Any] | None:
    """The sizes of this process's groups; None: there are none."""
    return dict(_SIZES) or None


def shutdown() -> None:
    """Forget this process's groups, so that the next engine may have other sizes; for tests and benchmarks."""
    import_megatron("parallel_state").destroy_model_parallel()
    _SIZES.clear()
    _WORLD.clear()


def coordinates() -> Coordinates:
    """This rank's place: only data-parallel ranks get rows of their own, and the last stage answers for each."""
    state = import_megatron("parallel_state")
    tp, cp = state.get_tensor_model_parallel_rank(), state.get_context_parallel_rank()
    pp, stages = state.get_pipeline_model_parallel_rank(), state.get_pipeline_model_parallel_world_size()
    return Coordinates(
        dp_rank=state.get_data_parallel_rank(),
        dp_size=state.get_data_parallel_world_size(),
        answers=tp == 0 and cp == 0 and pp == stages - 1,
        tp_rank=tp,
        pp_rank=pp,
        cp_rank=cp,
    )
