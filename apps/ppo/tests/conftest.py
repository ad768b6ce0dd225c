"""What the tests of the app share: configurations and commands that pass the checks, changed one key at a time."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ostinato.ppo import placement
from ostinato.ppo.cli import main
from ostinato.ppo.config import PpoConfig
from ostinato.ppo.prepare import largest
from ostinato.ppo.testing import GSM8K_ROW, write_model, write_rows


def merged(base: dict[str, Any], change: dict[str, Any]) -> dict[str, Any]:
    out = dict(base)
    for key, value in change.items():
        out[key] = merged(out[key], value) if isinstance(value, dict) and isinstance(out.get(key), dict) else value
    return out


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., PpoConfig]:
    """A configuration that passes, with dotted changes: `make(**{"data.train_batch_size": 4})`."""
    monkeypatch.chdir(tmp_path)
    base = {
        "data": {"train_files": write_rows(tmp_path / "train.parquet", [GSM8K_ROW] * 40), "train_batch_size": 32},
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


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `model/`, `train.parquet`, `test.parquet` and `my_reward.py`."""
    folder = tmp_path_factory.mktemp("world")
    write_model(folder / "model")
    for name, rows in (("train", 1100), ("test", 8)):
        write_rows(folder / f"{name}.parquet", [GSM8K_ROW] * rows)
    (folder / "my_reward.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n    return 1.0\n"
    )
    return folder


@pytest.fixture
def base(world: Path) -> list[str]:
    """A command that passes the static checks, and stops there."""
    return [
        "algorithm.adv_estimator=grpo",
        f"data.train_files={world}/train.parquet",
        f"data.val_files={world}/test.parquet",
        f"actor_rollout_ref.model.path={world}/model",
        "actor_rollout_ref.rollout.name=vllm",
        "actor_rollout_ref.rollout.n=8",
        "actor_rollout_ref.actor.use_kl_loss=True",
        "trainer.dry_run=True",
    ]


@pytest.fixture(scope="session")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the toy task's model and data."""
    folder = tmp_path_factory.mktemp("toy")
    largest.prepare(folder)
    return folder


@pytest.fixture
def command(toy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Run a command on the toy task in this process, one step long; gives its exit code, stdout and stderr."""

    def call(**changes: Any) -> tuple[int, str, str]:
        values = {
            "algorithm.adv_estimator": "grpo",
            "data.train_files": toy / "train.parquet",
            "data.train_batch_size": 8,
            "data.max_prompt_length": 8,
            "data.max_response_length": 4,
            "actor_rollout_ref.model.path": toy / "model",
            "actor_rollout_ref.actor.ppo_mini_batch_size": 8,
            "actor_rollout_ref.rollout.n": 4,
            "actor_rollout_ref.rollout.dtype": "float32",
            "custom_reward_function.num_processes": 1,
            "trainer.total_training_steps": 1,
            "trainer.device": "cpu",
            "trainer.backend": "local",
            "trainer.logger": "jsonl",
            "trainer.default_local_dir": tmp_path / "run",
        }
        code = main([f"{key}={value}" for key, value in (values | changes).items()])
        printed = capsys.readouterr()
        return code, printed.out, printed.err

    return call


@pytest.fixture
def no_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that is started fails the test."""

    def forbidden(config: Any) -> None:
        raise AssertionError("workers were started")

    monkeypatch.setattr(placement, "open_backend", forbidden)
