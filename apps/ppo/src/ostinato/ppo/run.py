"""From a checked configuration to a finished run: builds what `Trainer` is handed, here or on a Ray cluster."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from importlib import import_module
from typing import Any

from ostinato.ppo.config import PpoConfig

logger = logging.getLogger(__name__)

Event = dict[str, Any]

LOG_FORMAT = "%(levelname)s %(name)s: %(message)s"

QUIET = {"TRANSFORMERS_VERBOSITY": "error", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
"""Environment of the workers: one loading bar a process and role says nothing that the run's own bar does not."""


def run(config: PpoConfig, on_event: Callable[[Event], None]) -> None:
    """Run a configuration to its end.

    With `trainer.backend=local` everything happens in this process; with `ray` the loop runs in an actor on the cluster
    and this process only shows what it reports.

    Args:
        config: a configuration that `preflight.check` passed.
        on_event: is called in this process with each event of the run (see `tracking`).

    Raises:
        LaunchError: this machine or cluster lacks what the configuration asks for.
    """
    from ostinato.ppo.preflight_launch import check_launch

    config = with_device(config)
    check_launch(config)
    if config.trainer.backend == "local":
        train(config, emit=on_event)
        return
    from ostinato.controller.ray import driver, env
    from ostinato.ppo.tracking import guarded

    with env.ray_session(env_vars=QUIET):
        driver.run_on_cluster(train_logged, config, logging.root.level, on_event=guarded(on_event))


def train_logged(config: PpoConfig, level: int, *, emit: Callable[[Event], None]) -> None:
    """`train` in the driver actor, a fresh process, with the log lines that it has in this one; Ray brings them here.

    Args:
        config: as for `train`.
        level: of the log lines.
        emit: as for `train`.
    """
    logging.basicConfig(level=level, format=LOG_FORMAT)
    train(config, emit=emit)


def train(config: PpoConfig, *, emit: Callable[[Event], None]) -> None:
    """The whole run in this process: the driver's side of every stage.

    Args:
        config: the configuration, `trainer.device` settled.
        emit: receives the run's events.
    """
    from ostinato.ppo import curve
    from ostinato.ppo.checkpoint import Checkpoints
    from ostinato.ppo.data import Schedule, load_tokenizer
    from ostinato.ppo.dump import observers
    from ostinato.ppo.placement import open_backend, place
    from ostinato.ppo.rewards import build_reward
    from ostinato.ppo.run_folder import model_fingerprint
    from ostinato.ppo.tracking import Tracker
    from ostinato.ppo.trainer import Trainer
    from ostinato.ppo.validation import Validation

    trainer = config.trainer
    for role in (config.actor_rollout_ref, config.critic, config.reward_model):
        if role.model.external_lib:  # may register estimators and reward scorers, which run here
            import_module(role.model.external_lib)
    with ExitStack() as stack:
        checkpoints = Checkpoints(trainer.default_local_dir, trainer.checkpoints_to_keep)
        stack.callback(checkpoints.close)
        checkpoints.claim(model_fingerprint(config.actor_rollout_ref.model.path))
        tokenizer = load_tokenizer(config.actor_rollout_ref.model)
        schedule = Schedule(config.data, tokenizer, config.trainer)
        config = config.with_total_steps(schedule.num_prompts)
        validation = Validation(config, tokenizer) if config.data.val_files else None  # a faulty prompt is found soon
        tracker = Tracker(trainer.logger, trainer.default_local_dir, config, emit, total_steps=schedule.total_steps)
        stack.callback(tracker.close)
        backend = open_backend(config)
        stack.callback(backend.shutdown)
        placement = place(config)
        groups = backend.launch(placement.roles, placement.pools)
        for group in reversed(groups.values()):  # the actor last: its rollout engine sizes its cache by what is left
            group.init_model()
        reward = build_reward(config, tokenizer, groups)
        stack.callback(reward.close)
        observe = observers(trainer, tokenizer)
        Trainer(config, groups, reward, schedule, validation, tracker, checkpoints, observe).fit()
        if "jsonl" in trainer.logger:
            tracker.note(f"reward curve: {curve.draw(checkpoints.folder)}")
        steps = f"{schedule.total_steps} step" + ("" if schedule.total_steps == 1 else "s")
        tracker.note(f"done, {steps}; what the run leaves behind is in {checkpoints.folder}")


def with_device(config: PpoConfig) -> PpoConfig:
    """Settle `trainer.device=auto`: CUDA where there is a device, else the CPU."""
    if config.trainer.device != "auto":
        return config
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    return replace(config, trainer=replace(config.trainer, device=device))
