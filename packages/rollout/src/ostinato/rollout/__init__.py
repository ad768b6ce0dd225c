"""Rollout engines behind one contract, and the in-place reshard that feeds them weights."""

from __future__ import annotations

from ostinato.rollout.backends import Backend, backend_names, check_installed, register_backend
from ostinato.rollout.base import Rollout, TensorSpec, WeightSource
from ostinato.rollout.build import build_rollout, check_rollout
from ostinato.rollout.config import RolloutConfig, SamplingParams, ValidationConfig
from ostinato.rollout.errors import RolloutError

__all__ = [
    "Backend",
    "Rollout",
    "RolloutConfig",
    "RolloutError",
    "SamplingParams",
    "TensorSpec",
    "ValidationConfig",
    "WeightSource",
    "backend_names",
    "build_rollout",
    "check_installed",
    "check_rollout",
    "register_backend",
]
