"""Every static check, with the fault it is for and the right case next to it; the launch checks; the plan."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ostinato.algos import adv_estimators, get_adv_estimator
from ostinato.ppo.config import PpoConfig
from ostinato.ppo.errors import ConfigError, LaunchError
from ostinato.ppo.facts import read_model
from ostinato.ppo.plan import memory_plan, plan_text, update_plan
from ostinato.ppo.preflight import Checked, check, examine
from ostinato.ppo.preflight_launch import check_launch

CHAT = [{"role": "user", "content": "what is 1 + 2"}]
ROW = {"data_source": "openai/gsm8k", "prompt": CHAT, "reward_model": {"ground_truth": "3"}}


def write_rows(path: Path, rows: list[dict[str, Any]]) -> str:
    pq.write_table(pa.Table.from_pylist(rows), path)
    return str(path)


def write_model(folder: Path, tokenizer: dict[str, Any] | None = None, **config: Any) -> str:
    """A model folder as the checks see it: config, tokenizer files, no weights."""
    folder.mkdir()
    values = {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 64,
        "vocab_size": 64,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": True,
    }
    (folder / "config.json").write_text(json.dumps(values | config))
    (folder / "tokenizer.json").write_text("{}")
    known = {"chat_template": "{{ messages }}", "pad_token": "<pad>", "eos_token": {"content": "<eos>"}}
    (folder / "tokenizer_config.json").write_text(json.dumps(known if tokenizer is None else tokenizer))
    return str(folder)


def merged(base: dict[str, Any], change: dict[str, Any]) -> dict[str, Any]:
    out = dict(base)
    for key, value in change.items():
        out[key] = merged(out[key], value) if isinstance(value, dict) and isinstance(out.get(key), dict) else value
    return out


Make = Callable[..., PpoConfig]


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Make:
    """A configuration that passes, with dotted changes: `make(**{"data.train_batch_size": 4})`."""
    monkeypatch.chdir(tmp_path)
    base = {
        "data": {"train_files": write_rows(tmp_path / "train.parquet", [ROW] * 40), "train_batch_size": 32},
        "actor_rollout_ref": {
            "model": {"path": write_model(tmp_path / "model")},
            "actor": {"ppo_mini_batch_size": 16},
            "rollout": {"n": 8},
        },
        "algorithm": {"adv_estimator": "grpo"},
    }

    def build(**changes: Any) -> PpoConfig:
        values: dict[str, Any] = base
        for key, value in changes.items():
            change = value
            for part in reversed(key.split(".")):
                change = {part: change}
            values = merged(values, change)
        return PpoConfig.from_mapping(values)

    return build


def faults(config: PpoConfig) -> dict[str, str]:
    return {problem.key: problem.text for problem in examine(config).problems}


ROLLOUT, ACTOR = "actor_rollout_ref.rollout", "actor_rollout_ref.actor"


def test_ppo_preflight_good_configuration_passes(make):
    checked = check(make())
    assert checked.problems == []
    assert checked.num_train_prompts == 40
    assert checked.models["actor"].architecture == "Qwen2ForCausalLM"


# --- batch arithmetic -----------------------------------------------------------------------------


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


# --- parallel sizes -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "key", "text"),
    [
        ({f"{ROLLOUT}.tensor_model_parallel_size": 3}, f"{ROLLOUT}.tensor_model_parallel_size", "does not divide"),
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
    wanted = {f"{ROLLOUT}.tensor_model_parallel_size": tp, f"{ROLLOUT}.name": "sglang"}
    found = faults(make(**{"trainer.n_gpus_per_node": 8, **wanted}))
    assert (f"{ROLLOUT}.tensor_model_parallel_size" not in found) == fits


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


# --- algorithm ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", adv_estimators())
def test_ppo_preflight_group_estimators_refuse_one_response(name, make):
    """Every estimator that compares within groups, and no other."""
    import inspect

    groups = "groups" in inspect.signature(get_adv_estimator(name)).parameters
    found = faults(make(**{"algorithm.adv_estimator": name, f"{ROLLOUT}.n": 1, "algorithm.gdpo_reward_keys": ["a"]}))
    assert (f"{ROLLOUT}.n" in found) == groups
    found = faults(make(**{"algorithm.adv_estimator": name, f"{ROLLOUT}.n": 2, "algorithm.gdpo_reward_keys": ["a"]}))
    assert found == {}


@pytest.mark.parametrize(
    ("key", "value", "known"),
    [
        ("algorithm.adv_estimator", "grop", "grpo"),
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


# --- data -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("role", ["train", "val"])
def test_ppo_preflight_data_files(role, make, tmp_path):
    key = f"data.{role}_files"
    (tmp_path / "text.parquet").write_text("no parquet")
    without = {name: value for name, value in ROW.items() if name != "reward_model"}
    cases = {
        str(tmp_path / "none.parquet"): (key, "there is no file"),
        str(tmp_path / "text.parquet"): (key, "is not a parquet file"),
        str(tmp_path): (key, "is not a parquet file"),
        write_rows(tmp_path / "w.parquet", [without] * 40): (key, "no column 'reward_model'"),
        write_rows(tmp_path / "q.parquet", [{"question": "?", **without}] * 40): (key, "no column 'reward_model'"),
        write_rows(tmp_path / "s.parquet", [{**ROW, "data_source": "mine"}] * 40): (key, "'mine'"),
        write_rows(tmp_path / "n.parquet", [{**ROW, "prompt": 3}] * 40): ("data.prompt_key", "neither chat"),
    }
    for path, (where, text) in cases.items():
        assert text in faults(make(**{key: path}))[where], path
    empty = pa.Table.from_pylist([ROW]).slice(0, 0)
    pq.write_table(empty, tmp_path / "empty.parquet")
    assert "has no rows" in faults(make(**{key: [str(tmp_path / "empty.parquet")]}))[key]
    assert "it has data_source, prompt, reward_model" in faults(make(**{"data.prompt_key": "text"}))["data.prompt_key"]


def test_ppo_preflight_no_training_file(make):
    assert "not set" in faults(make(**{"data.train_files": []}))["data.train_files"]


def test_ppo_preflight_several_files_add_up(make, tmp_path):
    files = [write_rows(tmp_path / f"{i}.parquet", [ROW] * 20) for i in range(2)]
    checked = examine(make(**{"data.train_files": files}))
    assert checked.problems == []
    assert checked.num_train_prompts == 40


@pytest.mark.parametrize("asking", [{"test_freq": 5}, {"val_before_train": True}])
def test_ppo_preflight_validation_needs_files(asking, make):
    assert "data.val_files" in faults(make(trainer=asking))


def test_ppo_preflight_own_reward_function_takes_any_data_source(make, tmp_path):
    (tmp_path / "reward.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None): ..."
    )
    files = write_rows(tmp_path / "s.parquet", [{**ROW, "data_source": "mine"}] * 40)
    changes = {"data.train_files": files, "custom_reward_function.path": str(tmp_path / "reward.py")}
    assert faults(make(**changes)) == {}


# --- model ----------------------------------------------------------------------------------------

PATH = "actor_rollout_ref.model.path"


def test_ppo_preflight_model_folder(make, tmp_path):
    bare = tmp_path / "bare"
    bare.mkdir()
    assert "no config.json" in faults(make(**{PATH: str(bare)}))[PATH]
    assert "there is no folder" in faults(make(**{PATH: str(tmp_path / "nowhere")}))[PATH]
    assert "not set" in faults(make(**{PATH: ""}))[PATH]
    no_tokenizer = Path(write_model(tmp_path / "no_tokenizer"))
    (no_tokenizer / "tokenizer.json").unlink()
    assert "has no tokenizer" in faults(make(**{PATH: str(no_tokenizer)}))[PATH]
    elsewhere = {PATH: str(no_tokenizer), "actor_rollout_ref.model.tokenizer_path": str(tmp_path / "model")}
    assert faults(make(**elsewhere)) == {}
    broken = Path(write_model(tmp_path / "broken"))
    (broken / "model.safetensors").write_bytes(b"short")
    assert "safetensors" in faults(make(**{PATH: str(broken)}))[PATH]


def test_ppo_preflight_cached_names_are_resolved_without_network(make, tmp_path, monkeypatch):
    from huggingface_hub import constants

    snapshot = tmp_path / "hub" / "models--Some--Model" / "snapshots" / "abc"
    snapshot.parent.mkdir(parents=True)
    write_model(snapshot)
    (tmp_path / "hub" / "models--Some--Model" / "refs").mkdir()
    (tmp_path / "hub" / "models--Some--Model" / "refs" / "main").write_text("abc")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    checked = examine(make(**{PATH: "Some/Model"}))
    assert checked.problems == []
    assert checked.config.actor_rollout_ref.model.path == str(snapshot)
    text = faults(make(**{PATH: "Some/Other"}))[PATH]
    assert "hf download Some/Other" in text
    assert str(tmp_path / "hub") in text


def test_ppo_preflight_chat_prompts_need_a_chat_template(make, tmp_path):
    """H-43: the column and the model are named; plain text needs none."""
    base_model = write_model(tmp_path / "base", tokenizer={"pad_token": "p", "eos_token": "e"})
    text = faults(make(**{PATH: base_model}))[PATH]
    assert "'prompt'" in text
    assert base_model in text
    assert "chat template" in text
    plain = write_rows(tmp_path / "plain.parquet", [{**ROW, "prompt": "1 + 2 ="}] * 40)
    assert faults(make(**{PATH: base_model, "data.train_files": plain})) == {}
    (Path(base_model) / "chat_template.jinja").write_text("{{ messages }}")
    assert faults(make(**{PATH: base_model})) == {}


def test_ppo_preflight_pad_token(make, tmp_path):
    """H-42: pad = eos with a warning; neither is refused."""
    eos = write_model(tmp_path / "eos", tokenizer={"chat_template": "x", "eos_token": "<eos>"})
    checked = examine(make(**{PATH: eos}))
    assert checked.problems == []
    assert len([text for text in checked.warnings if "'<eos>'" in text and "lengths" in text]) == 1
    none = write_model(tmp_path / "none", tokenizer={"chat_template": "x"})
    assert "neither a pad_token nor an eos_token" in faults(make(**{PATH: none}))[PATH]
    assert not [text for text in examine(make()).warnings if "no pad_token" in text]


def test_ppo_preflight_lengths_fit_the_model(make, tmp_path):
    key = "data.max_response_length"
    assert "4097 tokens" in faults(make(**{"data.max_prompt_length": 4096, key: 1}))[key]
    assert faults(make(**{"data.max_prompt_length": 4095, key: 1})) == {}
    widened = {"actor_rollout_ref.model.override_config": {"max_position_embeddings": 5000}}
    assert faults(make(**{"data.max_prompt_length": 4096, key: 1, **widened})) == {}


def test_ppo_preflight_rollout_widths_follow_the_data(make):
    assert make(**{"data.max_prompt_length": 77}).actor_rollout_ref.rollout.prompt_length == 77
    found = faults(make(**{"data.max_prompt_length": 77, f"{ROLLOUT}.prompt_length": 78}))
    assert "data.max_prompt_length=77" in found[f"{ROLLOUT}.prompt_length"]


def test_ppo_preflight_critic_starts_from_the_policy_unless_told(make, tmp_path):
    changes = {"algorithm.adv_estimator": "gae", f"{ROLLOUT}.n": 1}
    checked = examine(make(**changes))
    assert checked.problems == []
    assert checked.models["critic"].folder == checked.models["actor"].folder
    other = write_model(tmp_path / "other", max_position_embeddings=100)
    found = faults(make(**changes, **{"critic.model.path": other}))
    assert "the critic's model" in found["data.max_response_length"]
    assert faults(make(**changes, **{"critic.model.path": "/nowhere"})).keys() == {"critic.model.path"}
    assert faults(make(**{"critic.model.path": "/nowhere"})) == {}  # grpo has no critic: nothing is looked at


def test_ppo_preflight_reward_model_only_where_enabled(make):
    assert "reward_model.model.path" in faults(make(**{"reward_model.enable": True}))
    assert faults(make(**{"reward_model.model": {"path": "/nowhere"}})) == {}


# --- reward function ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "key", "text"),
    [
        (None, "path", "no file"),
        ("def compute_score(:", "path", "not Python"),
        ("import no_such_module_here\ndef compute_score(**k): ...", "path", "no_such_module_here"),
        ("raise SystemError('x')\ndef compute_score(**k): ...", "path", "SystemError"),
        ("def score(data_source, solution_str, ground_truth, extra_info=None): ...", "name", "score"),
        ("compute_score = 3", "path", "not a function"),
        ("def compute_score(text): ...", "path", "cannot be called"),
        ("async def compute_score(**k): ...", "path", "async"),
        ("def compute_score(data_source, solution_str, ground_truth): ...", "path", "extra_info"),
    ],
)
def test_ppo_preflight_own_reward_function(source, key, text, make, tmp_path):
    if source is not None:
        (tmp_path / "reward.py").write_text(source)
    found = faults(make(**{"custom_reward_function.path": str(tmp_path / "reward.py")}))
    assert text in found[f"custom_reward_function.{key}"]


def test_ppo_preflight_own_reward_function_with_kwargs(make, tmp_path):
    (tmp_path / "reward.py").write_text(
        "def mine(data_source, solution_str, ground_truth, extra_info=None, *, bonus): return bonus"
    )
    section = {"path": str(tmp_path / "reward.py"), "name": "mine"}
    assert faults(make(custom_reward_function={**section, "reward_kwargs": {"bonus": 1}})) == {}
    assert "bonus" in faults(make(custom_reward_function=section))["custom_reward_function.path"]


# --- run folder -----------------------------------------------------------------------------------


def test_ppo_preflight_resume_path(make, tmp_path):
    key = "trainer.resume_from_path"
    assert "not set" in faults(make(trainer={"resume_mode": "resume_path"}))[key]
    asked = {"resume_mode": "resume_path", "resume_from_path": str(tmp_path / "global_step_3")}
    assert "there is no folder" in faults(make(trainer=asked))[key]
    (tmp_path / "global_step_3").mkdir()
    assert "no whole checkpoint" in faults(make(trainer=asked))[key]
    (tmp_path / "global_step_3" / "COMPLETE").write_text("3")
    assert faults(make(trainer=asked)) == {}


def test_ppo_preflight_run_folder_of_another_model(make, tmp_path):
    from ostinato.ppo.run_folder import model_fingerprint

    other = write_model(tmp_path / "other", hidden_size=64)
    folder = tmp_path / "run"
    (folder / "global_step_5").mkdir(parents=True)
    (folder / "global_step_5" / "COMPLETE").write_text("5")
    config = make(**{"trainer.default_local_dir": str(folder)})
    (folder / "run.json").write_text(json.dumps({"model": model_fingerprint(other)}))
    assert "another model" in faults(config)["trainer.default_local_dir"]
    (folder / "run.json").write_text(json.dumps({"model": model_fingerprint(tmp_path / "model")}))
    assert faults(config) == {}
    (folder / "run.json").write_text("{")
    assert "cannot be read" in faults(config)["trainer.default_local_dir"]


def test_ppo_preflight_checkpoint_of_another_model(make, tmp_path):
    """A checkpoint that is named outright, in the folder of another model's run."""
    from ostinato.ppo.run_folder import model_fingerprint

    other = write_model(tmp_path / "other", hidden_size=64)
    checkpoint = tmp_path / "run" / "global_step_5"
    checkpoint.mkdir(parents=True)
    (checkpoint / "COMPLETE").write_text("5")
    config = make(trainer={"resume_mode": "resume_path", "resume_from_path": str(checkpoint)})
    assert faults(config) == {}
    (checkpoint.parent / "run.json").write_text(json.dumps({"model": model_fingerprint(other)}))
    text = faults(config)["trainer.resume_from_path"]
    assert "another model (Qwen2ForCausalLM)" in text
    assert str(tmp_path / "model") in text
    (checkpoint.parent / "run.json").write_text(json.dumps({"model": model_fingerprint(tmp_path / "model")}))
    assert faults(config) == {}


def test_ppo_preflight_starting_anew_beside_older_checkpoints_is_a_warning(make, tmp_path):
    (tmp_path / "run" / "global_step_5").mkdir(parents=True)
    (tmp_path / "run" / "global_step_5" / "COMPLETE").write_text("5")
    for mode, warned in (("disable", True), ("auto", False)):
        checked = examine(make(trainer={"resume_mode": mode, "default_local_dir": str(tmp_path / "run")}))
        assert any("step 5 already" in text for text in checked.warnings) == warned


def test_ppo_preflight_length_tells_the_passes_over_the_data(make):
    """A step budget counts whatever the epochs: fewer steps than they give, or more."""
    assert "1 step an epoch (40 // 32) × 2 epochs = 2 steps, 4 updates of the actor\n" in plan_text(
        examine(make(**{"trainer.total_epochs": 2}))
    )
    text = plan_text(examine(make(**{"trainer.total_epochs": 2, "trainer.total_training_steps": 5})))
    assert "trainer.total_training_steps=5 = 5 steps, 10 updates of the actor, 5 passes over the data\n" in text


# --- launch ---------------------------------------------------------------------------------------


def test_ppo_preflight_static_checks_look_at_no_hardware_and_no_engine(make, monkeypatch):
    """`dry_run` for sixteen GPUs and an engine that is absent passes anywhere."""
    import importlib.util

    import torch

    def forbidden(*_: object, **__: object) -> None:
        raise AssertionError("a static check looked at the machine")

    for name in ("is_available", "device_count", "current_device"):
        monkeypatch.setattr(torch.cuda, name, forbidden)
    monkeypatch.setattr(importlib.util, "find_spec", forbidden)
    wanted = {f"{ROLLOUT}.name": "vllm", "trainer.n_gpus_per_node": 8, "trainer.nnodes": 2, "trainer.device": "cuda"}
    assert examine(make(**wanted, **{"trainer.logger": ["wandb", "mlflow"]})).problems == []


def test_ppo_preflight_launch_refuses_what_the_machine_lacks(make, monkeypatch):
    import torch

    from ostinato.ppo import loggers
    from ostinato.rollout import backends

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(backends, "_is_importable", lambda module: module != "vllm")
    monkeypatch.setattr(loggers, "find_spec", lambda module: None if module == "wandb" else object())
    config = make(
        **{"trainer.n_gpus_per_node": 8, "trainer.device": "cuda", f"{ROLLOUT}.name": "vllm", "trainer.logger": "wandb"}
    )
    with pytest.raises(LaunchError) as refusal:
        check_launch(config)
    text = str(refusal.value)
    assert "n_gpus_per_node=8" in text
    assert "2 found" in text
    assert "pip install" in text
    assert "wandb" in text
    check_launch(make(**{"trainer.n_gpus_per_node": 2, "trainer.device": "cuda"}))
    check_launch(make(**{"trainer.n_gpus_per_node": 64, "trainer.device": "cpu"}))


def test_ppo_preflight_launch_refuses_an_adapter_without_peft(make, monkeypatch):
    config = make(**{"actor_rollout_ref.model.lora_rank": 8, "trainer.device": "cpu"})
    check_launch(config)
    monkeypatch.setattr("ostinato.ppo.preflight_launch.find_spec", lambda module: None)
    with pytest.raises(LaunchError, match=r"pip install 'ostinato-workers-fsdp\[lora\]'"):
        check_launch(config)


# --- plan and facts -------------------------------------------------------------------------------


def test_ppo_preflight_parameters_are_counted_from_the_weights(tmp_path):
    folder = Path(write_model(tmp_path / "m"))
    estimate = read_model(str(folder)).num_parameters
    attention, mlp = 2 * 32 * 32 + 2 * 32 * 16, 3 * 32 * 64
    assert estimate == 2 * (attention + mlp + 64) + 64 * 32 + 32
    header = {"a": {"dtype": "F32", "shape": [3, 5], "data_offsets": [0, 60]}, "__metadata__": {"format": "pt"}}
    raw = json.dumps(header).encode()
    for name in ("model-1-of-2.safetensors", "model-2-of-2.safetensors"):
        (folder / name).write_bytes(struct.pack("<Q", len(raw)) + raw + bytes(60))
    facts = read_model(str(folder))
    assert facts.num_parameters == 30
    assert facts.has_weights


def test_ppo_preflight_memory_plan(make):
    changes = {
        "trainer.n_gpus_per_node": 4,
        f"{ACTOR}.use_kl_loss": True,
        f"{ACTOR}.fsdp_config": {"param_offload": True, "optimizer_offload": True},
        f"{ROLLOUT}.tensor_model_parallel_size": 2,
        f"{ROLLOUT}.name": "vllm",
        "algorithm.adv_estimator": "gae",
        "critic.fsdp_config": {"fsdp_size": 2},
    }
    checked = examine(make(**changes))
    count = checked.models["actor"].num_parameters
    assert count is not None
    plans = {plan.role: plan for plan in memory_plan(checked)}
    assert plans["actor"].total == pytest.approx(count * 16 / 4)
    assert plans["actor"].offloaded == "weights and optimizer"
    assert plans["critic"].total == pytest.approx(count * 16 / 2)
    assert plans["reference"].total == pytest.approx(count * 4 / 4)
    assert plans["rollout (vllm)"].total == pytest.approx(count * 2 / 2)
    assert "GPU" in plan_text(checked)


def test_ppo_preflight_memory_plan_of_an_adapter(make):
    """Weights alone, once: the reference is the actor's model, and the adapter's own state is small."""
    checked = examine(make(**{"actor_rollout_ref.model.lora_rank": 8, f"{ACTOR}.use_kl_loss": True}))
    plans = {plan.role: plan for plan in memory_plan(checked)}
    assert plans["actor"].total == pytest.approx(checked.models["actor"].num_parameters * 4)
    assert "reference" not in plans
    assert "parameters, adapters of rank 8, " in plan_text(checked)


def test_ppo_preflight_plan_without_a_known_size(make, tmp_path):
    checked = examine(make(**{PATH: write_model(tmp_path / "odd", hidden_size=None)}))
    assert memory_plan(checked) == []
    assert "not estimated" in plan_text(checked)


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
