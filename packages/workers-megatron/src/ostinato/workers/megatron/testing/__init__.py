"""Helpers for tests of this engine: Megatron-Core on a CPU, tiny mixtures, what spawned ranks run."""
