"""The role workers and the one update loop of ostinato, written against the TrainEngine contract.

The configs are imported with the package, the workers when they are first asked for: reading a configuration needs
neither the controller nor a batch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ostinato.workers.core.config import (
    ActorConfig,
    ActorRolloutRefConfig,
    CriticConfig,
    ModelConfig,
    OptimConfig,
    PolicyLossConfig,
    RefConfig,
    RewardModelConfig,
)
from ostinato.workers.core.errors import WorkersError

if TYPE_CHECKING:
    from ostinato.workers.core.actor import ActorRolloutRefWorker
    from ostinato.workers.core.critic import CriticWorker
    from ostinato.workers.core.reward import RewardModelWorker

__all__ = [
    "ActorConfig",
    "ActorRolloutRefConfig",
    "ActorRolloutRefWorker",
    "CriticConfig",
    "CriticWorker",
    "ModelConfig",
    "OptimConfig",
    "PolicyLossConfig",
    "RefConfig",
    "RewardModelConfig",
    "RewardModelWorker",
    "WorkersError",
]

_WORKERS = {"ActorRolloutRefWorker": "actor", "CriticWorker": "critic", "RewardModelWorker": "reward"}


def __getattr__(name: str) -> Any:
    """Import a worker when it is first asked for."""
    if name in _WORKERS:
        return getattr(import_module(f"{__name__}.{_WORKERS[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
