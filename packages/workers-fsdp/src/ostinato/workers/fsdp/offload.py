"""Parameters and optimizer state between the device and host memory.

Host memory is allocated once for each tensor and used again. On a GPU it is page-locked, and copies run on a stream of
their own: state comes back while the device works, and only what reads it waits.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TypeVar

import torch
from torch import nn
from torch.distributed.tensor import DTensor

K = TypeVar("K", bound=Hashable)

HOST = torch.device("cpu")


class HostCopies:
    """Host tensors by key, allocated when a key first comes and filled again afterwards.

    PyTorch rounds a page-locked block up to a power of two.

    Args:
        pinned: page-locked memory, from which and to which a GPU copies without waiting.
    """

    def __init__(self, *, pinned: bool) -> None:
        self._pinned = pinned
        self._buffers: dict[Hashable, torch.Tensor] = {}

    def take(self, key: Hashable, tensor: torch.Tensor) -> torch.Tensor:
        """Copy a tensor into its host buffer, on the current stream and without waiting for it.

        Args:
            key: names the buffer; another shape or type than before gets a new one.
            tensor: on any device; a DTensor gives a DTensor. What lies in a quantised form is copied anew.

        Returns:
            The buffer. On a GPU it is filled once the current stream has got there.
        """
        buffer = self._buffers.get(key)
        if not _plain(tensor):
            return tensor.detach().to(HOST, copy=True)
        if buffer is None or (buffer.shape, buffer.dtype) != (tensor.shape, tensor.dtype):
            buffer = _room_for(tensor, HOST, pinned=self._pinned)
            self._buffers[key] = buffer
        _copy(buffer, tensor)
        return buffer


class Mover:
    """Moves one engine's parameters and optimizer state.

    Args:
        device: where the model trains.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        on_gpu = device.type == "cuda"
        self._copies = HostCopies(pinned=on_gpu)
        self._stream = torch.cuda.Stream(device) if on_gpu else None
        self._arriving: list[torch.Event] = []

    def parameters_to_host(self, module: nn.Module) -> None:
        """Move parameters, gradients and buffers; FSDP keeps the parameter objects, so an optimizer still owns them."""
        _place(module, self._leave(dict(module.named_parameters())), HOST)

    def parameters_to_device(self, module: nn.Module) -> None:
        """Bring parameters, gradients and buffers back."""
        arriving = self._come(dict(module.named_parameters()))
        self.wait()
        _place(module, arriving, self._device)

    def optimizer_to_host(self, optimizer: torch.optim.Optimizer) -> None:
        """Move the optimizer's state; one that has not stepped has none, and keeps none."""
        _store(optimizer, self._leave(_moments(optimizer)))

    def optimizer_to_device(self, optimizer: torch.optim.Optimizer) -> None:
        """Bring the optimizer's state back while the device works; `wait` before it is read."""
        _store(optimizer, self._come(_moments(optimizer)))

    def wait(self) -> None:
        """Let the device's further work wait for what is on its way to it."""
        for event in self._arriving:
            event.wait()
        self._arriving.clear()

    def _leave(self, tensors: Mapping[K, torch.Tensor]) -> dict[K, torch.Tensor]:
        """Copy to the host, after the device's work so far; complete on return."""
        self.wait()
        with self._aside():
            copies = {key: self._copies.take(key, tensor) for key, tensor in tensors.items()}
        if self._stream is not None:
            self._stream.synchronize()
        return copies

    def _come(self, tensors: Mapping[K, torch.Tensor]) -> dict[K, torch.Tensor]:
        """Copy to the device, after the device's work so far; `wait` before they are read."""
        # Allocated on the stream that will use them, filled on the other one.
        arriving = {key: _room_for(tensor, self._device) for key, tensor in tensors.items()}
        with self._aside():
            for key, tensor in tensors.items():
                _copy(arriving[key], tensor)
        if self._stream is not None:
            self._arriving.append(self._stream.record_event())
        return arriving

    def _aside(self) -> AbstractContextManager[object]:
        if self._stream is None:
            return nullcontext()
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        return torch.cuda.stream(self._stream)


def _place(module: nn.Module, tensors: Mapping[str, torch.Tensor], device: torch.device) -> None:
    """Give a module's parameters new storage; what is not among `tensors` is moved the plain way."""
    places = {id(parameter): tensors[name] for name, parameter in module.named_parameters()}
    # A tied parameter comes here twice, the second time in its new place.
    module._apply(lambda tensor: places.pop(id(tensor)) if id(tensor) in places else tensor.to(device))


def _shard(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local().detach() if isinstance(tensor, DTensor) else tensor.detach()


def _plain(tensor: torch.Tensor) -> bool:
    """Whether it is an ordinary tensor, or shards of one; a parameter counts as one, what is quantised does not."""
    return type(_shard(tensor)) in (torch.Tensor, nn.Parameter)


def _room_for(tensor: torch.Tensor, device: torch.device, *, pinned: bool = False) -> torch.Tensor:
    """An uninitialised tensor of the same form elsewhere; what lies in a quantised form is copied at once."""
    if not _plain(tensor):
        return tensor.detach().to(device, copy=True)
    shard = _shard(tensor)
    room = torch.empty(shard.shape, dtype=shard.dtype, device=device, pin_memory=pinned)
    # Not by `from_local`, which moves shards to the mesh's device.
    return DTensor(room, tensor._spec, requires_grad=False) if isinstance(tensor, DTensor) else room  # pyright: ignore


def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
    if _plain(source):
        _shard(target).copy_(_shard(source), non_blocking=True)


def _moments(optimizer: torch.optim.Optimizer) -> dict[tuple[int, str], torch.Tensor]:
    """The tensors to move, by the parameter's number and the state's name.

    The step counter stays where the optimizer made it: the plain implementation wants it in host memory.
    """
    return {
        (number, kind): value
        for number, parameter in enumerate(_parameters(optimizer))
        for kind, value in optimizer.state.get(parameter, {}).items()
        if kind != "step" and isinstance(value, torch.Tensor)
    }


def _store(optimizer: torch.optim.Optimizer, moments: Mapping[tuple[int, str], torch.Tensor]) -> None:
    parameters = _parameters(optimizer)
    for (number, kind), value in moments.items():
        optimizer.state[parameters[number]][kind] = value


def _parameters(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def free_device_cache(device: torch.device) -> None:
    """Give freed device memory back, so that a rollout engine in the same process can have it."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
