"""Where an engine's own loader puts each byte of a weight: watched once, repeated as plain copies afterwards.

A loader spends its time on names and shapes, which are the same at every load. What it does to memory is a list of
copies from a part of a sent tensor into a part of a live parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

if TYPE_CHECKING:
    from ostinato.rollout.base import Bucket


@dataclass(frozen=True)
class Copy:
    """One copy: a strided part of a sent tensor into live memory.

    Attributes:
        target: the live memory.
        shape: of the part.
        stride: of the part within the contiguous sent tensor, in elements.
        offset: of the part's first element, in elements.
    """

    target: torch.Tensor
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def part(self, tensor: torch.Tensor) -> torch.Tensor:
        """The part of a contiguous tensor that this copy concerns."""
        return tensor.as_strided(self.shape, self.stride, tensor.storage_offset() + self.offset)


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


class _Watch(TorchDispatchMode):
    """Notes every write into live memory."""

    def __init__(self, plan: CopyPlan, bucket: Bucket):
        super().__init__()
        self._plan = plan
        self._bucket = bucket

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func._schema.is_mutable:
            self._note(func, args)
        return result

    def _note(self, func: Any, args: tuple[Any, ...]) -> None:
        written = [
            value
            for argument, value in zip(func._schema.arguments, args, strict=False)
            if argument.alias_info is not None and argument.alias_info.is_write and isinstance(value, torch.Tensor)
        ]
        if not any(_address(tensor) in self._plan.live for tensor in written):
            return
        if func is torch.ops.aten.copy_.default and self._plan.add_copy(args[0], args[1], self._bucket):
            return
        if func in (torch.ops.aten.fill_.Scalar, torch.ops.aten.zero_.default):
            self._plan.add_fill(args[0], float(args[1]) if len(args) > 1 else 0.0)
            return
        self._plan.reason = f"{func} writes a value that is no part of a sent tensor"


class CopyPlan:
    """The copies of one model's loader.

    Args:
        model: the live module; its parameters and buffers must keep their memory addresses from here on.

    Attributes:
        live: addresses of the storages of all parameters and buffers.
        reason: why the loads cannot be repeated as copies; "" where nothing speaks against it.
    """

    def __init__(self, model: torch.nn.Module):
        self._model = model
        self.live = self._addresses()
        self.reason = ""
        self._copies: dict[str, list[Copy]] = {}
        self._fills: list[tuple[torch.Tensor, float]] = []

    def _addresses(self) -> set[int]:
        tensors = [*self._model.parameters(), *self._model.buffers()]
        return {_address(tensor) for tensor in tensors if tensor.numel()}

    def add_copy(self, target: torch.Tensor, sent: torch.Tensor, bucket: Bucket) -> bool:
        """Note a copy; False where its source is not a part of one tensor of the bucket."""
        start = sent.storage_offset() * sent.element_size()
        for name, tensor in bucket:
            first = tensor.storage_offset() * tensor.element_size()
            inside = first <= start < first + tensor.numel() * tensor.element_size()
            if inside and _address(tensor) == _address(sent) and tensor.dtype == sent.dtype:
                offset = int(sent.storage_offset() - tensor.storage_offset())
                part = Copy(target.detach(), tuple(sent.shape), tuple(sent.stride()), offset)
                if tuple(target.shape) != part.shape:
                    return False
                self._copies.setdefault(name, []).append(part)
                return True
        return False

    def add_fill(self, target: torch.Tensor, value: float) -> None:
        """Note that padding was filled."""
        self._fills.append((target.detach(), value))

    def record(self, bucket: Bucket, load: Callable[[Iterable[tuple[str, torch.Tensor]]], object]) -> None:
        """Load a bucket of contiguous tensors with the engine's own loader and watch what it does."""
        for name, _ in bucket:
            self._copies.pop(name, None)
        with _Watch(self, bucket):
            load(iter(bucket))

    def complete(self, names: Iterable[str]) -> bool:
        """Whether the loads of all these names can be repeated; called after the first whole load."""
        lost = [name for name in names if name not in self._copies]
        if not self.reason and self._addresses() != self.live:
            self.reason = "the loader replaced a parameter's memory"
        if not self.reason and lost:
            self.reason = f"{len(lost)} weights left no copy, such as {lost[0]}"
        return not self.reason

    def begin(self) -> None:
        """Fill the padding again, whose memory may have been given back in between."""
        for target, value in self._fills:
            target.fill_(value)

    def repeat(self, bucket: Bucket) -> None:
        """Load a bucket whose names were all recorded."""
        targets: list[torch.Tensor] = []
        parts: list[torch.Tensor] = []
        for name, tensor in bucket:
            for copy in self._copies[name]:
                targets.append(copy.target)
                parts.append(copy.part(tensor))
        if targets:
            torch._foreach_copy_(targets, parts)  # pyright: ignore[reportPrivateImportUsage]

    def gathered(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """One weight read back from live memory.

        Returns:
            The full tensor, 0 where this process holds no part of it; and which elements it holds, as bool.
        """
        copies = self._copies[name]
        full = torch.zeros(tuple(shape), dtype=dtype, device=copies[0].target.device)
        held = torch.zeros(tuple(shape), dtype=torch.bool, device=full.device)
        for copy in copies:
            copy.part(full).copy_(copy.target)
            copy.part(held).fill_(True)
        return full, held


def merged(full: torch.Tensor, held: torch.Tensor, group: torch.distributed.ProcessGroup) -> torch.Tensor:
    """A weight that several processes hold in parts; collective, and exact to the bit.

    Args:
        full: what `CopyPlan.gathered` gave, of 2 or 4 bytes an element.
        held: which elements this process holds.
        group: the processes.
    """
    kind = {2: torch.int16, 4: torch.int32}[full.element_size()]
    bits = torch.where(held, full.view(kind).to(torch.int64), torch.iinfo(torch.int64).min)
    torch.distributed.all_reduce(bits, op=torch.distributed.ReduceOp.MAX, group=group)
    return bits.to(kind).view(full.dtype)
