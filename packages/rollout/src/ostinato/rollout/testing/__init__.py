"""Help for tests: tiny models, a weight source over any module, prompts, and the conformance suite."""

from __future__ import annotations

from ostinato.rollout.testing.conformance import checks, run_conformance
from ostinato.rollout.testing.models import ModuleWeights, make_prompts, save_tiny_model
from ostinato.rollout.testing.setting import Setting, build_here, engine_setting, kept_engines

__all__ = [
    "ModuleWeights",
    "Setting",
    "build_here",
    "checks",
    "engine_setting",
    "kept_engines",
    "make_prompts",
    "run_conformance",
    "save_tiny_model",
]
