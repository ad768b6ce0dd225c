"""`register`: how a worker method says what a group call does with its arguments and results."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
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
        blocking: whether the group call waits; otherwise it returns a handle with `.get()`.
        reads: columns that travel to the workers; empty means all of them. Of the names here those that a batch has
            are sent: a column that the method cannot do without is the method's own check.
        writes: columns that the method adds; documentation that tools read.
        mutates: columns that the method changes in place.
        mesh: name of the mesh whose coordinates are used.
    """

    dispatch_mode: DispatchMode
    execute_mode: Execute
    blocking: bool
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    mutates: tuple[str, ...]
    mesh: str


def register(
    dispatch_mode: DispatchMode | str = Dispatch.ALL_TO_ALL,
    execute_mode: Execute = Execute.ALL,
    blocking: bool = True,
    reads: Sequence[str] = (),
    writes: Sequence[str] = (),
    mutates: Sequence[str] = (),
    mesh: str = "train",
) -> Callable[[F], F]:
    """Mark a worker method as callable on a group.

    Args:
        dispatch_mode: a member of `Dispatch`, or the name of a mode that `register_dispatch_mode` added.
        execute_mode: `Execute.RANK_ZERO` runs the method on rank 0 alone and returns its value alone.
        blocking: with False the group call returns a handle at once; `.get()` waits.
        reads: columns to send; empty sends all.
        writes: columns that the method adds.
        mutates: columns that the method changes in place.
        mesh: which of the worker's meshes splits the rows.

    Returns:
        A decorator that returns the method itself, with a `Registration` attached.

    Raises:
        RegistrationError: the combination cannot work.
        UnknownDispatchMode: no mode has that name.
    """
    mode = dispatch_mode_named(dispatch_mode) if isinstance(dispatch_mode, str) else dispatch_mode
    for field, names in (("reads", reads), ("writes", writes), ("mutates", mutates)):
        if isinstance(names, str):
            raise RegistrationError(f"register: {field}={names!r} is one string; pass a tuple of column names")
    if execute_mode is Execute.RANK_ZERO and mode.uses_mesh:
        raise RegistrationError(
            f"register: {mode.name} splits rows over all data-parallel ranks, Execute.RANK_ZERO runs one; "
            "use Dispatch.RANK_ZERO, or Execute.ALL"
        )
    record = Registration(mode, execute_mode, blocking, tuple(reads), tuple(writes), tuple(mutates), mesh)

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
