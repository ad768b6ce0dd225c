"""What a run says that does not come to its end: Ctrl-C, the checkpoint in force, failures."""

from __future__ import annotations

import signal
import threading
from pathlib import Path
from typing import Any

import pytest

from ostinato.controller import CallTimedOut, RayNotRunning, ResourcesUnavailable, WorkerDied, WorkerFailed
from ostinato.ppo import cli
from ostinato.ppo.config import PpoConfig
from ostinato.ppo.ending import PATIENCE_S, Interrupts, failure_text, outlook
from ostinato.ppo.errors import DataError, RunFolderBusy
from ostinato.ppo.run_folder import MARKER
from ostinato.protocol.errors import ColumnConflictError
from ostinato.rollout.errors import BackendUnavailableError
from ostinato.workers.core.errors import ModelMismatchError
from ostinato.workers.fsdp.errors import ModelLoadError

SIGNALS = (signal.SIGINT, signal.SIGTERM)


@pytest.fixture(autouse=True)
def handlers():
    before = [signal.signal(number, default) for number, default in zip(SIGNALS, DEFAULTS, strict=True)]
    yield
    signal.alarm(0)
    for number, handler in zip(SIGNALS, before, strict=True):
        signal.signal(number, handler)


DEFAULTS = (signal.default_int_handler, signal.SIG_DFL)


@pytest.mark.parametrize("exits", [False, True])
@pytest.mark.parametrize("number", SIGNALS)
def test_first_signal_interrupts_and_further_ones_change_nothing(number, exits, capsys):
    def block() -> None:
        try:
            signal.raise_signal(number)
        finally:  # what is being closed goes on
            for each in SIGNALS:
                signal.raise_signal(each)
            assert 0 < signal.alarm(PATIENCE_S) <= PATIENCE_S

    interrupts = Interrupts(exits=exits)
    with interrupts, pytest.raises(KeyboardInterrupt):
        block()
    assert interrupts.say("prog") == 128 + number
    how = {signal.SIGINT: "interrupted", signal.SIGTERM: "terminated (SIGTERM)"}[number]
    assert capsys.readouterr().err == f"\nprog: {how}; nothing was started\n"
    if exits:  # nothing breaks off the interpreter's exit
        assert [signal.getsignal(each) for each in SIGNALS] == [signal.SIG_IGN] * 2
        assert signal.alarm(0) > 0
    else:
        assert tuple(signal.getsignal(each) for each in SIGNALS) == DEFAULTS
        assert signal.alarm(0) == 0


def test_undisturbed_block_leaves_the_handlers_as_they_were():
    with Interrupts(exits=True):
        assert signal.getsignal(signal.SIGINT) is not signal.default_int_handler
    assert tuple(signal.getsignal(each) for each in SIGNALS) == DEFAULTS


def test_ignored_signals_and_other_threads_are_left_alone():
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with Interrupts():
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    signal.signal(signal.SIGINT, signal.default_int_handler)
    seen = []

    def elsewhere() -> None:
        with Interrupts():
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert seen == [signal.default_int_handler]


def test_ctrl_c_of_a_command_before_there_is_a_run(monkeypatch, capsys):
    monkeypatch.setattr(cli, "compose", lambda *args, **kwargs: signal.raise_signal(signal.SIGINT))
    assert cli.main(["trainer.nnodes=1"]) == 130
    assert capsys.readouterr().err == "\nostinato-ppo: interrupted; nothing was started\n"


def config_of(folder: Path, **trainer: Any) -> PpoConfig:
    return PpoConfig.from_mapping({"trainer": {"default_local_dir": str(folder), **trainer}})


def add_checkpoint(folder: Path, step: int, whole: bool = True) -> None:
    (folder / f"global_step_{step}").mkdir(parents=True)
    if whole:
        (folder / f"global_step_{step}" / MARKER).write_text(str(step))


def test_outlook_names_the_checkpoint_in_force(tmp_path):
    nothing = f"there is no checkpoint in {tmp_path} yet (trainer.save_freq=-1 saves none)"
    assert outlook(config_of(tmp_path)) == f"{nothing}; the same command starts again from step 1"
    assert "yet; the same command" in outlook(config_of(tmp_path, save_freq=5))
    elsewhere = config_of(tmp_path, resume_mode="resume_path", resume_from_path="/a/global_step_7")
    assert outlook(elsewhere).endswith("starts again from /a/global_step_7")
    for step in (9, 10):
        add_checkpoint(tmp_path, step)
    add_checkpoint(tmp_path, 11, whole=False)
    assert outlook(config_of(tmp_path)) == (
        f"the checkpoint in force is {tmp_path}/global_step_10; the same command continues from it"
    )
    assert "same command with trainer.resume_mode=auto continues" in outlook(config_of(tmp_path, resume_mode="disable"))


@pytest.mark.parametrize(
    "error",
    [
        DataError("row 3: too long"),
        RunFolderBusy("in use by another run"),
        ResourcesUnavailable("pool", {"GPU": 16}, {"GPU": 8}, "too few"),
        RayNotRunning("no Ray answers"),
        BackendUnavailableError("vllm is not installed"),
        ModelMismatchError("reward_model.model.path: another vocabulary"),
        ModelLoadError("no weights"),
    ],
)
def test_failure_text_of_refusals_is_their_own(error, tmp_path):
    assert failure_text(error, "prog", config_of(tmp_path)) == f"prog: {error}\n"
    error.add_note("raised by role 'actor'")
    error.__cause__ = WorkerFailed("actor", 0, "node", "init_model", "Traceback …", "reason")
    assert failure_text(error, "prog", config_of(tmp_path)) == f"prog: {error}\nraised by role 'actor'\n"


def test_failure_text_of_workers_has_their_traceback_place_and_the_outlook(tmp_path):
    add_checkpoint(tmp_path, 4)
    config = config_of(tmp_path)
    last = f"the checkpoint in force is {tmp_path}/global_step_4; the same command continues from it\n"
    raised = KeyError("x")
    text = "Traceback\n  frame\nKeyError: 'x'\n"
    raised.__cause__ = WorkerFailed("actor", 2, "n1", "update_actor", text, "KeyError: 'x'")
    raised.add_note(f"raised by {raised.__cause__.where}")
    raised.add_note("also failed: rank 3")
    assert failure_text(raised, "prog", config) == (
        "Traceback\n  frame\nKeyError: 'x'\n\n"
        "prog: role 'actor', rank 2 on node n1, method 'update_actor': KeyError: 'x'\nalso failed: rank 3\n" + last
    )
    died = WorkerDied("critic", 1, "n2", "compute_values", "what Ray knows", "its process ended")
    assert failure_text(died, "prog", config) == (
        "what Ray knows\n\nprog: role 'critic', rank 1 on node n2, method 'compute_values': its process ended\n" + last
    )
    hung = CallTimedOut("role 'actor', method 'update_actor': no answer within 5 s")
    assert failure_text(hung, "prog", config) == f"prog: {hung}\n{last}"


@pytest.mark.parametrize("error", [ZeroDivisionError(), AssertionError("bug"), ColumnConflictError("union")])
def test_failure_text_leaves_bugs_to_their_traceback(error, tmp_path):
    assert failure_text(error, "prog", config_of(tmp_path)) is None
