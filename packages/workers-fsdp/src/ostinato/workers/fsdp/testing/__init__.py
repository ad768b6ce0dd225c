"""Helpers for tests of this engine: engine factories, checks, what spawned ranks run."""

from __future__ import annotations

from ostinato.workers.fsdp.testing.runs import check_activation_offload, fsdp

__all__ = ["check_activation_offload", "fsdp"]
