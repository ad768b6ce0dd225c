"""Checkpoints that are written from host memory, at once or while training goes on.

Megatron-Core's own background writing ends in collectives on the process group of the training, which every rank would
have to join at the same moment. Here Megatron says what a checkpoint holds, everything is copied to the host, and
torch's writer puts it down in the same format, in a thread whose ranks talk in a group of their own. Megatron's own
writing at once hides the system's error, and where the disk is full, what it leaves ends the process later.
"""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save as save_state_dict

from ostinato.workers.core.checkpoint import WriteUnderWay, named_failure, not_in_force
from ostinato.workers.megatron.errors import CheckpointError
from ostinato.workers.megatron.parallel import import_megatron
from ostinato.workers.megatron.saved import METADATA

WRITE_TIMEOUT = timedelta(hours=3)
"""How long the fastest rank waits for the slowest one's disk."""


class Writer:
    """Writes one checkpoint after another; made on every rank.

    Args:
        device: where the model trains.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._group = dist.new_group(backend="gloo", timeout=WRITE_TIMEOUT)
        self._last: WriteUnderWay | None = None

    def end(self) -> None:
        """Return once nothing is under way."""
        if self._last is not None:
            self._last.end()

    def write(self, path: Path, state: dict[str, Any], content: dict[str, Any]) -> None:
        """Write a state by way of host memory; collective. Arguments and errors are those of `start`."""
        self._write(path, *self._taken(path, state, content, pinned=False))

    def start(self, path: Path, state: dict[str, Any], content: dict[str, Any]) -> WriteUnderWay:
        """Copy a state to host memory and begin to write it; collective.

        Args:
            path: an empty folder, or one without `metadata.json`.
            state: what Megatron's `dist_checkpointing.save` takes; may change as soon as this returns.
            content: what the checkpoint says about its format.

        Raises:
            CheckpointError: it cannot be written; of what the thread meets, where it is waited for.
        """
        taken = self._taken(path, state, content, pinned=True)
        self._last = WriteUnderWay(lambda: self._write(path, *taken))
        return self._last

    def _taken(
        self, path: Path, state: dict[str, Any], content: dict[str, Any], *, pinned: bool
    ) -> tuple[dict[str, Any], Any]:
        self.end()
        own = import_megatron("dist_checkpointing.core").CheckpointingException
        with named_failure(_what(path), CheckpointError, own, advice=not_in_force(METADATA)):
            prepared, config = _prepared(path, state, content)
            copied = _copied(prepared, pinned)  # the host's memory may not do
            if self._device.type == "cuda":
                torch.cuda.current_stream().synchronize()
        return copied, config

    def _write(self, path: Path, state: dict[str, Any], config: Any) -> None:
        if self._device.type == "cuda":
            # A new thread begins on the first device, where torch would start a context for its streams.
            torch.cuda.set_device(self._device)
        strategies = import_megatron("dist_checkpointing.strategies.torch")
        planner = strategies.MCoreSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        group = cast(dist.ProcessGroup, self._group)
        failure: list[str | None] = [None]
        with named_failure(_what(path), CheckpointError, advice=not_in_force(METADATA)):
            save_state_dict(state, storage_writer=FileSystemWriter(path), planner=planner, process_group=group)
            if dist.get_rank() == 0:
                try:
                    _mark(path, config)
                except Exception as error:  # whatever it is, the other ranks wait for the answer
                    failure = [f"{type(error).__name__}: {error}"]
            dist.broadcast_object_list(failure, src=0, group=group)
        if failure[0] is not None:
            raise CheckpointError(f"{_what(path)}: rank 0: {failure[0]}. {not_in_force(METADATA)}")


def _what(path: Path) -> str:
    return f"checkpoint {path} cannot be written"


def _prepared(path: Path, state: dict[str, Any], content: dict[str, Any]) -> tuple[dict[str, Any], Any]:
    """What Megatron would write, checked over all ranks, and what its `metadata.json` says; collective."""
    strategies = import_megatron("dist_checkpointing.strategies.torch")
    request = import_megatron("dist_checkpointing.strategies.async_utils").AsyncRequest
    taken: dict[str, Any] = {}

    class Take(strategies.TorchDistSaveShardedStrategy):
        """Writes nothing."""

        def async_save(self, sharded_state_dict: Any, *_: Any) -> Any:
            taken.update(sharded_state_dict)
            return request(None, (), [])

    strategy: Any = Take()
    import_megatron("dist_checkpointing").save(
        state, str(path), strategy, async_sharded_save=True, content_metadata=content
    )
    config = import_megatron("dist_checkpointing.core").CheckpointingConfig(strategy.backend, strategy.version)
    return taken, config


def _copied(prepared: dict[str, Any], pinned: bool) -> dict[str, Any]:
    """This rank's part in host memory, as torch's writer takes it; objects are pickled here and now.

    Page-locked memory is worth its price (blocks rounded up to a power of two) only where training waits for the copy.
    """
    strategies = import_megatron("dist_checkpointing.strategies.torch")
    by_key, _, _ = strategies._replace_state_dict_keys_with_sharded_keys(prepared, keep_only_main_replica=True)
    sharded_tensor = import_megatron("dist_checkpointing.mapping").ShardedTensor
    for entries in by_key.values():
        for entry in entries:
            if isinstance(entry, sharded_tensor):
                entry.data = _on_host(entry.data, pinned)
    return strategies.mcore_to_pyt_state_dict(by_key, False)


def _on_host(tensor: torch.Tensor, pinned: bool) -> torch.Tensor:
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=pinned and tensor.is_cuda)
    return copy.copy_(tensor.detach(), non_blocking=True)


def _mark(path: Path, config: Any) -> None:
    """Write `metadata.json` beside its place and put it there at once."""
    beside = path / ".mark"
    beside.mkdir(exist_ok=True)
    import_megatron("dist_checkpointing.core").save_config(config, str(beside))
    with (beside / METADATA).open("rb") as handle:
        os.fsync(handle.fileno())
    (beside / METADATA).replace(path / METADATA)
    beside.rmdir()
