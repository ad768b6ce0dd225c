"""The static checks of estimators, losses, KL terms and the rollout correction, each with the right case next to it."""

from __future__ import annotations

import inspect

import pytest

from ostinato.algos import adv_estimators, get_adv_estimator
from ostinato.ppo.errors import ConfigError
from ostinato.ppo.plan import memory_plan, plan_text
from ostinato.ppo.preflight import examine
from ostinato.ppo.testing import faults

ROLLOUT, ACTOR = "actor_rollout_ref.rollout", "actor_rollout_ref.actor"


@pytest.mark.parametrize("name", adv_estimators())
def test_ppo_preflight_group_estimators_refuse_one_response(name, make):
    """Every estimator that compares within groups, and no other."""
    groups = "groups" in inspect.signature(get_adv_estimator(name)).parameters
    found = faults(make(**{"algorithm.adv_estimator": name, f"{ROLLOUT}.n": 1, "algorithm.gdpo_reward_keys": ["a"]}))
    assert (f"{ROLLOUT}.n" in found) == groups
    found = faults(make(**{"algorithm.adv_estimator": name, f"{ROLLOUT}.n": 2, "algorithm.gdpo_reward_keys": ["a"]}))
    assert found == {}


@pytest.mark.parametrize(
    ("key", "value", "known"),
    [
        ("algorithm.adv_estimator", "grop", "did you mean grpo?"),
        ("algorithm.adv_estimator", "GRPO", "did you mean grpo?"),
        ("algorithm.adv_estimator", "ppo", "PPO, with a critic, is gae"),
        (f"{ACTOR}.policy_loss.loss_mode", "PPO", "PPO's clipped loss is vanilla"),
        (f"{ACTOR}.policy_loss.loss_mode", "vanila", "vanilla"),
        ("algorithm.kl_penalty", "low_var", "low_var_kl"),
        ("algorithm.kl_penalty", "full", "logits"),
        ("trainer.logger", "consol", "console"),
    ],
)
def test_ppo_preflight_unknown_names_list_the_known_ones(key, value, known, make):
    """A-124."""
    assert known in faults(make(**{key: value}))[key]


@pytest.mark.parametrize(
    ("key", "known"),
    [(f"{ACTOR}.loss_agg_mode", "token-mean"), (f"{ACTOR}.kl_loss_type", "low_var_kl"), (f"{ROLLOUT}.name", "sglang")],
)
def test_ppo_preflight_unknown_names_of_the_wheels_list_the_known_ones(key, known, make):
    """A-124: these are refused where their wheel's section is built."""
    with pytest.raises(ConfigError) as refusal:
        make(**{key: "no-such-name"})
    (problem,) = refusal.value.problems
    assert problem.key == key
    assert known in problem.text


def test_ppo_preflight_policy_loss_keywords_are_those_of_its_signature(make):
    """H-74: a renamed option is not swallowed."""
    key = f"{ACTOR}.policy_loss.loss_kwargs"
    assert faults(make(**{key: {"clip_ratio_c": 2.0}})) == {}
    assert "clip_ratio_c" in faults(make(**{key: {"clip_ratioc": 2.0}}))[f"{key}.clip_ratioc"]
    loss = f"{ACTOR}.policy_loss"
    assert faults(make(**{f"{loss}.loss_mode": "clip_cov", f"{key}": {"clip_cov_ratio": 0.1}})) == {}
    assert faults(make(**{f"{loss}.loss_mode": "clip_cov", f"{loss}.clip_cov_ratio": 0.1})) == {}
    assert "no such parameter" in faults(make(**{f"{loss}.tau_pos": 2.0}))[f"{loss}.tau_pos"]


@pytest.mark.parametrize(("name", "warns"), [("gspo", True), ("geo_mean", True), ("vanilla", False)])
def test_ppo_preflight_sequence_losses_want_the_mean_over_sequences(name, warns, make):
    changes = {f"{ACTOR}.policy_loss.loss_mode": name}
    assert any("seq-mean-token-mean" in text for text in examine(make(**changes)).warnings) == warns
    changes[f"{ACTOR}.loss_agg_mode"] = "seq-mean-token-mean"
    assert not any("seq-mean-token-mean" in text for text in examine(make(**changes)).warnings)


def test_ppo_preflight_estimator_that_wants_what_no_step_gives(make, monkeypatch):
    from ostinato.algos import registry

    def greedy(token_level_rewards, response_mask, *, groups, moon_phase, lam=1.0): ...

    monkeypatch.setitem(registry._ADV_ESTIMATORS, "greedy", greedy)
    text = faults(make(**{"algorithm.adv_estimator": "greedy"}))["algorithm.adv_estimator"]
    assert text.startswith("greedy needs moon_phase, which no step gives")
    assert "reward_baselines" in text


def test_ppo_preflight_gdpo_wants_a_reward_function(make):
    changes = {"algorithm.adv_estimator": "gdpo", "algorithm.gdpo_reward_keys": ["a"], "reward_model.enable": True}
    assert "one score a row" in faults(make(**changes))["algorithm.adv_estimator"]


def test_ppo_preflight_both_kl_terms_warn_and_neither_means_no_reference(make):
    """H-65."""
    both = examine(make(**{"algorithm.use_kl_in_reward": True, f"{ACTOR}.use_kl_loss": True}))
    assert both.problems == []
    (warning,) = [text for text in both.warnings if "KL" in text]
    assert "algorithm.use_kl_in_reward" in warning
    assert f"{ACTOR}.use_kl_loss" in warning
    neither = examine(make())
    assert not neither.config.needs_reference
    assert not [text for text in neither.warnings if "KL" in text]
    assert "reference   none" in plan_text(neither)
    assert "reference" not in [plan.role for plan in memory_plan(neither)]
    for one in ({"algorithm.use_kl_in_reward": True}, {f"{ACTOR}.use_kl_loss": True}):
        checked = examine(make(**one))
        assert checked.config.needs_reference
        assert not [text for text in checked.warnings if "KL" in text]
        assert "reference" in [plan.role for plan in memory_plan(checked)]


@pytest.mark.parametrize(
    ("settings", "key", "text"),
    [
        ({"rollout_is": "tok"}, "rollout_is", "token"),
        ({"rollout_is": "token", "rollout_is_threshold": "x"}, "rollout_is_threshold", "upper"),
        ({"rollout_is": "token", "rollout_is_threshold": "3_2"}, "rollout_is_threshold", "3_2"),
        ({"rollout_rs": "token_k9", "rollout_rs_threshold": "2.0"}, "rollout_rs", "token_k1"),
        ({"rollout_rs": "token_k1"}, "rollout_rs_threshold", "missing"),
    ],
)
def test_ppo_preflight_rollout_correction(settings, key, text, make):
    whole = "algorithm.rollout_correction"
    assert text in faults(make(**{whole: settings}))[f"{whole}.{key}".rstrip(".")]
    good = {"rollout_is": "sequence", "rollout_is_threshold": "0.5_2.0", "rollout_rs": "token_k3"}
    assert faults(make(**{whole: good | {"rollout_rs_threshold": "0.5_5.0"}})) == {}


def test_ppo_preflight_hf_engine_runs_on_one_rank(make):
    changes = {"trainer.n_gpus_per_node": 2, f"{ROLLOUT}.tensor_model_parallel_size": 2}
    assert "one rank" in faults(make(**changes))[f"{ROLLOUT}.tensor_model_parallel_size"]


def test_ppo_preflight_gdpo_needs_its_reward_keys(make):
    assert "algorithm.gdpo_reward_keys" in faults(make(**{"algorithm.adv_estimator": "gdpo"}))
    weights = {"algorithm.gdpo_reward_keys": ["a", "b"], "algorithm.gdpo_reward_weights": [1.0]}
    assert "algorithm.gdpo_reward_weights" in faults(make(**{"algorithm.adv_estimator": "gdpo", **weights}))
