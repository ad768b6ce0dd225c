"""Bad input through the command line: what comes out on stderr, the exit code, and how much of a run there was."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from ostinato.ppo.checkpoint import Checkpoints
from ostinato.ppo.run_folder import MARKER, model_fingerprint

REWARD = "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n    "


def metrics(run: Path) -> list[dict[str, Any]]:
    file = run / "metrics.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def changed_table(toy: Path, path: Path, change: Callable[[Any], Any]) -> Path:
    pq.write_table(change(pq.read_table(toy / "train.parquet")), path)
    return path


# --- found by the static checks -------------------------------------------------------------------


def static_faults(toy: Path, folder: Path) -> dict[str, tuple[dict[str, Any], str, str]]:
    """Case -> (changes of the command, the key that is named, what is said)."""
    no_tokenizer = folder / "no_tokenizer"
    shutil.copytree(toy / "model", no_tokenizer, ignore=shutil.ignore_patterns("tokenizer*"))
    other_run = folder / "other"
    (other_run / "global_step_5").mkdir(parents=True)
    (other_run / "global_step_5" / MARKER).write_text("5")
    other_model = {**model_fingerprint(toy / "model"), "config_sha256": "0" * 64}
    (other_run / "run.json").write_text(json.dumps({"model": other_model}))
    (folder / "no_import.py").write_text("import no_such_module_here\n" + REWARD + "return 1.0\n")
    (folder / "no_python.py").write_text("def compute_score(:\n")
    resume = {"trainer.resume_mode": "resume_path", "trainer.resume_from_path": other_run / "global_step_5"}
    no_prompt = changed_table(toy, folder / "no_prompt.parquet", lambda table: table.drop(["prompt"]))
    empty = changed_table(toy, folder / "empty.parquet", lambda table: table.slice(0, 0))
    return {
        "no prompt column": (
            {"data.train_files": no_prompt},
            "data.prompt_key",
            "no column 'prompt'; it has data_source",
        ),
        "no prompt column to validate": ({"data.val_files": no_prompt}, "data.prompt_key", "no column 'prompt'"),
        "empty file": ({"data.train_files": empty}, "data.train_files", "empty.parquet has no rows"),
        "empty file to validate": ({"data.val_files": empty}, "data.val_files", "empty.parquet has no rows"),
        "no tokenizer": (
            {"actor_rollout_ref.model.path": no_tokenizer},
            "actor_rollout_ref.model.path",
            "no_tokenizer has no tokenizer: expected one of tokenizer.json",
        ),
        "reward file that does not import": (
            {"custom_reward_function.path": folder / "no_import.py"},
            "custom_reward_function.path",
            "no_import.py cannot be imported: ModuleNotFoundError: No module named 'no_such_module_here'",
        ),
        "reward file that is no Python": (
            {"custom_reward_function.path": folder / "no_python.py"},
            "custom_reward_function.path",
            "no_python.py is not Python: ",
        ),
        "run folder of another model": (
            {"trainer.default_local_dir": other_run},
            "trainer.default_local_dir",
            "holds checkpoints of another model (LlamaForCausalLM)",
        ),
        "checkpoint of another model": (resume, "trainer.resume_from_path", "is a checkpoint of another model"),
    }


def test_ppo_bad_input_is_found_by_the_static_checks(toy, command, tmp_path):
    for case, (changes, key, text) in static_faults(toy, tmp_path).items():
        code, _, error = command(**changes, **{"trainer.dry_run": True})
        assert code == 2, case
        assert f"  {key}: " in error, (case, error)
        assert text in error, (case, error)
        assert "(1 problem)" in error, (case, error)
        assert "Traceback" not in error, (case, error)
    assert not (tmp_path / "run").exists()


def test_ppo_bad_input_reward_model_of_another_vocabulary(toy, command, tmp_path):
    from ostinato.workers.core.testing.models import tiny_reward_model

    reward = tiny_reward_model(tmp_path / "reward")
    enabled = {"reward_model.enable": True, "reward_model.model.path": reward, "trainer.dry_run": True}
    code, _, error = command(**enabled)
    assert code == 2
    assert "reward_model.model.path: expected the policy's vocabulary (20 tokens" in error
    assert "got one of 259 tokens" in error
    for file in reward.glob("tokenizer*"):
        file.unlink()
    code, _, error = command(**enabled)
    assert code == 2
    assert f"reward_model.model.path: {reward} has no tokenizer" in error
    for file in (toy / "model").glob("tokenizer*"):
        shutil.copy(file, reward)
    assert command(**enabled)[0] == 0


# --- found when the run reads its data, before any worker starts ------------------------------------


@pytest.mark.parametrize("role", ["train", "val"])
@pytest.mark.usefixtures("no_workers")
def test_ppo_bad_input_long_prompts_end_the_run_before_workers_start(role, toy, command, tmp_path):
    """A prompt of 7 tokens, and `data.truncation=error`."""
    files = {"train": toy / "train.parquet", "val": toy / "val.parquet"}
    long = {"data.max_prompt_length": 6, "data.truncation": "error"}
    if role == "val":  # the training prompts fit
        short = changed_table(toy, tmp_path / "short.parquet", short_prompts)
        long |= {"data.train_files": short, "data.val_files": files["val"]}
    code, _, error = command(**long)
    assert code == 1
    assert f"ostinato-ppo: row 0 of {files[role]}: a prompt has 7 tokens, data.max_prompt_length is 6" in error
    assert "data.filter_overlong_prompts=True" in error
    assert "Traceback" not in error


def short_prompts(table: Any) -> Any:
    import pyarrow as pa

    prompts = [[{"role": "user", "content": "largest 3"}]] * table.num_rows
    return table.set_column(table.column_names.index("prompt"), "prompt", pa.array(prompts))


@pytest.mark.usefixtures("no_workers")
def test_ppo_bad_input_model_that_nothing_here_can_load(toy, command, tmp_path):
    """The files are there, and neither its tokenizer nor its kind can be made of them."""
    for case, (file, change, text) in {
        "tokenizer": ("tokenizer.json", lambda old: "{", "no tokenizer could be loaded from '"),
        "kind": (
            "config.json",
            lambda old: json.dumps({**json.loads(old), "model_type": "of_next_year"}),
            "does not recognize this architecture",
        ),
    }.items():
        model = shutil.copytree(toy / "model", tmp_path / case)
        (model / file).write_text(change((model / file).read_text()))
        code, _, error = command(**{"actor_rollout_ref.model.path": model})
        assert code == 1, case
        assert text in error, case
        assert str(model) in error, case
        assert "Traceback" not in error, case


@pytest.mark.usefixtures("no_workers")
def test_ppo_bad_input_filter_that_leaves_no_prompt(command):
    code, _, error = command(**{"data.max_prompt_length": 6, "data.filter_overlong_prompts": True})
    assert code == 1
    assert "no prompt is left of 800 rows" in error


@pytest.mark.usefixtures("no_workers")
def test_ppo_bad_input_run_folder_in_use(command, tmp_path):
    """Two runs on one folder: the second is refused, and goes once the first has ended."""
    first = Checkpoints(tmp_path / "run")
    code, _, error = command()
    assert code == 1
    assert "run is in use by another run (pid " in error
    assert "Traceback" not in error
    first.close()
    with pytest.raises(AssertionError, match="workers were started"):
        command()


# --- found, or not minded, by the run itself --------------------------------------------------------


@pytest.mark.parametrize("how", ["left", "right", "middle"])
def test_ppo_bad_input_long_prompts_are_cut(how, command, tmp_path):
    code, _, error = command(**{"data.max_prompt_length": 4, "data.truncation": how})
    assert code == 0, error
    (line,) = metrics(tmp_path / "run")
    assert line["prompt_length/max"] == line["prompt_length/min"] == 4


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ("return {}['missing']", "KeyError: 'missing'"),
        ("return None", "must return a number or a dict with 'score'; got NoneType"),
    ],
)
def test_ppo_bad_input_reward_function_that_fails(body, text, command, tmp_path, caplog):
    """Each row gets the default score and is counted, and the first is told; `on_error=raise` ends the run."""
    path = tmp_path / "reward.py"
    path.write_text(REWARD + body + "\n")
    code, _, error = command(**{"custom_reward_function.path": path, "custom_reward_function.default_score": -0.5})
    assert code == 0, error
    (line,) = metrics(tmp_path / "run")
    assert line["reward/errors"] == 32
    assert line["critic/score/mean"] == -0.5
    assert caplog.text.count(text) == 1
    code, _, error = command(
        **{
            "custom_reward_function.path": path,
            "custom_reward_function.on_error": "raise",
            "trainer.default_local_dir": tmp_path / "stops",
        }
    )
    assert code == 1
    assert "ostinato-ppo: a reward call failed" in error
    assert text in error
    assert "ostinato/ppo/trainer.py" not in error  # the user's traceback, not ours
    assert metrics(tmp_path / "stops") == []


def test_ppo_bad_input_checkpoint_of_a_run_without_a_critic(command, tmp_path):
    assert command(**{"trainer.save_freq": 1})[0] == 0
    code, _, error = command(**{"algorithm.adv_estimator": "gae", "trainer.total_training_steps": 2})
    assert code == 1
    assert f"ostinato-ppo: {tmp_path}/run/global_step_1 holds no critic" in error
    code, _, error = command(**{"data.train_batch_size": 16, "trainer.total_training_steps": 2})
    assert code == 1
    assert "written with another setting (data.train_batch_size: 8 then, 16 now)" in error
    assert "resume with data.train_batch_size=8, or start anew with trainer.resume_mode=disable" in error
    assert "other training data" not in error


def test_ppo_bad_input_checkpoint_without_run_json_of_another_model(toy, command, tmp_path):
    """Moved away from its run folder, a checkpoint is recognised by its weights' shapes."""
    from transformers import AutoConfig, AutoModelForCausalLM

    assert command(**{"trainer.save_freq": 1})[0] == 0
    moved = shutil.move(tmp_path / "run" / "global_step_1", tmp_path / "global_step_1")
    shutil.copytree(toy / "model", tmp_path / "model")
    config = AutoConfig.from_pretrained(toy / "model")
    config.intermediate_size = 64
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
    code, _, error = command(
        **{
            "actor_rollout_ref.model.path": tmp_path / "model",
            "trainer.resume_mode": "resume_path",
            "trainer.resume_from_path": moved,
            "trainer.total_training_steps": 2,
        }
    )
    assert code == 1
    assert "It belongs to another model" in error
    assert "Traceback" not in error


def test_ppo_bad_input_users_code_in_a_worker_keeps_its_traceback(command, tmp_path, monkeypatch):
    (tmp_path / "ostinato_test_bad_loss.py").write_text(
        "from ostinato.algos import register_policy_loss\n"
        "@register_policy_loss('of_mine')\n"
        "def of_mine(log_probs, old_log_probs, advantages, response_mask, *, weights=None):\n"
        "    return {}['of mine']\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(KeyError, match="of mine") as caught:
        command(
            **{
                "actor_rollout_ref.model.external_lib": "ostinato_test_bad_loss",
                "actor_rollout_ref.actor.policy_loss.loss_mode": "of_mine",
            }
        )
    assert caught.traceback[-1].path.name == "ostinato_test_bad_loss.py"
    assert any("method 'update_actor'" in note for note in caught.value.__notes__)
