"""From a checked configuration to a finished run: builds what `Trainer` is handed, here or on a Ray cluster."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ostinato.ppo.config import PpoConfig

if TYPE_CHECKING:
    from ostinato.ppo.checkpoint import Resumed
    from ostinato.ppo.data import Schedule

logger = logging.getLogger(__name__)

Event = dict[str, Any]

LOG_FORMAT = "%(levelname)s %(name)s: %(message)s"

QUIET = {"TRANSFORMERS_VERBOSITY": "error", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
"""Environment of the workers: one loading bar a process and role says nothing that the run's own bar does not."""


PLAIN_LOGS = {"RAY_COLOR_PREFIX": "0", "RAY_DEDUP_LOGS": "0"}
"""Environment of this process where its output goes to no terminal: Ray colours the prefix of a worker's line, and its
note that a line was left out because other workers wrote it too."""


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
    done = finished(config)
    if not done:
        check_launch(config)
    if done or config.trainer.backend == "local":
        train(config, emit=on_event)
        return
    from ostinato.ppo.console import coloured
    from ostinato.ppo.tracking import guarded

    if not coloured(sys.stdout, sys.stderr):  # before Ray is imported: it reads one of them only then
        for name, value in PLAIN_LOGS.items():
            os.environ.setdefault(name, value)
    from ostinato.controller.ray import driver, env

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

    Where the checkpoint that it goes on from has all its steps already, it says so and starts nothing.

    Args:
        config: the configuration, `trainer.device` settled.
        emit: receives the run's events.
    """
    from ostinato.ppo import curve
    from ostinato.ppo.checkpoint import Checkpoints
    from ostinato.ppo.data import Schedule, load_tokenizer
    from ostinato.ppo.dump import observers
    from ostinato.ppo.placement import open_backend, place
    from ostinato.ppo.preflight_launch import check_architectures
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
        check_architectures(config)
        schedule = Schedule(config.data, tokenizer, config.trainer)
        config = config.with_total_steps(schedule.num_prompts)
        resumed = checkpoints.resume(trainer.resume_mode, trainer.resume_from_path, config.trained_roles)
        if resumed is not None:
            schedule.load_state_dict(resumed.state["schedule"])
            if schedule.step >= schedule.total_steps:
                emit({"kind": "note", "text": nothing_left(config, schedule, resumed)})
                return
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
        Trainer(config, groups, reward, schedule, validation, tracker, checkpoints, observe, resumed).fit()
        if "jsonl" in trainer.logger:
            tracker.note(f"reward curve: {curve.draw(checkpoints.folder)}")
        steps = f"{schedule.total_steps} step" + ("" if schedule.total_steps == 1 else "s")
        tracker.note(f"done, {steps}; what the run leaves behind is in {checkpoints.folder}")


def finished(config: PpoConfig) -> bool:
    """Whether the checkpoint that a run goes on from has all its steps, as far as the files here tell.

    Then `train` starts no worker and needs neither GPUs nor a cluster. It counts anew, with the prompts that are left
    after filtering: here are all, so no run is held for finished that is not.
    """
    from ostinato.ppo.facts import Unreadable, read_data
    from ostinato.ppo.run_folder import complete_steps, step_of

    trainer, data = config.trainer, config.data
    if trainer.resume_mode == "auto":
        steps = complete_steps(Path(trainer.default_local_dir), roles=config.trained_roles, warn=False)
    else:
        steps = [step_of(Path(trainer.resume_from_path or ""))] if trainer.resume_mode == "resume_path" else []
    if not steps:
        return False
    try:
        rows = sum(read_data(file, data.prompt_key).num_rows for file in data.train_files)
    except Unreadable:  # `train` says so, where it will read the files
        return False
    prompts = rows if data.train_max_samples < 0 else min(rows, data.train_max_samples)
    return steps[-1] >= config.total_steps(prompts)


def nothing_left(config: PpoConfig, schedule: Schedule, resumed: Resumed) -> str:
    """What to say of a run whose steps are all done."""
    trainer, total = config.trainer, schedule.total_steps
    counted = (
        f"trainer.total_epochs={trainer.total_epochs} × {schedule.steps_per_epoch} an epoch = {total}"
        if trainer.total_training_steps is None
        else f"trainer.total_training_steps={trainer.total_training_steps}"
    )
    return (
        f"nothing to do: the checkpoint {resumed.folder} is of step {schedule.step}, and {counted}. Raise that to "
        "train on; to start anew take another trainer.experiment_name, or trainer.resume_mode=disable"
    )


def with_device(config: PpoConfig) -> PpoConfig:
    """Settle `trainer.device=auto`: CUDA where there is a device, else the CPU."""
    if config.trainer.device != "auto":
        return config
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    return replace(config, trainer=replace(config.trainer, device=device))
