"""A run that was killed and resumed is the run that was not."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest
import torch
from safetensors.torch import load_file
from toy_runs import arguments, metrics_of, toy_overrides, untimed

pytestmark = pytest.mark.e2e


def start(toy, folder, **more):
    options = {
        "algorithm.adv_estimator": "gae",
        "trainer.backend": "local",
        "trainer.total_training_steps": 6,
        "trainer.save_freq": 3,
        "trainer.save_hf_model": True,
        **more,
    }
    words = [sys.executable, "-m", "ostinato.ppo", *arguments(toy_overrides(toy, folder, **options))]
    return subprocess.Popen(words, env={**os.environ, "OMP_NUM_THREADS": "1"})


def wait_for(condition, process, seconds=240):
    deadline = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, "the run ended before it could be killed"
        assert time.monotonic() < deadline
        time.sleep(0.01)


def lines(folder):
    return metrics_of(folder) if (folder / "metrics.jsonl").exists() else []


def test_resume_after_kill_gives_the_same_metrics_and_weights(toy, tmp_path):
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    assert start(toy, whole).wait(300) == 0
    process = start(toy, broken)
    wait_for(lambda: (broken / "global_step_3" / "COMPLETE").exists(), process)
    process.send_signal(signal.SIGKILL)
    process.wait(30)
    assert start(toy, broken).wait(300) == 0
    expected = {line["training/global_step"]: untimed(line) for line in lines(whole)}
    found = {line["training/global_step"]: untimed(line) for line in lines(broken)}
    assert sorted(expected) == [1, 2, 3, 4, 5, 6]
    assert found == expected
    first = load_file(whole / "global_step_6" / "huggingface" / "model.safetensors")
    second = load_file(broken / "global_step_6" / "huggingface" / "model.safetensors")
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_resume_at_the_budget_trains_no_more(toy, tmp_path):
    """H-63: a checkpoint at the step budget: no update, a clean exit."""
    options = {"trainer.total_training_steps": 3}
    assert start(toy, tmp_path, **options).wait(300) == 0
    before = lines(tmp_path)
    assert start(toy, tmp_path, **options).wait(300) == 0
    assert lines(tmp_path) == before
