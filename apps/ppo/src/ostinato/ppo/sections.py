"""The sections of the configuration that the app itself reads: data, algorithm, trainer, reward function."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any, Literal


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


OFFERED = (
    "values",
    "groups",
    "rollouts",
    "gamma",
    "lam",
    "norm_adv_by_std_in_grpo",
    "reward_baselines",
    "log_probs",
    "sum_pi_squared",
    "reward_scores",
    "weights",
)
"""The keywords that an estimator may name in its signature and gets (`register_adv_est`)."""


@dataclass(frozen=True)
class TrainerConfig:
    """The run: how long, where, and what it leaves behind.

    Attributes:
        total_epochs: passes over the training data.
        total_training_steps: stop after so many steps, whatever the epochs: sooner than `total_epochs` would, or later,
            with further passes over the data, each in an order of its own; null counts epochs.
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
        resume_mode: `auto` (the newest whole checkpoint of `default_local_dir`, if any), `disable`, `resume_path`.
        resume_from_path: the checkpoint folder (`…/global_step_N`) for `resume_path`.
        save_hf_model: put a Hugging Face folder of the policy into every checkpoint as well; the same as `hf_model` in
            `actor_rollout_ref.actor.checkpoint.save_contents`.
        max_actor_ckpt_to_keep: checkpoints to keep; null keeps all.
        max_critic_ckpt_to_keep: the same for the critic's part of them; null: as long as the actor's.
        critic_warmup: steps in which only the critic learns.
        balance_batch: deal rows over ranks by length; false leaves them in order.
        log_val_generations: so many validation samples are logged as text.
        rollout_data_dir: a folder for the rows of each training step, `STEP.jsonl` with texts, scores and what
            `examples/offline_analysis.py` reads; null writes none.
        validation_data_dir: a folder for the answers of each validation, likewise.
        call_timeout_seconds: a worker call that takes longer counts as hung and ends the run; null waits without end.
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
    resume_mode: Literal["auto", "disable", "resume_path"] = "auto"
    resume_from_path: str | None = None
    save_hf_model: bool = False
    max_actor_ckpt_to_keep: int | None = None
    max_critic_ckpt_to_keep: int | None = None
    critic_warmup: int = 0
    balance_batch: bool = True
    log_val_generations: int = 0
    rollout_data_dir: str | None = None
    validation_data_dir: str | None = None
    call_timeout_seconds: float | None = 3600.0
    dry_run: bool = False

    def __post_init__(self) -> None:
        """Fill in the run folder; refuse counts below their least."""
        folder = self.default_local_dir or f"checkpoints/{self.project_name}/{self.experiment_name}"
        object.__setattr__(self, "default_local_dir", os.path.expanduser(folder))
        for name in ("resume_from_path", "rollout_data_dir", "validation_data_dir"):
            if getattr(self, name):
                object.__setattr__(self, name, os.path.expanduser(getattr(self, name)))
        if isinstance(self.logger, str):
            object.__setattr__(self, "logger", [self.logger])
        _at_least(self, 1, "total_epochs", "total_training_steps", "n_gpus_per_node", "nnodes")
        _at_least(self, 0, "critic_warmup", "log_val_generations")
        _at_least(self, 1, "max_actor_ckpt_to_keep", "max_critic_ckpt_to_keep")

    @property
    def checkpoints_to_keep(self) -> dict[str, int | None]:
        """How many checkpoints hold each role's part; None: all."""
        actor, critic = self.max_actor_ckpt_to_keep, self.max_critic_ckpt_to_keep
        return {"actor": actor, "critic": actor if critic is None else critic}


@dataclass(frozen=True)
class CustomRewardConfig:
    """The reward function: your own, or the built-in one of each row's `data_source`.

    Attributes:
        path: a Python file with your function; null takes the built-in ones.
        name: the function's name: `compute_score(data_source, solution_str, ground_truth, extra_info=None)`; or that of
            a class, which is made once in each scoring process with `reward_kwargs` and called like the function.
        reward_kwargs: further keyword arguments of every call, your own function's or a built-in one's
            (`custom_reward_function.reward_kwargs.method=flexible`).
        timeout_seconds: time a call may take; a row that takes longer gets `default_score`. With
            `reward_manager.name=batch` the one call for all rows.
        num_processes: calls that run at once; null takes the number of cores.
        on_error: `default` scores a failed row `default_score` and counts it; `raise` ends the run.
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
class OverlongBufferConfig:
    """The penalty on overlong responses of `reward_manager.name=dapo`.

    Attributes:
        len: so many tokens before `data.max_response_length` the penalty begins; it grows evenly up to the limit.
        penalty_factor: what a response at the limit loses.
    """

    len: int = 0
    penalty_factor: float = 1.0

    def __post_init__(self) -> None:
        """Refuse what is below 0."""
        _at_least(self, 0, "len", "penalty_factor")


@dataclass(frozen=True)
class RewardManagerConfig:
    """How the reward function is called, and what becomes of its scores.

    Attributes:
        name: `naive` (once a row), `batch` (your function once for all rows, with lists: `compute_score(data_sources,
            solution_strs, ground_truths, extra_infos)`), `dapo` (once a row, with a penalty on overlong responses), or
            one that `model.external_lib` registers.
        overlong_buffer: the penalty of `dapo`.
    """

    name: str = "naive"
    overlong_buffer: OverlongBufferConfig = field(default_factory=OverlongBufferConfig)


def _at_least(section: Any, least: int, *names: str) -> None:
    """Refuse fields below their least; one that is None is not set."""
    for name in names:
        value = getattr(section, name)
        if value is not None and value < least:
            raise ValueError(f"{name}: expected at least {least}, got {value}")
