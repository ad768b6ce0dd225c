"""Sharded checkpoints: written by every rank, at once or in the background, read at any world size."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.state_dict_loader import load as load_state_dict
from torch.distributed.checkpoint.state_dict_saver import save as save_state_dict
from torch.distributed.tensor import DTensor

from ostinato.workers.core.checkpoint import WriteUnderWay, named_failure, not_in_force
from ostinato.workers.fsdp.errors import CheckpointError
from ostinato.workers.fsdp.folder import folder_tensors
from ostinato.workers.fsdp.lora import folder_name, is_adapter
from ostinato.workers.fsdp.offload import HostCopies
from ostinato.workers.fsdp.quantized import fill, in_full, is_quantized, new_moment, scale_of

WRITE_TIMEOUT = timedelta(hours=3)
"""How long the fastest rank waits for the slowest one's disk."""

METADATA = ".metadata"
"""What a checkpoint's folder gets last."""

EARLIER = "Resume from an earlier one."
"""What to do about a checkpoint that cannot be read."""


def _model_state(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.detach() for name, tensor in folder_tensors(module).items()}


def _optimizer_state(module: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, dict[str, torch.Tensor]]:
    """State by parameter name, in full. It is read as it is: an optimizer that has not stepped has none."""
    return {
        name: {
            kind: in_full(value) if is_quantized(value) else value for kind, value in optimizer.state[parameter].items()
        }
        for name, parameter in module.named_parameters()
        if optimizer.state.get(parameter)
    }


def _quantized(module: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """What the optimizer keeps in 8 bits, by parameter and kind."""
    return {
        f"{name}.{kind}": value
        for name, parameter in module.named_parameters()
        for kind, value in optimizer.state.get(parameter, {}).items()
        if is_quantized(value)
    }


def _layout(module: nn.Module) -> str:
    """Names this rank and the layout in which its shards are what they are."""
    mesh = next(parameter.device_mesh for parameter in module.parameters() if isinstance(parameter, DTensor))
    return f"rank{dist.get_rank()}of{'x'.join(str(size) for size in mesh.shape)}"


def _random_state(device: torch.device) -> dict[str, torch.Tensor]:
    state = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def state_to_save(
    module: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    counters: dict[str, int],
    device: torch.device,
) -> dict[str, Any]:
    """Model, optimizer, counters and this rank's random state, nested by name; tensors are not copied.

    Args:
        module: The sharded model, resharded.
        optimizer: None for a frozen model.
        counters: Small whole numbers that all ranks agree on.
        device: Where the model trains.
    """
    state: dict[str, Any] = {
        "model": _model_state(module),
        "counters": {name: torch.tensor(value) for name, value in counters.items()},
        "random": {f"rank{dist.get_rank()}": _random_state(device)},
    }
    if optimizer is not None:
        state["optimizer"] = _optimizer_state(module, optimizer)
        scales = {name: scale_of(value) for name, value in _quantized(module, optimizer).items()}
        if scales:
            state["scales"] = {_layout(module): scales}
    return state


def save(path: Path, state: dict[str, Any], group: dist.ProcessGroup | None = None) -> None:
    """Write what `state_to_save` gave; collective.

    Args:
        path: A folder, made where it is absent. Its `.metadata` is written last, by rename; an old one goes first.
        state: Tensors by name, nested.
        group: The ranks; None: all of them.

    Raises:
        CheckpointError: It cannot be written, on whichever rank.
    """
    with named_failure(f"checkpoint {path} cannot be written", CheckpointError, advice=not_in_force(METADATA)):
        save_state_dict(state, storage_writer=_Writer(path), process_group=group)


class _Writer(FileSystemWriter):
    """Takes the mark of a whole checkpoint away before anything is written over it."""

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Called on one rank, before any of them writes; what it raises is raised on all."""
        (Path(self.path) / METADATA).unlink(missing_ok=True)
        return super().prepare_global_plan(plans)


class BackgroundWriter:
    """Writes checkpoints from host memory while training goes on, one at a time; made on every rank.

    Its ranks talk in a group of their own: their messages must not mix with those of the training.

    Args:
        device: Where the model trains.
    """

    def __init__(self, device: torch.device) -> None:
        self._group = dist.new_group(backend="gloo", timeout=WRITE_TIMEOUT)
        self._device = device
        self._on_gpu = device.type == "cuda"
        self._copies = HostCopies(pinned=self._on_gpu)
        self._last: WriteUnderWay | None = None

    def start(self, path: Path, state: dict[str, Any]) -> WriteUnderWay:
        """Copy the state to host memory and begin to write it; collective. Waits for an earlier write to end.

        Args:
            path: As for `save`.
            state: As for `save`; may change as soon as this returns.
        """
        if self._last is not None:
            self._last.end()
        copied = self._copied(state)
        if self._on_gpu:
            torch.cuda.current_stream().synchronize()
        self._last = WriteUnderWay(lambda: self._write(path, copied))
        return self._last

    def _write(self, path: Path, copied: dict[str, Any]) -> None:
        if self._on_gpu:
            # A new thread begins on the first device, where torch would start a context for its streams.
            torch.cuda.set_device(self._device)
        save(path, copied, cast(dist.ProcessGroup, self._group))

    def _copied(self, state: dict[str, Any], prefix: str = "") -> dict[str, Any]:
        return {
            name: self._copied(value, f"{prefix}{name}.")
            if isinstance(value, dict)
            else self._copies.take(f"{prefix}{name}", value)
            for name, value in state.items()
        }


def load(
    path: Path,
    module: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    counters: dict[str, int],
    device: torch.device,
) -> dict[str, int]:
    """Read what `save` wrote into a model and optimizer, at any world size; collective.

    A rank that did not exist when the checkpoint was written keeps its random state.

    Args:
        path: The folder.
        module: The sharded model, resharded.
        optimizer: Gets the saved state, or none where none was saved.
        counters: The names to read; one that was not saved keeps its value.
        device: Where the model trains.

    Returns:
        The counters.

    Raises:
        CheckpointError: The folder holds no whole checkpoint, or one of another model, or cannot be read.
    """
    metadata = read_metadata(path)
    saved = set(metadata.state_dict_metadata)
    check_model(path, module, metadata)
    state: dict[str, Any] = {
        "model": _model_state(module),
        # A run in another type than the checkpoint's has a loss scale and the checkpoint has none, or the other way.
        "counters": {name: torch.tensor(0) for name in counters if f"counters.{name}" in saved},
    }
    quantized: dict[str, torch.Tensor] = {}
    scales: dict[str, torch.Tensor] = {}
    mine = f"rank{dist.get_rank()}"
    state["random"] = {
        mine: {kind: value for kind, value in _random_state(device).items() if f"random.{mine}.{kind}" in saved}
    }
    if optimizer is not None:
        _match_optimizer(module, optimizer, saved, device)
        state["optimizer"] = _optimizer_state(module, optimizer)
        quantized = _quantized(module, optimizer)
        scales = _scales_to_read(metadata, quantized, _layout(module))
        state["scales"] = {_layout(module): scales}
    with named_failure(f"checkpoint {path} cannot be read", CheckpointError, advice=EARLIER):
        load_state_dict(state, storage_reader=FileSystemReader(path))
    for name, moment in quantized.items():
        parameter, _, kind = name.rpartition(".")
        fill(moment, state["optimizer"][parameter][kind], scales.get(name))
    for kind, value in state["random"][mine].items():
        torch.set_rng_state(value) if kind == "cpu" else torch.cuda.set_rng_state(value, device)
    return counters | {name: int(value) for name, value in state["counters"].items()}


def _scales_to_read(metadata: Metadata, quantized: Mapping[str, torch.Tensor], layout: str) -> dict[str, torch.Tensor]:
    """Room for the scales that this rank wrote in this very layout; nothing where another one wrote them."""
    found: dict[str, torch.Tensor] = {}
    for name, moment in quantized.items():
        entry = metadata.state_dict_metadata.get(f"scales.{layout}.{name}")
        scale = scale_of(moment)
        if isinstance(entry, TensorStorageMetadata) and tuple(entry.size) == tuple(scale.shape):
            found[name] = torch.empty_like(scale)
    return found


def read_metadata(path: Path) -> Metadata:
    """What a checkpoint holds.

    Raises:
        CheckpointError: The folder holds no whole checkpoint.
    """
    if not (path / METADATA).is_file():
        raise CheckpointError(
            f"checkpoint {path}: expected a folder with a `{METADATA}` file, which is written last; found none. The "
            f"checkpoint is missing or was cut off while it was written. {EARLIER}"
        )
    # A pickle that is broken may raise anything.
    with named_failure(f"checkpoint {path} cannot be read: {METADATA}", CheckpointError, Exception, advice=EARLIER):
        return FileSystemReader(path).read_metadata()


def check_model(path: Path, module: nn.Module, metadata: Metadata) -> None:
    """Refuse a checkpoint of a model with other weights.

    Raises:
        CheckpointError: A weight is missing, is not known, or has another shape.
    """
    saved = {
        name.removeprefix("model."): tuple(entry.size)
        for name, entry in metadata.state_dict_metadata.items()
        if name.startswith("model.") and isinstance(entry, TensorStorageMetadata)
    }
    mine = {name: tuple(tensor.shape) for name, tensor in folder_tensors(module).items()}
    if saved != mine:
        differences = sorted(name for name in saved.keys() | mine.keys() if saved.get(name) != mine.get(name))
        first = differences[0]
        if any(map(is_adapter, saved)) != any(map(is_adapter, mine)):
            raise CheckpointError(
                f"checkpoint {path}: {'it' if any(map(is_adapter, saved)) else 'the run'} trains an adapter and "
                f"{'the run' if any(map(is_adapter, saved)) else 'it'} does not; set model.lora_rank as it was."
            )
        why = "It belongs to another model."
        if _without_adapters(saved) == _without_adapters(mine):
            keys = "model.lora_rank, model.target_modules and model.exclude_modules"
            why = f"Only its adapters are other ones; set {keys} as they were."
        raise CheckpointError(
            f"checkpoint {path}: {len(differences)} weights differ from the model; the first is {first}: the model has "
            f"{mine.get(first, 'no such weight')}, the checkpoint {saved.get(first, 'no such weight')}. {why}"
        )


def _without_adapters(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """The folder's weights among a model's."""
    return {folder_name(name): shape for name, shape in shapes.items() if not is_adapter(name)}


def _match_optimizer(
    module: nn.Module, optimizer: torch.optim.Optimizer, saved: set[str], device: torch.device
) -> None:
    """Give each parameter the same kinds of optimizer state as the checkpoint holds, ready to be read into.

    A fused optimizer wants its step counter on the device, any other in host memory.
    """
    counter_device = device if optimizer.defaults.get("fused") else torch.device("cpu")
    for name, parameter in module.named_parameters():
        prefix = f"optimizer.{name}."
        kinds = {key.removeprefix(prefix) for key in saved if key.startswith(prefix)}
        if not kinds:
            optimizer.state.pop(parameter, None)
            continue
        optimizer.state[parameter] = {
            kind: torch.zeros((), dtype=torch.float32, device=counter_device)
            if kind == "step"
            else new_moment(optimizer, parameter.detach(), kind)
            for kind in sorted(kinds)
        }
