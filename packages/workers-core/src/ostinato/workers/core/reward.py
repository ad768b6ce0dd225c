"""A reward model: a frozen classifier with one output that scores whole rows."""

from __future__ import annotations

from functools import partial

from ostinato.controller import Dispatch, Worker, register
from ostinato.protocol import DataProto
from ostinato.workers.core.config import RewardModelConfig
from ostinato.workers.core.errors import RoleError
from ostinato.workers.core.factory import build_engine, check_vocabulary, prepare_model
from ostinato.workers.core.microbatch import pack_last
from ostinato.workers.core.residency import Residency
from ostinato.workers.core.scoring import SCORING, scored, values_as


class RewardModelWorker(Worker):
    """One rank of the reward model.

    The model reads the policy's token ids as they are, so both must have one vocabulary.

    Args:
        config: model and batch sizes (`reward_model` of the app).
        engine: import path of the training engine.
        policy_path: the policy's folder; given, `init_model` compares the two vocabularies.
    """

    def __init__(
        self,
        config: RewardModelConfig,
        engine: str = "ostinato.workers.fsdp:FsdpEngine",
        policy_path: str | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        self.engine_path = engine
        self.policy_path = policy_path
        self._residency: Residency | None = None

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        """Build the engine; collective over all ranks.

        Raises:
            ModelMismatchError: the policy has another vocabulary.
        """
        prepare_model(self.config.model, "reward_model.model")
        check_vocabulary(self.config.model, self.policy_path, "reward_model.model")
        self.init_process_group()
        self._residency = build_engine(self.engine_path, self.config, self.config.model, head="value")
        self.register_mesh("train", self._residency.engine.coordinates)

    @register(
        dispatch_mode=Dispatch.DP_COMPUTE_PROTO,
        reads=SCORING,
        requires=SCORING,
        writes=("token_level_scores",),
        keeps_rows=True,
    )
    def compute_rm_score(self, batch: DataProto) -> DataProto:
        """Score each row by the model's output at its last valid token.

        Args:
            batch: `input_ids`, `attention_mask` (B, P+R), `response_mask` (B, R).

        Returns:
            `token_level_scores` (B, R) float32: the score on the last token that the policy sampled, 0 elsewhere. A row
            without such a token has no score.
        """
        if self._residency is None:
            raise RoleError("compute_rm_score: the reward model is not built; call init_model first")
        packer = partial(pack_last, device=self._residency.engine.device)
        read = values_as("token_level_scores")
        return DataProto.from_dict(scored(self._residency, batch, packer, read, self.config.limit, phase="reward"))
