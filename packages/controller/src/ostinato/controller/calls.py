"""A group call under way, and what becomes of its results: values here, or a handle to rows that stay away."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from ostinato.controller.arrival import Contract, Left
from ostinato.controller.dispatch import Broadcast, Call, Plan, describe_kinds
from ostinato.controller.errors import CollectError
from ostinato.controller.topology import RankPlace
from ostinato.protocol import DataProto, DataProtoFuture, Metric, merge_metrics
from ostinato.protocol.future import Coming, State
from ostinato.protocol.lanes import Lane, Piece, Rows, Source, Store
from ostinato.protocol.meta import METRICS, merge_meta

T = TypeVar("T")


@dataclass(frozen=True)
class Ended:
    """How a call ended on one rank: its mesh revision, and what it left where that is rows."""

    revision: int
    left: Left | None = None


class Transport(Protocol):
    """What carries calls to the workers of one role and their results back. The one place that knows processes."""

    @property
    def places(self) -> Sequence[RankPlace]:
        """Each rank's place, in rank order."""
        ...

    @property
    def store(self) -> Store:
        """Where rows lie that these workers leave."""
        ...

    def start(self, method: str, calls: Sequence[Call | None], answering: Sequence[int], contract: Contract) -> Any:
        """Send one call a rank and return a ticket; arguments that are one object are stored once.

        Results of ranks that do not answer are dropped where they arise.
        """
        ...

    def finish(self, ticket: Any) -> Mapping[int, Ended]:
        """Wait until all calls of a ticket have ended; return how, by rank, or raise the first failure."""
        ...

    def fetch(self, ticket: Any, ranks: Sequence[int]) -> list[Any]:
        """Bring the results of these ranks here, after `finish`."""
        ...

    def slots(self, ticket: Any, rank: int) -> Sequence[Any]:
        """References of what the call leaves on a rank, by slot, whether or not it has ended; taken once."""
        ...


class Owner(Protocol):
    """The group whose call it is."""

    @property
    def role(self) -> str:
        """Its role."""
        ...

    def note(self, ended: Mapping[int, Ended]) -> None:
        """Take notice of mesh revisions."""
        ...


class PendingCall(Generic[T]):
    """A group call under way whose results become values on the driver."""

    def __init__(self, owner: Owner, transport: Transport, method: str, plan: Plan, ticket: Any) -> None:
        self._owner, self._transport, self._method, self._plan = owner, transport, method, plan
        self._ticket = ticket
        self._result: tuple[T] | None = None

    def get(self) -> T:
        """Wait for the call and return its result; a second `get` returns the same.

        Raises:
            Exception: what a worker raised, as its own type where it pickles.
            WorkerFailed: a worker's exception that does not pickle, or (WorkerDied) a process that ended.
            CollectError: the results do not go together.
        """
        if self._result is None:
            self._owner.note(self._transport.finish(self._ticket))
            results = self._transport.fetch(self._ticket, self._plan.answering)
            try:
                self._result = (self._plan.collect(results),)
            except CollectError as error:
                raise CollectError(f"role {self._owner.role!r}, method {self._method!r}: {error}") from None
            self._ticket = None  # drops the references to results
        return self._result[0]


class RowsCall(Coming):
    """A group call under way whose results are rows; what a `DataProtoFuture` waits for.

    It holds the references of the rows until it has ended, unless the call keeps rows: then `promise` handed them out.
    """

    def __init__(self, owner: Owner, transport: Transport, method: str, plan: Plan, ticket: Any) -> None:
        self._owner, self._transport, self._method = owner, transport, method
        self._answering = plan.answering
        self._ticket = ticket
        self._slots = {rank: transport.slots(ticket, rank) for rank in plan.answering}
        self._left: list[Left] | None = None

    def wait(self) -> list[Left]:
        """Wait until the call has ended; what each answering rank left, in data-parallel order."""
        if self._left is None:
            ended = self._transport.finish(self._ticket)
            self._owner.note(ended)
            found = [ended[rank].left for rank in self._answering]
            self._left = [left for left in found if left is not None]
            assert len(self._left) == len(found), "a rank answered without saying what it left"
            self._ticket = None
        return self._left

    def value(self) -> Any:
        """Wait; a future of the rows, or what the ranks returned instead: None, or their metrics merged.

        Raises:
            CollectError: the ranks returned something else, or not all the same.
        """
        left = self.wait()
        kinds = {one.kind for one in left}
        if kinds == {"rows"}:
            return DataProtoFuture(self.state())
        if kinds == {"nothing"}:
            return None
        if kinds == {"metrics"}:
            return merge_metrics(*(one.value for one in left))
        told = {"rows": "DataProto", "nothing": "NoneType", "metrics": "dict of ['Metric']"}
        raise CollectError(
            f"role {self._owner.role!r}, method {self._method!r}: "
            + describe_kinds([told.get(one.kind, one.kind) for one in left])
        )

    def state(self) -> State:
        """Wait; what is known of the rows."""
        left = self.wait()
        if any(one.kind != "rows" for one in left):
            self.value()
            told = {"nothing": "None", "metrics": "metrics"}[left[0].kind]
            raise CollectError(
                f"role {self._owner.role!r}, method {self._method!r}: is annotated to return a DataProto and returned "
                f"{told}; correct the annotation"
            )
        self._check_alike(left)
        names = dict.fromkeys(name for one in left for name in one.columns)
        pieces = [
            Piece(
                self._transport.store,
                one.num_rows,
                {name: (self._slots[rank][slot], name) for name, (slot, _) in one.columns.items()},
                {name: kind for name, (_, kind) in one.columns.items()},
            )
            for rank, one in zip(self._answering, left, strict=True)
        ]
        self._slots = {}
        meta = merge_meta(f"role {self._owner.role!r}, method {self._method!r}", [one.meta for one in left])
        metrics = meta.pop(METRICS, None)
        total = sum(one.num_rows for one in left)
        lane = Lane(Source(pieces), Rows(0, total))
        return State(total, {name: (lane, name) for name in names}, meta, (metrics,) if metrics else ())

    def _check_alike(self, left: Sequence[Left]) -> None:
        first = {name: kind for name, (_, kind) in left[0].columns.items()}
        for rank, one in zip(self._answering[1:], left[1:], strict=True):
            kinds = {name: kind for name, (_, kind) in one.columns.items()}
            if kinds != first:
                raise CollectError(
                    f"role {self._owner.role!r}, method {self._method!r}: rank {self._answering[0]} returned {first} "
                    f"and rank {rank} {kinds}; all ranks must return the same columns of the same kinds"
                )

    def metrics(self) -> dict[str, Metric]:
        """Wait; the metrics of all ranks, merged."""
        return merge_metrics(*(one.meta.get(METRICS) for one in self.wait()))

    def promise(self, writes: Sequence[str], sizes: Sequence[int]) -> DataProtoFuture:
        """The result of a call that keeps rows, before it has ended.

        Args:
            writes: its columns.
            sizes: rows of each answering rank, in data-parallel order.
        """
        store = self._transport.store
        pieces = [
            Piece(store, size, {name: (slot, name) for name, slot in zip(writes, self._slots[rank], strict=True)})
            for rank, size in zip(self._answering, sizes, strict=True)
        ]
        self._slots = {}
        lane = Lane(Source(pieces), Rows(0, sum(sizes)))
        return DataProtoFuture(State(sum(sizes), {name: (lane, name) for name in writes}, {}, (self,)))


def sizes_of(plan: Plan) -> list[int] | None:
    """Rows of the first batch that each answering rank gets; None where one gets no batch."""
    sizes = []
    for rank in plan.answering:
        call = plan.calls[rank]
        assert call is not None
        given = batches_of(call)
        if not given:
            return None
        sizes.append(len(given[0]))
    return sizes


def batches_of(call: Call) -> list[DataProto | DataProtoFuture]:
    """The batches among the arguments of a call, in order; one that is marked for every rank counts."""
    values = [v.value if isinstance(v, Broadcast) else v for v in (*call.args, *call.kwargs.values())]
    return [value for value in values if isinstance(value, DataProto | DataProtoFuture)]
