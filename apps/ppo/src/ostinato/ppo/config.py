"""The configuration of a run: the app's own sections, and the other wheels' sections composed with them.

Plain dataclasses: this module knows neither Hydra nor files. A key lives in the wheel that reads it. What follows from
several keys (mini-batches a step, whether there is a critic or a reference) is worked out here, once.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeVar

from ostinato.ppo.errors import ConfigError, Problem
from ostinato.ppo.schema import build
from ostinato.ppo.sections import (
    AlgorithmConfig,
    CustomRewardConfig,
    DataConfig,
    KlControlConfig,
    OverlongBufferConfig,
    RewardManagerConfig,
    RolloutCorrectionConfig,
    TrainerConfig,
)
from ostinato.workers.core.config import ActorConfig, CriticConfig, RefConfig, RewardModelConfig
from ostinato.workers.core.config import ActorRolloutRefConfig as WorkerConfig
from ostinato.workers.fsdp.config import FsdpConfig

if TYPE_CHECKING:
    from ostinato.workers.megatron.config import MegatronConfig
else:
    try:
        from ostinato.workers.megatron.config import MegatronConfig
    except ModuleNotFoundError:  # an extra: the keys below `megatron` are taken as they are, a launch is refused
        MegatronConfig = dict[str, Any]

__all__ = [
    "FOLLOWS",
    "ActorRolloutRefConfig",
    "ActorSection",
    "AlgorithmConfig",
    "CriticSection",
    "CustomRewardConfig",
    "DataConfig",
    "KlControlConfig",
    "OverlongBufferConfig",
    "PpoConfig",
    "RefSection",
    "RewardManagerConfig",
    "RewardModelSection",
    "RolloutCorrectionConfig",
    "TrainerConfig",
]

_MEGATRON_SIZES = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "virtual_pipeline_model_parallel_size",
    "context_parallel_size",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
    "sequence_parallel",
)
"""A process has one Megatron layout, so the roles that share it have the actor's."""

FOLLOWS: dict[str, str] = {
    "data.seed": "trainer.seed",
    "actor_rollout_ref.rollout.seed": "trainer.seed",
    "actor_rollout_ref.rollout.prompt_length": "data.max_prompt_length",
    "actor_rollout_ref.rollout.response_length": "data.max_response_length",
    "critic.model.path": "actor_rollout_ref.model.path",
    "critic.ppo_epochs": "actor_rollout_ref.actor.ppo_epochs",
    "actor_rollout_ref.ref.ulysses_sequence_parallel_size": "actor_rollout_ref.actor.ulysses_sequence_parallel_size",
    "actor_rollout_ref.ref.strategy": "actor_rollout_ref.actor.strategy",
    **{
        f"{role}.megatron.{size}": f"actor_rollout_ref.actor.megatron.{size}"
        for role in ("actor_rollout_ref.ref", "critic")
        for size in _MEGATRON_SIZES
    },
}
"""Keys that take another key's value until they are given one of their own."""


@dataclass(frozen=True)
class EngineLayouts:
    """How a role's engine lays it out.

    Attributes:
        fsdp_config: layout, offload and number types of the FSDP engine.
        megatron: parallel sizes, offload and number types of the Megatron engine.
    """

    fsdp_config: FsdpConfig = field(default_factory=FsdpConfig)
    megatron: MegatronConfig = field(default_factory=MegatronConfig)


@dataclass(frozen=True)
class ActorSection(EngineLayouts, ActorConfig):
    """The actor's keys, and how its engine lays it out."""


@dataclass(frozen=True)
class RefSection(EngineLayouts, RefConfig):
    """The reference's keys, and how its engine lays it out."""


@dataclass(frozen=True)
class CriticSection(EngineLayouts, CriticConfig):
    """The critic's keys, and how its engine lays it out."""


Role = TypeVar("Role", ActorSection, CriticSection)


@dataclass(frozen=True)
class RewardModelSection(EngineLayouts, RewardModelConfig):
    """The reward model's keys, where it runs, and how its engine lays it out.

    Attributes:
        enable: score with a reward model instead of a reward function.
        enable_resource_pool: give it GPUs of its own instead of the actor's.
        n_gpus_per_node: GPUs a node of that pool; on a CPU, processes.
        nnodes: nodes of that pool.
    """

    enable: bool = False
    enable_resource_pool: bool = False
    n_gpus_per_node: int = 1
    nnodes: int = 1


@dataclass(frozen=True)
class ActorRolloutRefConfig(WorkerConfig):
    """The policy in its three roles.

    Attributes:
        model: the policy's model; the reference starts from the same.
        actor: training.
        ref: the frozen reference of the KL terms.
        rollout: generation.
    """

    actor: ActorSection = field(default_factory=ActorSection)
    ref: RefSection = field(default_factory=RefSection)


@dataclass(frozen=True)
class PpoConfig:
    """A whole run.

    Attributes:
        data: the prompts.
        actor_rollout_ref: the policy as actor, rollout and reference.
        critic: the value function; only where the estimator learns one.
        reward_model: a reward model; off unless enabled.
        algorithm: from scores to advantages.
        trainer: how long, where, and what the run leaves behind.
        custom_reward_function: the reward function.
        reward_manager: how it is called.
    """

    data: DataConfig = field(default_factory=DataConfig)
    actor_rollout_ref: ActorRolloutRefConfig = field(default_factory=ActorRolloutRefConfig)
    critic: CriticSection = field(default_factory=CriticSection)
    reward_model: RewardModelSection = field(default_factory=RewardModelSection)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    custom_reward_function: CustomRewardConfig = field(default_factory=CustomRewardConfig)
    reward_manager: RewardManagerConfig = field(default_factory=RewardManagerConfig)

    def __post_init__(self) -> None:
        """Work out the optimizer steps of one pass, prompts // prompts, and what the estimator wants of the actor."""
        batch, hybrid, critic = self.data.train_batch_size, self.actor_rollout_ref, self.critic
        actor = replace(
            hybrid.actor,
            num_mini_batches=mini_batches(batch, hybrid.actor.ppo_mini_batch_size),
            sum_pi_squared=self._estimator_names("sum_pi_squared"),
        )
        critic = replace(critic, num_mini_batches=mini_batches(batch, self.critic_mini_batch_size))
        object.__setattr__(self, "actor_rollout_ref", replace(hybrid, actor=actor))
        object.__setattr__(self, "critic", critic)

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> PpoConfig:
        """A configuration from a nested mapping, with the values of `FOLLOWS` filled in.

        Args:
            values: section -> key -> value, as in a YAML file; what is left out keeps its default.

        Raises:
            ConfigError: unknown keys or values of a wrong type, all of them at once.
        """
        config, problems = cls.read(values)
        if problems:
            raise ConfigError(problems)
        return config

    @classmethod
    def read(cls, values: Mapping[str, Any]) -> tuple[PpoConfig, list[Problem]]:
        """As `from_mapping`, but faulty keys have their defaults and the faults are returned beside."""
        problems: list[Problem] = []
        config = build(cls, follow(values), problems)
        faulty = {problem.key for problem in problems}
        return config, [problem for problem in problems if FOLLOWS.get(problem.key) not in faulty]

    @property
    def world_size(self) -> int:
        """Processes that train: one a GPU."""
        return self.trainer.n_gpus_per_node * self.trainer.nnodes

    @property
    def rows_per_step(self) -> int:
        """Responses a step: `train_batch_size` prompts × `rollout.n`."""
        return self.data.train_batch_size * self.actor_rollout_ref.rollout.n

    @property
    def needs_reference(self) -> bool:
        """Whether a KL term asks for a reference model; without one there is no reference forward."""
        return self.algorithm.use_kl_in_reward or self.actor_rollout_ref.actor.use_kl_loss

    @property
    def needs_critic(self) -> bool:
        """Whether the advantage estimator names `values` in its signature."""
        return self._estimator_names("values")

    @property
    def trained_roles(self) -> list[str]:
        """Roles with weights that change."""
        return ["actor", "critic"] if self.needs_critic else ["actor"]

    def _estimator_names(self, keyword: str) -> bool:
        """Whether the advantage estimator names a keyword in its signature; False where it is not known."""
        from ostinato.algos import adv_estimators, get_adv_estimator

        name = self.algorithm.adv_estimator
        return name in adv_estimators() and keyword in inspect.signature(get_adv_estimator(name)).parameters

    @property
    def critic_mini_batch_size(self) -> int:
        """Prompts of one optimizer step of the critic: its own number, or the actor's."""
        return self.critic.ppo_mini_batch_size or self.actor_rollout_ref.actor.ppo_mini_batch_size

    def steps_per_epoch(self, num_prompts: int) -> int:
        """Training steps an epoch over `num_prompts` prompts; an incomplete last batch is left out."""
        return num_prompts // self.data.train_batch_size

    def total_steps(self, num_prompts: int) -> int:
        """Training steps of the whole run over `num_prompts` prompts."""
        planned = self.steps_per_epoch(num_prompts) * self.trainer.total_epochs
        limit = self.trainer.total_training_steps
        return planned if limit is None else limit

    def with_total_steps(self, num_prompts: int) -> PpoConfig:
        """The same run with the lengths of both learning-rate schedules filled in, where they were left at -1.

        Args:
            num_prompts: training prompts, after filtering.
        """
        steps = self.total_steps(num_prompts)
        hybrid, critic = self.actor_rollout_ref, self.critic
        actor = _with_optimizer_steps(hybrid.actor, max(steps - self.trainer.critic_warmup, 0))
        return replace(
            self, actor_rollout_ref=replace(hybrid, actor=actor), critic=_with_optimizer_steps(critic, steps)
        )


def mini_batches(train_batch_size: int, ppo_mini_batch_size: int) -> int:
    """Mini-batches of a batch, both counted in prompts; a mini-batch larger than the batch is the whole batch."""
    return max(train_batch_size // ppo_mini_batch_size, 1)


def sharing_ranks(role: ActorSection | CriticSection) -> int:
    """Ranks that get the same rows: they share the model (Megatron's tp × pp × cp) or each row's tokens (Ulysses)."""
    if role.strategy == "megatron":
        return getattr(role.megatron, "model_size", 1)  # where the wheel is missing, the keys are a plain dict
    return role.ulysses_sequence_parallel_size


def _with_optimizer_steps(role: Role, steps: int) -> Role:
    """A role whose schedule knows its length: steps × passes × mini-batches."""
    if role.optim.total_training_steps != -1:
        return role
    total = steps * role.ppo_epochs * role.num_mini_batches
    return replace(role, optim=replace(role.optim, total_training_steps=total))


def follow(values: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of nested settings in which every key of `FOLLOWS` that is not set has the value that it follows.

    Only values that were set are copied: where both are left out, both keep their (equal) defaults.
    """
    filled = _copy(values)
    for key, source in FOLLOWS.items():
        value = _get(filled, source)
        if value is not None and _get(filled, key) is None:
            *path, name = key.split(".")
            section = filled
            for part in path:
                section = section.setdefault(part, {})
            section[name] = value
    return filled


def _copy(values: Any) -> Any:
    return {name: _copy(value) for name, value in values.items()} if isinstance(values, Mapping) else values


def _get(values: Any, key: str) -> Any:
    for part in key.split("."):
        values = values.get(part) if isinstance(values, Mapping) else None
    return values
