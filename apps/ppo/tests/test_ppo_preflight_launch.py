"""What is looked at where a run is about to start, and never before."""

from __future__ import annotations

import pytest

from ostinato.ppo.errors import LaunchError
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
    assert "pip install" in text
    assert "wandb" in text
    check_launch(with_weights(**{"trainer.n_gpus_per_node": 2, "trainer.device": "cuda"}))
    check_launch(with_weights(**{"trainer.n_gpus_per_node": 64, "trainer.device": "cpu"}))


def test_ppo_preflight_launch_refuses_an_adapter_without_peft(with_weights, monkeypatch):
    config = with_weights(**{"actor_rollout_ref.model.lora_rank": 8, "trainer.device": "cpu"})
    check_launch(config)
    monkeypatch.setattr("ostinato.ppo.preflight_launch.find_spec", lambda module: None)
    with pytest.raises(LaunchError, match=r"pip install 'ostinato-workers-fsdp\[lora\]'"):
        check_launch(config)


@pytest.mark.parametrize("role", ["actor_rollout_ref.actor", "critic"])
def test_ppo_preflight_launch_refuses_an_optimizer_that_is_not_installed(role, with_weights, tmp_path, monkeypatch):
    paths = {"algorithm.adv_estimator": "gae", "critic.model.path": str(tmp_path / "model")}
    config = with_weights(**paths, **{f"{role}.optim.optimizer": "AdamW8bit", "trainer.device": "cpu"})
    monkeypatch.setattr("ostinato.ppo.preflight_launch.find_spec", lambda module: object())
    check_launch(config)
    monkeypatch.setattr("ostinato.ppo.preflight_launch.find_spec", lambda module: None)
    with pytest.raises(LaunchError, match=rf"{role}\.optim\.optimizer=AdamW8bit: .*'ostinato-ppo\[adamw8bit\]'"):
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
    with pytest.raises(LaunchError, match=rf"{role}\.model\.use_liger: .*pip install 'ostinato-ppo\[liger\]'"):
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
