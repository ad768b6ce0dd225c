"""The policy in its roles: it trains, it samples, it is a reference, or several of these in one process."""

from __future__ import annotations

import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TypeVar

from ostinato.controller import Coordinates, Dispatch, register
from ostinato.protocol import DataProto, Metric, columns
from ostinato.rollout import Rollout, build_rollout, check_rollout
from ostinato.rollout.reshard import reshard
from ostinato.workers.core.checkpoint import RoleCheckpoint
from ostinato.workers.core.config import ActorRolloutRefConfig, rollout_log_prob_limit
from ostinato.workers.core.errors import ConfigError, RoleError
from ostinato.workers.core.export import export_hf
from ostinato.workers.core.factory import build_engine, prepare_model
from ostinato.workers.core.flops import Mfu
from ostinato.workers.core.limits import BatchLimit
from ostinato.workers.core.losses import ActorObjective
from ostinato.workers.core.memory import MemoryTimeline, memory_metrics
from ostinato.workers.core.microbatch import pack
from ostinato.workers.core.residency import Residency
from ostinato.workers.core.saving import SavedWorker
from ostinato.workers.core.scoring import SCORING, Outputs, log_probs_of, scored
from ostinato.workers.core.update import update

T = TypeVar("T")

ROLES = ("actor", "rollout", "ref", "actor_rollout", "actor_rollout_ref")
GENERATED = (*columns.ROLLOUT, "uid", "rollout_id")
TRAINING = (*SCORING, "old_log_probs", "advantages", "ref_log_prob", "rollout_is_weights", "mini_batch")


class ActorRolloutRefWorker(SavedWorker):
    """One rank of the policy.

    Args:
        config: model, actor, ref and rollout (`actor_rollout_ref` of the app).
        role: what this worker does: `actor`, `rollout`, `ref`, `actor_rollout` or `actor_rollout_ref`. There is a
            reference model only where the role names `ref`; beside an actor that trains an adapter it is that actor
            with its adapter off.
        engine: import path of the training engine.

    A `rollout` alone has no training engine and samples with the weights of the model's folder.
    """

    def __init__(
        self, config: ActorRolloutRefConfig, role: str, engine: str = "ostinato.workers.fsdp:FsdpEngine"
    ) -> None:
        super().__init__()
        if role not in ROLES:
            raise ConfigError(f"role: expected one of {', '.join(ROLES)}, got '{role}'")
        self.config = config
        self.policy_role = role
        self.engine_path = engine
        self._actor: Residency | None = None
        self._checkpoint: RoleCheckpoint | None = None
        self._mfu: Mfu | None = None
        self._ref: Residency | None = None
        self._rollout: Rollout | None = None
        self._objective: ActorObjective | None = None

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        """Build what the role needs, in the order reference, actor, rollout; collective over all ranks."""
        config, parts = self.config, self.policy_role.split("_")
        prepare_model(config.model, "actor_rollout_ref.model")
        self.init_process_group()
        if "rollout" in parts:
            check_rollout(
                config.rollout,
                model_path=config.model.path,
                world_size=self.world_size,
                device=self.context.device_type,
                override_config=config.model.override_config,
                trust_remote_code=config.model.trust_remote_code,
            )
        if "ref" in parts and not self._shares_reference:
            self._ref = build_engine(self.engine_path, config.ref, config.model, head="lm")
        if "actor" in parts:
            self._objective = ActorObjective(config.actor)
            optim = config.actor.engine_optim
            self._actor = build_engine(self.engine_path, config.actor, config.model, head="lm", optim=optim)
            self._checkpoint = RoleCheckpoint(self._actor, config.model, "lm", config.actor.checkpoint)
            self._mfu = Mfu(config.model, "lm", self._actor.engine, self.world_size)
        built = self._actor or self._ref
        if built is not None:
            self.register_mesh("train", built.engine.coordinates)
            self.register_mesh("ref", (self._ref or built).engine.coordinates)
        if "rollout" in parts:
            self._rollout = self._build_rollout()

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, reads=columns.PROMPT, writes=GENERATED, mesh="rollout")
    def generate_sequences(self, prompts: DataProto) -> DataProto:
        """Answer prompts with the actor's current weights.

        Args:
            prompts: `columns.PROMPT`; meta `global_step` (int), `validate` (bool: sample by `val_kwargs`) and `greedy`
                (bool: do not sample).

        Returns:
            Whole rows: the columns of `GENERATED`.
        """
        rollout = self._need(self._rollout, "generate_sequences", "rollout")
        sampling = self.config.rollout.sampling(
            step=int(prompts.meta_info.get("global_step", 0)),
            validate=bool(prompts.meta_info.get("validate", False)),
            greedy=bool(prompts.meta_info.get("greedy", False)),
        )
        if self._actor is None:
            return rollout.generate(prompts, sampling)
        began = time.perf_counter()
        # The source streams from where the parameters lie, so offloaded ones never share the device with the engine's.
        source = self._actor.engine.weight_source()
        memory = MemoryTimeline(self._actor.engine.device)
        with reshard(
            source,
            rollout,
            park=self._actor.park,
            bucket_megabytes=self.config.rollout.update_weights_bucket_megabytes,
            check=self.config.rollout.check_weights,
            observe=memory.mark,
        ):
            seconds = time.perf_counter() - began
            generated = rollout.generate(prompts, sampling)
        own = {"timing_s/update_weights": Metric.max(seconds), **memory.metrics()}
        return generated.with_meta(metrics={**generated.metrics, **own})

    @register(
        dispatch_mode=Dispatch.DP_COMPUTE_PROTO,
        reads=SCORING,
        requires=SCORING,
        writes=("old_log_probs", "sum_pi_squared"),
    )
    def compute_log_prob(self, batch: DataProto) -> DataProto:
        """Score the rows with the actor as it is now.

        Args:
            batch: `input_ids`, `attention_mask` (B, P+R), `response_mask` (B, R).

        Returns:
            `old_log_probs` (B, R) float32, 0 under the mask, and `sum_pi_squared` likewise where `actor.sum_pi_squared`
            is set; metric `actor/entropy`, a token mean.
        """
        actor = self._need(self._actor, "compute_log_prob", "actor")
        limit = rollout_log_prob_limit(self.config.rollout, self.config.actor.ulysses_sequence_parallel_size)
        also = self.config.actor.sum_pi_squared
        mfu = self._need(self._mfu, "compute_log_prob", "actor")
        with mfu.measured():
            result = self._score(actor, batch, limit, "old_log_prob", entropy=True, sum_pi_squared=also)
        if result is None:
            return DataProto.from_dict()
        assert batch.batch is not None, "scored rows have tensor columns"
        tokens = float(batch.batch["response_mask"].sum())
        entropy = float(result["entropy"].double().sum()) / tokens if tokens else 0.0
        return DataProto.from_dict(
            {"old_log_probs": result["log_probs"]} | ({"sum_pi_squared": result["sum_pi_squared"]} if also else {}),
            meta_info={
                "metrics": {
                    "actor/entropy": Metric.mean(entropy, weight=tokens),
                    **mfu.metrics("actor_infer", batch),
                }
            },
        )

    @register(
        dispatch_mode=Dispatch.DP_COMPUTE_PROTO,
        reads=SCORING,
        requires=SCORING,
        writes=("ref_log_prob",),
        mesh="ref",
        keeps_rows=True,
    )
    def compute_ref_log_prob(self, batch: DataProto) -> DataProto:
        """Score the rows with the frozen reference.

        Args:
            batch: as for `compute_log_prob`.

        Returns:
            `ref_log_prob` (B, R) float32, 0 under the mask.
        """
        limit = self.config.ref.log_prob_limit
        if self._shares_reference:
            actor = self._need(self._actor, "compute_ref_log_prob", "ref")
            result = self._score(actor, batch, limit, "ref", adapter=False)
        else:
            result = self._score(self._need(self._ref, "compute_ref_log_prob", "ref"), batch, limit, "ref")
        return DataProto.from_dict() if result is None else DataProto.from_dict({"ref_log_prob": result["log_probs"]})

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, reads=TRAINING, requires=TRAINING[:5])
    def update_actor(self, batch: DataProto) -> DataProto:
        """Train the policy on the rows of one step.

        Args:
            batch: the columns of `TRAINING`; `ref_log_prob` with `use_kl_loss`, the last two where there are any.

        Returns:
            No rows; the metrics are in its meta.
        """
        actor = self._need(self._actor, "update_actor", "actor")
        assert self._objective is not None, "an actor has an objective"
        config = self.config.actor
        mfu = self._need(self._mfu, "update_actor", "actor")
        with actor.training(), actor.peaks.during("update_actor"), mfu.measured():
            metrics = update(
                actor.engine,
                batch,
                self._objective,
                num_mini_batches=config.num_mini_batches,
                epochs=config.ppo_epochs,
                limit=config.update_limit,
                temperature=self.config.rollout.temperature,
            )
            memory = MemoryTimeline(actor.engine.device)
            memory.mark("update_actor")
        metrics |= (
            mfu.metrics("actor", batch, config.ppo_epochs) | memory_metrics(actor.engine.device) | memory.metrics()
        )
        for part in (actor, self._ref):
            metrics |= part.peaks.metrics() if part is not None else {}
        if config.use_kl_loss:
            metrics["actor/kl_coef"] = Metric.mean(config.kl_loss_coef)
        return DataProto.from_dict(meta_info={"metrics": metrics})

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def export_hf(self, path: str) -> None:
        """Write the actor as a Hugging Face folder; collective, rank 0 writes."""
        actor = self._need(self._actor, "export_hf", "actor")
        export_hf(actor.engine.weight_source(), self.config.model, Path(path), head="lm", writes=self.rank == 0)

    def close(self) -> None:
        """Free the rollout engine."""
        if self._rollout is not None:
            self._rollout.close()

    def _build_rollout(self) -> Rollout:
        config, size = self.config.rollout, self.config.rollout.tensor_model_parallel_size
        if self.world_size % size:
            raise ConfigError(
                "actor_rollout_ref.rollout.tensor_model_parallel_size: expected a divisor of the number of ranks "
                f"({self.world_size}), got {size}"
            )
        dp_rank, tp_rank = divmod(self.rank, size)
        place = Coordinates(dp_rank, self.world_size // size, answers=tp_rank == 0, tp_rank=tp_rank)
        self.register_mesh("rollout", place)
        alone = self._actor is None
        rollout = build_rollout(
            replace(config, load_format="auto") if alone else config,
            model_path=self.config.model.path,
            override_config=self.config.model.override_config,
            trust_remote_code=self.config.model.trust_remote_code,
            device=self._actor.engine.device if self._actor else self.context.device_type,
            dp_rank=place.dp_rank,
            dp_size=place.dp_size,
        )
        if alone:
            rollout.wake("weights")
            rollout.wake("kv_cache")
        return rollout

    @property
    def _shares_reference(self) -> bool:
        parts = self.policy_role.split("_")
        return "actor" in parts and "ref" in parts and self.config.model.lora_rank > 0

    def _score(self, part: Residency, batch: DataProto, limit: BatchLimit, phase: str, **asked: bool) -> Outputs | None:
        packer = partial(pack, temperature=self.config.rollout.temperature, device=part.engine.device)
        return scored(part, batch, packer, log_probs_of, limit, phase=phase, **asked)

    def _saved(self, method: str) -> RoleCheckpoint:
        return self._need(self._checkpoint, method, "actor")

    def _need(self, part: T | None, method: str, role: str) -> T:
        if part is None:
            reason = "call init_model first" if role in self.policy_role.split("_") else f"its role needs '{role}'"
            raise RoleError(f"{method}: this worker has the role '{self.policy_role}'; {reason}")
        return part
