"""Errors of the rule rewards."""

from __future__ import annotations

from ostinato.ppo.errors import RewardError


class UnknownDataSourceError(RewardError, LookupError):
    """No scorer is registered for a data source."""


class ScorerError(RewardError, ValueError):
    """A reward function cannot be used at all: not found, not loadable, or with another signature."""


class RowFailedError(RewardError):
    """A row could not be scored and the run was told to stop at that (`on_error=raise`)."""
