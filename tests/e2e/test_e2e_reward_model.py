"""A reward model in place of a reward function: in this process, on the actor's processes, and on a pool of its own."""

from __future__ import annotations

import pytest
import torch
from toy_runs import batches_seen, metrics_of, nested, toy_overrides

from ostinato.ppo import run as run_module
from ostinato.ppo.config import PpoConfig
from ostinato.ppo.preflight import check
from ostinato.workers.core.errors import ModelMismatchError
from ostinato.workers.core.testing.models import tiny_causal_lm, tiny_reward_model

pytestmark = pytest.mark.e2e

OWN_POOL = {"reward_model.enable_resource_pool": True, "reward_model.n_gpus_per_node": 2}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A folder with a policy and a reward model of one vocabulary, bytes."""
    folder = tmp_path_factory.mktemp("models")
    tiny_causal_lm(folder / "policy")
    tiny_reward_model(folder / "reward")
    return folder


def overrides(toy, folder, models, **more):
    changes = {
        "actor_rollout_ref.model.path": str(models / "policy"),
        "reward_model.enable": True,
        "reward_model.model.path": str(models / "reward"),
        "data.max_prompt_length": 64,
        "data.val_max_samples": 4,
        "trainer.test_freq": 2,
    }
    return nested(toy_overrides(toy, folder, **(changes | more)))


def train(toy, folder, models, **more):
    config = check(PpoConfig.from_mapping(overrides(toy, folder, models, **more))).config
    run_module.train(config, emit=lambda event: None)
    return metrics_of(folder)


def test_reward_model_scores_the_last_token_wherever_it_runs(toy, tmp_path, models, ray_session, monkeypatch):
    seen = batches_seen(monkeypatch)
    here = train(toy, tmp_path / "local", models, **{"trainer.backend": "local"})
    check_scores(seen[0], models / "reward")
    assert [line["training/global_step"] for line in here] == [1, 2]
    assert "reward/errors" not in here[0]
    assert here[0]["actor/grad_norm"] > 0
    assert [name for name in here[1] if name.startswith("val-core/")]
    for name, more in {"shared": {}, "apart": OWN_POOL}.items():
        there = train(toy, tmp_path / name, models, **more)
        assert [line.keys() for line in there] == [line.keys() for line in here]
        for mine, theirs in zip(here, there, strict=True):
            for key in ("critic/score/mean", "critic/score/max", "actor/pg_loss", "actor/grad_norm"):
                assert mine[key] == pytest.approx(theirs[key], rel=1e-5, abs=1e-6), (name, key)


def check_scores(batch, folder):
    """The scores are those of the classifier itself, row by row, on the last token that was sampled."""
    from transformers import AutoModelForSequenceClassification

    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    rows = batch.batch
    for row in range(0, len(batch), 5):
        tokens = rows["input_ids"][row][rows["attention_mask"][row].bool()]
        with torch.no_grad():
            expected = model(input_ids=tokens[None]).logits[0, 0]
        scores, mask = rows["token_level_scores"][row], rows["response_mask"][row].bool()
        last = int(mask.nonzero()[-1])
        torch.testing.assert_close(scores[last], expected, atol=1e-5, rtol=1e-5)
        assert scores.count_nonzero() == 1


def test_reward_model_of_another_vocabulary_is_refused_by_the_worker_too(toy, tmp_path, models):
    """The static checks find it first; a program that skips them gets the same text."""
    unlike = {"actor_rollout_ref.model.path": str(toy / "model"), "trainer.backend": "local"}
    config = PpoConfig.from_mapping(overrides(toy, tmp_path, models, **unlike))
    with pytest.raises(
        ModelMismatchError, match=r"reward_model\.model\.path: expected the policy's vocabulary"
    ) as caught:
        run_module.train(config, emit=lambda event: None)
    assert any("role 'reward_model'" in note for note in caught.value.__notes__)
