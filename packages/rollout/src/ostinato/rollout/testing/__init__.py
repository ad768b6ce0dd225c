"""Help for tests: tiny models, a weight source over any module, prompts, and the conformance suite."""

from __future__ import annotations

from ostinato.rollout.testing.conformance import Setting, checks, run_conformance
from ostinato.rollout.testing.models import ModuleWeights, make_prompts, save_tiny_model

__all__ = ["ModuleWeights", "Setting", "checks", "make_prompts", "run_conformance", "save_tiny_model"]
