"""Every advantage estimator and every policy loss trains: two steps of the toy task, in this process."""

from __future__ import annotations

import math

import pytest
from toy_runs import metrics_of, nested, toy_overrides

from ostinato.algos import adv_estimators, policy_losses
from ostinato.ppo import run as run_module
from ostinato.ppo.config import PpoConfig
from ostinato.ppo.preflight import check

pytestmark = pytest.mark.e2e

LOSS = "actor_rollout_ref.actor.policy_loss.loss_mode"
MORE = {
    "gdpo": {"algorithm.gdpo_reward_keys": ["score", "length"], "algorithm.gdpo_reward_weights": [1.0, 0.5]},
    "gspo": {"actor_rollout_ref.actor.loss_agg_mode": "seq-mean-token-mean"},
    "geo_mean": {"actor_rollout_ref.actor.loss_agg_mode": "seq-mean-token-mean"},
    "clip_cov": {"actor_rollout_ref.actor.policy_loss.clip_cov_ratio": 0.1},
    "kl_cov": {"actor_rollout_ref.actor.policy_loss.kl_cov_ratio": 0.1},
}

REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return {"score": sum(map(ord, solution_str)) % 11 / 10, "length": len(solution_str)}
"""  # an untrained model is hardly ever right: groups need scores that differ


def train(toy, folder, **more):
    reward = folder / "reward.py"
    reward.write_text(REWARD)
    options = {
        "trainer.backend": "local",
        "data.val_files": [],
        "custom_reward_function.path": str(reward),
        "custom_reward_function.num_processes": 1,
        **more,
    }
    checked = check(PpoConfig.from_mapping(nested(toy_overrides(toy, folder, **options))))
    run_module.train(checked.config, emit=lambda event: None)
    return metrics_of(folder)


def assert_trained(lines):
    assert [line["training/global_step"] for line in lines] == [1, 2]
    for line in lines:
        assert all(math.isfinite(value) for value in line.values() if isinstance(value, float))
        assert line["actor/skipped_steps"] == 0
        assert line["actor/grad_norm"] > 0


@pytest.mark.parametrize("name", adv_estimators())
def test_every_estimator_runs_two_steps(toy, tmp_path, name):
    lines = train(toy, tmp_path, **{"algorithm.adv_estimator": name}, **MORE.get(name, {}))
    assert_trained(lines)
    assert ("critic/vf_loss" in lines[0]) == (name == "gae")
    assert ("timing_s/baseline" in lines[0]) == (name == "remax")
    assert ("reward_baseline/mean" in lines[0]) == (name == "remax")


@pytest.mark.parametrize("name", policy_losses())
def test_every_policy_loss_runs_two_steps(toy, tmp_path, name):
    lines = train(toy, tmp_path, **{LOSS: name}, **MORE.get(name, {}))
    assert_trained(lines)
    assert "actor/pg_loss" in lines[0]


WHOLE = """
def compute_score(data_sources, solution_strs, ground_truths, extra_infos):
    return [sum(map(ord, text)) % 11 / 10 for text in solution_strs]
"""


@pytest.mark.parametrize("name", ["batch", "dapo"])
def test_every_reward_manager_runs_two_steps(toy, tmp_path, name):
    more = {"reward_manager.name": name}
    if name == "batch":
        (tmp_path / "whole.py").write_text(WHOLE)
        more["custom_reward_function.path"] = str(tmp_path / "whole.py")
    else:
        more["reward_manager.overlong_buffer.len"] = 2
    lines = train(toy, tmp_path, **more)
    assert_trained(lines)
    assert ("reward/overlong_penalty/mean" in lines[0]) == (name == "dapo")
