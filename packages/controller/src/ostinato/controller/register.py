"""`register`: how a worker method says what a group call does with its arguments and results."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TypeVar

from ostinato.controller.dispatch import Dispatch, DispatchMode, dispatch_mode_named
from ostinato.controller.errors import RegistrationError

F = TypeVar("F", bound=Callable[..., object])

_ATTRIBUTE = "__ostinato_registration__"


class Execute(Enum):
    """Which ranks run a method."""

    ALL = "all"
    RANK_ZERO = "rank_zero"


@dataclass(frozen=True)
class Registration:
    """What `register` attached to a method.

    Attributes:
        dispatch_mode: how arguments are split over the ranks and results are put together.
        execute_mode: which ranks run the method.
        blocking: whether the group call waits for the ranks to end.
        reads: columns that travel to the workers; empty means all of them. Of the names here those that a batch has
            are sent; `requires` says which it cannot do without.
        writes: columns that the method adds.
        mutates: columns that the method changes in place.
        mesh: name of the mesh whose coordinates are used.
        requires: columns without which a call is refused.
        keeps_rows: whether the result has the columns of `writes` and no others, one row for each row it got.
    """

    dispatch_mode: DispatchMode
    execute_mode: Execute
    blocking: bool
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    mutates: tuple[str, ...]
    mesh: str
    keeps_rows: bool = False
    requires: tuple[str, ...] = ()

    @property
    def travels(self) -> tuple[str, ...]:
        """Columns to send; empty means all."""
        return (*self.reads, *self.mutates, *self.requires) if self.reads else ()


def register(
    dispatch_mode: DispatchMode | str = Dispatch.ALL_TO_ALL,
    execute_mode: Execute = Execute.ALL,
    blocking: bool | None = None,
    reads: Sequence[str] = (),
    writes: Sequence[str] = (),
    mutates: Sequence[str] = (),
    mesh: str = "train",
    keeps_rows: bool = False,
    requires: Sequence[str] = (),
) -> Callable[[F], F]:
    """Mark a worker method as callable on a group.

    Args:
        dispatch_mode: a member of `Dispatch`, or the name of a mode that `register_dispatch_mode` added.
        execute_mode: `Execute.RANK_ZERO` runs the method on rank 0 alone and returns its value alone.
        blocking: True waits until the ranks have ended; False returns a handle at once, whose `.get()` waits. None
            waits unless the result is rows, which stay where they are: a `DataProtoFuture` is such a handle.
        reads: columns to send; empty sends all. They arrive as views of memory that others read too and must not be
            written to; without `reads` all columns are copies.
        writes: columns that the method adds. Each lies in the store for itself where it is large.
        mutates: columns that the method changes in place; they are sent too, and arrive as copies.
        mesh: which of the worker's meshes splits the rows.
        keeps_rows: the result has the columns of `writes` and no others, one row for each row of the first batch that
            it got, and no meta entry but metrics. The driver then knows the result before the call has ended and can
            send calls that depend on it at once; a result that is otherwise fails the call.
        requires: columns that the first batch of a call must have: `protocol.columns.validate` looks for them on the
            driver, before anything is sent. They travel and arrive as those of `reads` do.

    Returns:
        A decorator that returns the method itself, with a `Registration` attached.

    Raises:
        RegistrationError: the combination cannot work.
        UnknownDispatchMode: no mode has that name.
    """
    mode = dispatch_mode_named(dispatch_mode) if isinstance(dispatch_mode, str) else dispatch_mode
    if not isinstance(mode, DispatchMode):
        hint = "; write @register(...) with brackets" if callable(mode) else ""
        raise RegistrationError(f"register: expected a dispatch mode or its name, got {type(mode).__name__}{hint}")
    if not isinstance(execute_mode, Execute) or not isinstance(blocking, bool | None) or not isinstance(mesh, str):
        raise RegistrationError(
            "register: execute_mode is Execute.ALL or Execute.RANK_ZERO, blocking True, False or None, mesh a name; "
            f"got {execute_mode!r}, {blocking!r} and {mesh!r}"
        )
    for field, names in (("reads", reads), ("writes", writes), ("mutates", mutates), ("requires", requires)):
        if isinstance(names, str):
            raise RegistrationError(f"register: {field}={names!r} is one string; pass a tuple of column names")
        if not isinstance(names, Iterable) or not all(isinstance(name, str) for name in names):
            raise RegistrationError(f"register: {field} must be a tuple of column names, got {names!r}")
    if execute_mode is Execute.RANK_ZERO and mode.uses_mesh:
        raise RegistrationError(
            f"register: {mode.name} splits rows over all data-parallel ranks, Execute.RANK_ZERO runs one; "
            "use Dispatch.RANK_ZERO, or Execute.ALL"
        )
    if keeps_rows and not (mode.gives_rows and writes):
        raise RegistrationError(
            f"register: keeps_rows=True says what columns and rows come back: it needs writes=(...) and a mode that "
            f"collects rows, got writes={tuple(writes)} and {mode.name}"
        )
    waits = not mode.gives_rows if blocking is None else blocking
    record = Registration(
        mode,
        execute_mode,
        waits,
        tuple(reads),
        tuple(writes),
        tuple(mutates),
        mesh,
        keeps_rows,
        tuple(requires),
    )

    def mark(method: F) -> F:
        setattr(method, _ATTRIBUTE, record)
        return method

    return mark


def registration_of(method: object) -> Registration | None:
    """Return what `register` attached to this function, or None."""
    record = getattr(method, _ATTRIBUTE, None)
    return record if isinstance(record, Registration) else None


def registered_methods(cls: type) -> Iterator[tuple[str, Callable[..., object], Registration]]:
    """Yield name, function and registration of every registered method of a class, in order of name.

    A method that overrides a registered one without a decorator of its own keeps the registration that it overrides.
    """
    for name in dir(cls):
        function = inspect.getattr_static(cls, name)
        if not callable(function):
            continue
        for base in cls.__mro__:
            record = registration_of(base.__dict__.get(name))
            if record is not None:
                yield name, function, record
                break
