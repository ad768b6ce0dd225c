"""Rule rewards: scorers by data source, a user's own function, and the processes that run them under a time limit.

`RewardFunction` (in `manager`) is what the loop calls. This package itself imports neither torch nor a tokenizer, so
that the scoring processes start quickly.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ostinato.ppo.rewards.registry import known_data_sources, register_scorer, scorer_for

if TYPE_CHECKING:
    from ostinato.ppo.rewards.manager import RewardFunction

__all__ = ["RewardFunction", "known_data_sources", "register_scorer", "scorer_for"]


def __getattr__(name: str) -> Any:
    """Import `RewardFunction` when it is first asked for: it needs torch, the scoring processes do not."""
    if name == "RewardFunction":
        from ostinato.ppo.rewards.manager import RewardFunction

        return RewardFunction
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
