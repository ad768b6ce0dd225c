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


def start(toy, folder):
    options = {
        "algorithm.adv_estimator": "gae",
        "trainer.backend": "local",
        "trainer.total_training_steps": 6,
        "trainer.save_freq": 3,
        "trainer.save_hf_model": True,
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


@pytest.fixture(scope="module")
def whole(toy, tmp_path_factory):
    """A run that nothing disturbed."""
    folder = tmp_path_factory.mktemp("whole")
    assert start(toy, folder).wait(300) == 0
    return folder


def test_resume_after_kill_gives_the_same_metrics_and_weights(toy, whole, tmp_path):
    broken = tmp_path / "broken"
    process = start(toy, broken)
    log = broken / "metrics.jsonl"  # the line of step 3 comes after its checkpoint
    wait_for(lambda: log.exists() and log.read_text().count("\n") >= 3, process)
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


def test_resume_at_the_budget_trains_no_more(toy, whole):
    """H-63: a checkpoint at the step budget: no update, a clean exit."""
    before = lines(whole)
    assert start(toy, whole).wait(300) == 0
    assert lines(whole) == before
