"""The static checks that look at files: data, models, the reward function, the run folder."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ostinato.ppo.preflight import examine
from ostinato.ppo.run_folder import model_fingerprint
from ostinato.ppo.testing import GSM8K_ROW, faults, write_model, write_rows

ROLLOUT, PATH = "actor_rollout_ref.rollout", "actor_rollout_ref.model.path"


@pytest.mark.parametrize("role", ["train", "val"])
def test_ppo_preflight_data_files(role, make, tmp_path):
    key = f"data.{role}_files"
    (tmp_path / "text.parquet").write_text("no parquet")
    without = {name: value for name, value in GSM8K_ROW.items() if name != "reward_model"}
    no_truth = [{**GSM8K_ROW, "reward_model": {"style": "rule"}}] * 40
    cases = {
        str(tmp_path / "none.parquet"): (key, "there is no file"),
        str(tmp_path / "text.parquet"): (key, "is not a parquet file"),
        str(tmp_path): (key, "is not a parquet file"),
        write_rows(tmp_path / "w.parquet", [without] * 40): (key, "no column 'reward_model'"),
        write_rows(tmp_path / "q.parquet", [{"question": "?", **without}] * 40): (key, "no column 'reward_model'"),
        write_rows(tmp_path / "s.parquet", [{**GSM8K_ROW, "data_source": "mine"}] * 40): (key, "'mine'"),
        write_rows(tmp_path / "t.parquet", [{**GSM8K_ROW, "reward_model": "3"}] * 40): (
            key,
            "no mappings with 'ground",
        ),
        write_rows(tmp_path / "g.parquet", no_truth): (key, "no mappings with 'ground_truth'"),
        write_rows(tmp_path / "n.parquet", [{**GSM8K_ROW, "prompt": 3}] * 40): ("data.prompt_key", "neither chat"),
    }
    for path, (where, text) in cases.items():
        assert text in faults(make(**{key: path}))[where], path
    empty = pa.Table.from_pylist([GSM8K_ROW]).slice(0, 0)
    pq.write_table(empty, tmp_path / "empty.parquet")
    assert "has no rows" in faults(make(**{key: [str(tmp_path / "empty.parquet")]}))[key]
    assert "it has data_source, prompt, reward_model" in faults(make(**{"data.prompt_key": "text"}))["data.prompt_key"]


def test_ppo_preflight_no_training_file(make):
    assert "not set" in faults(make(**{"data.train_files": []}))["data.train_files"]


def test_ppo_preflight_several_files_add_up(make, tmp_path):
    files = [write_rows(tmp_path / f"{i}.parquet", [GSM8K_ROW] * 20) for i in range(2)]
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
    files = write_rows(tmp_path / "s.parquet", [{**GSM8K_ROW, "data_source": "mine"}] * 40)
    changes = {"data.train_files": files, "custom_reward_function.path": str(tmp_path / "reward.py")}
    assert faults(make(**changes)) == {}


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
    plain = write_rows(tmp_path / "plain.parquet", [{**GSM8K_ROW, "prompt": "1 + 2 ="}] * 40)
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
    assert "4097 tokens" in (text := faults(make(**{"data.max_prompt_length": 4096, key: 1}))[key])
    assert text.endswith("has 4096 positions; prompts of 4095 leave room for one")
    assert faults(make(**{"data.max_prompt_length": 96, key: 4001}))[key].endswith("4096 positions; 4000 works")
    assert faults(make(**{"data.max_prompt_length": 4095, key: 1})) == {}
    widened = {"actor_rollout_ref.model.override_config": {"max_position_embeddings": 5000}}
    assert faults(make(**{"data.max_prompt_length": 4096, key: 1, **widened})) == {}


def test_ppo_preflight_longest_sequence_fits_the_model(make):
    """An engine refuses it too, but when the actor's weights have been loaded."""
    found = faults(make(**{f"{ROLLOUT}.max_model_len": 4097}))
    assert "4097 tokens are more than the 4096 positions" in found[f"{ROLLOUT}.max_model_len"]
    assert "4096 works, and null is" in found[f"{ROLLOUT}.max_model_len"]
    assert faults(make(**{f"{ROLLOUT}.max_model_len": 4096})) == {}


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


def test_ppo_preflight_name_of_a_reward_function_without_its_file_is_a_warning(make):
    checked = examine(make(**{"custom_reward_function.name": "mine"}))
    assert checked.problems == []
    assert (
        "custom_reward_function.name: mine has no effect without custom_reward_function.path, its file"
        in checked.warnings
    )


def test_ppo_preflight_own_reward_function_with_kwargs(make, tmp_path):
    (tmp_path / "reward.py").write_text(
        "def mine(data_source, solution_str, ground_truth, extra_info=None, *, bonus): return bonus"
    )
    section = {"path": str(tmp_path / "reward.py"), "name": "mine"}
    assert faults(make(custom_reward_function={**section, "reward_kwargs": {"bonus": 1}})) == {}
    assert "bonus" in faults(make(custom_reward_function=section))["custom_reward_function.path"]


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
