"""From a configuration to a rollout engine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ostinato.rollout.backends import load_backend

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    import torch

    from ostinato.rollout.base import Rollout
    from ostinato.rollout.config import RolloutConfig


def check_rollout(
    config: RolloutConfig,
    *,
    model_path: str | Path,
    world_size: int,
    device: torch.device | str = "cpu",
    override_config: Mapping[str, Any] | None = None,
    trust_remote_code: bool = False,
) -> None:
    """Refuse what the model, the ranks or the device cannot do for the engine, before anybody loads weights.

    For a worker whose training engine is built first: what is refused here would be refused by `build_rollout` too,
    after training's weights have been loaded. An engine without `examine` is asked nothing.

    Args:
        config: everything under `actor_rollout_ref.rollout`.
        model_path: local folder with `config.json`.
        world_size: ranks of the worker group.
        device: where the engine will compute.
        override_config: as for `build_rollout`.
        trust_remote_code: as for `build_rollout`.

    Raises:
        ConfigError: with a number that works.
    """
    examine = getattr(load_backend(config.name), "examine", None)
    if examine is not None:
        examine(
            config,
            model_path=model_path,
            world_size=world_size,
            device=device,
            override_config=override_config,
            trust_remote_code=trust_remote_code,
        )


def build_rollout(
    config: RolloutConfig,
    *,
    model_path: str | Path,
    device: torch.device | str = "cpu",
    dp_rank: int = 0,
    dp_size: int = 1,
    tokenizer: Any = None,
    override_config: Mapping[str, Any] | None = None,
    trust_remote_code: bool = False,
    **options: Any,
) -> Rollout:
    """Make the rollout engine that `config.name` asks for. It is asleep until woken.

    Args:
        config: everything under `actor_rollout_ref.rollout`.
        model_path: local folder with `config.json` (and weights, where `load_format` is not "dummy").
        device: where the engine computes.
        dp_rank: this engine's place among `dp_size` independent engines.
        dp_size: number of independent engines.
        tokenizer: gives the padding and end tokens where it is passed; the model's own are used otherwise.
        override_config: entries of the model's config that replace those of its folder; the training engine's own.
        trust_remote_code: run code that comes with the model.
        options: what only one engine knows, passed on to its adapter.

    Raises:
        UnknownBackendError: no engine of this name.
        BackendUnavailableError: the engine is not installed.
        BackendNotImplementedError: this version has no adapter for it.
    """
    adapter = load_backend(config.name)
    return adapter(
        config,
        model_path=model_path,
        device=device,
        dp_rank=dp_rank,
        dp_size=dp_size,
        tokenizer=tokenizer,
        override_config=override_config,
        trust_remote_code=trust_remote_code,
        **options,
    )
