"""KL divergence to a reference policy: per-token estimators, the full divergence, and coefficient controllers."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from ostinato.algos._checks import check_not_negative, check_positive, check_same_shape
from ostinato.algos._typing import TokenFloats, TokenMask
from ostinato.algos.errors import ArgumentError, unknown_name
from ostinato.algos.masked import zero_masked

LOG_RATIO_LIMIT = 20.0
K3_LIMIT = 10.0


def _k1(d: Tensor) -> Tensor:
    return d


def _k2(d: Tensor) -> Tensor:
    return 0.5 * d.square()


def _k3(d: Tensor) -> Tensor:
    d = d.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    # expm1 keeps the digits that exp(−d) − 1 loses near d = 0; what rounding is left below 0 is cut with the cap.
    return (torch.expm1(-d) + d).clamp(0.0, K3_LIMIT)


_ESTIMATORS: dict[str, Callable[[Tensor], Tensor]] = {
    "kl": _k1,
    "k1": _k1,
    "abs": torch.abs,
    "mse": _k2,
    "k2": _k2,
    "low_var_kl": _k3,
    "k3": _k3,
}

KL_KINDS = (*_ESTIMATORS, *(f"{name}+" for name in _ESTIMATORS), "full")


def kl_penalty(
    log_probs: TokenFloats,
    ref_log_probs: TokenFloats,
    kind: str,
    response_mask: TokenMask | None = None,
) -> TokenFloats:
    """Estimate KL(π ‖ ref) per token from the log-probabilities of the sampled tokens.

    With d = log π − log ref:

    - `kl`, `k1`: d
    - `abs`: |d|
    - `mse`, `k2`: d²/2
    - `low_var_kl`, `k3`: exp(−d) − 1 + d, with d clamped to ±20 before the exp and the result capped at 10; the
      gradient is 0 in the clamped range.

    A `+` behind the name keeps the value and takes the gradient of k2, which is the unbiased one for on-policy samples.

    Args:
        log_probs: (B, R) of the policy, in nats.
        ref_log_probs: (B, R) of the reference.
        kind: one of `KL_KINDS` except `full`.
        response_mask: (B, R); given, masked entries may hold anything and give exactly 0 without a gradient. Without it
            a NaN goes through, in the value and in the gradient.

    Returns:
        (B, R) in nats.

    Raises:
        UnknownNameError: no such kind; the text lists the known ones.
        ArgumentError: `full`, which no log-probability of the sampled token can give.
        ShapeError: the shapes differ.

    Source:
        Schulman 2020, "Approximating KL divergence". The gradient of k2: Tang and Munos 2025 (arXiv 2506.09477).
    """
    if kind == "full":
        raise ArgumentError(
            "kl_penalty: 'full' needs the logits of both models and cannot be had from log-probabilities; "
            "use full_kl(logits, ref_logits), or one of the estimators 'k1', 'abs', 'k2', 'k3'"
        )
    name = kind.removesuffix("+")
    if name not in _ESTIMATORS or kind.count("+") > 1:
        raise unknown_name("kl_penalty", kind, KL_KINDS)
    check_same_shape("kl_penalty", log_probs=log_probs, ref_log_probs=ref_log_probs, response_mask=response_mask)
    d = log_probs - ref_log_probs
    if response_mask is not None:
        d = zero_masked(log_probs, response_mask) - zero_masked(ref_log_probs, response_mask)
    value = _ESTIMATORS[name](d)
    if not kind.endswith("+"):
        return value
    gradient = _k2(d)
    return value.detach() + (gradient - gradient.detach())


class FixedKLController:
    """A KL coefficient that stays.

    Args:
        kl_coef: β, 0 or more.
    """

    def __init__(self, kl_coef: float) -> None:
        check_not_negative("FixedKLController", kl_coef=kl_coef)
        self.value = kl_coef

    def update(self, kl: float, n: int) -> None:
        """Nothing changes.

        Args:
            kl: mean KL of the step.
            n: rollouts of the step.
        """

    def state_dict(self) -> dict[str, float]:
        """What a checkpoint holds."""
        return {"value": self.value}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Take what `state_dict` gave."""
        self.value = float(state["value"])


class AdaptiveKLController:
    """A KL coefficient that is steered towards a target KL.

    β ← β·(1 + clip(kl/target − 1, ±0.2)·n/horizon)

    Args:
        kl_coef: the first β, above 0.
        target_kl: the KL to hold, in nats a token, above 0.
        horizon: how many rollouts a full correction takes, above 0.

    Source:
        Ziegler et al. 2019 (arXiv 1909.08593), section 2.2.
    """

    def __init__(self, kl_coef: float, target_kl: float, horizon: float) -> None:
        check_positive("AdaptiveKLController", kl_coef=kl_coef, target_kl=target_kl, horizon=horizon)
        self.value = kl_coef
        self.target_kl = target_kl
        self.horizon = horizon

    def update(self, kl: float, n: int) -> None:
        """Steer after a step.

        Args:
            kl: mean KL of the step, in the target's unit.
            n: rollouts of the step.

        Raises:
            ArgumentError: kl is NaN, which would stay in the coefficient for ever.
        """
        if math.isnan(kl):
            raise ArgumentError("AdaptiveKLController.update: kl is NaN; look for NaN in log_probs or ref_log_probs")
        error = min(max(kl / self.target_kl - 1.0, -0.2), 0.2)
        self.value *= 1.0 + error * n / self.horizon

    def state_dict(self) -> dict[str, float]:
        """What a checkpoint holds."""
        return {"value": self.value}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Take what `state_dict` gave; target and horizon stay those of the configuration."""
        self.value = float(state["value"])
