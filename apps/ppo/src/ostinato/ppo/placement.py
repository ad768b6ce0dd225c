"""Who runs where: the roles that a configuration needs, the pools they lie on, and the groups that come of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ostinato.controller import WorkerSpec
from ostinato.ppo.config import PpoConfig

ENGINES = {"fsdp": "ostinato.workers.fsdp:FsdpEngine", "megatron": "ostinato.workers.megatron:MegatronEngine"}
"""`strategy` -> import path of its TrainEngine."""

POOL, REWARD_POOL = "global_pool", "reward_pool"


@dataclass(frozen=True)
class Placement:
    """The roles of a run and the pool of each; roles of one pool share its processes."""

    roles: dict[str, WorkerSpec]
    pools: dict[str, str]


def place(config: PpoConfig) -> Placement:
    """Roles and pools of a configuration.

    Args:
        config: the whole run.

    Returns:
        `actor` always (with the reference in the same worker where a KL term asks for one), `critic` where the
        estimator learns a value function, `reward_model` where one is enabled, on the shared pool or on its own.
    """
    from ostinato.workers.core import ActorRolloutRefWorker, CriticWorker, RewardModelWorker

    hybrid = config.actor_rollout_ref
    role = "actor_rollout_ref" if config.needs_reference else "actor_rollout"
    roles: dict[str, WorkerSpec[Any]] = {
        "actor": WorkerSpec(ActorRolloutRefWorker, hybrid, role=role, engine=ENGINES[hybrid.actor.strategy])
    }
    pools = {"actor": POOL}
    if config.needs_critic:
        roles["critic"] = WorkerSpec(CriticWorker, config.critic, engine=ENGINES[config.critic.strategy])
        pools["critic"] = POOL
    if config.reward_model.enable:
        reward = config.reward_model
        roles["reward_model"] = WorkerSpec(
            RewardModelWorker, reward, engine=ENGINES[reward.strategy], policy_path=hybrid.model.resolved_tokenizer_path
        )
        pools["reward_model"] = REWARD_POOL if reward.enable_resource_pool else POOL
    return Placement(roles, pools)


def open_backend(config: PpoConfig) -> Any:
    """The backend of `trainer.backend`, holding its processes until `shutdown`.

    Raises:
        ResourcesUnavailable: the cluster has less than what is asked for.
    """
    if config.trainer.backend == "local":
        from ostinato.controller.local import LocalBackend

        return LocalBackend(config.trainer.device)
    from ostinato.controller.ray import RayBackend, ResourcePool, ResourcePoolManager

    trainer, reward = config.trainer, config.reward_model
    on_gpu = trainer.device == "cuda"
    pools = [ResourcePool(POOL, [trainer.n_gpus_per_node] * trainer.nnodes, use_gpu=on_gpu)]
    if reward.enable and reward.enable_resource_pool:
        pools.append(ResourcePool(REWARD_POOL, [reward.n_gpus_per_node] * reward.nnodes, use_gpu=on_gpu))
    return RayBackend(ResourcePoolManager(pools), call_timeout_s=trainer.call_timeout_seconds)
