"""The value model: it scores states and is trained on returns."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from ostinato.controller import Dispatch, register
from ostinato.protocol import DataProto
from ostinato.workers.core.checkpoint import RoleCheckpoint
from ostinato.workers.core.config import CriticConfig
from ostinato.workers.core.errors import RoleError
from ostinato.workers.core.export import export_hf
from ostinato.workers.core.factory import build_engine, prepare_model
from ostinato.workers.core.flops import Mfu
from ostinato.workers.core.losses import CriticObjective
from ostinato.workers.core.memory import memory_metrics
from ostinato.workers.core.microbatch import pack
from ostinato.workers.core.residency import Residency
from ostinato.workers.core.saving import SavedWorker
from ostinato.workers.core.scoring import SCORING, scored, values_as
from ostinato.workers.core.update import update

TRAINING = (*SCORING, "values", "returns", "mini_batch")


class CriticWorker(SavedWorker):
    """One rank of the critic.

    Args:
        config: model, optimizer and batch sizes (`critic` of the app).
        engine: import path of the training engine.
    """

    def __init__(self, config: CriticConfig, engine: str = "ostinato.workers.fsdp:FsdpEngine") -> None:
        super().__init__()
        self.config = config
        self.engine_path = engine
        self._residency: Residency | None = None
        self._checkpoint: RoleCheckpoint | None = None
        self._mfu: Mfu | None = None

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        """Build the engine; collective over all ranks."""
        prepare_model(self.config.model, "critic.model")
        self.init_process_group()
        config = self.config
        self._residency = build_engine(self.engine_path, config, config.model, head="value", optim=config.engine_optim)
        self._checkpoint = RoleCheckpoint(self._residency, config.model, "value", config.checkpoint)
        self._mfu = Mfu(config.model, "value", self._residency.engine, self.world_size)
        self.register_mesh("train", self._residency.engine.coordinates)

    @register(
        dispatch_mode=Dispatch.DP_COMPUTE_PROTO, reads=SCORING, requires=SCORING, writes=("values",), keeps_rows=True
    )
    def compute_values(self, batch: DataProto) -> DataProto:
        """Estimate the value of the state before each token that the policy sampled.

        Args:
            batch: `input_ids`, `attention_mask` (B, P+R), `response_mask` (B, R).

        Returns:
            `values` (B, R) float32, 0 under the mask.
        """
        critic = self._built("compute_values")
        packer = partial(pack, device=critic.engine.device)
        read = values_as("values")
        return DataProto.from_dict(scored(critic, batch, packer, read, self.config.forward_limit, phase="values"))

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, reads=TRAINING, requires=TRAINING[:-1])
    def update_critic(self, batch: DataProto) -> DataProto:
        """Train on the returns of one step.

        Args:
            batch: the columns of `TRAINING`, the last one where there is one.

        Returns:
            No rows; the metrics are in its meta.
        """
        critic, config = self._built("update_critic"), self.config
        assert self._mfu is not None, "made together with the engine"
        with critic.training(), critic.peaks.during("update_critic"), self._mfu.measured():
            metrics = update(
                critic.engine,
                batch,
                CriticObjective(config),
                num_mini_batches=config.num_mini_batches,
                epochs=config.ppo_epochs,
                limit=config.update_limit,
            )
        metrics |= self._mfu.metrics("critic", batch, config.ppo_epochs) | memory_metrics(critic.engine.device)
        metrics |= critic.peaks.metrics()
        return DataProto.from_dict(meta_info={"metrics": metrics})

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def export_hf(self, path: str) -> None:
        """Write the critic as a sequence-classification folder; collective, rank 0 writes."""
        source = self._built("export_hf").engine.weight_source()
        export_hf(source, self.config.model, Path(path), head="value", writes=self.rank == 0)

    def _built(self, method: str) -> Residency:
        if self._residency is None:
            raise RoleError(f"{method}: the critic is not built; call init_model first")
        return self._residency

    def _saved(self, method: str) -> RoleCheckpoint:
        self._built(method)
        assert self._checkpoint is not None, "made together with the engine"
        return self._checkpoint
