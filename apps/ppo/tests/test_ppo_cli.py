"""The command line, in this process and as a user starts it: labs commands, overrides, files of another project."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from ostinato.controller import ResourcesUnavailable
from ostinato.ppo.__main__ import main
from ostinato.ppo.cli import compose, from_hydra, register_schema
from ostinato.ppo.errors import ConfigError, LaunchError, Problem, RunFolderBusy
from ostinato.workers.core.config import rollout_log_prob_limit

LABS = {
    "ppo-one-gpu": """algorithm.adv_estimator=gae data.train_files=$D/train.parquet data.val_files=$D/test.parquet
        data.train_batch_size=256 data.max_prompt_length=512 data.max_response_length=512
        actor_rollout_ref.model.path=Qwen/Qwen2.5-0.5B-Instruct actor_rollout_ref.actor.optim.lr=1e-6
        actor_rollout_ref.actor.ppo_mini_batch_size=64 actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=8
        actor_rollout_ref.rollout.name=vllm actor_rollout_ref.rollout.tensor_model_parallel_size=1
        actor_rollout_ref.rollout.gpu_memory_utilization=0.4
        critic.model.path=Qwen/Qwen2.5-0.5B-Instruct critic.optim.lr=1e-5
        trainer.n_gpus_per_node=1 trainer.nnodes=1 trainer.total_epochs=15""",
    "grpo-eight-gpus": """algorithm.adv_estimator=grpo data.train_files=$D/train.parquet data.val_files=$D/test.parquet
        actor_rollout_ref.model.path=Qwen/Qwen2.5-7B-Instruct actor_rollout_ref.rollout.name=vllm
        actor_rollout_ref.rollout.n=8 actor_rollout_ref.actor.use_kl_loss=True
        actor_rollout_ref.actor.kl_loss_coef=0.001 actor_rollout_ref.actor.kl_loss_type=low_var_kl
        trainer.n_gpus_per_node=8 trainer.nnodes=1 trainer.total_epochs=15""",
    "lab1": """algorithm.adv_estimator=gae data.train_files=$D/train.parquet data.val_files=$D/test.parquet
        actor_rollout_ref.model.path=Qwen/Qwen2.5-0.5B-Instruct actor_rollout_ref.rollout.name=vllm
        actor_rollout_ref.rollout.gpu_memory_utilization=0.4 critic.model.path=Qwen/Qwen2.5-0.5B-Instruct
        trainer.n_gpus_per_node=1 trainer.nnodes=1 trainer.total_epochs=2""",
    "lab2": """algorithm.adv_estimator=grpo data.train_files=$D/train.parquet data.val_files=$D/test.parquet
        actor_rollout_ref.model.path=Qwen/Qwen2.5-0.5B-Instruct actor_rollout_ref.rollout.name=vllm
        actor_rollout_ref.rollout.n=8 actor_rollout_ref.actor.use_kl_loss=True
        actor_rollout_ref.actor.kl_loss_coef=0.001
        trainer.n_gpus_per_node=1 trainer.nnodes=1 trainer.total_epochs=2""",
    "lab3": """algorithm.adv_estimator=grpo data.train_files=$D/train.parquet data.val_files=$D/test.parquet
        actor_rollout_ref.model.path=Qwen/Qwen2.5-0.5B-Instruct actor_rollout_ref.rollout.name=sglang
        actor_rollout_ref.rollout.n=8 trainer.n_gpus_per_node=1 trainer.nnodes=1 trainer.total_epochs=1""",
    "lab5": """algorithm.adv_estimator=grpo data.train_files=$D/train.parquet data.val_files=$D/test.parquet
        actor_rollout_ref.model.path=Qwen/Qwen2.5-3B-Instruct actor_rollout_ref.rollout.name=vllm
        actor_rollout_ref.rollout.n=8 actor_rollout_ref.rollout.gpu_memory_utilization=0.5
        actor_rollout_ref.actor.fsdp_config.param_offload=True
        actor_rollout_ref.actor.fsdp_config.optimizer_offload=True
        trainer.n_gpus_per_node=2 trainer.nnodes=1 trainer.total_epochs=1""",
    "lab6": """algorithm.adv_estimator=grpo data.train_files=$D/train.parquet data.val_files=$D/test.parquet
        actor_rollout_ref.model.path=Qwen/Qwen2.5-0.5B-Instruct actor_rollout_ref.rollout.name=vllm
        actor_rollout_ref.rollout.n=8 custom_reward_function.path=$PWD/my_reward.py
        custom_reward_function.name=compute_score
        trainer.n_gpus_per_node=1 trainer.nnodes=1 trainer.total_epochs=1""",
}


def words(text: str, world: Path) -> list[str]:
    text = text.replace("$D", str(world)).replace("$PWD", str(world))
    return shlex.split(re.sub(r"Qwen/[\w.-]+", str(world / "model"), text))


@pytest.mark.parametrize("lab", LABS)
def test_ppo_cli_lab_passes_the_static_checks_as_written(lab, world, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert main([*words(LABS[lab], world), "trainer.dry_run=True"]) == 0
    printed = capsys.readouterr()
    assert printed.out.startswith("plan\n")
    assert "nothing was started" in printed.out
    assert list(tmp_path.iterdir()) == []  # a dry run leaves nothing behind


def test_ppo_cli_labs_here_are_those_of_the_reference():
    """The commands above, word for word, wherever the reference page is at hand."""
    page = os.environ.get("OSTINATO_LABS")
    if not page:
        pytest.skip("OSTINATO_LABS does not name the reference page")
    text = Path(page).read_text().replace("\\\n", " ")
    commands = [line.split(None, 3)[3] for line in text.splitlines() if line.startswith("python -m ostinato.ppo ")]
    assert [shlex.split(command) for command in commands] == [shlex.split(lab) for lab in LABS.values()]


def test_ppo_cli_explicit_micro_batch_turns_dynamic_off_for_its_role_only(world):
    config, problems = compose(words(LABS["ppo-one-gpu"], world))
    assert problems == []
    assert config.actor_rollout_ref.actor.update_limit.micro_batch_size == 8
    assert config.critic.update_limit.max_tokens == 16384
    assert config.actor_rollout_ref.ref.log_prob_limit.max_tokens == 16384
    assert rollout_log_prob_limit(config.actor_rollout_ref.rollout).max_tokens == 16384


def test_ppo_cli_cfg_prints_the_resolved_configuration(base, capsys):
    assert main([*base, "--cfg", "job", "data.max_prompt_length=100"]) == 0
    printed = yaml.safe_load(capsys.readouterr().out)
    assert printed["actor_rollout_ref"]["rollout"]["prompt_length"] == 100
    assert printed["trainer"]["default_local_dir"] == "checkpoints/ostinato/ppo"
    assert "num_mini_batches" not in printed["actor_rollout_ref"]["actor"]


def test_ppo_cli_cfg_can_be_read_back(base, capsys, tmp_path):
    assert main([*base, "--cfg", "job"]) == 0
    (tmp_path / "again.yaml").write_text("defaults: [ppo, _self_]\n" + capsys.readouterr().out)
    again, problems = compose(config_dir=tmp_path, config_name="again")
    assert problems == []
    assert again == compose(base)[0]


def test_ppo_cli_help_names_the_first_keys_and_the_reference(capsys):
    for argument in ("--help", "-h"):
        assert main([argument]) == 0
        text = capsys.readouterr().out
        for name in (
            "data.train_files",
            "actor_rollout_ref.model.path",
            "rollout.name",
            "adv_estimator",
            "n_gpus_per_node",
        ):
            assert name in text
        assert "docs/config.md" in text
        assert "--cfg job" in text


def test_ppo_cli_help_commands_are_valid(world, capsys):
    """The commands that `--help` shows pass the checks themselves."""
    main(["--help"])
    text = capsys.readouterr().out.replace("\\\n", " ")
    commands = [line.strip() for line in text.splitlines() if line.strip().startswith("ostinato-ppo algorithm")]
    assert len(commands) == 2
    for command in commands:
        line = command.replace("$HOME/data/gsm8k", str(world)).removeprefix("ostinato-ppo ")
        assert main([*words(line, world), "trainer.dry_run=True"]) == 0


def test_ppo_cli_version_and_bad_options(capsys):
    assert main(["--version"]) == 0
    assert re.fullmatch(r"ostinato-ppo \d+\.\d+\.\d+\n", capsys.readouterr().out)
    assert main(["--no-such-option"]) == 2
    assert main(["--cfg", "hydra"]) == 2
    assert main([]) == 2
    assert "usage" in capsys.readouterr().err


def test_ppo_cli_is_the_same_as_a_module_and_as_a_script():
    script = Path(sys.executable).parent / "ostinato-ppo"
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    texts = [
        subprocess.run([*start, "--help"], capture_output=True, text=True, check=True, env=environment).stdout
        for start in ([sys.executable, "-m", "ostinato.ppo"], [str(script)])
    ]
    assert texts[0] == texts[1] != ""


def test_ppo_cli_help_is_quick_and_imports_nothing_heavy():
    code = (
        "import sys; from ostinato.ppo.__main__ import main; code = main(['--help']); "
        "heavy = {'torch', 'ray', 'transformers', 'hydra'} & set(sys.modules); sys.exit(f'{heavy}' if heavy else code)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_ppo_cli_dry_run_is_checked_without_the_libraries_of_a_run(world, tmp_path):
    """The plan of PPO with a critic comes without transformers, Ray and tensordict."""
    code = (
        "import sys; from ostinato.ppo.__main__ import main; code = main(sys.argv[1:]); "
        "heavy = {'transformers', 'ray', 'tensordict'} & set(sys.modules); sys.exit(f'{heavy}' if heavy else code)"
    )
    command = [*words(LABS["lab2"], world), "algorithm.adv_estimator=gae", "trainer.dry_run=True"]
    done = subprocess.run([sys.executable, "-c", code, *command], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr


def test_ppo_cli_import_has_no_effects():
    code = (
        "import logging, os, sys; before = dict(os.environ), list(logging.root.handlers); import ostinato.ppo.cli; "
        "sys.exit(int((dict(os.environ), list(logging.root.handlers)) != before))"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_ppo_cli_project_of_its_own_finds_the_config_package(world, tmp_path, capsys):
    """H-78: `--config-dir` of another project; its file builds on ours by name."""
    run = f"""
defaults: [ppo, more, _self_]
data: {{train_files: {world}/train.parquet, train_batch_size: 64}}
actor_rollout_ref: {{model: {{path: {world}/model}}, rollout: {{n: 4}}}}
algorithm: {{adv_estimator: grpo}}
trainer: {{dry_run: true}}
"""
    (tmp_path / "my_run.yaml").write_text(run)
    (tmp_path / "more.yaml").write_text("trainer: {experiment_name: mine}\n")
    assert main(["--config-dir", str(tmp_path), "--config-name", "my_run", "trainer.total_epochs=3"]) == 0
    printed = capsys.readouterr().out
    assert "64 prompts × n 4 = 256 responses" in printed
    assert "checkpoints/ostinato/mine" in printed
    (tmp_path / "my_run.yaml").write_text(run + "typoo: 3\ncritic: {modle: {path: x}}\n")
    assert main(["-cd", str(tmp_path), "-cn", "my_run"]) == 2
    error = capsys.readouterr().err
    assert "typoo: there is no such key" in error
    assert "critic.modle.path: there is no such key; did you mean critic.model.path?" in error


def test_ppo_cli_other_hydra_apps_find_the_package_on_their_search_path(world, tmp_path):
    """H-78: a Hydra app that has never imported ours, with `pkg://ostinato.ppo.conf` on its search path."""
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf" / "main.yaml").write_text(
        "hydra: {searchpath: ['pkg://ostinato.ppo.conf']}\ndefaults: [ppo, _self_]\ntrainer: {total_epochs: 9}\n"
    )
    (tmp_path / "app.py").write_text(
        "import hydra\n"
        "@hydra.main(version_base='1.3', config_path='conf', config_name='main')\n"
        "def app(composed):\n"
        "    from ostinato.ppo.cli import from_hydra\n"
        "    config, problems = from_hydra(composed)\n"
        "    assert problems == []\n"
        "    print('epochs', config.trainer.total_epochs, config.data.train_batch_size)\n"
        "app()\n"
    )
    done = subprocess.run(
        [sys.executable, "app.py", "hydra.run.dir=."], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert done.stdout.strip() == "epochs 9 1024", done.stderr
    assert "not available" not in done.stderr


def test_ppo_cli_config_files_that_cannot_be_read_are_named(tmp_path, capsys):
    assert main(["--config-dir", str(tmp_path / "none"), "trainer.nnodes=1"]) == 2
    assert "there is no folder" in capsys.readouterr().err
    assert main(["--config-dir", str(tmp_path), "--config-name", "nothing"]) == 2
    assert "nothing" in capsys.readouterr().err


def test_ppo_cli_external_lib_registers_before_names_are_checked(base, tmp_path, monkeypatch, capsys):
    (tmp_path / "ostinato_test_extension.py").write_text(
        "from ostinato.algos import register_adv_est\n"
        "@register_adv_est('of_my_own')\n"
        "def of_my_own(token_level_rewards, response_mask, *, groups):\n"
        "    return token_level_rewards, token_level_rewards\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    extension = "actor_rollout_ref.model.external_lib=ostinato_test_extension"
    assert main([*base, "algorithm.adv_estimator=of_my_own", extension]) == 0
    assert main([*base, "actor_rollout_ref.model.external_lib=no_such_module_of_mine"]) == 2
    assert "PYTHONPATH" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("raised", "code"),
    [
        (None, 0),
        (LaunchError("this machine cannot run it: 2 GPUs"), 1),
        (RunFolderBusy("in use by another run"), 1),
        (ResourcesUnavailable("pool", {"GPU": 16}, {"GPU": 8}, "too few"), 1),
        (ConfigError([Problem("data.train_files", "gone")]), 2),
    ],
)
def test_ppo_cli_refusals_of_a_run_end_without_a_traceback(raised, code, base, monkeypatch, capsys):
    got = []

    def run(config, on_event):
        got.append(config)
        on_event({"kind": "note", "text": "hello"})
        if raised is not None:
            raise raised

    monkeypatch.setattr("ostinato.ppo.run.run", run)
    assert main([*base, "trainer.dry_run=False"]) == code
    printed = capsys.readouterr()
    assert "hello" in printed.out
    assert printed.out.startswith("plan\n")
    assert got[0].actor_rollout_ref.rollout.n == 8
    assert "Traceback" not in printed.err
    assert raised is None or str(raised).partition(":")[0] in printed.err


def test_ppo_cli_bugs_keep_their_traceback(base, monkeypatch):
    def run(config, on_event):
        raise ZeroDivisionError

    monkeypatch.setattr("ostinato.ppo.run.run", run)
    with pytest.raises(ZeroDivisionError):
        main([*base, "trainer.dry_run=False"])


def test_ppo_cli_schema_can_be_registered_twice(world):
    register_schema()
    register_schema()
    assert compose(words(LABS["lab1"], world))[1] == []
    assert callable(from_hydra)
