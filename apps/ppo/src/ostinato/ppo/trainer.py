"""The loop: generate, score, estimate, update. One plain Python function on the driver.

`Trainer` is handed everything that it uses (groups, reward, schedule, tracker, checkpoints) by `run.py` and knows
neither Ray nor Hydra nor an engine. It passes one `DataProto` from stage to stage and looks at values only through
`.get(columns)`.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ostinato.ppo.balance import balance
from ostinato.ppo.baseline import GreedyBaseline
from ostinato.ppo.checkpoint import Checkpoints, Resumed
from ostinato.ppo.config import PpoConfig
from ostinato.ppo.data import Schedule, follow, rollouts
from ostinato.ppo.estimate import Estimate, correct
from ostinato.ppo.metrics import batch_metrics
from ostinato.ppo.tracking import Tracker
from ostinato.ppo.validation import Validation
from ostinato.protocol import DataProto, Metric, columns

logger = logging.getLogger(__name__)

EXPORTS = {"actor": "huggingface", "critic": "huggingface_critic"}
"""Folders of a checkpoint that hold an exported role."""


@dataclass
class Trainer:
    """One run.

    Attributes:
        config: the whole configuration, checked.
        groups: worker groups by role: `actor`, and `critic` and `reward_model` where the configuration has them.
        reward: `batch -> token_level_scores`, a rule on the driver or the reward model's group method.
        schedule: the training data, step by step; of a run that is resumed, where that goes on.
        validation: the validation pass, or None without validation data.
        tracker: metrics, timings, progress.
        checkpoints: the run folder.
        observers: look at the scored rows of each step, by timing name.
        resumed: the checkpoint that the run goes on from; None: it starts.
    """

    config: PpoConfig
    groups: Mapping[str, Any]
    reward: Callable[[DataProto], DataProto]
    schedule: Schedule
    validation: Validation | None
    tracker: Tracker
    checkpoints: Checkpoints
    observers: Mapping[str, Callable[[DataProto], None]]
    resumed: Resumed | None = None

    def __post_init__(self) -> None:
        config = self.config
        self.actor = self.groups["actor"]
        self.critic = self.groups.get("critic")
        self.reference = self.actor if config.needs_reference else None
        self.estimate = Estimate(config.algorithm)
        self.preparations: dict[str, Callable[[DataProto], DataProto]] = {}  # steps on the prompts, by timing name
        if "reward_baselines" in self.estimate.wanted:
            self.preparations["baseline"] = GreedyBaseline(self.actor, self.reward)
        self.step = self.schedule.step
        self.num_mini_batches = config.actor_rollout_ref.actor.num_mini_batches
        if self.critic:  # the finest cut that both roles' mini-batches are whole multiples of
            self.num_mini_batches = math.lcm(self.num_mini_batches, config.critic.num_mini_batches)

    def fit(self) -> None:
        """Train until the schedule ends, from the checkpoint on where the run is resumed."""
        cfg, trainer = self.config, self.config.trainer
        self.resume()
        if trainer.val_before_train and self.step == 0:
            self.tracker.report(0, self.validate())
        for step, batch in self.schedule.steps():
            with self.tracker.step(step) as log:
                for name, prepare in self.preparations.items():
                    with log.time(name):
                        batch = batch.union(prepare(batch))
                batch = rollouts(batch, cfg.actor_rollout_ref.rollout.n)
                with log.time("gen"):
                    generated = self.actor.generate_sequences(batch.select(columns.PROMPT))
                    batch = follow(batch, generated)
                with log.time("reward"):
                    batch = batch.union(self.reward(batch))
                batch = balance(batch, self.dp_size, self.num_mini_batches, enabled=trainer.balance_batch)
                with log.time("old_log_prob"):
                    batch = batch.union(self.actor.compute_log_prob(batch))
                if self.reference:
                    with log.time("ref"):
                        batch = batch.union(self.reference.compute_ref_log_prob(batch))
                if self.critic:
                    with log.time("values"):
                        batch = batch.union(self.critic.compute_values(batch))
                for name, observe in self.observers.items():
                    with log.time(name):
                        observe(batch)
                with log.time("adv"):
                    batch = correct(batch, cfg.algorithm.rollout_correction)
                    batch = batch.union(self.estimate(batch))
                if self.critic:
                    with log.time("update_critic"):
                        log.add(self.critic.update_critic(batch))
                if step > trainer.critic_warmup:
                    with log.time("update_actor"):
                        log.add(self.actor.update_actor(batch))
                log.add(batch_metrics(batch, cfg.data.max_response_length))
                self.step = step
                if self.due(trainer.test_freq):
                    with log.time("testing"):
                        log.add(self.validate())
                if self.due(trainer.save_freq):
                    with log.time("save_checkpoint"):
                        log.add(self.save())
            self.checkpoints.settle()  # after the step's metrics: a run that dies in between trains the step anew
        self.checkpoints.finish()

    def validate(self) -> dict[str, Metric]:
        """Generate for every validation prompt and score the answers; returns `val-core/*` and `val-aux/*`."""
        return self.validation.run(self.step, self.actor, self.reward) if self.validation else {}

    def due(self, frequency: int) -> bool:
        """Whether something with this frequency (steps; below 1: never) is to happen now; the last step counts."""
        return frequency > 0 and (self.step % frequency == 0 or self.step == self.schedule.total_steps)

    def save(self) -> dict[str, Metric]:
        """Write a checkpoint of this step, or begin to; it is in force once `checkpoints.settle` has found it whole."""
        roles = self.config.trained_roles

        def write(folder: Path) -> None:
            for role in roles:
                self.groups[role].save_checkpoint(str(folder / role), self.step)
            for role in self.exported:
                self.groups[role].export_hf(str(folder / EXPORTS[role]))

        def written(wait: bool) -> bool:
            states = [self.groups[role].checkpoint_saved(wait) for role in roles]  # every role is asked
            return all(done for ranks in states for done in ranks)

        self.checkpoints.begin(self.step, write, self.state_dict(), written)
        return {"training/failed_checkpoints": Metric.max(float(self.checkpoints.num_failed))}

    def resume(self) -> None:
        """Take over the checkpoint that the run goes on from, if there is one; the schedule has its part already."""
        if self.resumed is None:
            return
        self.estimate.load_state_dict(self.resumed.state["estimate"])
        for role in self.config.trained_roles:
            self.groups[role].load_checkpoint(str(self.resumed.folder / role))
        self.tracker.note(f"resumed from {self.resumed.folder}, step {self.step} of {self.schedule.total_steps}")

    @property
    def exported(self) -> list[str]:
        """Roles whose weights go into each checkpoint as a Hugging Face folder too."""
        roles = {"actor": self.config.actor_rollout_ref.actor, "critic": self.config.critic}
        also = ["actor"] if self.config.trainer.save_hf_model else []
        return [role for role in self.config.trained_roles if role in also or roles[role].checkpoint.exports]

    @property
    def dp_size(self) -> int:
        """Data-parallel ranks of the actor."""
        return self.actor.dp_size()

    def state_dict(self) -> dict[str, Any]:
        """What the loop itself needs to continue."""
        return {"schedule": self.schedule.state_dict(), "estimate": self.estimate.state_dict()}
