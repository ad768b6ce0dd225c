"""The optimizer's config and the learning-rate schedule, the same for every engine."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from ostinato.workers.core.limits import require, require_choice

LR_SCHEDULES = ("constant", "cosine")
OPTIMIZERS = ("AdamW", "AdamW8bit")


@dataclass(frozen=True)
class OptimConfig:
    """AdamW and its schedule; every step here is an optimizer step, of which one trainer step makes several.

    Attributes:
        optimizer: `AdamW`, or `AdamW8bit`: moments in 8 bits, in blocks of 256 with a scale each (a quarter of the
            memory); small tensors keep theirs in full.
        lr: learning rate after warm-up.
        weight_decay: decoupled weight decay.
        betas: AdamW's betas.
        eps: AdamW's epsilon.
        lr_warmup_steps: warm-up steps; negative means `lr_warmup_steps_ratio` × `total_training_steps`.
        lr_warmup_steps_ratio: see there.
        lr_scheduler_type: `constant` or `cosine`.
        min_lr_ratio: where the cosine's lowest point lies, as a share of `lr`.
        num_cycles: waves of the cosine between warm-up and end; one half goes down once.
        total_training_steps: optimizer steps of the whole run; -1 is filled in by the trainer.
        grad_clip: largest l2 norm of the gradient; filled in from the role's `grad_clip`.
    """

    optimizer: str = "AdamW"
    lr: float = 1e-6
    weight_decay: float = 0.01
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    lr_warmup_steps: int = -1
    lr_warmup_steps_ratio: float = 0.0
    lr_scheduler_type: str = "constant"
    min_lr_ratio: float = 0.0
    num_cycles: float = 0.5
    total_training_steps: int = -1
    grad_clip: float = field(default=1.0, metadata={"derived": True})

    def __post_init__(self) -> None:
        """Check ranges."""
        require_choice(self.optimizer, OPTIMIZERS, "optim.optimizer")
        require(self.lr >= 0, "optim.lr", "at least 0", self.lr)
        require(self.weight_decay >= 0, "optim.weight_decay", "at least 0", self.weight_decay)
        betas = tuple(self.betas)
        require(len(betas) == 2 and all(0 <= b < 1 for b in betas), "optim.betas", "two numbers in [0, 1)", self.betas)
        object.__setattr__(self, "betas", betas)
        require(self.eps > 0, "optim.eps", "greater than 0", self.eps)
        require(
            0 <= self.lr_warmup_steps_ratio <= 1,
            "optim.lr_warmup_steps_ratio",
            "a share in [0, 1]",
            self.lr_warmup_steps_ratio,
        )
        require_choice(self.lr_scheduler_type, LR_SCHEDULES, "optim.lr_scheduler_type")
        require(0 <= self.min_lr_ratio <= 1, "optim.min_lr_ratio", "a share in [0, 1]", self.min_lr_ratio)
        require(self.num_cycles > 0, "optim.num_cycles", "greater than 0", self.num_cycles)
        require(self.grad_clip > 0, "optim.grad_clip", "greater than 0", self.grad_clip)

    @property
    def num_warmup_steps(self) -> int:
        """Warm-up steps, once `total_training_steps` is known."""
        if self.lr_warmup_steps >= 0:
            return self.lr_warmup_steps
        return int(self.lr_warmup_steps_ratio * max(self.total_training_steps, 0))

    def check_resolved(self) -> None:
        """Refuse a schedule whose length nobody has filled in.

        Raises:
            ConfigError: the schedule needs `total_training_steps` and it is not positive.
        """
        needs_total = self.lr_scheduler_type == "cosine" or (
            self.lr_warmup_steps < 0 and self.lr_warmup_steps_ratio > 0
        )
        require(
            not needs_total or self.total_training_steps > 0,
            "optim.total_training_steps",
            "the run's number of optimizer steps, which this schedule needs",
            self.total_training_steps,
        )


def lr_factor(step: int, optim: OptimConfig) -> float:
    """Return what the base learning rate is multiplied by in one optimizer step.

    With w warm-up steps and T steps in all: (step + 1)/w while step < w; after that 1 for `constant`, and for `cosine`
    m + (1 − m)·(1 + cos(2π·c·p))/2 with p = (step − w)/(T − w) in [0, 1], m = `min_lr_ratio` and c = `num_cycles`.

    Args:
        step: number of optimizer steps made before this one; the first step is 0 and already has a rate above 0.
        optim: the schedule's type and lengths, in optimizer steps.

    Returns:
        A factor in [0, 1].
    """
    warmup = optim.num_warmup_steps
    if step < warmup:
        return (step + 1) / warmup
    if optim.lr_scheduler_type == "constant":
        return 1.0
    remaining = max(optim.total_training_steps - warmup, 1)
    progress = min((step - warmup) / remaining, 1.0)
    wave = 0.5 * (1.0 + math.cos(2.0 * math.pi * optim.num_cycles * progress))
    return optim.min_lr_ratio + (1.0 - optim.min_lr_ratio) * wave
