"""Runs that do not come to their end: Ctrl-C, a worker that dies or raises. What stands on stderr, and what is left."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import uuid
from pathlib import Path

import pytest
from toy_runs import arguments, toy_overrides

from ostinato.ppo import cli

pytestmark = pytest.mark.e2e

LONG = {"trainer.total_training_steps": 1000, "trainer.save_freq": 1, "trainer.max_actor_ckpt_to_keep": 2}


class Program:
    """A run as a user starts it: a process group of its own, which is what a terminal's Ctrl-C goes to."""

    def __init__(self, toy, folder, **more):
        self.tag = uuid.uuid4().hex
        words = [sys.executable, "-m", "ostinato.ppo", *arguments(toy_overrides(toy, folder, **more))]
        self.process = subprocess.Popen(
            words,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            preexec_fn=_heeds_ctrl_c,
            env={**os.environ, "OMP_NUM_THREADS": "1", "OSTINATO_TEST_RUN": self.tag},
        )
        self.out: list[str] = []
        self.err: list[str] = []
        for stream, lines in ((self.process.stdout, self.out), (self.process.stderr, self.err)):
            threading.Thread(target=lines.extend, args=(stream,), daemon=True).start()

    def wait_for(self, condition, seconds=120.0):
        deadline = time.monotonic() + seconds
        while not condition():
            assert self.process.poll() is None, "".join(self.err)
            assert time.monotonic() < deadline
            time.sleep(0.01)

    def ctrl_c(self):
        os.killpg(self.process.pid, signal.SIGINT)

    def ends(self, seconds=30.0):
        """Wait for the end; returns the exit code and stderr."""
        code = self.process.wait(seconds)
        time.sleep(0.1)  # the last lines
        return code, "".join(self.err)

    def processes(self, pattern="."):
        """Ids of the processes that this run has started: those of its session (Ray's rename themselves, which
        overwrites their environment), and those with its environment (scorers have sessions of their own)."""
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    session = int((entry / "stat").read_text().rpartition(")")[2].split()[3])
                    mine = session == self.process.pid or self.tag.encode() in (entry / "environ").read_bytes()
                    text = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                except OSError:
                    continue
                if mine and text and re.search(pattern, text):
                    found.append(int(entry.name))
        return found

    def left_behind(self, seconds=10.0):
        deadline = time.monotonic() + seconds
        while (left := self.processes()) and time.monotonic() < deadline:
            time.sleep(0.05)
        return left


def _heeds_ctrl_c():
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # a test session in the background ignores it, and so would the run


def newest_step(folder):
    return max((int(path.parent.name[12:]) for path in folder.glob("global_step_*[0-9]/COMPLETE")), default=0)


def in_force(text):
    found = re.search(r"the checkpoint in force is \S*/global_step_(\d+); the same command continues from it", text)
    assert found, text
    return int(found[1])


def test_ctrl_c_during_a_step_names_the_checkpoint_and_the_same_command_continues(toy, tmp_path, capsys):
    options = {"trainer.backend": "local", **LONG}
    program = Program(toy, tmp_path, **options)
    program.wait_for(lambda: newest_step(tmp_path) >= 2)
    program.ctrl_c()
    code, text = program.ends()
    assert code == 130
    assert "ostinato-ppo: interrupted; " in text
    assert "Traceback" not in text
    step = in_force(text)
    assert step == newest_step(tmp_path)
    assert program.left_behind() == []
    more = {**options, "trainer.total_training_steps": step + 1, "trainer.logger": "[console,jsonl]"}
    assert cli.main(arguments(toy_overrides(toy, tmp_path, **more))) == 0
    printed = capsys.readouterr().out
    assert f"resumed from {tmp_path}/global_step_{step}, step {step} of {step + 1}" in printed
    assert f"step {step + 1}/{step + 1}" in printed


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_during_a_step_on_ray_leave_no_process(toy, tmp_path, number):
    """A terminal's Ctrl-C goes to all processes of the run, a scheduler's SIGTERM to the first."""
    program = Program(toy, tmp_path, **LONG)
    program.wait_for(lambda: newest_step(tmp_path) >= 1)
    program.ctrl_c() if number == signal.SIGINT else program.process.send_signal(number)
    code, text = program.ends()
    assert code == 128 + number
    assert ("interrupted" if number == signal.SIGINT else "terminated (SIGTERM)") in text
    assert in_force(text) == newest_step(tmp_path)
    assert "Traceback" not in text
    printed = "".join(program.out) + text
    assert "(_Driver pid=" in printed  # a line that Ray brought, and coloured if it were let
    assert "\x1b" not in printed
    assert program.left_behind() == []


@pytest.mark.parametrize("backend", ["local", "ray"])
def test_ctrl_c_twice_while_a_run_is_set_up(toy, tmp_path, backend):
    program = Program(toy, tmp_path, **{"trainer.backend": backend})
    if backend == "ray":
        program.wait_for(lambda: program.processes("raylet"))
    else:
        program.wait_for(lambda: any(line.startswith("plan") for line in program.out))
    program.ctrl_c()
    time.sleep(0.05)
    program.ctrl_c()
    code, text = program.ends()
    assert code == 130
    assert text.count("ostinato-ppo: interrupted; there is no checkpoint in") == 1
    assert "(trainer.save_freq=-1 saves none); the same command starts again from step 1" in text
    assert "Traceback" not in text
    assert program.left_behind() == []


def test_death_of_a_worker_names_it_and_the_checkpoint(toy, tmp_path):
    program = Program(toy, tmp_path, **LONG)
    program.wait_for(lambda: newest_step(tmp_path) >= 1)
    (worker,) = program.processes("HostActor")
    os.kill(worker, signal.SIGKILL)
    code, text = program.ends()
    assert code == 1
    assert re.search(r"ostinato-ppo: role 'actor', rank 0 on node .*, method '\w+': its process ended", text)
    assert in_force(text) == newest_step(tmp_path)
    assert "Traceback" not in text
    assert program.left_behind() == []


def test_users_code_that_raises_in_a_worker_shows_the_workers_traceback(toy, tmp_path, ray_session, capsys):
    """Through the driver actor: the traceback on the worker, its place, and no frame of the program itself."""
    changes = {
        "actor_rollout_ref.model.external_lib": "bad_loss",
        "actor_rollout_ref.actor.policy_loss.loss_mode": "of_mine",
    }
    assert cli.main(arguments(toy_overrides(toy, tmp_path / "run", **changes))) == 1
    text = capsys.readouterr().err
    assert 'in of_mine\n    return {}["of mine"]' in text
    assert "ostinato/ppo/" not in text
    assert re.search(
        r"\nostinato-ppo: role 'actor', rank 0 on node .*, method 'update_actor': KeyError: 'of mine'", text
    )


def test_refusals_keep_their_text_on_the_way_from_the_driver_actor(toy, tmp_path, ray_session, capsys):
    model = shutil.copytree(toy / "model", tmp_path / "model")
    settings = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**settings, "num_hidden_layers": settings["num_hidden_layers"] + 1}))
    changes = {"actor_rollout_ref.model.path": model}
    assert cli.main(arguments(toy_overrides(toy, tmp_path / "run", **changes))) == 1
    text = capsys.readouterr().err
    assert f"ostinato-ppo: model.path {model}: " in text
    assert "weights are missing from the folder" in text
    assert "\nraised by role 'actor', rank 0 on node " in text
    many = {
        "trainer.n_gpus_per_node": 64,
        "data.train_batch_size": 64,
        "actor_rollout_ref.actor.ppo_mini_batch_size": 64,
    }
    assert cli.main(arguments(toy_overrides(toy, tmp_path, **many))) == 1
    text = capsys.readouterr().err
    assert "ostinato-ppo: resource pool 'global_pool' asks for " in text
    assert "Ask for fewer processes, or add nodes." in text
    assert "ostinato/controller" not in text
