"""The checks where a run is about to start: what this machine lacks of what the configuration asks for."""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib.util import find_spec

from ostinato.ppo.config import PpoConfig
from ostinato.ppo.errors import LaunchError


def check_launch(config: PpoConfig) -> None:
    """Refuse what this machine cannot run; called where the run is about to start, with `trainer.device` settled.

    Args:
        config: a configuration that passed `check`.

    Raises:
        LaunchError: GPUs are missing, or an engine or a tracker is not installed; the text lists all of it.
    """
    lacks = [*_missing_gpus(config), *_missing_software(config)]
    if lacks:
        raise LaunchError("this machine cannot run it:\n" + "\n".join(f"  {lack}" for lack in lacks))


def _missing_gpus(config: PpoConfig) -> Iterator[str]:
    import torch

    trainer = config.trainer
    if trainer.device != "cuda" or (trainer.backend == "ray" and os.environ.get("RAY_ADDRESS")):
        return  # on a cluster the GPUs are counted where the worker groups are placed
    found = torch.cuda.device_count()
    if trainer.nnodes == 1 and found < trainer.n_gpus_per_node:
        yield (
            f"trainer.n_gpus_per_node={trainer.n_gpus_per_node} GPUs were asked for and {found} found. Lower it, set "
            "trainer.device=cpu, or set RAY_ADDRESS to a cluster that has them"
        )


def _missing_software(config: PpoConfig) -> Iterator[str]:
    from ostinato.ppo.loggers import TrackingError
    from ostinato.ppo.loggers import check_installed as check_loggers
    from ostinato.ppo.preflight_megatron import missing
    from ostinato.rollout import RolloutError, check_installed

    yield from missing(config)
    name, trackers = config.actor_rollout_ref.rollout.name, config.trainer.logger
    for find in (lambda: check_installed(name), lambda: check_loggers(trackers)):
        try:
            find()
        except (RolloutError, TrackingError) as error:
            yield str(error)
    adapts = config.actor_rollout_ref.model.lora_rank or (config.needs_critic and config.critic.model.lora_rank)
    if adapts and find_spec("peft") is None:
        yield "model.lora_rank: adapters need peft, which is missing: pip install 'ostinato-workers-fsdp[lora]'"
