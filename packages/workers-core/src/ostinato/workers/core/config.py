"""Configuration of the role workers: plain dataclasses, each checked when it is made.

A field that is None is resolved by the property that reads it, so `dataclasses.replace` never carries a stale value.
Fields whose metadata says `derived` are filled in by the trainer and are no keys for a user.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from ostinato.rollout.config import RolloutConfig
from ostinato.workers.core.checkpoint import CheckpointConfig
from ostinato.workers.core.limits import BatchLimit, batch_limit, require, require_choice
from ostinato.workers.core.model import EngineChoice, ModelConfig
from ostinato.workers.core.optim import OptimConfig

__all__ = [
    "ActorConfig",
    "ActorRolloutRefConfig",
    "CheckpointConfig",
    "CriticConfig",
    "EngineChoice",
    "ModelConfig",
    "OptimConfig",
    "PolicyLossConfig",
    "RefConfig",
    "RewardModelConfig",
    "rollout_log_prob_limit",
]

LOSS_AGG_MODES = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-sum-norm", "seq-mean-token-mean")
KL_LOSS_TYPES = ("kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3")
STRATEGIES = ("fsdp", "megatron")


@dataclass(frozen=True)
class PolicyLossConfig:
    """Which policy loss, and the parameters of those that have their own; None is the loss's own default.

    Attributes:
        loss_mode: a registered name.
        tau_pos: `sapo`: steepness of the gate where the advantage is positive.
        tau_neg: `sapo`: the same where it is not.
        clip_cov_ratio: `clip_cov`: share of the tokens that lose their gradient.
        clip_cov_lb: `clip_cov`: lower bound of the covariance of such a token.
        clip_cov_ub: `clip_cov`: upper bound of it.
        kl_cov_ratio: `kl_cov`: share of the tokens that are held back.
        ppo_kl_coef: `kl_cov`: coefficient of their KL term.
        dro_beta: `dro`: coefficient of the quadratic penalty.
        loss_kwargs: parameters of a loss of your own, by the names in its signature; also wins over the clip keys.
    """

    loss_mode: str = "vanilla"
    tau_pos: float | None = None
    tau_neg: float | None = None
    clip_cov_ratio: float | None = None
    clip_cov_lb: float | None = None
    clip_cov_ub: float | None = None
    kl_cov_ratio: float | None = None
    ppo_kl_coef: float | None = None
    dro_beta: float | None = None
    loss_kwargs: Mapping[str, Any] = field(default_factory=dict)

    @property
    def parameters(self) -> dict[str, Any]:
        """What was set, by the names in the loss's signature."""
        own = {entry.name: getattr(self, entry.name) for entry in fields(self)}
        del own["loss_mode"], own["loss_kwargs"]
        return {name: value for name, value in own.items() if value is not None} | dict(self.loss_kwargs)


def _check_update(key: str, config: ActorConfig | CriticConfig) -> None:
    """Check what both trained roles have: batch sizes, epochs, clipping, aggregation."""
    size = config.ppo_mini_batch_size
    require(size is None or size >= 1, f"{key}.ppo_mini_batch_size", "at least 1 prompt", size)
    require(config.ppo_epochs >= 1, f"{key}.ppo_epochs", "at least 1", config.ppo_epochs)
    require(config.grad_clip > 0, f"{key}.grad_clip", "greater than 0", config.grad_clip)
    require(
        config.num_mini_batches >= 1,
        f"{key}.num_mini_batches",
        "at least 1 (= prompts of a step // ppo_mini_batch_size)",
        config.num_mini_batches,
    )
    require_choice(config.strategy, STRATEGIES, f"{key}.strategy")
    optimizer = config.optim.optimizer
    require(
        optimizer == "AdamW" or config.strategy == "fsdp",
        f"{key}.optim.optimizer",
        "AdamW with this strategy",
        optimizer,
    )
    require_choice(config.loss_agg_mode, LOSS_AGG_MODES, f"{key}.loss_agg_mode")
    scale = config.loss_scale_factor
    require(scale is None or scale > 0, f"{key}.loss_scale_factor", "greater than 0", scale)
    _ = config.update_limit


def _update_limit(key: str, config: ActorConfig | CriticConfig) -> BatchLimit:
    return batch_limit(
        key,
        config.use_dynamic_bsz,
        config.ppo_micro_batch_size_per_gpu,
        config.ppo_max_token_len_per_gpu,
        "ppo_",
        ranks=config.ulysses_sequence_parallel_size,
    )


@dataclass(frozen=True)
class ActorConfig(EngineChoice):
    """Training of the policy.

    Attributes:
        ppo_mini_batch_size: prompts (not responses) of one optimizer step, over all ranks.
        ppo_micro_batch_size_per_gpu: rows of a micro-batch; setting it switches dynamic micro-batches off.
        use_dynamic_bsz: micro-batches under a token budget; None: on unless an explicit size is given.
        ppo_max_token_len_per_gpu: that budget.
        ppo_epochs: passes over the rows of a step.
        grad_clip: largest l2 norm of a gradient.
        clip_ratio: PPO's epsilon on both sides, unless one of the next two is given.
        clip_ratio_low: epsilon below 1.
        clip_ratio_high: epsilon above 1.
        clip_ratio_c: dual-clip constant, above 1.
        loss_agg_mode: how per-token losses become one number.
        loss_scale_factor: divisor of `seq-mean-token-sum-norm`; None: the response width.
        entropy_coeff: weight of the entropy bonus.
        use_kl_loss: add a KL term against the reference policy to the loss.
        kl_loss_coef: its weight.
        kl_loss_type: its estimator; a suffix `+` keeps the value and takes the gradient of `k2`.
        policy_loss: which policy loss.
        optim: optimizer and schedule.
        checkpoint: what a checkpoint holds, and whether training waits for it.
        num_mini_batches: optimizer steps of one pass; filled in by the trainer.
        sum_pi_squared: `compute_log_prob` gives Σπ² as well; filled in by the trainer where the estimator names it.
    """

    ppo_mini_batch_size: int = 256
    ppo_micro_batch_size_per_gpu: int | None = None
    use_dynamic_bsz: bool | None = None
    ppo_max_token_len_per_gpu: int = 16384
    ppo_epochs: int = 1
    grad_clip: float = 1.0
    clip_ratio: float = 0.2
    clip_ratio_low: float | None = None
    clip_ratio_high: float | None = None
    clip_ratio_c: float = 3.0
    loss_agg_mode: str = "token-mean"
    loss_scale_factor: float | None = None
    entropy_coeff: float = 0.0
    use_kl_loss: bool = False
    kl_loss_coef: float = 0.001
    kl_loss_type: str = "low_var_kl"
    policy_loss: PolicyLossConfig = field(default_factory=PolicyLossConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    num_mini_batches: int = field(default=1, metadata={"derived": True})
    sum_pi_squared: bool = field(default=False, metadata={"derived": True})

    def __post_init__(self) -> None:
        """Check ranges."""
        key = "actor_rollout_ref.actor"
        _check_update(key, self)
        require(self.clip_low >= 0, f"{key}.clip_ratio_low", "at least 0", self.clip_low)
        require(self.clip_high >= 0, f"{key}.clip_ratio_high", "at least 0", self.clip_high)
        require(
            self.clip_ratio_c > 1,
            f"{key}.clip_ratio_c",
            "a number above 1 (at or below it the dual clip cuts into ratios that have not moved)",
            self.clip_ratio_c,
        )
        require(self.kl_loss_coef >= 0, f"{key}.kl_loss_coef", "at least 0", self.kl_loss_coef)
        require_choice(self.kl_loss_type.removesuffix("+"), KL_LOSS_TYPES, f"{key}.kl_loss_type")

    @property
    def clip_low(self) -> float:
        """Epsilon below 1."""
        return self.clip_ratio if self.clip_ratio_low is None else self.clip_ratio_low

    @property
    def clip_high(self) -> float:
        """Epsilon above 1."""
        return self.clip_ratio if self.clip_ratio_high is None else self.clip_ratio_high

    @property
    def update_limit(self) -> BatchLimit:
        """Size of a training micro-batch."""
        return _update_limit("actor_rollout_ref.actor", self)

    @property
    def engine_optim(self) -> OptimConfig:
        """The optimizer's config as the engine gets it."""
        return replace(self.optim, grad_clip=self.grad_clip)


@dataclass(frozen=True)
class RefConfig(EngineChoice):
    """The frozen reference policy; it loads the actor's model.

    Attributes:
        log_prob_micro_batch_size_per_gpu: rows of a micro-batch; setting it switches dynamic micro-batches off.
        log_prob_use_dynamic_bsz: micro-batches under a token budget; None: on unless an explicit size is given.
        log_prob_max_token_len_per_gpu: that budget.
    """

    log_prob_micro_batch_size_per_gpu: int | None = None
    log_prob_use_dynamic_bsz: bool | None = None
    log_prob_max_token_len_per_gpu: int = 16384

    def __post_init__(self) -> None:
        """Check ranges."""
        require_choice(self.strategy, STRATEGIES, "actor_rollout_ref.ref.strategy")
        _ = self.log_prob_limit

    @property
    def log_prob_limit(self) -> BatchLimit:
        """Size of a scoring micro-batch."""
        return batch_limit(
            "actor_rollout_ref.ref",
            self.log_prob_use_dynamic_bsz,
            self.log_prob_micro_batch_size_per_gpu,
            self.log_prob_max_token_len_per_gpu,
            "log_prob_",
            ranks=self.ulysses_sequence_parallel_size,
        )


@dataclass(frozen=True)
class ActorRolloutRefConfig:
    """Everything that `ActorRolloutRefWorker` reads (`actor_rollout_ref` of the app)."""

    model: ModelConfig = field(default_factory=ModelConfig)
    actor: ActorConfig = field(default_factory=ActorConfig)
    ref: RefConfig = field(default_factory=RefConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)


def rollout_log_prob_limit(rollout: RolloutConfig, ranks: int = 1) -> BatchLimit:
    """Size of a micro-batch when the actor scores its own responses; the keys are the rollout's, as in the field.

    Args:
        rollout: holds the keys.
        ranks: of the actor that share the tokens of a micro-batch.
    """
    return batch_limit(
        "actor_rollout_ref.rollout",
        rollout.log_prob_use_dynamic_bsz,
        rollout.log_prob_micro_batch_size_per_gpu,
        rollout.log_prob_max_token_len_per_gpu,
        "log_prob_",
        ranks=ranks,
    )


def _critic_optim() -> OptimConfig:
    return OptimConfig(lr=1e-5)


@dataclass(frozen=True)
class CriticConfig(EngineChoice):
    """Training of the value model.

    Attributes:
        model: the folder it starts from; a causal language model gets a new value head.
        ppo_mini_batch_size: prompts of one optimizer step; None: the actor's, filled in by the trainer.
        ppo_micro_batch_size_per_gpu: rows of a micro-batch; setting it switches dynamic micro-batches off.
        use_dynamic_bsz: micro-batches under a token budget; None: on unless an explicit size is given.
        ppo_max_token_len_per_gpu: that budget.
        forward_micro_batch_size_per_gpu: rows of a micro-batch of `compute_values`; None: as in training.
        forward_max_token_len_per_gpu: token budget of `compute_values`; None: as in training.
        ppo_epochs: passes over the rows of a step.
        grad_clip: largest l2 norm of a gradient.
        cliprange_value: how far a value may move from its old one.
        loss_agg_mode: how per-token losses become one number.
        loss_scale_factor: divisor of `seq-mean-token-sum-norm`; None: the response width.
        optim: optimizer and schedule.
        checkpoint: what a checkpoint holds, and whether training waits for it.
        num_mini_batches: optimizer steps of one pass; filled in by the trainer.
    """

    model: ModelConfig = field(default_factory=ModelConfig)
    ppo_mini_batch_size: int | None = None
    ppo_micro_batch_size_per_gpu: int | None = None
    use_dynamic_bsz: bool | None = None
    ppo_max_token_len_per_gpu: int = 16384
    forward_micro_batch_size_per_gpu: int | None = None
    forward_max_token_len_per_gpu: int | None = None
    ppo_epochs: int = 1
    grad_clip: float = 1.0
    cliprange_value: float = 0.5
    loss_agg_mode: str = "token-mean"
    loss_scale_factor: float | None = None
    optim: OptimConfig = field(default_factory=_critic_optim)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    num_mini_batches: int = field(default=1, metadata={"derived": True})

    def __post_init__(self) -> None:
        """Check ranges."""
        _check_update("critic", self)
        require(self.cliprange_value > 0, "critic.cliprange_value", "greater than 0", self.cliprange_value)
        _ = self.forward_limit

    @property
    def update_limit(self) -> BatchLimit:
        """Size of a training micro-batch."""
        return _update_limit("critic", self)

    @property
    def forward_limit(self) -> BatchLimit:
        """Size of a micro-batch of `compute_values`."""
        if self.forward_micro_batch_size_per_gpu is None and self.forward_max_token_len_per_gpu is None:
            return self.update_limit
        return batch_limit(
            "critic",
            None,
            self.forward_micro_batch_size_per_gpu,
            self.forward_max_token_len_per_gpu or self.ppo_max_token_len_per_gpu,
            "forward_",
            ranks=self.ulysses_sequence_parallel_size,
        )

    @property
    def engine_optim(self) -> OptimConfig:
        """The optimizer's config as the engine gets it."""
        return replace(self.optim, grad_clip=self.grad_clip)


@dataclass(frozen=True)
class RewardModelConfig(EngineChoice):
    """A frozen sequence-classification model that scores whole rows.

    Attributes:
        model: its folder, with a head of one output.
        micro_batch_size_per_gpu: rows of a micro-batch; setting it switches dynamic micro-batches off.
        use_dynamic_bsz: micro-batches under a token budget; None: on unless an explicit size is given.
        max_token_len_per_gpu: that budget.
    """

    model: ModelConfig = field(default_factory=ModelConfig)
    micro_batch_size_per_gpu: int | None = None
    use_dynamic_bsz: bool | None = None
    max_token_len_per_gpu: int = 16384

    def __post_init__(self) -> None:
        """Check ranges."""
        require_choice(self.strategy, STRATEGIES, "reward_model.strategy")
        rank = self.model.lora_rank
        require(rank == 0, "reward_model.model.lora_rank", "0, because a reward model is not trained", rank)
        _ = self.limit

    @property
    def limit(self) -> BatchLimit:
        """Size of a scoring micro-batch."""
        return batch_limit(
            "reward_model",
            self.use_dynamic_bsz,
            self.micro_batch_size_per_gpu,
            self.max_token_len_per_gpu,
            "",
            ranks=self.ulysses_sequence_parallel_size,
        )
