"""Checkpoints appear whole or not at all, and only the run that they belong to takes them."""

from __future__ import annotations

import json
import logging
import os
import pickle
import subprocess
import sys

import pytest

from ostinato.ppo.checkpoint import MARKER, Checkpoints, complete_steps, model_fingerprint
from ostinato.ppo.errors import CheckpointError, RunFolderBusy


@pytest.fixture
def checkpoints(tmp_path):
    opened = Checkpoints(tmp_path / "run")
    yield opened
    opened.close()


def write(folder):
    (folder / "actor").mkdir()
    (folder / "actor" / "weights").write_text("w")


def test_checkpoint_save_leaves_whole_folder_and_latest(checkpoints):
    folder = checkpoints.save(3, write, {"step": 3})
    assert folder.name == "global_step_3"
    assert (folder / "actor" / "weights").read_text() == "w"
    assert (folder / MARKER).exists()
    assert (checkpoints.folder / "latest_checkpointed_iteration.txt").read_text() == "3"
    assert checkpoints.driver_state(folder) == {"step": 3}
    assert not list(checkpoints.folder.glob("*.partial"))


@pytest.mark.parametrize("step", [5, 10])
def test_checkpoint_failed_save_leaves_the_older_one_in_force(checkpoints, caplog, step):
    """H-69: the newest folder was cut off while it was written; resume takes the last whole one and says so."""
    checkpoints.save(4, write, {"step": 4})

    def fail(folder):
        write(folder)
        raise OSError("no space left on device")

    with pytest.raises(CheckpointError, match=f"global_step_{step} could not be written; the older .* no space"):
        checkpoints.save(step, fail, {"step": step})
    with caplog.at_level(logging.WARNING):
        assert checkpoints.to_resume("auto").name == "global_step_4"
    assert f"global_step_{step}" in caplog.text


def test_checkpoint_without_its_last_file_is_passed_over(checkpoints, caplog):
    """H-69: step 5 whole, step 10 without its last file."""
    checkpoints.save(5, write, {"step": 5})
    folder = checkpoints.save(10, write, {"step": 10})
    (folder / MARKER).unlink()
    with caplog.at_level(logging.WARNING):
        assert checkpoints.to_resume("auto").name == "global_step_5"
    assert "global_step_10" in caplog.text


def test_checkpoint_kill_during_save_leaves_the_older_one_in_force(tmp_path, caplog):
    code = (
        "import os, sys; from ostinato.ppo.checkpoint import Checkpoints\n"
        "c = Checkpoints(sys.argv[1]); c.save(1, lambda f: (f / 'a').write_text('a'), {'step': 1})\n"
        "c.save(2, lambda f: ((f / 'a').write_text('half'), os.kill(os.getpid(), 9)), {'step': 2})\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)])
    assert done.returncode == -9
    survivor = Checkpoints(tmp_path)  # the dead run's hold on the folder went with it
    assert survivor.to_resume("auto").name == "global_step_1"
    assert "global_step_2.partial was cut off while it was written and is removed" in caplog.text
    assert not (tmp_path / "global_step_2.partial").exists()
    assert survivor.save(2, write, {"step": 2}).name == "global_step_2"
    assert complete_steps(tmp_path) == [1, 2]
    survivor.close()


def test_checkpoint_saved_again_replaces_the_old(checkpoints):
    checkpoints.save(1, write, {"step": 1, "try": 1})
    folder = checkpoints.save(1, write, {"step": 1, "try": 2})
    assert checkpoints.driver_state(folder)["try"] == 2
    assert [path.name for path in checkpoints.folder.glob("global_step_1*")] == ["global_step_1"]


def test_checkpoint_kill_between_the_renames_of_a_replacement_loses_nothing(tmp_path, monkeypatch):
    first = Checkpoints(tmp_path)
    first.save(1, write, {"try": 1})

    def dies(self, target):
        os.rename(self, target)
        if target.name.endswith(".replaced"):
            raise KeyboardInterrupt

    monkeypatch.setattr(type(tmp_path), "rename", dies)
    with pytest.raises(KeyboardInterrupt):
        first.save(1, write, {"try": 2})
    monkeypatch.undo()
    first.close()
    assert complete_steps(tmp_path) == []
    second = Checkpoints(tmp_path)
    assert second.driver_state(second.to_resume("auto")) == {"try": 2}
    second.save(1, write, {"try": 3})
    assert [path.name for path in tmp_path.glob("global_step_*")] == ["global_step_1"]
    second.close()


def test_checkpoint_keep_drops_the_oldest(tmp_path):
    kept = Checkpoints(tmp_path, keep=2)
    for step in (2, 4, 6, 10):
        kept.save(step, write, {"step": step})
    assert complete_steps(tmp_path) == [6, 10]
    kept.close()


def test_checkpoint_kill_while_an_old_one_is_dropped_leaves_no_half_one(tmp_path, monkeypatch):
    kept = Checkpoints(tmp_path, keep=1)
    kept.save(2, write, {"step": 2})

    def dies(folder, **options):
        if folder.name == "global_step_2":
            (folder / "actor" / "weights").unlink()
            raise KeyboardInterrupt

    monkeypatch.setattr("ostinato.ppo.checkpoint.shutil.rmtree", dies)
    with pytest.raises(KeyboardInterrupt):
        kept.save(4, write, {"step": 4})
    assert complete_steps(tmp_path) == [4]
    kept.close()


def test_checkpoint_steps_sort_as_numbers(checkpoints):
    for step in (9, 10, 100):
        checkpoints.save(step, write, {"step": step})
    assert checkpoints.to_resume("auto").name == "global_step_100"


@pytest.mark.parametrize("mode", ["auto", "disable"])
def test_checkpoint_fresh_folder_resumes_nothing(checkpoints, mode):
    assert checkpoints.to_resume(mode) is None


def test_checkpoint_disable_ignores_what_is_there(checkpoints):
    checkpoints.save(1, write, {"step": 1})
    assert checkpoints.to_resume("disable") is None


def test_checkpoint_resume_path_takes_only_whole_ones(checkpoints, tmp_path):
    folder = checkpoints.save(1, write, {"step": 1})
    assert checkpoints.to_resume("resume_path", str(folder)) == folder
    with pytest.raises(CheckpointError, match=r"trainer\.resume_from_path"):
        checkpoints.to_resume("resume_path", str(tmp_path))


def test_checkpoint_two_runs_on_one_folder_are_refused(checkpoints):
    with pytest.raises(RunFolderBusy, match=r"in use by another run \(pid \d+"):
        Checkpoints(checkpoints.folder)
    checkpoints.close()
    Checkpoints(checkpoints.folder).close()


def test_checkpoint_of_another_model_is_refused(checkpoints, tmp_path):
    def model(**entries):
        folder = tmp_path / str(len(entries)) / "model"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps({"architectures": ["A"], "hidden_size": 8, **entries}))
        return model_fingerprint(folder)

    mine = model()
    checkpoints.claim(mine)
    checkpoints.claim(model(num_layers=3))  # nothing saved yet: the folder may change hands
    checkpoints.claim(mine)
    checkpoints.save(1, write, {"step": 1})
    checkpoints.claim(model(dtype="bfloat16", transformers_version="9"))  # not what gives weights their shapes
    with pytest.raises(CheckpointError, match="checkpoints of another model") as caught:
        checkpoints.claim(model(num_layers=3))
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_checkpoint_without_a_role_that_the_run_has_is_refused(checkpoints):
    folder = checkpoints.save(1, write, {"step": 1})
    assert checkpoints.driver_state(folder, ["actor"]) == {"step": 1}
    with pytest.raises(CheckpointError, match=r"holds no critic: .*algorithm\.adv_estimator"):
        checkpoints.driver_state(folder, ["actor", "critic"])


def test_checkpoint_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"trainer\.default_local_dir=.*file/run cannot be written to"):
        Checkpoints(tmp_path / "file" / "run")


def test_checkpoint_unreadable_driver_state_is_named(checkpoints):
    folder = checkpoints.save(1, write, {"step": 1})
    (folder / "driver.pt").write_bytes(b"PK")
    with pytest.raises(CheckpointError, match=r"driver\.pt cannot be read"):
        checkpoints.driver_state(folder)
