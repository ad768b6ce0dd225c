"""Errors of the app. Each tells the config key it is about, what came, what was expected, and what to do."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


class PpoError(Exception):
    """Root of everything that the app refuses."""


@dataclass(frozen=True)
class Problem:
    """One fault of a configuration.

    Attributes:
        key: the dotted key that it is about, as one writes it on the command line.
        text: what came, what was expected, what to do.
        also: other keys that have a part in it.
    """

    key: str
    text: str
    also: tuple[str, ...] = ()

    def __str__(self) -> str:
        """`key: text`."""
        return f"{self.key}: {self.text}"


class ConfigError(PpoError, ValueError):
    """A configuration cannot be run. Holds every fault that was found, not only the first.

    Args:
        problems: the faults.
    """

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems = tuple(problems)
        super().__init__(self.problems)

    def __str__(self) -> str:
        """All faults, one a paragraph."""
        if len(self.problems) == 1:
            return str(self.problems[0])
        return f"{len(self.problems)} problems:\n" + "\n".join(f"  {problem}" for problem in self.problems)


class LaunchError(PpoError, RuntimeError):
    """This machine lacks what the configuration asks for: GPUs, processes, or an installed engine."""


class DataError(PpoError, ValueError):
    """A row of a data file cannot be used."""


class RewardError(PpoError, RuntimeError):
    """A reward function failed and the run was told to stop at that."""


class CheckpointError(PpoError, RuntimeError):
    """A checkpoint cannot be read, or belongs to another run."""


class RunFolderBusy(CheckpointError):  # noqa: N818  (it names a state, not a fault)
    """Another live run holds the run folder."""
