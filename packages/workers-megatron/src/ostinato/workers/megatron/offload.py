"""Parameters, optimizer state and gradient buffers between the device and host memory.

Megatron's parameters, its optimizer's own copies and its gradient buffers are views of one another, so no tensor is
replaced: a storage is copied to the host and shrunk to nothing, and grows again when it comes back. Every view of it,
wherever Megatron keeps one, is then valid again.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

from ostinato.workers.megatron.optim import inner, parts


def _key(storage: torch.UntypedStorage) -> int:
    return storage._cdata


def _bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)  # pyright: ignore[reportArgumentType]


class HostCopies:
    """Storages that lie in host memory for now."""

    def __init__(self) -> None:
        self._away: dict[int, tuple[torch.UntypedStorage, torch.Tensor]] = {}

    def __bool__(self) -> bool:
        """Whether anything is away."""
        return bool(self._away)

    def take(self, tensors: Iterable[torch.Tensor]) -> None:
        """Copy the storages of some tensors to the host and free the device's."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if _key(storage) in self._away or storage.nbytes() == 0:
                continue
            source = _bytes(storage)
            host = torch.empty(source.shape, dtype=torch.uint8, pin_memory=source.is_cuda)
            host.copy_(source)
            self._away[_key(storage)] = (storage, host)
            storage.resize_(0)

    def bring_back(self) -> None:
        """Fill all storages again."""
        for storage, host in self._away.values():
            storage.resize_(host.numel())
            _bytes(storage).copy_(host)
        self._away.clear()

    def read(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor, or a view of its copy in host memory."""
        entry = self._away.get(_key(tensor.untyped_storage()))
        if entry is None:
            return tensor
        host = torch.empty(0, dtype=tensor.dtype)
        return host.set_(entry[1].untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())


def parameter_tensors(chunks: Sequence[nn.Module]) -> list[torch.Tensor]:
    """All parameters of this rank; a buffer that holds several comes with each of them."""
    return [parameter.detach() for chunk in chunks for parameter in chunk.parameters()]


def optimizer_tensors(optimizer: Any, chunks: Sequence[nn.Module]) -> list[torch.Tensor]:
    """Moments, and the optimizer's own copies of the parameters; what it shares with the model is left out."""
    model = {_key(tensor.untyped_storage()) for tensor in parameter_tensors(chunks)}
    found: list[torch.Tensor] = []
    for part in parts(optimizer):
        adam = inner(part)
        if adam is None:
            continue
        found += [parameter.detach() for group in adam.param_groups for parameter in group["params"]]
        found += [
            value for state in adam.state.values() for value in state.values() if torch.is_tensor(value) and value.dim()
        ]
    return [tensor for tensor in found if _key(tensor.untyped_storage()) not in model]


class GradientBuffers:
    """Megatron's gradient buffers, which hold nothing between a step and the next backward pass.

    Args:
        chunks: the model's pieces, wrapped by Megatron's DistributedDataParallel.
    """

    def __init__(self, chunks: Sequence[Any]) -> None:
        self._buffers = [
            buffer.grad_data for chunk in chunks for buffer in [*chunk.buffers, *chunk.expert_parallel_buffers]
        ]
        self._sizes: list[int] | None = None

    def free(self) -> None:
        """Give their memory back; what they hold is lost."""
        if self._sizes is None:
            self._sizes = [buffer.untyped_storage().nbytes() for buffer in self._buffers]
            for buffer in self._buffers:
                buffer.untyped_storage().resize_(0)

    def ensure(self) -> None:
        """Take the memory again, filled with 0, where it was given back."""
        if self._sizes is None:
            return
        for buffer, size in zip(self._buffers, self._sizes, strict=True):
            buffer.untyped_storage().resize_(size)
            buffer.zero_()
        self._sizes = None
