"""Whose time it is: calls end while the driver is somewhere else, and the time goes to who sent them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar


class Watch:
    """The time of one stage: what passes inside, less waits for other stages' calls, plus others' waits for its own.

    A driver that runs ahead of its workers waits late, and perhaps in another stage. The sum over all stages is the
    time that has passed, as if each stage had waited for its calls itself.
    """

    def __init__(self) -> None:
        self._begun = time.perf_counter()
        self._inside: float | None = None
        self._moved = 0.0

    @property
    def seconds(self) -> float:
        """The stage's time as it is known by now; complete once all of its calls were waited for."""
        inside = self._inside if self._inside is not None else time.perf_counter() - self._begun
        return inside + self._moved

    def waited(self, seconds: float, owner: Watch | None) -> None:
        """Book a wait inside this stage for a call of another one."""
        if owner is self or seconds <= 0:
            return
        self._moved -= seconds
        if owner is not None:
            owner._moved += seconds

    def _end(self) -> None:
        self._inside = time.perf_counter() - self._begun


_current: ContextVar[Watch | None] = ContextVar("ostinato_watch", default=None)


def current_watch() -> Watch | None:
    """The stage that is under way here."""
    return _current.get()


@contextmanager
def watch() -> Iterator[Watch]:
    """Measure a stage: calls that are sent inside belong to it, wherever they are waited for.

    Yields:
        Its watch; `seconds` may grow after the block, when a call is waited for.
    """
    mine = Watch()
    token = _current.set(mine)
    try:
        yield mine
    finally:
        mine._end()
        _current.reset(token)


def book(seconds: float, owner: Watch | None) -> None:
    """Book a wait for a call of `owner`, made here and now."""
    here = _current.get()
    if here is not None:
        here.waited(seconds, owner)
    elif owner is not None:
        owner._moved += max(0.0, seconds)
