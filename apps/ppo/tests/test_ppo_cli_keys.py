"""Keys and values on the command line: what is taken, and what is refused with the nearest right one."""

from __future__ import annotations

import pytest

from ostinato.ppo.__main__ import main
from ostinato.ppo.cli import compose


@pytest.mark.parametrize(
    ("override", "key", "near"),
    [
        ("+actor_rollout_ref.actor.clip_ratoi=.3", "actor_rollout_ref.actor.clip_ratoi", "actor.clip_ratio"),
        ("actor_rollout_ref.actor.clip_ratoi=.3", "actor_rollout_ref.actor.clip_ratoi", "actor.clip_ratio"),
        ("++actor_rollout_ref.actor.clip_ratoi=.3", "actor_rollout_ref.actor.clip_ratoi", "actor.clip_ratio"),
        ("+actor.clip_ratoi=.3", "actor.clip_ratoi", "actor_rollout_ref.actor.clip_ratio"),
        ("+trainer.n_gpus=2", "trainer.n_gpus", "trainer.n_gpus_per_node"),
        ("+tranier.total_epochs=2", "tranier.total_epochs", "trainer.total_epochs"),
        ("data.train_file=x", "data.train_file", "data.train_files"),
        ("train_batch_size=8", "train_batch_size", "data.train_batch_size"),
        (
            "actor_rollout_ref.actor.optim.lrr=1",
            "actor_rollout_ref.actor.optim.lrr",
            "actor_rollout_ref.actor.optim.lr",
        ),
        (
            "actor_rollout_ref.actor.fsdp_config.parm_offload=True",
            "actor_rollout_ref.actor.fsdp_config.parm_offload",
            "actor_rollout_ref.actor.fsdp_config.param_offload",
        ),
        (
            "actor_rollout_ref.actor.ppo_micro_batch_size=4",
            "actor_rollout_ref.actor.ppo_micro_batch_size",
            "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu",
        ),
        (
            "actor_rollout_ref.ref.log_prob_micro_batch_size=4",
            "actor_rollout_ref.ref.log_prob_micro_batch_size",
            "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu",
        ),
        ("critic.model.fsdp_config.param_offload=True", "critic.model.fsdp_config", "critic.fsdp_config.param_offload"),
        ("actor_rollout_ref.actor={clip_ratoi: 1}", "actor_rollout_ref.actor.clip_ratoi", "actor.clip_ratio"),
        ("data.train_batch_size.x=1", "data.train_batch_size.x", ""),
    ],
)
def test_ppo_cli_unknown_key_is_refused_with_the_nearest(override, key, near, base, capsys):
    """H-73: also with `+`, nested, and under the name that other systems use."""
    assert main([*base, override]) == 2
    error = capsys.readouterr().err
    line = next(line for line in error.splitlines() if key in line)
    assert "there is no such key" in line
    assert near in line
    assert "Traceback" not in error


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("data.train_batch_size=many", "data.train_batch_size: expected int, got 'many' (str)"),
        ("data.train_batch_size=2.5", "data.train_batch_size: expected int, got 2.5 (float)"),
        ("data.train_batch_size=true", "data.train_batch_size: expected int, got True (bool)"),
        ("data.shuffle=3", "data.shuffle: expected bool, got 3 (int)"),
        ("trainer.total_epochs=null", "trainer.total_epochs: expected int, got null"),
        ("trainer.device=gpu", "trainer.device: expected one of auto, cuda, cpu, got 'gpu' (str)"),
        ("actor_rollout_ref.actor.optim.lr=fast", "actor_rollout_ref.actor.optim.lr: expected float, got 'fast' (str)"),
        ("trainer.save_freq={a: 1}", "trainer.save_freq: expected int, got a mapping with a"),
        ("trainer=5", "trainer: is a section, got 5"),
        ("custom_reward_function.reward_kwargs=3", "custom_reward_function.reward_kwargs: expected a mapping"),
        ("data.truncation=up", "data.truncation: expected one of error, left, right, middle, got 'up' (str)"),
        ("data.train_files=a,b", "data.train_files: several values; a list is written [a,b]"),
        ("~trainer.seed", "trainer.seed: keys cannot be deleted"),
        ("hydra.run.dir=x", "hydra.run.dir: ostinato runs no Hydra jobs"),
        ("nonsense", "nonsense: expected key=value"),
        ("=", "=: expected key=value, without spaces around the ="),
        ("--data.train_files=x", "--data.train_files=x; keys are written without dashes, key=value"),
        ("trainer.seed=${data.nothing}", "data.nothing"),
    ],
)
def test_ppo_cli_wrong_value_names_key_expected_and_got(override, expected, base, capsys):
    assert main([*base, override]) == 2
    error = capsys.readouterr().err
    assert expected in error
    assert "Traceback" not in error


def test_ppo_cli_tells_all_problems_of_a_run_together(base, capsys):
    bad = [
        "+typoo.x=1",
        "data.train_batch_size=many",
        "actor_rollout_ref.actor.clip_ratio_c=0.5",
        "actor_rollout_ref.rollout.n=1",
        "trainer.logger=foo",
        "nonsense",
    ]
    assert main([*base, *bad]) == 2
    error = capsys.readouterr().err
    assert "(6 problems)" in error
    for key in ("typoo.x", "data.train_batch_size", "clip_ratio_c", "rollout.n", "trainer.logger", "nonsense"):
        assert f"  {key}" in error or f"actor_rollout_ref.{key}" in error or key in error


def test_ppo_cli_consequences_of_a_known_fault_are_not_told(base, capsys):
    assert main([word.replace("data.train_files", "data.train_file") for word in base]) == 2
    error = capsys.readouterr().err
    assert "(1 problem)" in error
    assert "data.train_file: there is no such key; did you mean data.train_files?" in error


def test_ppo_cli_values_are_taken_in_every_sensible_writing(base):
    config, problems = compose(
        [
            *base,
            "trainer.logger=jsonl",
            "data.val_files=[a.parquet,b.parquet]",
            "actor_rollout_ref.actor.optim.betas=[0.9,0.95]",
            "custom_reward_function.reward_kwargs.method=flexible",
            "+custom_reward_function.reward_kwargs.limit=2",
            "trainer.experiment_name=7",
            "algorithm.rollout_correction.rollout_is=token",
            "algorithm.rollout_correction.rollout_is_threshold=2.0",
            "data.train_batch_size=1e3",
            "algorithm.lam=1",
            "trainer.seed=5",
        ]
    )
    assert problems == []
    assert config.trainer.logger == ["jsonl"]
    assert config.data.val_files == ["a.parquet", "b.parquet"]
    assert config.actor_rollout_ref.actor.optim.betas == (0.9, 0.95)
    assert config.custom_reward_function.reward_kwargs == {"method": "flexible", "limit": 2}
    assert config.trainer.default_local_dir == "checkpoints/ostinato/7"
    assert config.algorithm.rollout_correction.rollout_is_threshold == "2.0"
    assert config.data.train_batch_size == 1000
    assert isinstance(config.algorithm.lam, float)
    assert (config.data.seed, config.actor_rollout_ref.rollout.seed) == (5, 5)


def test_ppo_cli_home_folder_needs_no_quotes(base, monkeypatch, tmp_path, capsys):
    """Shells leave `~` alone behind `key=`, and Hydra takes it in quotes only."""
    monkeypatch.setenv("HOME", str(tmp_path))
    folders = ("default_local_dir", "resume_from_path", "rollout_data_dir", "validation_data_dir")
    keys = [f"trainer.{name}='~/{name}'" for name in folders]
    config, problems = compose([*base, "data.train_files=~/x.parquet", *keys])
    assert problems == []
    assert config.data.train_files == [f"{tmp_path}/x.parquet"]
    for name in folders:
        assert getattr(config.trainer, name) == f"{tmp_path}/{name}"
    assert main([*base, "actor_rollout_ref.model.path=~/none"]) == 2
    assert "actor_rollout_ref.model.path: there is no folder ~/none" in capsys.readouterr().err


def test_ppo_cli_flexible_scoring_can_be_chosen(base):
    """H-33: the built-in function's option reaches the checks as it reaches the rewards."""
    assert main([*base, "custom_reward_function.reward_kwargs.method=flexible"]) == 0
    assert main([*base, "custom_reward_function.reward_kwargs.metod=flexible"]) == 2
