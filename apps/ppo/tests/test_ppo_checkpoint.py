"""Checkpoints appear whole or not at all, and only the run that they belong to takes them."""

from __future__ import annotations

import errno
import json
import logging
import os
import pickle
import subprocess
import sys

import pytest
import torch

from ostinato.controller import CallTimedOut, WorkerDied, WorkerFailed
from ostinato.ppo.checkpoint import Checkpoints
from ostinato.ppo.errors import CheckpointError, RunFolderBusy
from ostinato.ppo.run_folder import LATEST, MARKER, complete_steps, model_fingerprint


@pytest.fixture
def checkpoints(tmp_path):
    opened = Checkpoints(tmp_path / "run")
    yield opened
    opened.close()


def write(folder):
    (folder / "actor").mkdir()
    (folder / "actor" / "weights").write_text("w")


def save(checkpoints, step, write, state):
    """A checkpoint, begun and put in force."""
    checkpoints.begin(step, write, state)
    checkpoints.settle(wait=True)
    return checkpoints.folder / f"global_step_{step}"


def full_disk(folder):
    write(folder)
    raise OSError(errno.ENOSPC, "No space left on device.")


def test_checkpoint_save_leaves_whole_folder_and_latest(checkpoints):
    folder = save(checkpoints, 3, write, {"step": 3})
    assert folder.name == "global_step_3"
    assert (folder / "actor" / "weights").read_text() == "w"
    assert (folder / MARKER).exists()
    assert (checkpoints.folder / "latest_checkpointed_iteration.txt").read_text() == "3"
    assert checkpoints.driver_state(folder) == {"step": 3}
    assert not list(checkpoints.folder.glob("*.partial"))


@pytest.mark.parametrize("step", [4, 10])
def test_checkpoint_full_disk_is_named_and_leaves_the_older_one_in_force(checkpoints, caplog, step):
    """The run goes on: a warning, a count, and the space that half a checkpoint took is free again."""
    save(checkpoints, 4, write, {"step": 4, "try": 1})
    save(checkpoints, step, full_disk, {"step": step})
    assert f"global_step_{step} could not be written; global_step_4 stays in force: " in caplog.text
    assert "No space left on device. The run goes on; the next checkpoint tries anew" in caplog.text
    assert checkpoints.num_failed == 1
    assert [path.name for path in checkpoints.folder.glob("global_step_*")] == ["global_step_4"]
    assert checkpoints.driver_state(checkpoints.to_resume("auto"))["try"] == 1
    with pytest.raises(CheckpointError, match=f"global_step_{step} could not be written.*No space"):
        checkpoints.finish()
    save(checkpoints, 11, write, {"step": 11})
    checkpoints.finish()
    assert complete_steps(checkpoints.folder) == [4, 11]


def test_checkpoint_messages_name_the_folder_that_stays(checkpoints, caplog):
    """Not `.partial`, where it is written: that one is renamed, or gone."""
    caplog.set_level(logging.INFO)

    def full(folder):
        raise OSError(errno.ENOSPC, "No space left on device", str(folder / "actor" / "weights"))

    folder = save(checkpoints, 1, write, {})
    assert f"checkpoint {folder} is whole and in force" in caplog.text
    save(checkpoints, 2, full, {})
    assert f"No space left on device: '{checkpoints.folder}/global_step_2/actor/weights'" in caplog.text
    assert ".partial" not in caplog.text


def test_checkpoint_full_disk_where_the_driver_or_a_worker_writes(checkpoints, monkeypatch):
    """torch's own error for a full disk is no OSError, and a worker's arrives in a WorkerFailed."""

    def on_a_worker(folder):
        raise WorkerFailed("actor", 1, "node", "save_checkpoint") from OSError(errno.ENOSPC, "No space left on device")

    save(checkpoints, 1, on_a_worker, {})
    with monkeypatch.context() as patch:
        patch.setattr(torch, "save", lambda *_: (_ for _ in ()).throw(RuntimeError("PytorchStreamWriter failed")))
        save(checkpoints, 2, write, {})
    with monkeypatch.context() as patch:
        patch.setattr("ostinato.ppo.checkpoint._write_atomically", lambda *_: full_disk(checkpoints.folder / "x"))
        (checkpoints.folder / "x").mkdir()
        save(checkpoints, 3, write, {})
    assert checkpoints.num_failed == 3
    assert complete_steps(checkpoints.folder) == []


@pytest.mark.parametrize(
    "error", [WorkerDied("actor", 1, "node", "save_checkpoint"), CallTimedOut("hung"), ValueError("a bug")]
)
def test_checkpoint_failure_that_is_not_the_disk_s_ends_the_run(checkpoints, error):
    def fail(folder):
        raise error

    with pytest.raises(type(error)):
        save(checkpoints, 1, fail, {})
    assert checkpoints.num_failed == 0


def test_checkpoint_under_way_is_not_in_force_until_it_is_written(checkpoints, caplog):
    """Written in the background: no marker, no resume before all of it is there; the next one waits for it."""
    asked = []

    def written(wait):
        asked.append(wait)
        return wait

    checkpoints.begin(1, write, {"step": 1}, written)
    checkpoints.settle()
    assert asked == [False]
    assert complete_steps(checkpoints.folder, warn=False) == []
    assert not (checkpoints.folder / "global_step_1.partial" / MARKER).exists()
    checkpoints.begin(2, write, {"step": 2}, written)
    assert asked == [False, True]
    assert complete_steps(checkpoints.folder, warn=False) == [1]
    checkpoints.finish()
    assert complete_steps(checkpoints.folder) == [1, 2]
    assert not caplog.records


def test_checkpoint_under_way_that_fails_is_given_up(checkpoints, caplog):
    def written(wait):
        raise OSError(errno.ENOSPC, "No space left on device")

    save(checkpoints, 1, write, {"step": 1})
    checkpoints.begin(2, write, {"step": 2}, written)
    checkpoints.settle()
    assert "global_step_2 could not be written; global_step_1 stays in force: " in caplog.text
    assert [path.name for path in checkpoints.folder.glob("global_step_*")] == ["global_step_1"]
    save(checkpoints, 3, write, {"step": 3})
    checkpoints.finish()


def test_checkpoint_in_force_is_not_given_up_where_the_folder_around_it_fails(checkpoints, caplog):
    """The number for people and scripts cannot be written: a warning, and the checkpoint counts."""
    (checkpoints.folder / f"{LATEST}.tmp").mkdir()
    save(checkpoints, 1, write, {"step": 1})
    checkpoints.finish()
    assert checkpoints.num_failed == 0
    assert complete_steps(checkpoints.folder) == [1]
    assert "global_step_1 is in force, but" in caplog.text


def test_checkpoint_keeps_each_role_s_part_as_long_as_asked(tmp_path):
    def both(folder):
        write(folder)
        (folder / "critic").mkdir()

    kept = Checkpoints(tmp_path, keep={"actor": 3, "critic": 1})
    for step in (1, 2, 3, 4):
        save(kept, step, both, {"step": step})
    assert complete_steps(tmp_path) == [2, 3, 4]
    assert complete_steps(tmp_path, roles=["actor", "critic"]) == [4]
    (tmp_path / "global_step_4" / MARKER).unlink()
    assert kept.to_resume("auto", roles=["actor"]).name == "global_step_3"
    with pytest.raises(CheckpointError, match="holds no critic"):
        kept.driver_state(kept.to_resume("auto", roles=["actor", "critic"]), ["actor", "critic"])
    kept.close()
    longer = Checkpoints(tmp_path / "longer", keep={"actor": 1, "critic": 2})
    for step in (1, 2):
        save(longer, step, write, {"step": step})
    assert complete_steps(longer.folder) == [2], "nothing is kept of a checkpoint without a critic"
    longer.close()


def test_checkpoint_without_its_last_file_is_passed_over(checkpoints, caplog):
    """H-69: step 5 whole, step 10 without its last file."""
    save(checkpoints, 5, write, {"step": 5})
    folder = save(checkpoints, 10, write, {"step": 10})
    (folder / MARKER).unlink()
    with caplog.at_level(logging.WARNING):
        assert checkpoints.to_resume("auto").name == "global_step_5"
    assert "global_step_10" in caplog.text


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    """Folders of runs that were killed while they wrote their second checkpoint, by where they were."""
    code = (
        "import os, sys; from ostinato.ppo.checkpoint import Checkpoints\n"
        "kill = lambda: os.kill(os.getpid(), 9)\n"
        "for when in ('begin', 'settle'):\n"  # one start of Python for both
        "    if (run := os.fork()) == 0:\n"
        "        c = Checkpoints(os.path.join(sys.argv[1], when))\n"
        "        c.begin(1, lambda f: (f / 'a').write_text('a'), {'step': 1}); c.settle()\n"
        "        half = lambda f: ((f / 'a').write_text('half'), when == 'begin' and kill())\n"
        "        c.begin(2, half, {}, lambda wait: kill()); c.settle(); os._exit(1)\n"
        "    assert os.waitstatus_to_exitcode(os.waitpid(run, 0)[1]) == -9, when\n"
    )
    folder = tmp_path_factory.mktemp("killed")
    done = subprocess.run([sys.executable, "-c", code, str(folder)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.parametrize("when", ["begin", "settle"])
def test_checkpoint_kill_during_save_leaves_the_older_one_in_force(killed, caplog, when):
    folder = killed / when
    survivor = Checkpoints(folder)  # the dead run's hold on the folder went with it
    assert survivor.to_resume("auto").name == "global_step_1"
    assert "global_step_2.partial was cut off while it was written and is removed" in caplog.text
    assert not (folder / "global_step_2.partial").exists()
    assert save(survivor, 2, write, {"step": 2}).name == "global_step_2"
    assert complete_steps(folder) == [1, 2]
    survivor.close()


def test_checkpoint_saved_again_replaces_the_old(checkpoints):
    save(checkpoints, 1, write, {"step": 1, "try": 1})
    folder = save(checkpoints, 1, write, {"step": 1, "try": 2})
    assert checkpoints.driver_state(folder)["try"] == 2
    assert [path.name for path in checkpoints.folder.glob("global_step_1*")] == ["global_step_1"]


def test_checkpoint_kill_between_the_renames_of_a_replacement_loses_nothing(tmp_path, monkeypatch):
    first = Checkpoints(tmp_path)
    save(first, 1, write, {"try": 1})

    def dies(self, target):
        os.rename(self, target)
        if target.name.endswith(".replaced"):
            raise KeyboardInterrupt

    monkeypatch.setattr(type(tmp_path), "rename", dies)
    with pytest.raises(KeyboardInterrupt):
        save(first, 1, write, {"try": 2})
    monkeypatch.undo()
    first.close()
    assert complete_steps(tmp_path) == []
    second = Checkpoints(tmp_path)
    assert second.driver_state(second.to_resume("auto")) == {"try": 2}
    save(second, 1, write, {"try": 3})
    assert [path.name for path in tmp_path.glob("global_step_*")] == ["global_step_1"]
    second.close()


def test_checkpoint_keep_drops_the_oldest(tmp_path):
    kept = Checkpoints(tmp_path, keep=2)
    for step in (2, 4, 6, 10):
        save(kept, step, write, {"step": step})
    assert complete_steps(tmp_path) == [6, 10]
    kept.close()


@pytest.mark.parametrize("keep", [{"actor": 1}, {"actor": 2, "critic": 1}], ids=["all of it", "a role's part"])
def test_checkpoint_kill_while_an_old_one_is_dropped_leaves_no_half_one(tmp_path, monkeypatch, caplog, keep):
    """Nor the space that it took: a half one without its name stayed, with a warning at every start."""

    def both(folder):
        write(folder)
        (folder / "critic").mkdir()
        (folder / "critic" / "weights").write_text("w")

    def dies(folder, **options):
        if folder.exists():
            next(folder.rglob("weights")).unlink()
            raise KeyboardInterrupt

    kept = Checkpoints(tmp_path, keep=keep)
    save(kept, 2, both, {"step": 2})
    with monkeypatch.context() as patch:
        patch.setattr("ostinato.ppo.checkpoint.shutil.rmtree", dies)
        with pytest.raises(KeyboardInterrupt):
            save(kept, 4, both, {"step": 4})
    kept.close()
    assert complete_steps(tmp_path, roles=["actor", "critic"]) == [4]
    Checkpoints(tmp_path, keep=keep).close()
    assert not [path for path in tmp_path.rglob("*") if "dropped" in path.name]
    assert complete_steps(tmp_path) == ([4] if keep == {"actor": 1} else [2, 4])
    assert not caplog.records


def test_checkpoint_leftovers_go_where_one_lies_in_another(tmp_path):
    """A role's part could not be removed, and later the whole checkpoint: the next run did not start."""
    (tmp_path / "global_step_2.dropped" / "critic.dropped").mkdir(parents=True)
    Checkpoints(tmp_path).close()
    assert not list(tmp_path.glob("global_step_*"))


def test_checkpoint_steps_sort_as_numbers(checkpoints):
    for step in (9, 10, 100):
        save(checkpoints, step, write, {"step": step})
    assert checkpoints.to_resume("auto").name == "global_step_100"


@pytest.mark.parametrize("mode", ["auto", "disable"])
def test_checkpoint_fresh_folder_resumes_nothing(checkpoints, mode):
    assert checkpoints.to_resume(mode) is None


def test_checkpoint_disable_ignores_what_is_there(checkpoints):
    save(checkpoints, 1, write, {"step": 1})
    assert checkpoints.to_resume("disable") is None


def test_checkpoint_resume_path_takes_only_whole_ones(checkpoints, tmp_path):
    folder = save(checkpoints, 1, write, {"step": 1})
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
    save(checkpoints, 1, write, {"step": 1})
    checkpoints.claim(model(dtype="bfloat16", transformers_version="9"))  # not what gives weights their shapes
    with pytest.raises(CheckpointError, match="checkpoints of another model") as caught:
        checkpoints.claim(model(num_layers=3))
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_checkpoint_without_a_role_that_the_run_has_is_refused(checkpoints):
    folder = save(checkpoints, 1, write, {"step": 1})
    assert checkpoints.driver_state(folder, ["actor"]) == {"step": 1}
    with pytest.raises(CheckpointError, match=r"holds no critic: .*algorithm\.adv_estimator"):
        checkpoints.driver_state(folder, ["actor", "critic"])


def test_checkpoint_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"trainer\.default_local_dir=.*file/run cannot be written to"):
        Checkpoints(tmp_path / "file" / "run")


def test_checkpoint_unreadable_driver_state_is_named(checkpoints):
    folder = save(checkpoints, 1, write, {"step": 1})
    (folder / "driver.pt").write_bytes(b"PK")
    with pytest.raises(CheckpointError, match=r"driver\.pt cannot be read"):
        checkpoints.driver_state(folder)
