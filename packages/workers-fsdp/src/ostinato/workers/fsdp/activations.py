"""Activations in host memory between the forward and the backward pass.

What autograd keeps for the backward pass is copied out on a stream of its own while the forward pass goes on, and comes
back while the backward pass works: each tensor that is asked for lets the ones before it start.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

MIN_BYTES = 1 << 20
"""Smaller tensors are not worth a transfer."""

AHEAD = 4
"""Tensors that are on their way back at once."""


class _Parked:
    """One tensor in host memory.

    Attributes:
        host: its copy.
        device: where it came from.
        number: its place among the tensors of its pass.
        back: the copy on the device, while one is there or on its way.
    """

    def __init__(self, tensor: torch.Tensor, number: int, stream: torch.cuda.Stream | None) -> None:
        self.device, self.number, self._stream = tensor.device, number, stream
        self.back: torch.Tensor | None = None
        self._arrived: Any = None
        self.host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=stream is not None)
        if stream is None:
            self.host.copy_(tensor)
            return
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            self.host.copy_(tensor, non_blocking=True)
        # The device's memory is free for others once the copy is done, and not before.
        tensor.record_stream(stream)

    def fetch(self) -> None:
        """Start the way back, unless it has been started."""
        if self.back is not None:
            return
        if self._stream is None:
            self.back = self.host.clone()
            return
        self.back = torch.empty(self.host.shape, dtype=self.host.dtype, device=self.device)
        # The memory may have been in use by work that the current stream has still to do.
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._stream):
            self.back.copy_(self.host, non_blocking=True)
            self._arrived = self._stream.record_event()
        self.back.record_stream(self._stream)

    def take(self) -> torch.Tensor:
        """The tensor on the device; what follows on the current stream waits for it."""
        self.fetch()
        assert self.back is not None, "fetched just now"
        if self._arrived is not None:
            self._arrived.wait(torch.cuda.current_stream(self.device))
        return self.back


class ActivationOffload:
    """Parks what forward passes save for backward; parameters, small and integer tensors stay.

    Args:
        device: where the model trains.
        min_bytes: smallest tensor that is parked.

    Attributes:
        num_parked: tensors of the last pass that were parked.
    """

    def __init__(self, device: torch.device, min_bytes: int = MIN_BYTES) -> None:
        self._device = device
        self._min_bytes = min_bytes
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.num_parked = 0

    @contextmanager
    def parking(self) -> Iterator[None]:
        """Around one forward pass. Its backward pass may run when the context has ended."""
        order: list[weakref.ref[_Parked]] = []
        seen: dict[Any, tuple[weakref.ref[torch.Tensor], weakref.ref[_Parked]]] = {}

        def pack(tensor: torch.Tensor) -> torch.Tensor | _Parked:
            owner = tensor if tensor._base is None else tensor._base
            if not self._worthwhile(tensor, owner):
                return tensor
            # Several layers keep the same tensor (query, key and value their input): one copy serves them.
            key = (id(owner), tensor.data_ptr(), tensor.shape, tensor.stride(), owner._version)
            known = seen.get(key)
            parked = known[1]() if known is not None and known[0]() is owner else None
            if parked is None:
                parked = _Parked(tensor, len(order), self._stream)
                order.append(weakref.ref(parked))
                seen[key] = (weakref.ref(owner), order[-1])
            return parked

        def unpack(kept: torch.Tensor | _Parked) -> torch.Tensor:
            if isinstance(kept, torch.Tensor):
                return kept
            tensor = kept.take()
            for reference in reversed(order[max(kept.number - AHEAD, 0) : kept.number]):
                earlier = reference()
                if earlier is not None:
                    earlier.fetch()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            yield
        self.num_parked = len(order)

    def _worthwhile(self, tensor: torch.Tensor, owner: torch.Tensor) -> bool:
        """Activations have come out of an operation. A leaf is a parameter, or depends on none."""
        return (
            tensor.device == self._device
            and tensor.is_floating_point()
            and tensor.nbytes >= self._min_bytes
            and not owner.is_leaf
            and tensor.layout == torch.strided
        )
