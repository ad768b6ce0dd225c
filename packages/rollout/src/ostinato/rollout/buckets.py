"""A stream of named tensors as flat buckets of bounded size, and exact checksums of tensors."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import torch

_ALIGNMENT = 256  # bytes; what device copies and kernels like best
_CHECKSUM_BLOCK = 1 << 22  # elements widened to int64 at a time
_INT_VIEWS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_MIX = -7046029254386353131  # 2**64 / golden ratio, as a signed number


def aligned_bytes(num_bytes: int) -> int:
    """What a tensor of `num_bytes` takes up in a bucket."""
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


class _Flat:
    """One reusable flat buffer and the views handed out of it."""

    def __init__(self, capacity: int):
        self.capacity = capacity
        self.buffer: torch.Tensor | None = None
        self.used = 0
        self.entries: list[tuple[str, torch.Tensor]] = []

    def add(self, name: str, tensor: torch.Tensor, dtype: torch.dtype) -> None:
        if self.buffer is None:
            self.buffer = torch.empty(self.capacity, dtype=torch.uint8, device=tensor.device)
        num_bytes = tensor.numel() * dtype.itemsize
        view = self.buffer[self.used : self.used + num_bytes].view(dtype).view(tensor.shape)
        view.copy_(tensor)
        self.entries.append((name, view))
        self.used += aligned_bytes(num_bytes)

    def fits(self, num_bytes: int, device: torch.device) -> bool:
        same_device = self.buffer is None or self.buffer.device == device
        return same_device and self.used + num_bytes <= self.capacity

    def take(self) -> list[tuple[str, torch.Tensor]]:
        entries, self.entries, self.used = self.entries, [], 0
        return entries


def buckets(
    stream: Iterable[tuple[str, torch.Tensor]],
    megabytes: int,
    dtypes: Mapping[str, torch.dtype] | None = None,
    *,
    total_bytes: int | None = None,
) -> Iterator[list[tuple[str, torch.Tensor]]]:
    """Group a stream of tensors into flat buckets, two of which exist at a time.

    Each tensor is cast and copied into the current bucket, because its own memory may be reused once the next one is
    asked for. One bucket can be read while the next fills: its tensors stay intact until the second next bucket is
    asked for. A tensor that is larger than a bucket travels alone in memory of its own.

    Args:
        stream: names and full tensors of any dtype and device.
        megabytes: what a bucket may take, in units of 2**20. An eighth of it is left free for the tensor that the
            stream is making, so that all takes two buckets and no more, unless a tensor is larger than that.
        dtypes: dtype to cast to, by name; a name that is absent keeps its dtype.
        total_bytes: what `aligned_bytes` gives for all tensors together, where known: no buffer is made larger.

    Yields:
        Non-empty lists of (name, tensor), in the order of the stream.
    """
    capacity = (megabytes << 20) * 7 // 8
    if total_bytes is not None:
        capacity = min(capacity, total_bytes)
    flats = [_Flat(capacity), _Flat(capacity)]
    current = 0
    for name, tensor in stream:
        dtype = (dtypes or {}).get(name, tensor.dtype)
        num_bytes = tensor.numel() * dtype.itemsize
        if num_bytes > capacity or not flats[current].fits(num_bytes, tensor.device):
            if flats[current].entries:
                yield flats[current].take()
                current = 1 - current
            if not flats[current].fits(0, tensor.device):
                flats[current] = _Flat(capacity)
        if num_bytes > capacity:
            yield [(name, tensor.detach().to(dtype, copy=True))]
        else:
            flats[current].add(name, tensor.detach(), dtype)
        del tensor  # or it would live until the next one is there
    if flats[current].entries:
        yield flats[current].take()


def checksum(tensor: torch.Tensor) -> int:
    """A 64-bit number that depends on every bit of a tensor and on its place; equal tensors give equal numbers.

    The sign of a zero does not count: a weight that an engine tells by a product with it has none.

    sum_i (bits_i + 1) * (i * g + 1) modulo 2**64, with an odd constant g. Exact on every device, unlike a float sum.

    Args:
        tensor: any shape and dtype of at most 8 bytes an element; two tensors compare only in one dtype.
    """
    flat = tensor.detach().contiguous().view(-1)
    bits = flat.view(torch.uint8 if flat.dtype is torch.bool else _INT_VIEWS[flat.element_size()])
    negative_zero = torch.full((), -0.0, dtype=flat.dtype).view(bits.dtype).item() if flat.is_floating_point() else None
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    for start in range(0, bits.numel(), _CHECKSUM_BLOCK):
        block = bits[start : start + _CHECKSUM_BLOCK].to(torch.int64)
        if negative_zero is not None:
            block = block.masked_fill(block == negative_zero, 0)
        places = torch.arange(start, start + block.numel(), dtype=torch.int64, device=bits.device)
        total += ((block + 1) * (places * _MIX + 1)).sum()
    return int(total)
