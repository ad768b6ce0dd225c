"""What a group call does with its arguments and results: pure functions over coordinates, no processes here.

A mode is a pair. `split` turns one call on the group into one call a rank; `collect` turns the results of the answering
ranks, in data-parallel order, into one result. All known names are declarations over the same core: a rule says what
becomes of one argument (a list with one piece a data-parallel rank), and each rank gets the piece of its `dp_rank`.
Ranks that share a data-parallel rank get the same object, so whoever sends the calls can store it once.

Whether a plain argument is scattered or broadcast is never guessed from its type or length: it is broadcast unless the
caller wraps it in `Scatter`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from ostinato.controller.errors import CollectError, DispatchError, RegistrationError, UnknownDispatchMode
from ostinato.controller.topology import Mesh, pipeline_as_data
from ostinato.protocol import DataProto, DataProtoFuture, Metric, merge_metrics


@dataclass(frozen=True)
class Scatter:
    """One value for each data-parallel rank (each rank, in modes without a mesh), in order."""

    values: Sequence[Any]

    def __post_init__(self) -> None:
        if isinstance(self.values, str | bytes) or not hasattr(self.values, "__len__"):
            kind = type(self.values).__name__
            raise DispatchError(f"Scatter: expected a list with one value for each rank, got {kind}")


@dataclass(frozen=True)
class Broadcast:
    """The same value for every rank; how to send a whole DataProto where a mode would split it."""

    value: Any


@dataclass(frozen=True)
class Call:
    """The arguments of one call, on the group or on one rank."""

    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)


Rule = Callable[[str, Any, int], list[Any]]
"""(where it stands, argument, number of data-parallel ranks) -> one piece for each of them."""
SplitFn = Callable[[Mesh, Call], list["Call | None"]]
"""(mesh, call on the group) -> one call a rank, in rank order; None for a rank that is not called."""
CollectFn = Callable[[Mesh, list[Any]], Any]
"""(mesh, results of the answering ranks in data-parallel order) -> the result of the group call."""


@dataclass(frozen=True)
class DispatchMode:
    """A named way to split a call and to collect its results.

    Attributes:
        name: how `register` and error texts call it.
        split: group call -> calls of the ranks.
        collect: results of the answering ranks -> result.
        uses_mesh: whether the worker's own coordinates count; otherwise every rank is its own data-parallel rank.
        view: how the mesh is looked at, e.g. with pipeline stages as data-parallel ranks.
    """

    name: str
    split: SplitFn
    collect: CollectFn
    uses_mesh: bool = True
    view: Callable[[Mesh], Mesh] = field(default=lambda mesh: mesh)

    @property
    def gives_rows(self) -> bool:
        """Whether the results are rows to put end to end, which can stay where they are."""
        return self.collect is concat_rows

    def __repr__(self) -> str:
        return f"Dispatch.{self.name}"

    def __reduce__(self) -> tuple[Any, ...]:
        # A known mode travels as its name: it holds functions that need not pickle.
        if _modes.get(self.name) is self:
            return dispatch_mode_named, (self.name,)
        return super().__reduce__()  # pyright: ignore[reportReturnType]


# --- rules: what becomes of one argument -----------------------------------------------------------------------------


def scatter_marked(where: str, value: Any, size: int) -> list[Any]:
    """Scatter what is marked so, broadcast everything else."""
    if isinstance(value, Scatter):
        if len(value.values) != size:
            raise DispatchError(
                f"{where}: Scatter holds {len(value.values)} values for {size} ranks; pass exactly one for each"
            )
        return list(value.values)
    return [value.value if isinstance(value, Broadcast) else value] * size


def broadcast_only(where: str, value: Any, size: int) -> list[Any]:
    """Broadcast everything; a `Scatter` is refused."""
    if isinstance(value, Scatter):
        raise DispatchError(f"{where}: this method sends the same arguments to every rank, got a Scatter")
    return scatter_marked(where, value, size)


def chunk_protos(where: str, value: Any, size: int) -> list[Any]:
    """Cut a batch into one piece a rank, sizes differing by at most one (empty ones too); the rest as marked."""
    if isinstance(value, DataProto | DataProtoFuture):
        return list(value.chunk(size))
    return scatter_marked(where, value, size)


# --- splits ----------------------------------------------------------------------------------------------------------


def by_argument(rule: Rule) -> SplitFn:
    """Make a split that applies one rule to every argument, by position and by keyword alike."""

    def split(mesh: Mesh, call: Call) -> list[Call | None]:
        size = mesh.dp_size
        args = [rule(f"argument {place}", value, size) for place, value in enumerate(call.args)]
        kwargs = {name: rule(f"argument {name!r}", value, size) for name, value in call.kwargs.items()}
        of_dp = [
            Call(tuple(pieces[dp] for pieces in args), {name: pieces[dp] for name, pieces in kwargs.items()})
            for dp in range(size)
        ]
        return [of_dp[c.dp_rank] for c in mesh.coordinates]

    return split


def to_rank_zero(mesh: Mesh, call: Call) -> list[Call | None]:
    """Call rank 0 alone."""
    first = by_argument(broadcast_only)(mesh, call)[0]
    return [first] + [None] * (len(mesh) - 1)


def function_first(mesh: Mesh, call: Call) -> list[Call | None]:
    """Split as `chunk_protos`; the first argument is a function, which every rank gets."""
    function = call.args[0] if call.args else next(iter(call.kwargs.values()), None)
    if not callable(function):
        raise DispatchError(f"first argument: expected a function for every rank, got {type(function).__name__}")
    return by_argument(chunk_protos)(mesh, call)


# --- collects --------------------------------------------------------------------------------------------------------


def as_list(mesh: Mesh, results: list[Any]) -> list[Any]:
    """Return one result for each data-parallel rank."""
    return results


def only(mesh: Mesh, results: list[Any]) -> Any:
    """Return the one result there is."""
    return results[0]


def is_metrics(value: Any) -> bool:
    """Whether a result is a dict of metrics."""
    return isinstance(value, dict) and all(isinstance(entry, Metric) for entry in value.values())


def concat_rows(mesh: Mesh, results: list[Any]) -> Any:
    """Concatenate DataProtos, merge metrics dicts, pass on None.

    Raises:
        CollectError: the ranks returned something else, or not all the same.
    """
    if all(isinstance(result, DataProto) for result in results):
        return results[0] if len(results) == 1 else DataProto.concat(results)
    if all(result is None for result in results):
        return None
    if all(is_metrics(result) for result in results):
        return merge_metrics(*results)
    raise CollectError(describe_kinds(_kinds(results)))


def merge_metric_dicts(mesh: Mesh, results: list[Any]) -> dict[str, Metric]:
    """Merge metrics dicts, each value by its own reduction.

    Raises:
        CollectError: a rank returned something else.
    """
    if all(is_metrics(result) for result in results):
        return merge_metrics(*results)
    got = ", ".join(dict.fromkeys(_kinds(results)))
    raise CollectError(
        f"expected a dict[str, Metric] from every data-parallel rank, got {got}; wrap plain numbers, e.g. "
        "Metric.mean(value, weight=rows)"
    )


def describe_kinds(kinds: Iterable[str]) -> str:
    """Say what was expected of a method that gives rows, and what came."""
    return (
        "expected a DataProto, a dict[str, Metric] or None, the same from every data-parallel rank; got "
        f"{', '.join(dict.fromkeys(kinds))}. A method that returns other values needs Dispatch.DP_COMPUTE, which gives "
        "a list"
    )


def _kinds(results: Iterable[Any]) -> list[str]:
    def kind(result: Any) -> str:
        name = type(result).__name__
        if isinstance(result, dict):
            return f"{name} of {sorted({type(entry).__name__ for entry in result.values()})}"
        return name

    return [kind(result) for result in results]


# --- the known names -------------------------------------------------------------------------------------------------

_modes: dict[str, DispatchMode] = {}


def register_dispatch_mode(
    name: str,
    split: SplitFn,
    collect: CollectFn,
    *,
    uses_mesh: bool = True,
    view: Callable[[Mesh], Mesh] | None = None,
) -> DispatchMode:
    """Add a dispatch mode; afterwards `register(name)` takes it.

    Args:
        name: an identifier in capitals that no mode has yet.
        split: (mesh, call) -> one `Call` (or None) a rank, in rank order. `by_argument(rule)` makes one.
        collect: (mesh, results of the answering ranks in data-parallel order) -> result.
        uses_mesh: False if every rank counts as its own data-parallel rank.
        view: how to look at the mesh; None takes it as it is.

    Returns:
        The mode, which `register` takes as well.

    Raises:
        RegistrationError: the name is taken or cannot be one, or split or collect cannot be called.
    """
    if not isinstance(name, str) or not name.isidentifier() or not callable(split) or not callable(collect):
        raise RegistrationError(
            "register_dispatch_mode: expected a name in capitals and two functions, got "
            f"{name!r}, {split!r} and {collect!r}"
        )
    if name in _modes:
        raise RegistrationError(f"register_dispatch_mode: {name!r} exists already; known: {sorted(_modes)}")
    mode = DispatchMode(name, split, collect, uses_mesh, view or (lambda mesh: mesh))
    _modes[name] = mode
    return mode


def dispatch_mode_named(name: str) -> DispatchMode:
    """Return the mode of this name.

    Raises:
        UnknownDispatchMode: there is none.
    """
    if name not in _modes:
        raise UnknownDispatchMode(f"dispatch mode {name!r} is not known; known: {sorted(_modes)}")
    return _modes[name]


class Dispatch:
    """The known dispatch modes.

    Attributes:
        ONE_TO_ALL: the same arguments to every rank; a list with each rank's result.
        RANK_ZERO: rank 0 alone; its result.
        ALL_TO_ALL: as ONE_TO_ALL, and a `Scatter` gives each rank its own value.
        DP_COMPUTE: a `Scatter` gives each data-parallel rank its own value; a list with each one's result.
        DP_COMPUTE_PROTO: every DataProto is cut into one piece a data-parallel rank; results are concatenated in
            data-parallel order, metrics dicts are merged.
        DP_COMPUTE_PROTO_WITH_FUNC: as DP_COMPUTE_PROTO, the first argument a function for every rank.
        DP_COMPUTE_METRIC: splits as DP_COMPUTE_PROTO; the results are dicts of `Metric`, merged.
        MEGATRON_COMPUTE: DP_COMPUTE under the name that Megatron workers use.
        MEGATRON_COMPUTE_PROTO: DP_COMPUTE_PROTO under the name that Megatron workers use.
        MEGATRON_PP_AS_DP_PROTO: DP_COMPUTE_PROTO with pipeline stages as further data-parallel ranks.
    """

    ONE_TO_ALL = register_dispatch_mode("ONE_TO_ALL", by_argument(broadcast_only), as_list, uses_mesh=False)
    RANK_ZERO = register_dispatch_mode("RANK_ZERO", to_rank_zero, only, uses_mesh=False)
    ALL_TO_ALL = register_dispatch_mode("ALL_TO_ALL", by_argument(scatter_marked), as_list, uses_mesh=False)
    DP_COMPUTE = register_dispatch_mode("DP_COMPUTE", by_argument(scatter_marked), as_list)
    DP_COMPUTE_PROTO = register_dispatch_mode("DP_COMPUTE_PROTO", by_argument(chunk_protos), concat_rows)
    DP_COMPUTE_PROTO_WITH_FUNC = register_dispatch_mode("DP_COMPUTE_PROTO_WITH_FUNC", function_first, concat_rows)
    DP_COMPUTE_METRIC = register_dispatch_mode("DP_COMPUTE_METRIC", by_argument(chunk_protos), merge_metric_dicts)
    MEGATRON_COMPUTE = register_dispatch_mode("MEGATRON_COMPUTE", DP_COMPUTE.split, DP_COMPUTE.collect)
    MEGATRON_COMPUTE_PROTO = register_dispatch_mode(
        "MEGATRON_COMPUTE_PROTO", DP_COMPUTE_PROTO.split, DP_COMPUTE_PROTO.collect
    )
    MEGATRON_PP_AS_DP_PROTO = register_dispatch_mode(
        "MEGATRON_PP_AS_DP_PROTO", DP_COMPUTE_PROTO.split, DP_COMPUTE_PROTO.collect, view=pipeline_as_data
    )


# --- a group call ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Plan:
    """One group call, ready to be sent.

    Attributes:
        calls: one call a rank, in rank order; None for a rank that is not called.
        answering: the ranks whose results are wanted, in the order in which `collect` wants them.
        collect: their results -> the result.
    """

    calls: list[Call | None]
    answering: tuple[int, ...]
    collect: Callable[[list[Any]], Any]


def keep_columns(value: Any, reads: Sequence[str]) -> Any:
    """Drop the columns that a method does not read from a batch, marked or not; nothing else changes."""
    if isinstance(value, Broadcast):
        return Broadcast(keep_columns(value.value, reads))
    if isinstance(value, Scatter):
        return Scatter([keep_columns(entry, reads) for entry in value.values])
    if not isinstance(value, DataProto | DataProtoFuture):
        return value
    kept = [name for name in value.columns if name in reads]
    return value if len(kept) == len(value.columns) else value.select(kept)


def plan_call(
    mode: DispatchMode, mesh: Mesh, call: Call, *, reads: Sequence[str] = (), rank_zero: bool = False
) -> Plan:
    """Split a group call.

    Args:
        mode: how.
        mesh: the coordinates of all ranks; modes without a mesh use only how many there are.
        call: arguments of the group call.
        reads: columns that travel; empty means all.
        rank_zero: run on rank 0 alone and return its value alone.

    Returns:
        The calls of the ranks and how to put their results together.
    """
    seen = mode.view(mesh) if mode.uses_mesh else Mesh.of_every_rank(len(mesh))
    if reads:
        call = Call(
            tuple(keep_columns(value, reads) for value in call.args),
            {name: keep_columns(value, reads) for name, value in call.kwargs.items()},
        )
    calls = mode.split(seen, call)
    if len(calls) != len(seen):
        raise DispatchError(f"{mode.name}: split gave {len(calls)} calls for {len(seen)} ranks")
    if rank_zero:
        return Plan([calls[0]] + [None] * (len(calls) - 1), (0,), lambda results: results[0])
    answering = tuple(rank for rank in seen.answering if calls[rank] is not None)
    return Plan(calls, answering, lambda results: mode.collect(seen, results))
