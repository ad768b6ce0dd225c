"""How an engine is examined, and engines that are built once for many checks."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ostinato.rollout.base import Rollout
from ostinato.rollout.build import build_rollout
from ostinato.rollout.config import RolloutConfig
from ostinato.rollout.testing.models import save_tiny_model

MakeRollout = Callable[[RolloutConfig, Path], Rollout]
"""Builds the engine under test, asleep and without weights, for a configuration and a model folder."""


@dataclass(frozen=True)
class Setting:
    """How an engine is examined.

    Attributes:
        name: its name in `RolloutConfig.name`.
        folder: an empty folder for the suite's models.
        dtype: what it computes in.
        atol: largest difference of log-probabilities to the float32 oracle, in nats; also how much less likely than
            the likeliest token a greedy token may be.
        has_model: False for engines that answer without a model: checks against the oracle are left out.
        abort: makes an engine give up the rows with these `rollout_id`; None where that cannot be forced.
        overrides: more keys of `RolloutConfig`.
    """

    name: str
    folder: Path
    dtype: str = "float32"
    atol: float = 2e-4
    has_model: bool = True
    abort: Callable[[Any, Collection[int]], None] | None = None
    overrides: dict[str, Any] = field(default_factory=dict)
    models: dict[tuple[bool, int], tuple[Path, torch.nn.Module]] = field(default_factory=dict)

    def model(self, *, tied: bool = True, seed: int = 0) -> tuple[Path, torch.nn.Module]:
        """Folder and float32 module of a tiny model; written once."""
        key = (tied, seed)
        if key not in self.models:
            path = self.folder / f"{'tied' if tied else 'untied'}-{seed}"
            self.models[key] = (path, save_tiny_model(path, tied=tied, seed=seed, eos_token_id=None))
        return self.models[key]

    def config(self, **changes: Any) -> RolloutConfig:
        """The configuration most checks share."""
        keys: dict[str, Any] = {
            "name": self.name,
            "dtype": self.dtype,
            "prompt_length": 8,
            "response_length": 12,
            "max_num_seqs": 64,
            "update_weights_bucket_megabytes": 1,
        }
        return RolloutConfig(**{**keys, **self.overrides, **changes})


def engine_setting(name: str, folder: Path) -> Setting:
    """For float32 engines of which several live on one device, so that none may take the others' room by waking."""
    overrides = {"free_cache_engine": False, "gpu_memory_utilization": 0.05}
    return Setting(name, folder, atol=5e-3 if torch.cuda.is_available() else 2e-4, overrides=overrides)


def build_here(config: RolloutConfig, path: Path) -> Rollout:
    """An engine on the GPU where there is one, on the CPU otherwise."""
    return build_rollout(config, model_path=path, device="cuda" if torch.cuda.is_available() else "cpu")


@contextmanager
def kept_engines(make_rollout: MakeRollout) -> Iterator[MakeRollout]:
    """Engines that are built once for each configuration and folder, and closed at the end, be it by an error.

    Args:
        make_rollout: builds one.
    """
    built: dict[tuple[str, Path], Rollout] = {}

    def make(config: RolloutConfig, path: Path) -> Rollout:
        key = (repr(config), path)
        if key not in built:
            built[key] = make_rollout(config, path)
        return built[key]

    try:
        yield make
    finally:
        for rollout in built.values():
            rollout.close()
