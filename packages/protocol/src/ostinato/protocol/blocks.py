"""Columns as they lie in a store: each can be taken out alone, as a view or as a copy.

A store holds blocks. `HeldBlock` is one in this process: the columns themselves. `PackedBlock` is one that travels: it
pickles with one out-of-band buffer a column, so that a store that keeps such buffers in shared memory hands them out
without a copy, and nothing of a column that nobody asks for is read. Cells of object columns are pickled in the stream;
`packed_blocks` keeps them apart from the buffers for that reason.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from ostinato.protocol import jagged, payload, wire
from ostinato.protocol.payload import Arrays, Tensors


class Block(Protocol):
    """Columns of equally many rows in a store."""

    @property
    def shared(self) -> bool:
        """Whether the memory belongs to others too, so that what leaves the library must be a copy."""
        ...

    def take(self, names: Collection[str]) -> tuple[Tensors, Arrays]:
        """The columns of these names; views that must not be written to."""
        ...


class HeldBlock:
    """Columns in this process; what they are is what was put in."""

    shared = False

    def __init__(self, tensors: Mapping[str, torch.Tensor], arrays: Mapping[str, np.ndarray]) -> None:
        self._tensors, self._arrays = dict(tensors), dict(arrays)

    def take(self, names: Collection[str]) -> tuple[Tensors, Arrays]:
        """The columns of these names."""
        return {n: self._tensors[n] for n in names if n in self._tensors}, {
            n: self._arrays[n] for n in names if n in self._arrays
        }


class PackedBlock:
    """Columns on their way; unpickled, they are views of the buffers that they came in."""

    shared = True

    def __init__(self, packed: list[Any], ends: list[Any], cells: list[Any]) -> None:
        self._packed, self._ends, self._cells = packed, ends, cells

    @classmethod
    def of(cls, tensors: Mapping[str, torch.Tensor], arrays: Mapping[str, np.ndarray]) -> PackedBlock:
        """Pack columns; tensors on a device come to host memory."""
        return cls(*wire.pack(tensors, arrays, 5))

    def take(self, names: Collection[str]) -> tuple[Tensors, Arrays]:
        """The columns of these names."""
        packed = [entry for entry in self._packed if entry[0] in names]
        cells = [entry for entry in self._cells if entry[0] in names]
        return wire.unpack(packed, self._ends, cells, True)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return PackedBlock, (self._packed, self._ends, self._cells)


def packed_blocks(
    tensors: Mapping[str, torch.Tensor], arrays: Mapping[str, np.ndarray]
) -> list[tuple[list[str], PackedBlock]]:
    """Pack columns into as few blocks as can be fetched sensibly: buffers in one, cells in another.

    Returns:
        Names and block, for each block that has a column.
    """
    cells = {name: column for name, column in arrays.items() if column.dtype == object}
    numbers = {name: column for name, column in arrays.items() if name not in cells}
    blocks = []
    if tensors or numbers:
        blocks.append(([*tensors, *numbers], PackedBlock.of(tensors, numbers)))
    if cells:
        blocks.append((list(cells), PackedBlock.of({}, cells)))
    return blocks


def kind_of(column: payload.Column) -> str:
    """What two columns must agree in to be joined, as text: dtype, trailing shape, layout; not the device."""
    return payload.describe(column[:0] if isinstance(column, np.ndarray) else _no_rows(column))


def _no_rows(column: torch.Tensor) -> torch.Tensor:
    if not jagged.is_jagged(column):
        return column[:0].cpu()
    ((tensors, _),) = payload.cut({"": column}, {}, [(0, 0)])
    return payload.move(tensors, torch.device("cpu"))[""]


class Compact:
    """A dataclass that pickles as its values in order: descriptions go with every call, names of fields need not."""

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), tuple(vars(self).values())


@dataclass(frozen=True)
class Run(Compact):
    """Rows of a column's source that lie in one block.

    Attributes:
        offset: number of its first row in the source.
        first: the block's row that this is.
        count: rows.
    """

    offset: int
    first: int
    count: int


@dataclass(frozen=True)
class Group(Compact):
    """Columns whose rows lie alike.

    Attributes:
        columns: name, and for each run the position of its block and its name there.
        runs: where the source's rows lie, in order of `offset`; rows that nobody wants may be missing.
        start: first row wanted, of the order where there is one, else of the source.
        stop: behind the last one.
        order: position of the array that says which rows of the source they are; None for the source's own order.
    """

    columns: tuple[tuple[str, tuple[tuple[int, str], ...]], ...]
    runs: tuple[Run, ...]
    start: int
    stop: int
    order: int | None = None


def assemble(
    groups: Sequence[Group], objects: Sequence[Any], private: Collection[str] | bool
) -> tuple[Tensors, Arrays]:
    """Bring columns together.

    Args:
        groups: what is wanted.
        objects: blocks and orders, by the positions that the groups name.
        private: columns (or all, or none) that must be copies; the others may share the blocks' memory.

    Returns:
        The columns, in the groups' order.
    """
    tensors: Tensors = {}
    arrays: Arrays = {}
    for group in groups:
        parts, fresh = _rows(group, objects)
        joined = payload.join(parts)
        fresh = fresh or len(parts) > 1
        wanted = _as_wanted(group, objects)
        if wanted is not None:
            joined, fresh = payload.take(*joined, wanted), True
        if not fresh:
            joined = _copied(*joined, private)
        tensors |= joined[0]
        arrays |= joined[1]
    return jagged.share_offsets(tensors), arrays


def _index(group: Group, objects: Sequence[Any]) -> np.ndarray:
    assert group.order is not None
    return np.asarray(objects[group.order][group.start : group.stop], dtype=np.int64)


def _rows(group: Group, objects: Sequence[Any]) -> tuple[list[tuple[Tensors, Arrays]], bool]:
    """The wanted rows of each run, in the source's order, or for an order in the order within the run."""
    parts, fresh = [], False
    index = None if group.order is None else _index(group, objects)
    for place, run in enumerate(group.runs):
        columns = _taken(group, objects, place)
        if index is None:
            low = min(max(group.start, run.offset) - run.offset, run.count)
            high = min(group.stop, run.offset + run.count) - run.offset
            parts += payload.cut(*columns, [(run.first + low, run.first + max(low, high))])
            continue
        here = index[(index >= run.offset) & (index < run.offset + run.count)]
        parts.append(payload.take(*columns, here - run.offset + run.first))
        fresh = True
    return parts, fresh


def _taken(group: Group, objects: Sequence[Any], place: int) -> tuple[Tensors, Arrays]:
    """A run's columns under their own names; columns of one block are taken together, since they may share offsets."""
    blocks: dict[int, dict[str, str]] = {}
    for name, where in group.columns:
        position, key = where[place]
        blocks.setdefault(position, {})[name] = key
    tensors: Tensors = {}
    arrays: Arrays = {}
    for position, keys in blocks.items():
        got_tensors, got_arrays = objects[position].take(set(keys.values()))
        tensors |= {name: got_tensors[key] for name, key in keys.items() if key in got_tensors}
        arrays |= {name: got_arrays[key] for name, key in keys.items() if key in got_arrays}
    return tensors, arrays


def _as_wanted(group: Group, objects: Sequence[Any]) -> np.ndarray | None:
    """Index that brings rows from run by run into the wanted order; None where they stand so already."""
    if group.order is None or len(group.runs) == 1:
        return None
    index = _index(group, objects)
    ends = np.asarray([run.offset + run.count for run in group.runs])
    by_run = np.argsort(np.searchsorted(ends, index, side="right"), kind="stable")
    wanted = np.empty(len(index), dtype=np.int64)
    wanted[by_run] = np.arange(len(index))
    return None if np.array_equal(wanted, np.arange(len(index))) else wanted


def _copied(tensors: Tensors, arrays: Arrays, private: Collection[str] | bool) -> tuple[Tensors, Arrays]:
    if private is False:
        return tensors, arrays

    def wanted(names: Iterable[str]) -> set[str]:
        return set(names) if private is True else set(names) & set(private)

    mine = wanted(tensors)
    return (
        {name: column.clone() if name in mine else column for name, column in tensors.items()},
        {name: column.copy() if name in wanted(arrays) else column for name, column in arrays.items()},
    )
