"""From references to rows: what is known of rows elsewhere, and how a batch is built of what stores hand out."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from ostinato.protocol.blocks import Compact, Group, Run, assemble
from ostinato.protocol.dataproto import DataProto
from ostinato.protocol.lanes import LOCAL, Lane, Store
from ostinato.protocol.meta import copy_meta
from ostinato.protocol.metrics import Metric

Places = dict[str, tuple[Lane, str]]
"""Column -> where its rows lie, and its name there."""


class Coming(Protocol):
    """A call that has not ended, as far as the driver knows."""

    def state(self) -> State:
        """Wait until it has ended; return what it left, or raise what it raised."""
        ...

    def metrics(self) -> Mapping[str, Metric]:
        """Wait until it has ended; return its metrics, or raise what it raised."""
        ...


class State(NamedTuple):
    """What is known of a future without its rows.

    Attributes:
        num_rows: rows.
        places: where each column lies.
        meta: meta entries, the metrics excepted.
        metrics: the metrics, or the calls that will have left some, in the order in which they are merged.
    """

    num_rows: int
    places: Places
    meta: dict[str, Any]
    metrics: tuple[Mapping[str, Metric] | Coming, ...] = ()


@dataclass(frozen=True)
class Layout(Compact):
    """How to build a batch from what a store hands out; small, and pickles without the references.

    Attributes:
        num_rows: rows of the batch.
        names: its columns, in order.
        groups: where they come from.
        meta: its meta entries.
    """

    num_rows: int
    names: tuple[str, ...]
    groups: tuple[Group, ...]
    meta: dict[str, Any]

    def build(self, objects: Sequence[Any], private: Collection[str] | bool) -> DataProto:
        """Build the batch.

        Args:
            objects: what the references of this layout stand for, in their order.
            private: columns, or all of them, that must not share memory with `objects`.
        """
        tensors, arrays = assemble(self.groups, objects, private)
        return DataProto._of(
            {name: tensors[name] for name in self.names if name in tensors},
            {name: arrays[name] for name in self.names if name in arrays},
            copy_meta(self.meta),
            self.num_rows,
        )


def lay_out(state: State, store: Store | None = None) -> tuple[Layout, list[tuple[Store, Any]]]:
    """How to build some rows, for whoever carries them.

    Args:
        state: the rows.
        store: the store that all references must be of; columns that lie elsewhere are copied into it, the wanted rows
            alone and once. None leaves everything where it is.

    Returns:
        The layout, without metrics, and (store, reference) by position.
    """
    planner = _Planner(store)
    by_lane: dict[Lane, dict[str, str]] = {}
    for name, (lane, key) in state.places.items():
        by_lane.setdefault(lane, {})[name] = key
    groups = tuple(planner.group(lane, keys) for lane, keys in by_lane.items())
    return Layout(state.num_rows, tuple(state.places), groups, copy_meta(state.meta)), planner.references


def bring(state: State) -> DataProto:
    """Build a batch in this process, without metrics; memory that others read too is copied."""
    layout, references = lay_out(state)
    objects: list[Any] = [None] * len(references)
    for store in {id(store): store for store, _ in references}.values():
        places = [place for place, (of, _) in enumerate(references) if of is store]
        for place, found in zip(places, store.fetch([references[p][1] for p in places]), strict=True):
            objects[place] = found
    return layout.build(objects, private=any(getattr(found, "shared", False) for found in objects))


class _Planner:
    """Numbers the references that some rows need, each once."""

    def __init__(self, store: Store | None) -> None:
        self.store = store
        self.references: list[tuple[Store, Any]] = []
        self._positions: dict[int, int] = {}

    def position(self, store: Store, reference: Any) -> int:
        """The position of a reference; one object has one."""
        if id(reference) not in self._positions:
            self._positions[id(reference)] = len(self.references)
            self.references.append((store, reference))
        return self._positions[id(reference)]

    def group(self, lane: Lane, keys: Mapping[str, str]) -> Group:
        """Where the rows of columns that lie alike come from: column -> its name in the lane's pieces."""
        source, wanted = lane
        if self.store is not None and not source.lies_in(self.store):
            return self._moved(self.store, lane, keys)
        places = source.pieces_with(wanted)
        pieces = [source.pieces[place] for place in places]
        runs = [
            Run(int(source.offsets[place]), piece.first, piece.num_rows)
            for place, piece in zip(places, pieces, strict=True)
        ]
        columns = tuple(
            (name, tuple((self.position(p.store, p.columns[key][0]), p.columns[key][1]) for p in pieces))
            for name, key in keys.items()
        )
        if wanted.order is None:
            return Group(columns, tuple(runs), wanted.start, wanted.stop)
        keeper = self.store or LOCAL
        order = self.position(keeper, wanted.order.reference(keeper))
        return Group(columns, tuple(runs), wanted.start, wanted.stop, order)

    def _moved(self, store: Store, lane: Lane, keys: Mapping[str, str]) -> Group:
        """Copy the wanted rows into the store, unless they were copied before."""
        there = lane.source.moved.setdefault((id(store), lane.rows), {})
        missing = dict.fromkeys(key for key in keys.values() if key not in there)
        if missing:
            here = bring(State(len(lane.rows), {key: (lane, key) for key in missing}, {}))
            there |= store.put(here._tensors(), here._arrays())
        columns = tuple((name, ((self.position(store, there[key]), key),)) for name, key in keys.items())
        return Group(columns, (Run(0, 0, len(lane.rows)),), 0, len(lane.rows))
