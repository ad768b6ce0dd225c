"""What the loop promises: how many updates, which checkpoints, which models, and what one mini-batch a step shows."""

from __future__ import annotations

from collections import Counter

import pytest
from toy_runs import metrics_of, nested, toy_overrides

from ostinato.ppo import run as run_module
from ostinato.ppo.config import PpoConfig
from ostinato.ppo.preflight import check
from ostinato.ppo.run_folder import complete_steps
from ostinato.workers.fsdp import FsdpEngine

pytestmark = pytest.mark.e2e

REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return sum(map(ord, solution_str)) % 11 / 10
"""  # an untrained model is hardly ever right: groups need scores that differ

ONE_MINI_BATCH = {"actor_rollout_ref.actor.ppo_mini_batch_size": 8, "critic.ppo_mini_batch_size": 8}
KL_IN_REWARD, KL_IN_LOSS = "algorithm.use_kl_in_reward", "actor_rollout_ref.actor.use_kl_loss"


@pytest.fixture
def engines(monkeypatch):
    """Counts what engines do, by (head, trainable): `build` and `optimizer_step`."""
    counts = {"build": Counter(), "optimizer_step": Counter()}

    def counted(name):
        original = getattr(FsdpEngine, name)

        def method(self, *args, **kwargs):
            counts[name][self._head, self._trainable] += 1
            return original(self, *args, **kwargs)

        return method

    for name in counts:
        monkeypatch.setattr(FsdpEngine, name, counted(name))
    return counts


def train(toy, folder, **more):
    """Run in this process; returns the metrics' lines and the static checks' warnings."""
    (folder / "reward.py").write_text(REWARD)
    options = {
        "trainer.backend": "local",
        "data.val_files": [],
        "custom_reward_function.path": str(folder / "reward.py"),
        "custom_reward_function.num_processes": 1,
        **ONE_MINI_BATCH,
        **more,
    }
    checked = check(PpoConfig.from_mapping(nested(toy_overrides(toy, folder / "run", **options))))
    run_module.train(checked.config, emit=lambda event: None)
    return metrics_of(folder / "run"), checked.warnings


def steps_of(lines):
    return [line["training/global_step"] for line in lines]


def test_seven_steps_without_kl(toy, tmp_path, engines):
    """H-64: saved every 5 and at the end. H-65: no reference engine, no reference forward. H-62: an update a step.

    H-67: with one mini-batch a step the ratio is 1 and, advantages being centred, the loss is about 0; the gradient is
    not.
    """
    aggregation = {"actor_rollout_ref.actor.loss_agg_mode": "seq-mean-token-mean"}
    lines, _ = train(toy, tmp_path, **aggregation, **{"trainer.total_training_steps": 7, "trainer.save_freq": 5})
    assert steps_of(lines) == [1, 2, 3, 4, 5, 6, 7]
    assert complete_steps(tmp_path / "run") == [5, 7]
    assert engines["build"] == {("lm", True): 1}
    assert engines["optimizer_step"] == {("lm", True): 7}
    for line in lines:
        assert "timing_s/ref" not in line
        assert "actor/kl_loss" not in line
        assert "actor/reward_kl_penalty" not in line
        assert abs(line["actor/pg_loss"]) < 1e-6
        assert abs(line["actor/ppo_kl"]) < 1e-6
        assert line["actor/pg_clipfrac"] == 0
        assert line["actor/grad_norm"] > 0.01


def test_two_steps_with_both_kl_terms_and_a_critic(toy, tmp_path, engines):
    """H-62: 2 steps planned, 2 updates, logged as 1 and 2. H-65: both KL terms are a loud warning, one reference.

    H-67: the same for whitened advantages: ratio 1, loss about 0, a gradient.
    """
    both = {"algorithm.adv_estimator": "gae", KL_IN_REWARD: True, KL_IN_LOSS: True}
    lines, warnings = train(toy, tmp_path, **both)
    assert steps_of(lines) == [1, 2]
    assert [text for text in warnings if "BOTH KL TERMS ARE ON" in text]
    assert engines["build"] == {("lm", True): 1, ("lm", False): 1, ("value", True): 1}
    assert engines["optimizer_step"] == {("lm", True): 2, ("value", True): 2}
    for line in lines:
        assert "timing_s/ref" in line
        assert "actor/reward_kl_penalty" in line
        assert abs(line["actor/pg_loss"]) < 1e-6
        assert abs(line["actor/ppo_kl"]) < 1e-6
        assert line["actor/grad_norm"] > 0.01
    assert abs(lines[0]["actor/kl_loss"]) < 1e-6  # the reference is what the actor starts from
    assert lines[1]["actor/kl_loss"] > 0


@pytest.mark.parametrize(("flag", "other"), [(KL_IN_REWARD, KL_IN_LOSS), (KL_IN_LOSS, KL_IN_REWARD)])
def test_one_kl_term_has_a_reference_and_no_warning(toy, tmp_path, engines, flag, other):
    """H-65: each term alone does what its name says."""
    lines, warnings = train(toy, tmp_path, **{flag: True, "trainer.total_training_steps": 1})
    assert not [text for text in warnings if "KL" in text]
    assert engines["build"] == {("lm", True): 1, ("lm", False): 1}
    assert ("actor/reward_kl_penalty" in lines[0]) == (flag == KL_IN_REWARD)
    assert ("actor/kl_loss" in lines[0]) == (flag == KL_IN_LOSS)


def test_resume_at_an_epochs_end_trains_the_next_epoch(toy, tmp_path, engines):
    """H-68: 4 steps an epoch, 2 epochs, saved at 4: 4 more updates."""
    short = {"data.train_max_samples": 32, "trainer.total_training_steps": None, "trainer.save_freq": 4}
    assert steps_of(train(toy, tmp_path, **short, **{"trainer.total_epochs": 1})[0]) == [1, 2, 3, 4]
    lines, _ = train(toy, tmp_path, **short, **{"trainer.total_epochs": 2})
    assert steps_of(lines) == [1, 2, 3, 4, 5, 6, 7, 8]
    assert engines["optimizer_step"] == {("lm", True): 8}
    assert complete_steps(tmp_path / "run") == [4, 8]


def test_step_budget_beyond_the_epochs_goes_over_the_data_again(toy, tmp_path, engines):
    """`total_training_steps` counts whatever the epochs: 2 steps an epoch, 1 epoch, 5 steps."""
    budget = {"data.train_max_samples": 16, "trainer.total_epochs": 1, "trainer.total_training_steps": 5}
    lines, _ = train(toy, tmp_path, **budget)
    assert steps_of(lines) == [1, 2, 3, 4, 5]
    assert engines["optimizer_step"] == {("lm", True): 5}
