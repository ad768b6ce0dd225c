"""The configuration of a run: the app's own sections, and the other wheels' sections composed with them.

Plain dataclasses: this module knows neither Hydra nor files. A key lives in the wheel that reads it. What follows from
several keys (mini-batches a step, whether there is a critic or a reference) is worked out here, once.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeVar

from ostinato.ppo.errors import ConfigError, Problem
from ostinato.ppo.schema import build
from ostinato.workers.core.config import ActorConfig, CriticConfig, RefConfig, RewardModelConfig
from ostinato.workers.core.config import ActorRolloutRefConfig as WorkerConfig
from ostinato.workers.fsdp.config import FsdpConfig

NO_KEY = {"derived": True}
"""Metadata of a field of the wheels below that a user cannot set: it is worked out, or no engine here reads it."""

FOLLOWS: dict[str, str] = {
    "data.seed": "trainer.seed",
    "actor_rollout_ref.rollout.seed": "trainer.seed",
    "actor_rollout_ref.rollout.prompt_length": "data.max_prompt_length",
    "actor_rollout_ref.rollout.response_length": "data.max_response_length",
    "critic.model.path": "actor_rollout_ref.model.path",
    "critic.ppo_epochs": "actor_rollout_ref.actor.ppo_epochs",
}
"""Keys that take another key's value until they are given one of their own."""


@dataclass(frozen=True)
class DataConfig:
    """The prompts.

    Attributes:
        train_files: parquet files with the training prompts; one file or a list.
        val_files: parquet files for validation; may stay empty where nothing validates.
        prompt_key: column that holds the prompt: a list of chat messages, or plain text.
        train_batch_size: prompts a step (each is answered `actor_rollout_ref.rollout.n` times).
        val_batch_size: prompts a validation batch; null takes them all at once.
        max_prompt_length: tokens a prompt may have, chat template included; shorter ones are padded on the left.
        max_response_length: tokens a response may have.
        filter_overlong_prompts: drop longer prompts when the data is read.
        truncation: what becomes of a longer prompt: `error`, or cut on the `left`, the `right`, or in the `middle`.
        shuffle: a new order of the prompts each epoch.
        seed: seeds that order; follows `trainer.seed`.
        train_max_samples: use only so many training rows; -1 uses all.
        val_max_samples: use only so many validation rows; -1 uses all.
        apply_chat_template_kwargs: extra arguments of the tokenizer's chat template, for instance `enable_thinking`.
    """

    train_files: list[str] = field(default_factory=list)
    val_files: list[str] = field(default_factory=list)
    prompt_key: str = "prompt"
    train_batch_size: int = 1024
    val_batch_size: int | None = None
    max_prompt_length: int = 512
    max_response_length: int = 512
    filter_overlong_prompts: bool = False
    truncation: Literal["error", "left", "right", "middle"] = "error"
    shuffle: bool = True
    seed: int = 0
    train_max_samples: int = -1
    val_max_samples: int = -1
    apply_chat_template_kwargs: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Take one file for a list of one, and `~` for the home folder."""
        for name in ("train_files", "val_files"):
            files = getattr(self, name) or []
            files = [files] if isinstance(files, str) else files
            object.__setattr__(self, name, [os.path.expanduser(file) for file in files])
        _at_least(self, 1, "train_batch_size", "max_prompt_length", "max_response_length", "val_batch_size")


@dataclass(frozen=True)
class KlControlConfig:
    """The coefficient of the KL penalty in the reward.

    Attributes:
        type: `fixed`, or `adaptive` (steered towards `target_kl`).
        kl_coef: the coefficient, or the first one.
        horizon: rows over which the adaptive controller corrects.
        target_kl: the KL that the adaptive controller aims at, in nats a token.
    """

    type: Literal["fixed", "adaptive"] = "fixed"
    kl_coef: float = 0.001
    horizon: int = 10000
    target_kl: float = 0.1

    def __post_init__(self) -> None:
        """Refuse numbers that the controllers cannot use."""
        _at_least(self, 1, "horizon")
        _at_least(self, 0, "kl_coef")
        if self.target_kl <= 0:
            raise ValueError(f"target_kl: expected a number above 0, got {self.target_kl}")


@dataclass(frozen=True)
class RolloutCorrectionConfig:
    """What is done about the gap between the sampler's and the trainer's log-probabilities.

    Attributes:
        rollout_is: level of the importance weights: null (none), `token` or `sequence`.
        rollout_is_threshold: `"2.0"` truncates weights from above; a band `"0.5_2.0"` sets those outside to 0.
        rollout_is_batch_normalize: divide the weights by their mean over the batch.
        rollout_rs: rejection: null (none) or level and measure, for instance `token_k1` or `sequence_k3`.
        rollout_rs_threshold: bounds on the ratio outside which tokens or sequences are rejected, `"0.5_5.0"`.
    """

    rollout_is: str | None = None
    rollout_is_threshold: str = "2.0"
    rollout_is_batch_normalize: bool = False
    rollout_rs: str | None = None
    rollout_rs_threshold: str | None = None

    @property
    def enabled(self) -> bool:
        """Whether anything is corrected."""
        return self.rollout_is is not None or self.rollout_rs is not None


@dataclass(frozen=True)
class AlgorithmConfig:
    """From scores to advantages.

    Attributes:
        adv_estimator: the advantage estimator: `gae`, `grpo`, `rloo`, … (`gae` learns a critic).
        gamma: discount a token.
        lam: λ of GAE.
        norm_adv_by_std_in_grpo: divide by the group's standard deviation; false is Dr.GRPO.
        gdpo_reward_keys: `gdpo`: the reward function's result keys that are normalised apart.
        gdpo_reward_weights: `gdpo`: their weights; empty weighs all alike.
        use_kl_in_reward: subtract a KL penalty from the reward (needs a reference).
        kl_penalty: its estimator: `kl`, `abs`, `mse`, `low_var_kl`, …
        kl_ctrl: its coefficient.
        rollout_correction: what is done about the gap between sampler and trainer.
    """

    adv_estimator: str = "gae"
    gamma: float = 1.0
    lam: float = 1.0
    norm_adv_by_std_in_grpo: bool = True
    gdpo_reward_keys: list[str] = field(default_factory=list)
    gdpo_reward_weights: list[float] = field(default_factory=list)
    use_kl_in_reward: bool = False
    kl_penalty: str = "kl"
    kl_ctrl: KlControlConfig = field(default_factory=KlControlConfig)
    rollout_correction: RolloutCorrectionConfig = field(default_factory=RolloutCorrectionConfig)

    def __post_init__(self) -> None:
        """Refuse discounts outside 0..1."""
        for name in ("gamma", "lam"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name}: expected a number from 0 to 1, got {getattr(self, name)}")


@dataclass(frozen=True)
class TrainerConfig:
    """The run: how long, where, and what it leaves behind.

    Attributes:
        total_epochs: passes over the training data.
        total_training_steps: stop after so many steps, whatever the epochs; null counts epochs.
        n_gpus_per_node: GPUs a node; on a CPU, processes a node.
        nnodes: nodes.
        device: `auto` (CUDA where there is any, decided at launch), `cuda` or `cpu`.
        backend: `ray`, or `local`: everything in this process, one rank, so that breakpoints work.
        seed: seeds data order and sampling (`data.seed`, `actor_rollout_ref.rollout.seed`).
        project_name: name of the project in the trackers and of its folder under `checkpoints/`.
        experiment_name: name of this run in the trackers and of its folder.
        default_local_dir: where checkpoints and logs go.
        logger: where metrics go: `console`, `tensorboard`, …; one name or a list.
        save_freq: steps between checkpoints; -1 saves none.
        test_freq: steps between validations; -1 validates never.
        val_before_train: validate before the first step.
        val_only: validate once and stop.
        resume_mode: `auto` (the newest whole checkpoint of `default_local_dir`, if any), `disable`, `resume_path`.
        resume_from_path: the checkpoint folder (`…/global_step_N`) for `resume_path`.
        max_actor_ckpt_to_keep: whole checkpoints to keep; null keeps all.
        critic_warmup: steps in which only the critic learns.
        balance_batch: deal rows over ranks by length; false leaves them in order.
        log_val_generations: so many validation samples are logged as text.
        call_timeout_seconds: a worker call that takes longer counts as hung and ends the run.
        dry_run: check everything, print the plan, and stop.
    """

    total_epochs: int = 1
    total_training_steps: int | None = None
    n_gpus_per_node: int = 1
    nnodes: int = 1
    device: Literal["auto", "cuda", "cpu"] = "auto"
    backend: Literal["ray", "local"] = "ray"
    seed: int = 0
    project_name: str = "ostinato"
    experiment_name: str = "ppo"
    default_local_dir: str = ""
    logger: list[str] = field(default_factory=lambda: ["console"])
    save_freq: int = -1
    test_freq: int = -1
    val_before_train: bool = False
    val_only: bool = False
    resume_mode: Literal["auto", "disable", "resume_path"] = "auto"
    resume_from_path: str | None = None
    max_actor_ckpt_to_keep: int | None = None
    critic_warmup: int = 0
    balance_batch: bool = True
    log_val_generations: int = 0
    call_timeout_seconds: float = 3600.0
    dry_run: bool = False

    def __post_init__(self) -> None:
        """Fill in the run folder; refuse counts below their least."""
        folder = self.default_local_dir or f"checkpoints/{self.project_name}/{self.experiment_name}"
        object.__setattr__(self, "default_local_dir", os.path.expanduser(folder))
        if isinstance(self.logger, str):
            object.__setattr__(self, "logger", [self.logger])
        _at_least(self, 1, "total_epochs", "total_training_steps", "n_gpus_per_node", "nnodes")
        _at_least(self, 0, "critic_warmup", "log_val_generations")
        _at_least(self, 1, "max_actor_ckpt_to_keep")


@dataclass(frozen=True)
class CustomRewardConfig:
    """The reward function: your own, or the built-in one of each row's `data_source`.

    Attributes:
        path: a Python file with your function; null takes the built-in ones.
        name: the function's name: `compute_score(data_source, solution_str, ground_truth, extra_info=None)`.
        reward_kwargs: further keyword arguments of every call, your own function's or a built-in one's
            (`custom_reward_function.reward_kwargs.method=flexible`).
        timeout_seconds: time a call may take; a row that takes longer gets `default_score`.
        num_processes: calls that run at once; null takes the number of cores.
        on_error: `default` scores a failed row `default_score` and counts it; `raise` stops the run.
        default_score: the score of a row whose call failed.
    """

    path: str | None = None
    name: str = "compute_score"
    reward_kwargs: dict[str, Any] = field(default_factory=dict)
    timeout_seconds: float = 30.0
    num_processes: int | None = None
    on_error: Literal["default", "raise"] = "default"
    default_score: float = 0.0

    def __post_init__(self) -> None:
        """Take `~` for the home folder; refuse a time limit of nothing."""
        if self.path:
            object.__setattr__(self, "path", os.path.expanduser(self.path))
        if self.timeout_seconds <= 0:
            raise ValueError(f"timeout_seconds: expected a number above 0, got {self.timeout_seconds}")
        _at_least(self, 1, "num_processes")


@dataclass(frozen=True)
class ActorSection(ActorConfig):
    """The actor's keys, and how its engine lays it out.

    Attributes:
        fsdp_config: layout, offload and number types of the FSDP engine.
    """

    fsdp_config: FsdpConfig = field(default_factory=FsdpConfig)
    megatron: Any = field(default=None, metadata=NO_KEY)


@dataclass(frozen=True)
class RefSection(RefConfig):
    """The reference's keys, and how its engine lays it out.

    Attributes:
        fsdp_config: layout, offload and number types of the FSDP engine.
    """

    fsdp_config: FsdpConfig = field(default_factory=FsdpConfig)
    megatron: Any = field(default=None, metadata=NO_KEY)


@dataclass(frozen=True)
class CriticSection(CriticConfig):
    """The critic's keys, and how its engine lays it out.

    Attributes:
        fsdp_config: layout, offload and number types of the FSDP engine.
    """

    fsdp_config: FsdpConfig = field(default_factory=FsdpConfig)
    megatron: Any = field(default=None, metadata=NO_KEY)


Role = TypeVar("Role", ActorSection, CriticSection)


@dataclass(frozen=True)
class RewardModelSection(RewardModelConfig):
    """The reward model's keys, where it runs, and how its engine lays it out.

    Attributes:
        enable_resource_pool: give it GPUs of its own instead of the actor's.
        n_gpus_per_node: GPUs a node of that pool; on a CPU, processes.
        nnodes: nodes of that pool.
        fsdp_config: layout, offload and number types of the FSDP engine.
    """

    enable_resource_pool: bool = False
    n_gpus_per_node: int = 1
    nnodes: int = 1
    fsdp_config: FsdpConfig = field(default_factory=FsdpConfig)
    megatron: Any = field(default=None, metadata=NO_KEY)


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
    """

    data: DataConfig = field(default_factory=DataConfig)
    actor_rollout_ref: ActorRolloutRefConfig = field(default_factory=ActorRolloutRefConfig)
    critic: CriticSection = field(default_factory=CriticSection)
    reward_model: RewardModelSection = field(default_factory=RewardModelSection)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    custom_reward_function: CustomRewardConfig = field(default_factory=CustomRewardConfig)

    def __post_init__(self) -> None:
        """Work out the optimizer steps of one pass, for actor and critic: prompts // prompts."""
        batch, hybrid, critic = self.data.train_batch_size, self.actor_rollout_ref, self.critic
        actor = replace(hybrid.actor, num_mini_batches=mini_batches(batch, hybrid.actor.ppo_mini_batch_size))
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
        problems: list[Problem] = []
        config = build(cls, follow(values), problems)
        if problems:
            raise ConfigError(problems)
        return config

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
        from ostinato.algos import get_adv_estimator

        return "values" in inspect.signature(get_adv_estimator(self.algorithm.adv_estimator)).parameters

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


def _at_least(section: Any, least: int, *names: str) -> None:
    """Refuse fields below their least; one that is None is not set."""
    for name in names:
        value = getattr(section, name)
        if value is not None and value < least:
            raise ValueError(f"{name}: expected at least {least}, got {value}")
