"""Where rows lie that are not here: sources, the rows of them that are meant, and the stores that keep them.

Nothing here looks at a value. A `Source` is what one call left behind, piece by piece; `Rows` says which of its rows,
in which order; columns that lie alike share one `Lane`, so a row operation costs the same for one column or twenty.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from ostinato.protocol.blocks import HeldBlock
from ostinato.protocol.rows import Selection


class Store(Protocol):
    """Keeps blocks of columns under references; a block is dropped with its last reference."""

    def put(self, tensors: Mapping[str, torch.Tensor], arrays: Mapping[str, np.ndarray]) -> dict[str, Any]:
        """Keep columns; returns the reference of the block that each lies in."""
        ...

    def put_order(self, order: np.ndarray) -> Any:
        """Keep (N,) integers, row numbers; returns a reference."""
        ...

    def fetch(self, references: Sequence[Any]) -> list[Any]:
        """Bring what the references stand for here, in their order."""
        ...


class LocalStore:
    """The store of this process: a reference is the block itself."""

    def put(self, tensors: Mapping[str, torch.Tensor], arrays: Mapping[str, np.ndarray]) -> dict[str, Any]:
        """Keep columns; nothing is copied."""
        block = HeldBlock(tensors, arrays)
        return dict.fromkeys([*tensors, *arrays], block)

    def put_order(self, order: np.ndarray) -> Any:
        """Keep row numbers."""
        return order

    def fetch(self, references: Sequence[Any]) -> list[Any]:
        """Return the blocks."""
        return list(references)


LOCAL = LocalStore()
"""The one store of this process."""


@dataclass(frozen=True, eq=False)
class Piece:
    """A run of rows of stored blocks.

    Attributes:
        store: where the blocks lie.
        num_rows: rows of the piece.
        columns: column -> (reference of its block, its name there).
        kinds: column -> what `blocks.kind_of` says, where that is known by now.
        first: the blocks' row that is the piece's first.
    """

    store: Any
    num_rows: int
    columns: Mapping[str, tuple[Any, str]]
    kinds: Mapping[str, str] = field(default_factory=dict)
    first: int = 0


class Order:
    """An order of rows that several lanes share; a store gets it once.

    Args:
        array: (N,) row numbers of a source.
    """

    def __init__(self, array: np.ndarray) -> None:
        self.array = array
        self._stored: dict[int, tuple[Any, Any]] = {}

    def reference(self, store: Store) -> Any:
        """This order in a store."""
        if id(store) not in self._stored:
            small = len(self.array) == 0 or int(self.array.max()) < 2**31
            reference = store.put_order(self.array.astype(np.int32) if small else self.array)
            self._stored[id(store)] = store, reference
        return self._stored[id(store)][1]


@dataclass(frozen=True)
class Rows:
    """Rows `start` to `stop` of a source, or of an order of its rows."""

    start: int
    stop: int
    order: Order | None = None

    def __len__(self) -> int:
        return self.stop - self.start

    def pick(self, picked: Selection) -> Rows:
        """Rows of these rows."""
        if isinstance(picked, slice):
            return Rows(self.start + picked.start, self.start + picked.stop, self.order)
        if self.order is not None:
            picked = self.order.array[self.start : self.stop][picked]
        elif self.start:
            picked = picked + self.start
        return Rows(0, len(picked), Order(picked))

    @property
    def numbers(self) -> np.ndarray:
        """(len,) row numbers of the source."""
        if self.order is None:
            return np.arange(self.start, self.stop, dtype=np.int64)
        return self.order.array[self.start : self.stop]


class Source:
    """The pieces that make up some columns, end to end.

    Args:
        pieces: at least one; all have the same columns.
    """

    def __init__(self, pieces: Sequence[Piece]) -> None:
        self.pieces = tuple(pieces)
        self.moved: dict[tuple[int, Rows], dict[str, Any]] = {}
        """(store, rows) -> column -> reference: what was copied into another store, kept so that it is copied once."""

    @cached_property
    def offsets(self) -> np.ndarray:
        """(pieces + 1,) number of each piece's first row, and the total."""
        return np.concatenate([[0], np.cumsum([piece.num_rows for piece in self.pieces], dtype=np.int64)])

    @property
    def num_rows(self) -> int:
        """Rows of all pieces."""
        return int(self.offsets[-1])

    def lies_in(self, store: Store) -> bool:
        """Whether all pieces are in this store."""
        return len(self._stores) == 1 and self._stores[0] is store

    @cached_property
    def _stores(self) -> tuple[Any, ...]:
        return tuple({id(piece.store): piece.store for piece in self.pieces}.values())

    def pieces_with(self, rows: Rows) -> list[int]:
        """Which pieces hold some of these rows; one, if it must be, where there are no rows: it tells the kinds."""
        if not len(rows):
            return [0]
        offsets = self.offsets
        if rows.order is None:
            first = int(np.searchsorted(offsets, rows.start, side="right")) - 1
            last = int(np.searchsorted(offsets, rows.stop, side="left"))
            return [place for place in range(first, last) if self.pieces[place].num_rows]
        return np.unique(np.searchsorted(offsets, rows.numbers, side="right") - 1).tolist()


class Lane(NamedTuple):
    """Some rows of a source."""

    source: Source
    rows: Rows


def joined(parts: Sequence[tuple[Lane, Mapping[str, str]]]) -> Lane:
    """Put the rows of several lanes end to end.

    Args:
        parts: lane, and column -> its name in the lane's pieces.

    Returns:
        A lane whose pieces have the columns under the names given; the first lane's source where all parts are runs of
        rows of one source that follow each other.
    """
    merged = _adjoining(parts)
    if merged is not None:
        return merged
    pieces: list[Piece] = []
    if all(lane.rows.order is None for lane, _ in parts):
        for lane, keys in parts:
            pieces += _trimmed(lane, keys)
        source = Source(pieces)
        return Lane(source, Rows(0, source.num_rows))
    numbers = []
    bases: dict[tuple[Source, tuple[tuple[str, str], ...]], int] = {}
    total = 0
    for lane, keys in parts:
        known = lane.source, tuple(keys.items())
        if known not in bases:
            bases[known] = total
            total += lane.source.num_rows
            pieces += [_renamed(piece, keys) for piece in lane.source.pieces]
        numbers.append(lane.rows.numbers + bases[known])
    array = np.concatenate(numbers)
    return Lane(Source(pieces), Rows(0, len(array), Order(array)))


def _adjoining(parts: Sequence[tuple[Lane, Mapping[str, str]]]) -> Lane | None:
    first, keys = parts[0]
    if any(lane.source is not first.source or lane.rows.order is not first.rows.order for lane, _ in parts):
        return None
    if any(names != keys for _, names in parts) or any(name != key for name, key in keys.items()):
        return None
    stop = first.rows.start
    for lane, _ in parts:
        if lane.rows.start != stop:
            return None
        stop = lane.rows.stop
    return Lane(first.source, Rows(first.rows.start, stop, first.rows.order))


def _renamed(piece: Piece, keys: Mapping[str, str], low: int = 0, high: int | None = None) -> Piece:
    return Piece(
        piece.store,
        (piece.num_rows if high is None else high) - low,
        {name: piece.columns[key] for name, key in keys.items()},
        {name: piece.kinds[key] for name, key in keys.items() if key in piece.kinds},
        piece.first + low,
    )


def _trimmed(lane: Lane, keys: Mapping[str, str]) -> list[Piece]:
    """The pieces that hold a run of rows, cut to it."""
    source, rows = lane
    kept = []
    for place in source.pieces_with(rows):
        offset, piece = int(source.offsets[place]), source.pieces[place]
        low = min(max(rows.start - offset, 0), piece.num_rows)
        high = min(rows.stop - offset, piece.num_rows)
        kept.append(_renamed(piece, keys, low, max(low, high)))
    return kept
