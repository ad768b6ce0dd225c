"""Checkpoints that are written from host memory, at once or while training goes on.

Megatron-Core's own background writing ends in collectives on the process group of the training, which every rank would
have to join at the same moment. Here Megatron says what a checkpoint holds, everything is copied to the host, and
torch's writer puts it down in the same format, in a thread whose ranks talk in a group of their own. Megatron's own
writing at once hides the system's error, and where the disk is full, what it leaves ends the process later.
"""

from __future__ import annotations

import os
from contextlib import AbstractContextManager
from datetime import timedelta
from pathlib import Path
from traceback import extract_tb
from typing import Any, Literal, cast

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.state_dict_saver import save as save_state_dict
from torch.distributed.checkpoint.storage import WriteResult

from ostinato.workers.core.checkpoint import WriteUnderWay, named_failure, not_in_force
from ostinato.workers.megatron.errors import CheckpointError
from ostinato.workers.megatron.parallel import import_megatron
from ostinato.workers.megatron.saved import EARLIER, METADATA

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
            path: a folder, made where it is absent. Its `metadata.json` is written last; an old one goes first.
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
        with failure_named(path, "written"):
            _make_folder(path)
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
        with failure_named(path, "written"):
            save_state_dict(state, storage_writer=_Files(path, config), planner=planner, process_group=group)


class _Files(FileSystemWriter):
    """Declares a checkpoint whole once every rank's files are there."""

    def __init__(self, path: Path, config: Any) -> None:
        super().__init__(path)
        self._config = config

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Called on rank 0 alone; what it raises is raised on all ranks."""
        super().finish(metadata, results)
        _mark(Path(self.path), self._config)


def failure_named(path: Path, what: Literal["read", "written"]) -> AbstractContextManager[None]:
    """Inside, what keeps a checkpoint from being read or written becomes a `CheckpointError`; see `named_failure`."""
    text = f"checkpoint {path} cannot be {what}"
    if what == "read":  # a pickle that is broken may raise anything
        return named_failure(text, CheckpointError, Exception, advice=EARLIER)
    own = import_megatron("dist_checkpointing.core").CheckpointingException
    return named_failure(text, CheckpointError, own, advice=not_in_force(METADATA))


def _make_folder(path: Path) -> None:
    """Make a checkpoint's folder, or take an old one out of force; collective.

    Raises:
        CheckpointException: Rank 0, which does it, could not; raised on all ranks.
    """
    failure: list[CheckpointException | None] = [None]
    if dist.get_rank() == 0:
        try:
            path.mkdir(parents=True, exist_ok=True)
            (path / METADATA).unlink(missing_ok=True)
        except OSError as error:
            failure = [CheckpointException("folder", {0: (error, extract_tb(error.__traceback__))})]
    dist.broadcast_object_list(failure, src=0)
    if failure[0] is not None:
        raise failure[0]


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
