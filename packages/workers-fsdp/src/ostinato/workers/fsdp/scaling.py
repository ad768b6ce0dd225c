"""The loss scale of float16: small gradients are lifted above its smallest number, and brought back before the step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

FIRST_EXPONENT = 16
GROWTH_INTERVAL = 2000
"""Finite steps after which a larger scale is tried."""

_EXPONENT, _STEPS = "loss_scale_exponent", "loss_scale_steps"


@dataclass(frozen=True)
class LossScale:
    """A power of two, so that scaling rounds nothing.

    Attributes:
        exponent: the loss is multiplied by 2 to this power; None where nothing is scaled.
        finite_steps: steps since it last changed.
    """

    exponent: int | None = None
    finite_steps: int = 0

    @classmethod
    def of(cls, counters: Mapping[str, int]) -> LossScale:
        """The scale from an engine's counters, which go into its checkpoints."""
        return cls(counters.get(_EXPONENT), counters.get(_STEPS, 0))

    @property
    def counters(self) -> dict[str, int]:
        """What `of` reads."""
        return {} if self.exponent is None else {_EXPONENT: self.exponent, _STEPS: self.finite_steps}

    @property
    def factor(self) -> float:
        """What the loss is multiplied by."""
        return 1.0 if self.exponent is None else 2.0**self.exponent

    def after(self, *, finite: bool) -> LossScale:
        """The scale of the next step: half after a gradient that was not finite, double after long without one."""
        if self.exponent is None:
            return self
        if not finite:
            return LossScale(max(self.exponent - 1, 0))
        if self.finite_steps + 1 >= GROWTH_INTERVAL:
            return LossScale(self.exponent + 1)
        return LossScale(self.exponent, self.finite_steps + 1)


def first_scale(dtype: torch.dtype) -> LossScale:
    """Where to begin: float16 has too few small numbers for gradients, the others do not."""
    return LossScale(FIRST_EXPONENT) if dtype == torch.float16 else LossScale()
