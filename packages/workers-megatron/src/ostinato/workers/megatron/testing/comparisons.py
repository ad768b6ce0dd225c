"""Comparisons that several ranks make side by side: all that fail are told at the end."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

logger = logging.getLogger(__name__)


class Comparisons:
    """Comparisons by name; one that fails neither keeps the other ranks waiting nor hides what comes after it."""

    def __init__(self) -> None:
        self.failed: list[str] = []
        self._within: list[str] = []

    @contextmanager
    def within(self, title: str) -> Iterator[None]:
        """Name what is compared inside; errors pass."""
        self._within.append(title)
        try:
            yield
        finally:
            self._within.pop()

    @contextmanager
    def of(self, name: str) -> Iterator[None]:
        """Note a comparison that fails, and go on; inside are no calls that other ranks take part in."""
        try:
            yield
        except AssertionError as error:
            self.failed.append(f"{', '.join([*self._within, name])}: {error}")
            logger.warning(self.failed[-1])  # a rank that is killed later has no other way to tell


@contextmanager
def all_compared() -> Iterator[Comparisons]:
    """What fails inside is raised at the end, all of it, or noted with what ends it sooner.

    Raises:
        AssertionError: comparisons failed on this rank; the text holds each.
    """
    compared = Comparisons()
    try:
        yield compared
    except Exception as error:
        for failure in compared.failed:
            error.add_note(f"before it: {failure}")
        raise
    if compared.failed:
        failures = "\n".join(compared.failed)
        raise AssertionError(f"{len(compared.failed)} comparisons failed.\n{failures}")
