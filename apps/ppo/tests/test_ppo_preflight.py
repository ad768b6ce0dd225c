"""The static checks as a whole; batch arithmetic and parallel sizes, each fault with the right case next to it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ostinato.ppo.errors import ConfigError
from ostinato.ppo.plan import memory_plan, plan_text, update_plan
from ostinato.ppo.preflight import Checked, check, examine
from ostinato.ppo.testing import faults

ROLLOUT, ACTOR, PATH = "actor_rollout_ref.rollout", "actor_rollout_ref.actor", "actor_rollout_ref.model.path"


def test_ppo_preflight_good_configuration_passes(make):
    checked = check(make())
    assert checked.problems == []
    assert checked.num_train_prompts == 40
    assert checked.models["actor"].architecture == "Qwen2ForCausalLM"


def test_ppo_preflight_check_raises_all_and_paths_become_absolute(make, tmp_path):
    with pytest.raises(ConfigError) as refusal:
        check(make(**{"data.train_batch_size": 41, "algorithm.adv_estimator": "x", PATH: "/nowhere"}))
    assert {problem.key for problem in refusal.value.problems} == {
        "data.train_batch_size",
        "algorithm.adv_estimator",
        PATH,
    }
    folders = ("default_local_dir", "rollout_data_dir", "validation_data_dir")
    given = {f"trainer.{name}": f"to/{name}" for name in folders}
    config = check(make(**{"data.train_files": "train.parquet", **given})).config
    assert config.data.train_files == [str(tmp_path / "train.parquet")]
    assert [getattr(config.trainer, name) for name in folders] == [str(tmp_path / "to" / name) for name in folders]
    assert config.trainer.resume_from_path is None


def test_ppo_preflight_checked_survives_later_changes(make):
    """The number of mini-batches is worked out again when a configuration is changed."""
    config = make()
    changed = replace(config, data=replace(config.data, train_batch_size=16))
    assert changed.actor_rollout_ref.actor.num_mini_batches == 1
    assert Checked(changed).problems == []


def test_ppo_preflight_batch_arithmetic_in_prompts_and_in_responses(make):
    """H-71: 32 prompts, n 8, mini 16, 4 ranks, micro 4."""
    config = make(**{f"{ACTOR}.ppo_micro_batch_size_per_gpu": 4, "trainer.n_gpus_per_node": 4})
    plan = update_plan(config, "actor")
    assert config.rows_per_step == 256
    assert (plan.updates, plan.rows, plan.rows_per_rank, plan.micro_batches) == (2, 128, 32, 8)
    assert config.actor_rollout_ref.actor.num_mini_batches == 2
    assert examine(config).problems == []
    text = plan_text(examine(config))
    assert "32 prompts × n 8 = 256 responses; 64 a rank" in text
    assert "2 updates of 16 prompts = 128 responses; 32 a rank in 8 micro-batches" in text


def test_ppo_preflight_mini_batch_is_compared_with_prompts_not_with_responses(make):
    """H-71: a mini-batch of 64 is more than 32 prompts, though less than 256 responses: clamped, with a warning."""
    checked = examine(make(**{f"{ACTOR}.ppo_mini_batch_size": 64}))
    assert checked.problems == []
    assert checked.config.actor_rollout_ref.actor.num_mini_batches == 1
    (warning,) = [text for text in checked.warnings if "clamped" in text]
    assert "64 prompts" in warning
    assert "data.train_batch_size=32 prompts" in warning
    plan = update_plan(checked.config, "actor")
    assert (plan.updates, plan.prompts, plan.rows) == (1, 32, 256)


@pytest.mark.parametrize(("mini", "n", "ranks", "fits"), [(4, 1, 8, False), (8, 1, 8, True), (4, 2, 8, True)])
def test_ppo_preflight_mini_batch_of_no_rows_a_rank_is_refused(mini, n, ranks, fits, make):
    """H-72."""
    changes = {
        f"{ACTOR}.ppo_mini_batch_size": mini,
        f"{ROLLOUT}.n": n,
        "trainer.n_gpus_per_node": ranks,
        "algorithm.adv_estimator": "gae",
    }
    found = faults(make(**changes))
    assert (f"{ACTOR}.ppo_mini_batch_size" not in found) == fits
    if not fits:
        text = found[f"{ACTOR}.ppo_mini_batch_size"]
        assert "4 prompts" in text
        assert "4 rows // 8 ranks" in text
        assert "= 0 rows a rank" in text
        assert "Set it to 8 or more" in text
        assert "critic.ppo_mini_batch_size" in found


def test_ppo_preflight_critic_has_its_own_mini_batch(make):
    """H-72: refused for the critic alone, where only the critic's is too small."""
    config = make(
        **{
            "algorithm.adv_estimator": "gae",
            f"{ROLLOUT}.n": 1,
            "critic.ppo_mini_batch_size": 2,
            "trainer.n_gpus_per_node": 4,
        }
    )
    assert list(faults(config)) == ["critic.ppo_mini_batch_size"]
    assert config.critic.num_mini_batches == 16
    assert config.actor_rollout_ref.actor.num_mini_batches == 2


def test_ppo_preflight_uneven_mini_batches_are_a_warning(make):
    checked = examine(make(**{f"{ACTOR}.ppo_mini_batch_size": 12}))
    assert checked.problems == []
    assert any("32 // 12 = 2 updates" in text for text in checked.warnings)


def test_ppo_preflight_too_few_prompts_for_a_step(make):
    found = faults(make(**{"data.train_batch_size": 41}))
    assert "40 prompts in data.train_files // 41 prompts a step = 0 steps" in found["data.train_batch_size"]
    found = faults(make(**{"data.train_max_samples": 31}))
    assert "31 prompts" in found["data.train_batch_size"]


def spread(ranks: int) -> dict[str, object]:
    return {f"{ROLLOUT}.tensor_model_parallel_size": ranks, f"{ROLLOUT}.name": "vllm"}


@pytest.mark.parametrize(
    ("changes", "key", "text"),
    [
        ({**spread(3), f"{ROLLOUT}.name": "hf"}, f"{ROLLOUT}.tensor_model_parallel_size", "set it to 1"),
        (spread(3), f"{ROLLOUT}.tensor_model_parallel_size", "does not divide the ranks"),
        ({**spread(3), "trainer.n_gpus_per_node": 1}, f"{ROLLOUT}.tensor_model_parallel_size", "= 1 ranks; 1 would"),
        ({**spread(4), "trainer.n_gpus_per_node": 6}, f"{ROLLOUT}.tensor_model_parallel_size", "= 6 ranks; 1, 2 would"),
        (
            {f"{ACTOR}.fsdp_config": {"fsdp_size": 3}, "trainer.n_gpus_per_node": 4},
            f"{ACTOR}.fsdp_config.fsdp_size",
            "3 does not divide 4 ranks",
        ),
        ({"trainer.backend": "local", "trainer.nnodes": 2}, "trainer.backend", "one process"),
    ],
)
def test_ppo_preflight_parallel_sizes(changes, key, text, make):
    assert text in faults(make(**changes))[key]


def test_ppo_preflight_parallel_sizes_that_fit(make):
    fitting = {
        "trainer.n_gpus_per_node": 4,
        f"{ROLLOUT}.tensor_model_parallel_size": 2,
        f"{ROLLOUT}.name": "vllm",
        f"{ACTOR}.fsdp_config": {"fsdp_size": 2},
    }
    assert faults(make(**fitting)) == {}


def test_ppo_preflight_local_backend_has_no_room_for_a_second_pool(make, tmp_path):
    reward = {"enable": True, "enable_resource_pool": True, "model": {"path": str(tmp_path / "model")}}
    assert "pool of its own" in faults(make(**{"trainer.backend": "local", "reward_model": reward}))["trainer.backend"]


@pytest.mark.parametrize(("tp", "fits"), [(2, True), (4, True), (8, False)])
def test_ppo_preflight_heads_divide_over_tensor_parallel_ranks(tp, fits, make):
    found = faults(make(**{"trainer.n_gpus_per_node": 8, **spread(tp)}))
    assert (f"{ROLLOUT}.tensor_model_parallel_size" not in found) == fits
    assert fits or "1, 2, 4 would" in found[f"{ROLLOUT}.tensor_model_parallel_size"]


@pytest.mark.parametrize(("size", "fits"), [(2, True), (4, True), (3, False), (8, False)])
def test_ppo_preflight_heads_divide_over_ulysses_ranks(size, fits, make):
    """4 heads, 2 key/value heads; the reference follows the actor."""
    key = "ulysses_sequence_parallel_size"
    ranks = {"trainer.n_gpus_per_node": 24, "data.train_batch_size": 48, f"{ACTOR}.ppo_mini_batch_size": 48}
    found = faults(make(**{**ranks, f"{ACTOR}.{key}": size, f"{ACTOR}.use_kl_loss": True}))
    assert (f"{ACTOR}.{key}" not in found) == fits
    assert (f"actor_rollout_ref.ref.{key}" not in found) == fits
    assert fits or "1, 2, 4 would" in found[f"{ACTOR}.{key}"]


@pytest.mark.parametrize(
    ("engine", "key"),
    [
        ("fsdp", f"{ACTOR}.ulysses_sequence_parallel_size"),
        ("megatron", f"{ACTOR}.megatron.tensor_model_parallel_size"),
        ("megatron", f"{ACTOR}.megatron.pipeline_model_parallel_size"),
    ],
)
def test_ppo_preflight_ranks_share_rows(engine, key, make):
    """8 ranks in pairs are 4 data-parallel ranks: 4 rows are enough, 2 are not."""
    rows = {"trainer.n_gpus_per_node": 8, f"{ROLLOUT}.n": 2, key: 2, "data.train_batch_size": 8}
    rows[f"{ACTOR}.strategy"] = engine
    assert faults(make(**{**rows, f"{ACTOR}.ppo_mini_batch_size": 2})) == {}
    found = faults(make(**{**rows, f"{ACTOR}.ppo_mini_batch_size": 1}))
    assert "÷ 2 that share each row" in found[f"{ACTOR}.ppo_mini_batch_size"]
    assert (
        update_plan(make(**rows), "actor").rows_per_rank
        == 2 * update_plan(make(**{**rows, key: 1}), "actor").rows_per_rank
    )


def test_ppo_preflight_ulysses_ranks_divide_the_ranks(make):
    key = f"{ACTOR}.ulysses_sequence_parallel_size"
    assert "4 does not divide 6 ranks" in faults(make(**{"trainer.n_gpus_per_node": 6, key: 4}))[key]


def test_ppo_preflight_plan_without_the_megatron_wheel_leaves_its_models_out(make, monkeypatch):
    """Without the extra the keys below `megatron` are a plain dict: the check ends in a plan all the same."""
    monkeypatch.setattr("ostinato.ppo.preflight_megatron.find_spec", lambda module: None)
    config = make(**{f"{ACTOR}.strategy": "megatron"})
    actor = replace(config.actor_rollout_ref.actor, megatron={"tensor_model_parallel_size": 2})
    checked = examine(replace(config, actor_rollout_ref=replace(config.actor_rollout_ref, actor=actor)))
    assert {plan.role for plan in memory_plan(checked)} == {"rollout (hf)"}
    assert "where" in plan_text(checked)
