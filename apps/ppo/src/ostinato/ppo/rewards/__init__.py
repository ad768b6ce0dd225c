"""Rule rewards: scorers by data source, a user's own function, and the processes that run them under a time limit.

`build_reward` gives what the loop calls. This package itself imports neither torch nor a tokenizer, so
that the scoring processes start quickly.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ostinato.ppo.rewards.registry import known_data_sources, register_scorer, scorer_for

if TYPE_CHECKING:
    from ostinato.ppo.rewards.manager import RewardFunction, build_reward, register_reward_manager, reward_managers

__all__ = [
    "RewardFunction",
    "build_reward",
    "known_data_sources",
    "register_reward_manager",
    "register_scorer",
    "reward_managers",
    "scorer_for",
]


def __getattr__(name: str) -> Any:
    """Import what needs torch when it is first asked for: the scoring processes do without."""
    if name in ("RewardFunction", "build_reward", "register_reward_manager", "reward_managers"):
        from ostinato.ppo.rewards import manager

        return getattr(manager, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
