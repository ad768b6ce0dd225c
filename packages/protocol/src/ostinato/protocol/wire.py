"""A batch on its way: pickling that moves no bytes twice, and a versioned format without pickle.

**Pickle.** With protocol 5 every tensor and numeric array travels as one out-of-band buffer of its own rows (a view
does not drag its storage along); object cells and meta are pickled as ever. A batch arrives in host memory, without
gradients.

Buffers that arrive may be memory that others read too: an object store maps one copy into every process, and torch
would write into it although it is read-only. So arriving columns are private copies. Code that promises not to write
asks for views: `with shared_views(): ...` around the unpickling, or `shared_views(["input_ids"])` for some columns.
Such tensors must not be written to (torch cannot forbid it); such arrays are read-only.

**Bytes.** `encode` and `decode` write and read the format that `format.py` documents.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import numpy as np
import torch

from ostinato.protocol import jagged
from ostinato.protocol.cells import as_bytes
from ostinato.protocol.format import decode, encode, read_file, write_file

__all__ = ["decode", "encode", "pack", "read_file", "reduce", "shared_views", "unpack", "write_file"]

Buffer = Any
_SHARED: ContextVar[Collection[str] | bool] = ContextVar("ostinato_shared_views", default=False)


@contextmanager
def shared_views(columns: Collection[str] | bool = True) -> Iterator[None]:
    """Let columns that are unpickled inside be views of the buffers that they came in.

    Args:
        columns: names, or True for all; False is the default, private copies.

    Yields:
        Nothing. Holds for this thread or task, until the end of the block.
    """
    token = _SHARED.set([columns] if isinstance(columns, str) else columns)
    try:
        yield
    finally:
        _SHARED.reset(token)


def reduce(
    cls: type,
    tensors: Mapping[str, torch.Tensor],
    arrays: Mapping[str, np.ndarray],
    meta: Mapping[str, Any],
    num_rows: int,
    protocol: int,
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """What `DataProto.__reduce_ex__` returns.

    Args:
        cls: the class to make again; its `_of` takes tensors, arrays, meta and the row count.
        tensors: tensor columns.
        arrays: numpy columns.
        meta: meta entries.
        num_rows: rows of the batch.
        protocol: of the pickler; below 5 buffers are bytes in the stream.

    Returns:
        The function that builds the batch, and its arguments.
    """
    packed, ends, cells = pack(tensors, arrays, protocol)
    return _rebuild, (cls, packed, ends, cells, _guard(dict(meta)), num_rows)


def pack(
    tensors: Mapping[str, torch.Tensor], arrays: Mapping[str, np.ndarray], protocol: int
) -> tuple[list[Any], list[Any], list[Any]]:
    """Take columns apart into what pickles with a buffer each; the inverse of `unpack`.

    Args:
        tensors: tensor columns; they come to host memory.
        arrays: numpy columns.
        protocol: of the pickler; below 5 buffers are bytes in the stream.

    Returns:
        Tensors, the offsets that jagged ones among them share, numpy columns.
    """
    offsets: list[torch.Tensor] = []
    packed = []
    for name, column in tensors.items():
        if not jagged.is_jagged(column):
            packed.append((name, _pack_tensor(column, protocol), None, 0))
            continue
        values, ends, dim = jagged.unpacked(column)
        place = next((i for i, other in enumerate(offsets) if other is ends), len(offsets))
        if place == len(offsets):
            offsets.append(ends)
        packed.append((name, _pack_tensor(values, protocol), place, dim))
    return (
        packed,
        [_pack_tensor(tensor, protocol) for tensor in offsets],
        [(name, _pack_array(array, protocol)) for name, array in arrays.items()],
    )


def unpack(
    packed: list[Any], ends: list[Any], cells: list[Any], shared: Collection[str] | bool
) -> tuple[dict[str, torch.Tensor], dict[str, np.ndarray]]:
    """Put columns together again.

    Args:
        packed: tensors, of `pack`; some may be left out.
        ends: all of the offsets.
        cells: numpy columns; some may be left out.
        shared: columns that may be views of their buffers.

    Returns:
        Tensor columns and numpy columns.
    """
    wanted = {entry[2] for entry in packed}
    offsets = {place: _unpack_tensor(*end, shared=False) for place, end in enumerate(ends) if place in wanted}
    tensors = {}
    for name, content, place, dim in packed:
        values = _unpack_tensor(*content, shared=_is_shared(name, shared))
        tensors[name] = values if place is None else jagged.build(values, offsets[place], dim)
    return tensors, {name: _unpack_array(*content, shared=_is_shared(name, shared)) for name, content in cells}


def _rebuild(
    cls: Any, packed: list[Any], ends: list[Any], cells: list[Any], meta: dict[str, Any], num_rows: int
) -> Any:
    return cls._of(*unpack(packed, ends, cells, _SHARED.get()), meta, num_rows)


def _is_shared(name: str, shared: Collection[str] | bool) -> bool:
    return shared if isinstance(shared, bool) else name in shared


def _pack_tensor(tensor: torch.Tensor, protocol: int) -> tuple[Buffer, torch.dtype, tuple[int, ...]]:
    return _buffer(as_bytes(tensor.cpu()).numpy(), protocol), tensor.dtype, tuple(tensor.shape)


def _pack_array(array: np.ndarray, protocol: int) -> tuple[Buffer, str | None, tuple[int, ...]]:
    if array.dtype.kind == "O":
        return [_guard(cell) for cell in array], None, array.shape
    return _buffer(np.ascontiguousarray(array).reshape(-1).view(np.uint8), protocol), array.dtype.str, array.shape


def _buffer(octets: np.ndarray, protocol: int) -> Buffer:
    return pickle.PickleBuffer(octets) if protocol >= 5 else octets.tobytes()


def _octets(buffer: Buffer, shared: bool) -> np.ndarray:
    """An arrived buffer as (nbytes,) uint8, private and writable unless shared."""
    octets = np.frombuffer(buffer, dtype=np.uint8)
    return octets if shared else octets.copy()


class _Memory:
    """Memory at an address, said to be writable: torch warns of every read-only array, and cannot respect it anyhow."""

    def __init__(self, octets: np.ndarray):
        self._owner = octets
        self.__array_interface__ = {**octets.__array_interface__, "data": (octets.ctypes.data, False)}


def _unpack_tensor(buffer: Buffer, dtype: torch.dtype, shape: tuple[int, ...], *, shared: bool) -> torch.Tensor:
    octets = _octets(buffer, shared)
    if not octets.size:
        return torch.empty(shape, dtype=dtype)
    if octets.ctypes.data % dtype.itemsize:
        octets = octets.copy()
    if not octets.flags.writeable:
        octets = np.asarray(_Memory(octets))
    return torch.from_numpy(octets).view(dtype).reshape(shape)


def _unpack_array(buffer: Buffer, dtype: str | None, shape: tuple[int, ...], *, shared: bool) -> np.ndarray:
    if dtype is None:
        return np.fromiter(buffer, dtype=object, count=shape[0])
    array = _octets(buffer, shared).view(dtype).reshape(shape)
    if shared:
        array.flags.writeable = False
    return array


class _Cell:
    """Stands for a tensor in a cell while it is pickled, so that it too travels as its own rows and arrives private."""

    def __init__(self, tensor: torch.Tensor):
        self.tensor = tensor

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return _unpack_cell, _pack_tensor(self.tensor, protocol)


def _unpack_cell(buffer: Buffer, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    return _unpack_tensor(buffer, dtype, shape, shared=False)


def _guard(cell: Any) -> Any:
    """The cell itself, or, where plain containers in it hold strided tensors, a copy of these that holds stand-ins."""
    if isinstance(cell, torch.Tensor):
        plain = type(cell) is torch.Tensor and cell.layout == torch.strided and not cell.is_quantized
        return _Cell(cell) if plain else cell
    if type(cell) is dict:
        items = {key: _guard(value) for key, value in cell.items()}
        return items if any(items[key] is not value for key, value in cell.items()) else cell
    if type(cell) in (list, tuple):
        parts = [_guard(value) for value in cell]
        changed = any(part is not value for part, value in zip(parts, cell, strict=True))
        return type(cell)(parts) if changed else cell
    return cell
