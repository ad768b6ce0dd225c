"""The role workers and the one update loop of ostinato, written against the TrainEngine contract."""

from __future__ import annotations

from ostinato.workers.core.actor import ActorRolloutRefWorker
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
from ostinato.workers.core.critic import CriticWorker
from ostinato.workers.core.engine import StepStats, TokenOutputs, TrainEngine
from ostinato.workers.core.errors import WorkersError
from ostinato.workers.core.microbatch import PackedRows, micro_batches, pack, pack_last
from ostinato.workers.core.reward import RewardModelWorker
from ostinato.workers.core.update import update

__all__ = [
    "ActorConfig",
    "ActorRolloutRefConfig",
    "ActorRolloutRefWorker",
    "CriticConfig",
    "CriticWorker",
    "ModelConfig",
    "OptimConfig",
    "PackedRows",
    "PolicyLossConfig",
    "RefConfig",
    "RewardModelConfig",
    "RewardModelWorker",
    "StepStats",
    "TokenOutputs",
    "TrainEngine",
    "WorkersError",
    "micro_batches",
    "pack",
    "pack_last",
    "update",
]
