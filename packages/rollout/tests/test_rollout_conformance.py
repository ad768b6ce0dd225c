from __future__ import annotations

from pathlib import Path

import pytest

from ostinato.rollout import Rollout, RolloutConfig, build_rollout
from ostinato.rollout.backends.fake import FakeRollout
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


def test_hf_conforms_in_small_batches(tmp_path):
    """Few rows at once, prompts run one by one: the same suite, other paths of the decoder."""
    setting = Setting("hf", tmp_path, overrides={"max_num_seqs": 2, "max_num_batched_tokens": 1})
    assert len(run_conformance(make, setting)) == len(PROTOCOL_CHECKS) + len(MODEL_CHECKS)


def test_hf_conforms_in_bfloat16(tmp_path):
    """Half precision may swap near ties, so what compares tokens of different batches is left out."""
    setting = Setting("hf", tmp_path, dtype="bfloat16", atol=0.25)
    exclude = {"check_prompt_lengths", "check_split", "check_left_padding"}
    run_conformance(make, setting, exclude=exclude)
