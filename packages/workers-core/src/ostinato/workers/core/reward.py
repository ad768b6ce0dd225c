"""A reward model: a frozen classifier with one output that scores whole rows."""

from __future__ import annotations

from functools import partial

from ostinato.controller import Dispatch, Worker, register
from ostinato.protocol import DataProto
from ostinato.workers.core.config import RewardModelConfig
from ostinato.workers.core.engine import TokenOutputs, TrainEngine
from ostinato.workers.core.errors import RoleError
from ostinato.workers.core.factory import check_vocabulary, find_engine, prepare_model
from ostinato.workers.core.microbatch import pack_last
from ostinato.workers.core.residency import Residency
from ostinato.workers.core.scoring import Outputs, planned, token_columns

SCORING = ("input_ids", "attention_mask", "response_mask")


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
            ModelMismatchError: the policy's vocabulary has another size.
        """
        prepare_model(self.config.model, "reward_model.model")
        check_vocabulary(self.config.model, self.policy_path, "reward_model.model")
        self.init_process_group()
        engine: TrainEngine = find_engine(self.engine_path)(
            head="value", model=self.config.model, optim=None, engine=self.config.engine_config, trainable=False
        )
        engine.build()
        self.register_mesh("train", engine.coordinates)
        self._residency = Residency(engine, self.config)
        self._residency.park()

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, reads=SCORING, writes=("token_level_scores",))
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
        with self._residency.inference():
            engine = self._residency.engine
            plan = planned(engine, batch, self.config.limit)
            packer = partial(pack_last, device=engine.device)
            result = token_columns(engine, batch, packer, _score, plan=plan)
        return DataProto.from_dict() if result is None else DataProto.from_dict(result)


def _score(outputs: TokenOutputs) -> Outputs:
    assert outputs.values is not None, "the engine's head is not 'value'"
    return {"token_level_scores": outputs.values}
