"""Names of columns: what can be one, reading them from arguments, and giving new ones."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ostinato.protocol.errors import ArgumentError, ColumnConflictError, ColumnTypeError, MissingColumnError


def column_name(name: object) -> str:
    """Check that something can be a column's name.

    Raises:
        ColumnTypeError: it is no text, or empty.
    """
    if not isinstance(name, str) or not name:
        raise ColumnTypeError(
            f"DataProto: a column's name is a non-empty string, got {name!r}; nested keys are not taken"
        )
    return name


def wanted_names(where: str, names: Any, held: Sequence[str], batch: str) -> dict[str, None]:
    """Read names of columns that must be there.

    Args:
        where: the operation, for errors.
        names: iterable of names; a lone string is one name.
        held: the columns there are.
        batch: what holds them, for errors.

    Returns:
        The names in order, each once.

    Raises:
        ArgumentError: no names, but something else.
        MissingColumnError: a name is no column.
    """
    if not isinstance(names, Iterable):
        raise ArgumentError(f"{where}: expected names of columns, got {type(names).__name__}; pass a list of strings")
    wanted = dict.fromkeys([names] if isinstance(names, str) else names)
    if missing := [name for name in wanted if name not in held]:
        raise MissingColumnError(f"{where}: no column {missing}; {batch} has {list(held)}")
    return wanted


def new_names(names: Any, held: Sequence[str], batch: str) -> list[str]:
    """The columns' names after a rename, in their order.

    Args:
        names: old name -> new name.
        held: the columns there are.
        batch: what holds them, for errors.

    Raises:
        ArgumentError: no dict.
        MissingColumnError: an old name is no column.
        ColumnTypeError: a new name cannot be one.
        ColumnConflictError: two columns would have one name.
    """
    if not isinstance(names, Mapping):
        raise ArgumentError(f"rename: expected a dict of old name -> new name, got {type(names).__name__}")
    wanted_names("rename", names, held, batch)
    new = [column_name(names.get(name, name)) for name in held]
    if len(set(new)) < len(new):
        twice = sorted({name for name in new if new.count(name) > 1})
        raise ColumnConflictError(f"rename: {dict(names)} would give two columns the name {twice}; drop one first")
    return new
