from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ostinato.protocol import DataProto
from ostinato.rollout import Rollout, RolloutConfig, build_rollout
from ostinato.rollout.backends.fake import FakeRollout
from ostinato.rollout.backends.hf import HfRollout
from ostinato.rollout.errors import EngineStateError
from ostinato.rollout.testing import Setting, checks, run_conformance
from ostinato.rollout.testing.conformance import MODEL_CHECKS, PROTOCOL_CHECKS, Check


def make(config: RolloutConfig, path: Path) -> Rollout:
    return build_rollout(config, model_path=path)


def abort(rollout: FakeRollout, rows) -> None:
    rollout.abort = set(rows)


@pytest.fixture(scope="module")
def hf(tmp_path_factory) -> Setting:
    return Setting("hf", tmp_path_factory.mktemp("hf"))


@pytest.fixture(scope="module")
def fake(tmp_path_factory) -> Setting:
    return Setting("fake", tmp_path_factory.mktemp("fake"), has_model=False, abort=abort)


@pytest.mark.parametrize("check", [*PROTOCOL_CHECKS, *MODEL_CHECKS], ids=lambda check: check.__name__)
def test_hf_conforms(check: Check, hf: Setting):
    check(make, hf)


@pytest.mark.parametrize(
    "check", checks(Setting("fake", Path(), has_model=False, abort=abort)), ids=lambda check: check.__name__
)
def test_fake_conforms(check: Check, fake: Setting):
    check(make, fake)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_hf_conforms_on_a_gpu(dtype, tmp_path, monkeypatch):
    """The oracle stays on the CPU, and weights travel from there to the device."""
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", False)
    exclude = () if dtype == "float32" else {"check_prompt_lengths", "check_split", "check_left_padding"}
    setting = Setting("hf", tmp_path, dtype=dtype, atol=1e-3 if dtype == "float32" else 0.25)
    run_conformance(
        lambda config, path: build_rollout(config, model_path=path, device="cuda"), setting, exclude=exclude
    )


def test_hf_conforms_in_small_batches(tmp_path):
    """Few rows at once, prompts run one by one: the same suite, other paths of the decoder."""
    setting = Setting("hf", tmp_path, overrides={"max_num_seqs": 2, "max_num_batched_tokens": 1})
    assert len(run_conformance(make, setting)) == len(PROTOCOL_CHECKS) + len(MODEL_CHECKS)


def test_hf_conforms_in_bfloat16(tmp_path):
    """Half precision may swap near ties, so what compares tokens of different batches is left out."""
    setting = Setting("hf", tmp_path, dtype="bfloat16", atol=0.25)
    exclude = {"check_prompt_lengths", "check_split", "check_left_padding"}
    run_conformance(make, setting, exclude=exclude)


class StaleHead(HfRollout):
    """The tied head keeps the weights of the first load (environment: engines that prepack their head do this)."""

    def finish_load(self) -> None:
        super().finish_load()
        head = self.__dict__.setdefault("head", self._model.lm_head.weight.detach().clone())
        if self._specs["lm_head.weight"].tied_to is not None:
            self._model.lm_head.weight = torch.nn.Parameter(head)


class StaleWeights(HfRollout):
    """The first load wins."""

    def load_weights(self, bucket) -> None:
        kept = self.__dict__.setdefault("kept", {})
        super().load_weights([(name, kept.setdefault(name, tensor.clone())) for name, tensor in bucket])


class PadsAsPrompt(HfRollout):
    """Padding goes into the model."""

    def generate(self, prompts, sampling):
        rows = prompts.drop(["attention_mask"])
        ones = torch.ones_like(prompts.batch["attention_mask"])
        return super().generate(rows.union(DataProto.from_dict({"attention_mask": ones})), sampling)


class OneStream(HfRollout):
    """Every row draws from one stream."""

    def generate(self, prompts, sampling):
        numbers = prompts.non_tensor_batch["rollout_id"]
        same = prompts.drop(["rollout_id"]).union(DataProto.from_dict(None, {"rollout_id": numbers * 0}))
        out = super().generate(same, sampling).drop(["rollout_id"])
        return out.union(DataProto.from_dict(None, {"rollout_id": numbers}))


class NoStep(HfRollout):
    """Every step draws the same."""

    def generate(self, prompts, sampling):
        return super().generate(prompts, replace(sampling, step=0))


class RawLogProbs(HfRollout):
    """Log-probabilities are divided by the temperature instead of its logits."""

    def generate(self, prompts, sampling):
        rows = super().generate(prompts, sampling)
        rows.batch["rollout_log_probs"] *= sampling.log_prob_temperature
        return rows


class Eager(HfRollout):
    """Generates whatever the state is."""

    def wake(self, tag):
        self._state._arrived.update(self._state._needed)
        self._state._whole = True
        super().wake(tag)


class Overlong(HfRollout):
    """Ignores the context limit."""

    def __init__(self, config, **options):
        super().__init__(replace(config, max_model_len=None), **options)


class DropsEnd(HfRollout):
    """The end token is not part of the response."""

    def generate(self, prompts, sampling):
        rows = super().generate(prompts, sampling)
        lengths = rows.batch["response_mask"].sum(-1)
        stopped = torch.from_numpy((rows.non_tensor_batch["finish_reason"] == "stop").astype(bool))
        last = torch.arange(rows.batch["response_mask"].shape[1]) == lengths[:, None] - 1
        rows.batch["response_mask"][last & stopped[:, None]] = 0
        return rows


@pytest.mark.parametrize(
    ("broken", "check"),
    [
        (StaleHead, "check_new_weights"),
        (StaleWeights, "check_new_weights"),
        (PadsAsPrompt, "check_left_padding"),
        (OneStream, "check_samples"),
        (NoStep, "check_samples"),
        (RawLogProbs, "check_log_probs"),
        (Eager, "check_refuses_before_sync"),
        (Overlong, "check_limits"),
        (DropsEnd, "check_end_tokens"),
    ],
)
def test_conformance_catches_a_broken_engine(broken, check, hf: Setting):
    found = next(c for c in checks(hf) if c.__name__ == check)
    with pytest.raises(AssertionError):
        found(lambda config, path: broken(config, model_path=path), hf)


def test_conformance_closes_its_engines_where_a_check_fails(hf: Setting):
    made = []

    def make(config, path):
        made.append(DropsEnd(config, model_path=path))
        return made[-1]

    with pytest.raises(AssertionError):
        run_conformance(make, hf)
    assert made
    for rollout in made:
        with pytest.raises(EngineStateError, match="closed"):
            rollout.wake("weights")
