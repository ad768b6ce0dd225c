"""Helpers for tests of engines and workers: an engine on one process, tiny models, ranks as threads."""

from __future__ import annotations

from ostinato.workers.core.testing.models import tiny_causal_lm, tiny_reward_model
from ostinato.workers.core.testing.plain import PlainConfig, PlainEngine
from ostinato.workers.core.testing.ranks import ThreadRanks

__all__ = ["PlainConfig", "PlainEngine", "ThreadRanks", "tiny_causal_lm", "tiny_reward_model"]
