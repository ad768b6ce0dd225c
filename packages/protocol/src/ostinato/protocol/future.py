"""DataProtoFuture: a DataProto whose rows lie somewhere else, and may not be there yet.

Operations act on names, row counts and references. `get` brings rows here; everything else stays where it is.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NoReturn, Self

import numpy as np
from tensordict import TensorDict

from ostinato.protocol import rows
from ostinato.protocol.blocks import kind_of
from ostinato.protocol.dataproto import DataProto, parts_of
from ostinato.protocol.errors import (
    ArgumentError,
    ColumnConflictError,
    ColumnMismatchError,
    EmptyConcatError,
    RowCountError,
    RowsElsewhereError,
)
from ostinato.protocol.lanes import LOCAL, Lane, Piece, Rows, Source, Store, joined
from ostinato.protocol.layout import Coming, Layout, Places, State, bring, lay_out
from ostinato.protocol.meta import METRICS, checked_meta, copy_meta, merge_meta
from ostinato.protocol.metrics import Metric, merge_metrics
from ostinato.protocol.names import new_names, wanted_names

__all__ = ["Coming", "DataProtoFuture", "Layout", "State"]


class DataProtoFuture:
    """A handle to rows elsewhere, with the operations of a `DataProto`.

    Names, row counts and meta entries are known here; where a call must end before they are, the first operation that
    needs them waits for it, and raises what it raised. Results equal those of the same operations on a `DataProto`,
    but for one: `union` does not compare values, so it refuses two columns of one name unless they are the same rows
    of the same stored columns.

    Nothing here brings rows to this process except `get`, and `batch` and `non_tensor_batch`, which call it; `==` asks
    whether two names stand for one handle. The rows are dropped with the last future that holds them.

    Args:
        state: what is known, or the call that will tell.
    """

    def __init__(self, state: State | Coming) -> None:
        self._known: State | None = state if isinstance(state, State) else None
        self._coming: Coming | None = None if isinstance(state, State) else state

    @classmethod
    def of(cls, batch: DataProto | DataProtoFuture) -> DataProtoFuture:
        """A handle to rows that are here; a future is returned as it is. Nothing is copied.

        Raises:
            ArgumentError: neither a batch nor a handle to one.
        """
        if isinstance(batch, DataProtoFuture):
            return batch
        if not isinstance(batch, DataProto):
            raise ArgumentError(
                f"expected a DataProto or a handle to rows elsewhere, got {type(batch).__name__}; "
                "make one with DataProto.from_dict"
            )
        columns = batch._columns()
        metrics = (batch.metrics,) if batch.metrics else ()
        places: Places = {}
        if columns:
            block = LOCAL.put(batch._tensors(), batch._arrays())
            held = {name: (block[name], name) for name in columns}
            kinds = {name: kind_of(column) for name, column in columns.items()}
            lane = Lane(Source([Piece(LOCAL, len(batch), held, kinds)]), Rows(0, len(batch)))
            places = {name: (lane, name) for name in columns}
        return cls(State(len(batch), places, copy_meta(batch.meta_info, metrics=False), metrics))

    @property
    def _state(self) -> State:
        if self._known is None:
            assert self._coming is not None
            self._known = self._coming.state()
            self._coming = None
        return self._known

    def _with(self, **changes: Any) -> Self:
        return type(self)(self._state._replace(**changes))

    # --- what is known ------------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return self._state.num_rows

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of all columns, in the order in which they came; those of a `DataProto` are tensors first."""
        return tuple(self._state.places)

    @property
    def metrics(self) -> dict[str, Metric]:
        """The metrics; waits for the calls that they come from."""
        state = self._state
        if any(not isinstance(part, Mapping) for part in state.metrics):
            parts = tuple(part if isinstance(part, Mapping) else part.metrics() for part in state.metrics)
            self._known = state = state._replace(metrics=(merge_metrics(*parts),))
        return merge_metrics(*(part for part in state.metrics if isinstance(part, Mapping)))

    @property
    def meta_info(self) -> dict[str, Any]:
        """A copy of the meta entries, metrics included; write through `with_meta`."""
        metrics = self.metrics
        return copy_meta(self._state.meta) | ({METRICS: metrics} if metrics else {})

    def wait(self) -> Self:
        """Wait until every call has ended that this future's names, counts or metrics come from; returns itself."""
        _ = self.metrics
        return self

    def __repr__(self) -> str:
        if self._known is None:
            return f"{type(self).__name__}(of a call under way)"
        told = [f"{name} {self._kind(name) or '(kind not known yet)'}" for name in self._known.places]
        return f"{type(self).__name__}({self._known.num_rows} rows; {', '.join(told) or 'no columns'})"

    def _kind(self, name: str) -> str | None:
        lane, key = self._state.places[name]
        return lane.source.pieces[0].kinds.get(key)

    def __getattr__(self, name: str) -> NoReturn:
        if name in ("to", "save", "to_bytes", "make_iterator"):
            raise RowsElsewhereError(
                f"DataProtoFuture.{name}: the rows lie elsewhere; bring them here with .get([...]) and use the "
                "DataProto that it returns"
            )
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __copy__(self) -> Self:
        return self._with()

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise RowsElsewhereError(
            "a DataProtoFuture does not pickle: pass it to a group call as an argument of its own, or bring its rows "
            "here with .get()"
        )

    # --- bringing rows here -------------------------------------------------------------------------------------------

    def get(self, columns: Iterable[str] | None = None) -> DataProto:
        """Bring rows to this process; the one operation that needs values here.

        Args:
            columns: names; None brings all.

        Returns:
            The batch, with the meta entries and metrics. It shares memory with nobody else, but for rows that were in
            this process anyhow.

        Raises:
            MissingColumnError: a name is no column.
            Exception: what a call raised that the rows come from.
        """
        chosen = self if columns is None else self.select(columns)
        metrics = chosen.metrics
        built = bring(chosen._state)
        return built.with_metrics(metrics) if metrics else built

    @property
    def batch(self) -> TensorDict:
        """All tensor columns, brought here anew by every look; `get([...])` brings the ones that are meant."""
        return self.get().batch

    @property
    def non_tensor_batch(self) -> dict[str, np.ndarray]:
        """All numpy columns, brought here, as `batch` does."""
        return self.get().non_tensor_batch

    def layout(self, store: Store | None = None) -> tuple[Layout, list[tuple[Store, Any]]]:
        """How to build these rows, for whoever carries them; see `lay_out`."""
        return lay_out(self._state, store)

    # --- columns ------------------------------------------------------------------------------------------------------

    def _names(self, where: str, names: Iterable[str]) -> dict[str, None]:
        return wanted_names(where, names, self.columns, f"this handle to {len(self)} rows elsewhere")

    def select(self, columns: Iterable[str]) -> Self:
        """Keep these columns alone; see `DataProto.select`."""
        return self._with(places={name: self._state.places[name] for name in self._names("select", columns)})

    def drop(self, columns: Iterable[str]) -> Self:
        """Leave these columns out; see `DataProto.drop`."""
        names = self._names("drop", columns)
        return self._with(places={name: at for name, at in self._state.places.items() if name not in names})

    def pop(self, columns: Iterable[str]) -> Self:
        """Take columns out of this future, which is changed; the metrics stay. See `DataProto.pop`."""
        taken = self.select(self._names("pop", columns))._with(metrics=())
        self._known = self.drop(taken.columns)._state
        return taken

    def rename(self, names: Mapping[str, str]) -> Self:
        """Give columns new names; see `DataProto.rename`."""
        new = new_names(names, self.columns, f"this handle to {len(self)} rows elsewhere")
        return self._with(places=dict(zip(new, self._state.places.values(), strict=True)))

    def union(self, other: DataProto | DataProtoFuture) -> Self:
        """Put the columns of the same rows side by side; see `DataProto.union`.

        Args:
            other: a future, or rows that are here; these stay here until a call needs them.

        Raises:
            RowCountError: unlike numbers of rows.
            ColumnConflictError: both have a column of one name, not of the same rows of the same stored columns.
            MetaConflictError: both hold a meta entry of one key, and they differ.
        """
        mine, theirs = self._state, DataProtoFuture.of(other)._state
        if mine.num_rows != theirs.num_rows and (mine.places or mine.num_rows) and (theirs.places or theirs.num_rows):
            raise RowCountError(
                f"union: {mine.num_rows} rows ({', '.join(mine.places)}) and {theirs.num_rows} rows "
                f"({', '.join(theirs.places)}); bring both to the same rows first"
            )
        both = [name for name in theirs.places if mine.places.get(name, theirs.places[name]) != theirs.places[name]]
        if both:
            raise ColumnConflictError(
                f"union: {both} are in both, from other references, and values elsewhere are not compared; drop or "
                "rename them in one"
            )
        return type(self)(
            State(
                max(mine.num_rows, theirs.num_rows),
                mine.places | theirs.places,
                merge_meta("union", [mine.meta, theirs.meta]),
                mine.metrics + theirs.metrics,
            )
        )

    def with_meta(self, **entries: Any) -> Self:
        """Set meta entries; see `DataProto.with_meta`."""
        changed = self
        entries = checked_meta(entries)
        if METRICS in entries:
            given = entries.pop(METRICS)
            changed = self._with(metrics=(given,) if given else ())
        return changed._with(meta=copy_meta(self._state.meta | entries)) if entries else changed._with()

    def with_metrics(self, metrics: Mapping[str, Metric]) -> Self:
        """Set the metrics; see `DataProto.with_metrics`."""
        return self.with_meta(**{METRICS: metrics})

    # --- rows ---------------------------------------------------------------------------------------------------------

    def _pick(self, picked: rows.Selection, *, metrics: bool) -> Self:
        state = self._state
        moved: dict[Rows, Rows] = {}  # lanes of the same rows go on sharing one order
        lanes = {}
        for lane in dict.fromkeys(lane for lane, _ in state.places.values()):
            if lane.rows not in moved:
                moved[lane.rows] = lane.rows.pick(picked)
            lanes[lane] = Lane(lane.source, moved[lane.rows])
        count = picked.stop - picked.start if isinstance(picked, slice) else len(picked)
        places = {name: (lanes[lane], key) for name, (lane, key) in state.places.items()}
        return type(self)(State(count, places, copy_meta(state.meta), state.metrics if metrics else ()))

    def _cut(self, bounds: rows.Bounds) -> list[Self]:
        return [self._pick(slice(*ends), metrics=i == 0) for i, ends in enumerate(bounds)]

    def chunk(self, n: int) -> list[Self]:
        """Cut into n pieces whose sizes differ by at most one; see `DataProto.chunk`."""
        return self._cut(rows.chunk_bounds(len(self), n))

    def split(self, size: int) -> list[Self]:
        """Cut into pieces of `size` rows; see `DataProto.split`."""
        return self._cut(rows.split_bounds(len(self), size))

    def __getitem__(self, item: Any) -> Self:
        """Pick rows by int, slice, mask or list; see `DataProto.__getitem__`."""
        return self._pick(rows.selection(len(self), item), metrics=False)

    def __iter__(self) -> Iterator[Self]:
        return (self[i] for i in range(len(self)))

    def reorder(self, indices: Any) -> Self:
        """Put rows in another order; see `DataProto.reorder`."""
        return self._pick(rows.permutation(len(self), indices), metrics=True)

    def repeat(self, n: int, interleave: bool = True) -> Self:
        """Repeat every row n times; see `DataProto.repeat`."""
        return self._pick(rows.repeat_index(len(self), n, interleave), metrics=True)

    def pad_to_multiple(self, k: int) -> tuple[Self, int]:
        """Fill rows up to a multiple of k; see `DataProto.pad_to_multiple`."""
        index, pad = rows.padding_index(len(self), k)
        return (self._pick(index, metrics=True) if pad else self._with()), pad

    def unpad(self, pad: int) -> Self:
        """Take the last `pad` rows away; see `DataProto.unpad`."""
        pad = rows.whole_number("unpad", "pad", pad, 0)
        if pad > len(self):
            raise ArgumentError(f"unpad: cannot take {pad} rows from {len(self)}; give what pad_to_multiple gave")
        return self._pick(slice(0, len(self) - pad), metrics=True)

    @classmethod
    def concat(cls, parts: Iterable[DataProto | DataProtoFuture]) -> DataProtoFuture:
        """Put batches of the same columns end to end; see `DataProto.concat`.

        Raises:
            EmptyConcatError: no parts.
            ColumnMismatchError: parts differ in columns, or in what is known of their kinds.
            MetaConflictError: parts differ in a meta entry.
        """
        states = [DataProtoFuture.of(part)._state for part in parts_of(parts)]
        if not states:
            raise EmptyConcatError("concat: no parts, so the columns are not known; keep one empty piece (chunk does)")
        _check_alike(states)
        meta = merge_meta("concat", [state.meta for state in states])
        metrics = tuple(itertools.chain.from_iterable(state.metrics for state in states))
        if len(states) == 1:
            return cls(State(states[0].num_rows, dict(states[0].places), meta, metrics))
        together: dict[tuple[Lane, ...], list[str]] = {}
        for name in states[0].places:
            together.setdefault(tuple(state.places[name][0] for state in states), []).append(name)
        places: Places = {}
        for lanes, names in together.items():
            keys = [{name: state.places[name][1] for name in names} for state in states]
            lane = joined(list(zip(lanes, keys, strict=True)))
            places |= {name: (lane, name) for name in names}
        ordered = {name: places[name] for name in states[0].places}
        return cls(State(sum(state.num_rows for state in states), ordered, meta, metrics))


def _check_alike(states: Sequence[State]) -> None:
    first = states[0].places
    for i, state in enumerate(states[1:], start=1):
        if state.places.keys() != first.keys():
            lacks, more = sorted(first.keys() - state.places.keys()), sorted(state.places.keys() - first.keys())
            raise ColumnMismatchError(
                f"concat: part {i} lacks {lacks or 'nothing'} and has {more or 'nothing'} beyond part 0; all parts "
                "need the same columns: use select or drop first"
            )
        for name, (lane, key) in state.places.items():
            kinds = [at[0].source.pieces[0].kinds.get(at[1]) for at in (first[name], (lane, key))]
            if None not in kinds and kinds[0] != kinds[1]:
                raise ColumnMismatchError(
                    f"concat: column {name!r} is a {kinds[0]} in part 0 and a {kinds[1]} in part {i}; all but the "
                    "number of rows must agree: pad or convert before concat"
                )
