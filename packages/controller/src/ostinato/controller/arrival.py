"""The worker's side of a call: arguments become batches, and a result becomes blocks for the store.

Pure functions over what a store hands out; the in-process group and the Ray actor both stand on them.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from ostinato.controller.colocate import Failure, NeededCallFailed
from ostinato.controller.dispatch import is_metrics
from ostinato.controller.errors import ColumnWritten, ResultMismatch
from ostinato.controller.register import Registration
from ostinato.protocol import DataProto
from ostinato.protocol.blocks import Compact, PackedBlock, kind_of
from ostinato.protocol.layout import Layout

SPLIT_BYTES = 1024**2
"""A declared column of at least so many bytes a rank lies in the store for itself."""


@dataclass(frozen=True)
class Contract(Compact):
    """What both sides of a call know of its method.

    Attributes:
        gives_rows: whether its results are rows that stay in the store.
        reads: columns that arrive as views; empty: none is declared, and all are copies.
        mutates: columns that arrive as copies.
        writes: columns that it adds.
        keeps_rows: whether its result is `writes`, row by row.
        checked: whether shared columns are compared before and after (debug mode).
    """

    gives_rows: bool = False
    reads: tuple[str, ...] = ()
    mutates: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    keeps_rows: bool = False
    checked: bool = False

    @staticmethod
    def of(record: Registration, checked: bool) -> Contract:
        """The contract that a registration makes."""
        rows = record.dispatch_mode.gives_rows
        return Contract(rows, record.reads, record.mutates, record.writes, record.keeps_rows, checked)

    @property
    def private(self) -> Collection[str] | bool:
        """Columns that must arrive as copies, or all."""
        return self.mutates if self.reads else True

    @property
    def num_slots(self) -> int:
        """Objects that a call leaves: rows as blocks (numbers, cells, then each declared column), else the value."""
        if not self.gives_rows:
            return 1
        return len(self.writes) if self.keeps_rows else 2 + len(self.writes)


@dataclass(frozen=True)
class Absent:
    """Stands in a slot where a call failed."""

    failure: Failure


@dataclass(frozen=True)
class Arguments(Compact):
    """The arguments of one call on one rank, laid out flat: the values themselves travel beside.

    Attributes:
        entries: for each argument the position of its value, or a batch's layout and the positions that it needs.
        keywords: names of the last entries; the ones before them are positional.
    """

    entries: tuple[int | tuple[Layout, tuple[int, ...]], ...] = ()
    keywords: tuple[str, ...] = ()

    def build(self, values: Sequence[Any], private: Collection[str] | bool) -> tuple[list[Any], dict[str, Any]]:
        """Build the arguments.

        Args:
            values: what the positions stand for.
            private: columns that must not share memory with `values`.

        Raises:
            NeededCallFailed: a value is what a failed call left.
        """
        for value in values:
            if isinstance(value, Absent):
                raise NeededCallFailed(value.failure)
        built = [
            values[entry]
            if isinstance(entry, int)
            else entry[0].build([values[position] for position in entry[1]], private)
            for entry in self.entries
        ]
        split = len(built) - len(self.keywords)
        return built[:split], dict(zip(self.keywords, built[split:], strict=True))


@dataclass(frozen=True)
class Left(Compact):
    """What a method that gives rows returned, without the rows.

    Attributes:
        kind: "rows", "nothing" (None), "metrics", or the type's name where it is something else.
        num_rows: rows.
        columns: column -> (slot, what `kind_of` says).
        meta: meta entries, metrics included.
        value: the metrics, where they are all.
    """

    kind: str
    num_rows: int = 0
    columns: dict[str, tuple[int, str]] = field(default_factory=dict)
    meta: dict[str, Any] = field(default_factory=dict)
    value: Any = None


def left_by(result: Any, contract: Contract, expected: int | None) -> Left:
    """Describe a result and say which slot each of its columns belongs into.

    Args:
        result: what the method returned.
        contract: its contract.
        expected: rows of the first batch that it got; None where there is none.

    Raises:
        ResultMismatch: it promised other columns or rows.
    """
    if not isinstance(result, DataProto):
        if contract.keeps_rows:
            raise ResultMismatch(
                f"keeps_rows=True: expected a DataProto of {contract.writes}, got {type(result).__name__}"
            )
        if result is None:
            return Left("nothing")
        return Left("metrics", value=result) if is_metrics(result) else Left(type(result).__name__)
    columns = result._columns()
    if contract.keeps_rows:
        _check_promise(result, contract, expected)
        slots = {name: contract.writes.index(name) for name in columns}
    else:
        slots = {name: _slot(name, column, contract.writes) for name, column in columns.items()}
    kinds = {name: (slots[name], kind_of(column)) for name, column in columns.items()}
    return Left("rows", len(result), kinds, result.meta_info)


def _check_promise(result: DataProto, contract: Contract, expected: int | None) -> None:
    others = sorted(result.meta_info.keys() - {"metrics"})
    if set(result.columns) != set(contract.writes) or len(result) != expected or others:
        raise ResultMismatch(
            f"keeps_rows=True: expected the columns {list(contract.writes)}, {expected} rows and no meta entry but "
            f"metrics, got {list(result.columns)}, {len(result)} rows and {others}; return that, or drop keeps_rows"
        )


def _slot(name: str, column: torch.Tensor | np.ndarray, writes: Sequence[str]) -> int:
    cells = isinstance(column, np.ndarray) and column.dtype == object
    if name in writes and not cells and _bytes(column) >= SPLIT_BYTES:
        return 2 + writes.index(name)
    return 1 if cells else 0


def _bytes(column: torch.Tensor | np.ndarray) -> int:
    if isinstance(column, np.ndarray):
        return column.nbytes
    return column.numel() * column.element_size()


def packed(result: Any, left: Left, num_slots: int) -> list[Any]:
    """A result's columns as blocks, each in its slot."""
    slots: list[Any] = [None] * num_slots
    if not isinstance(result, DataProto):
        return slots
    for slot in {slot for slot, _ in left.columns.values()}:
        names = [name for name, (place, _) in left.columns.items() if place == slot]
        tensors, arrays = result._tensors(), result._arrays()
        slots[slot] = PackedBlock.of(
            {name: tensors[name] for name in names if name in tensors},
            {name: arrays[name] for name in names if name in arrays},
        )
    return slots


def batches_in(args: Iterable[Any]) -> list[DataProto]:
    """The batches among arguments."""
    return [value for value in args if isinstance(value, DataProto)]


def served(
    call: Callable[[list[Any], dict[str, Any]], Any],
    arguments: Arguments,
    values: Sequence[Any],
    contract: Contract,
    method: str,
    *,
    answers: bool = True,
) -> tuple[Any, Left | None]:
    """Build the arguments, call the method and describe its result.

    Args:
        call: calls it with positional and keyword arguments.
        arguments: how the arguments are built.
        values: of what.
        contract: the method's contract.
        method: its name, for errors.
        answers: whether the result counts; nothing is said of one that does not.

    Returns:
        The result, and what is to be said of it where it is rows.

    Raises:
        ColumnWritten: debug mode, and the method changed a column that others read too.
        ResultMismatch: it broke a promise of its registration.
    """
    args, kwargs = arguments.build(values, contract.private)
    batches = batches_in([*args, *kwargs.values()])
    expected = len(batches[0]) if batches else None
    before = [_prints(batch, contract.private) for batch in batches] if contract.checked else []
    result = call(args, kwargs)
    for batch, prints in zip(batches, before, strict=contract.checked):
        now = _prints(batch, contract.private)
        if changed := [name for name, value in prints.items() if now.get(name, value) != value]:
            raise ColumnWritten(
                f"method {method!r} wrote into {changed}, which it shares with others: declare them in mutates=(...), "
                "or write into a copy"
            )
    return result, left_by(result, contract, expected) if contract.gives_rows and answers else None


def _prints(batch: DataProto, private: Collection[str] | bool) -> dict[str, int]:
    """A checksum of each column that is shared."""
    if private is True:
        return {}
    mine = () if private is False else private
    tensors, arrays = batch._tensors(), batch._arrays()
    prints = {}
    for name, array in arrays.items():
        if name not in mine:
            prints[name] = zlib.crc32(repr(array.tolist()).encode() if array.dtype == object else array.tobytes())
    for name, tensor in tensors.items():
        if name not in mine:
            plain = tensor.values() if tensor.is_nested else tensor
            octets = plain.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
            prints[name] = zlib.crc32(octets.numpy())
    return prints
