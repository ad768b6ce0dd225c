"""A run that was killed and resumed is the run that was not."""

from __future__ import annotations

import errno
import signal
import subprocess
import sys
import time

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from toy_runs import arguments, metrics_of, nested, toy_overrides, untimed
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from ostinato.ppo import run as run_module
from ostinato.ppo.checkpoint import Checkpoints
from ostinato.ppo.cli import main
from ostinato.ppo.config import PpoConfig
from ostinato.ppo.preflight import check
from ostinato.ppo.run_folder import complete_steps

pytestmark = pytest.mark.e2e


def command(toy, folder, **more):
    options = {
        "algorithm.adv_estimator": "gae",
        "trainer.backend": "local",
        "trainer.total_training_steps": 6,
        "trainer.save_freq": 3,
        "trainer.save_hf_model": True,
        **more,
    }
    return arguments(toy_overrides(toy, folder, **options))


def wait_for(condition, process, seconds=240):
    deadline = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, "the run ended before it could be killed"
        assert time.monotonic() < deadline
        time.sleep(0.01)


def lines(folder):
    return metrics_of(folder) if (folder / "metrics.jsonl").exists() else []


@pytest.fixture(scope="module")
def whole(toy, tmp_path_factory):
    """A run that nothing disturbed."""
    folder = tmp_path_factory.mktemp("whole")
    assert main(command(toy, folder)) == 0
    return folder


def test_resume_after_kill_gives_the_same_metrics_and_weights(toy, whole, tmp_path):
    """Killed the moment its checkpoint is in force, which was written while training went on; no line is lost."""
    broken = tmp_path / "broken"
    background = {f"{role}.checkpoint.async_save": True for role in ("actor_rollout_ref.actor", "critic")}
    words = command(toy, broken, **background)
    process = subprocess.Popen([sys.executable, "-m", "ostinato.ppo", *words])
    wait_for((broken / "global_step_3" / "COMPLETE").exists, process)
    process.send_signal(signal.SIGKILL)
    process.wait(30)
    assert main(words) == 0
    expected = {line["training/global_step"]: untimed(line) for line in lines(whole)}
    found = {line["training/global_step"]: untimed(line) for line in lines(broken)}
    assert sorted(expected) == [1, 2, 3, 4, 5, 6]
    assert found == expected
    first = load_file(whole / "global_step_6" / "huggingface" / "model.safetensors")
    second = load_file(broken / "global_step_6" / "huggingface" / "model.safetensors")
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_export_of_a_checkpoint_is_what_the_run_exported(whole, tmp_path):
    """By the command, from the checkpoint alone: the policy bit for bit, and the critic with its head."""
    checkpoint = whole / "global_step_6"
    assert main(["export", str(whole), "--to", str(tmp_path / "policy")]) == 0
    assert (
        main(["export", str(checkpoint), "--role", "critic", "--to", str(tmp_path / "critic"), "--dtype", "bf16"]) == 0
    )
    expected = load_file(checkpoint / "huggingface" / "model.safetensors")
    found = load_file(tmp_path / "policy" / "model.safetensors")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    files = [
        sorted(path.name for path in folder.iterdir()) for folder in (tmp_path / "policy", checkpoint / "huggingface")
    ]
    assert files[0] == files[1]
    critic = AutoModelForSequenceClassification.from_pretrained(tmp_path / "critic")
    assert critic.dtype == torch.bfloat16
    assert critic.score.weight.shape[0] == 1
    assert AutoTokenizer.from_pretrained(tmp_path / "critic").vocab_size > 0


def test_resume_at_the_budget_trains_no_more(toy, whole, capsys):
    """H-63: a checkpoint at the step budget: no update, a clean exit."""
    before = lines(whole)
    assert main(command(toy, whole)) == 0
    assert "nothing to do: the checkpoint " in capsys.readouterr().out
    assert lines(whole) == before


def test_full_disk_costs_a_checkpoint_and_not_the_run(toy, tmp_path, monkeypatch):
    """The line of a step is there before its checkpoint is in force."""
    order, failing = [], iter([False, True, False])
    write, in_force = FileSystemWriter.write_data, Checkpoints._put_in_force

    def write_data(self, *args, **kwargs):
        if next(failing):
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(self, *args, **kwargs)

    def put_in_force(self, pending):
        order.append((pending.step, lines(tmp_path)[-1]["training/global_step"]))
        in_force(self, pending)

    monkeypatch.setattr(FileSystemWriter, "write_data", write_data)
    monkeypatch.setattr(Checkpoints, "_put_in_force", put_in_force)
    options = {
        "trainer.backend": "local",
        "trainer.total_training_steps": 3,
        "trainer.save_freq": 1,
        "data.val_files": [],
    }
    config = check(PpoConfig.from_mapping(nested(toy_overrides(toy, tmp_path, **options)))).config
    run_module.train(config, emit=lambda event: None)
    assert [line["training/failed_checkpoints"] for line in lines(tmp_path)] == [0, 1, 1]
    assert order == [(1, 1), (3, 3)]
    assert complete_steps(tmp_path) == [1, 3]
