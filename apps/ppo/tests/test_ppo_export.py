"""`ostinato-ppo export`: which folder it reads, and what it refuses."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from ostinato.ppo.cli import main
from ostinato.ppo.errors import CheckpointError
from ostinato.ppo.export import _Progress, export, find_role
from ostinato.ppo.install import how_to_install
from ostinato.ppo.run_folder import MARKER


@pytest.fixture
def run(tmp_path):
    """A run folder: 4 and 6 are whole, 6 without a critic, 8 was cut off."""
    for step, roles in ((4, ("actor", "critic")), (6, ("actor",)), (8, ("actor",))):
        for role in roles:
            folder = tmp_path / f"global_step_{step}" / role
            folder.mkdir(parents=True)
            (folder / "role.json").write_text(json.dumps({"format": 1, "strategy": "fsdp", "head": "lm", "model": {}}))
        if step != 8:
            (tmp_path / f"global_step_{step}" / MARKER).touch()
    return tmp_path


def test_export_finds_the_role_in_a_checkpoint_a_run_or_by_itself(run):
    assert find_role(run / "global_step_4", "critic") == run / "global_step_4" / "critic"
    assert find_role(run, "actor") == run / "global_step_6" / "actor"
    assert find_role(run, "critic") == run / "global_step_4" / "critic"
    assert find_role(run / "global_step_4" / "critic", "actor") == run / "global_step_4" / "critic"


@pytest.mark.parametrize("inside", ["global_step_4", "global_step_4/critic"])
def test_export_of_the_folder_it_is_called_in(run, inside, monkeypatch):
    monkeypatch.chdir(run / inside)
    assert find_role(Path("."), "critic") == (run / "global_step_4" / "critic").resolve()


@pytest.mark.parametrize(
    ("where", "role", "text"),
    [
        ("nothing", "actor", r"nothing: expected a checkpoint's folder"),
        ("global_step_6", "critic", r"global_step_6 holds no critic; it holds actor"),
        ("global_step_8", "actor", r"global_step_8 was cut off .* no file COMPLETE"),
        ("global_step_8/actor", "actor", r"global_step_8 was cut off"),
        ("empty", "critic", r"empty: expected a checkpoint .*, or a run folder with a whole checkpoint of a critic"),
    ],
)
def test_export_refuses_what_is_no_whole_checkpoint(run, where, role, text):
    (run / "empty").mkdir()
    with pytest.raises(CheckpointError, match=text):
        find_role(run / where, role)


def test_export_without_the_engine_s_wheel_names_it(run, tmp_path, monkeypatch):
    file = run / "global_step_6" / "actor" / "role.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"strategy": "megatron"}))
    monkeypatch.setitem(sys.modules, "ostinato.workers.megatron", None)
    monkeypatch.delitem(sys.modules, "ostinato.workers.megatron.saved", raising=False)
    monkeypatch.setattr("ostinato.workers.core.factory.prepare_model", lambda *_: None)
    with pytest.raises(CheckpointError, match=re.escape(how_to_install("megatron"))):
        export(run, tmp_path / "out")


def test_export_refuses_other_engines_newer_formats_and_a_target_that_is_there(run, tmp_path):
    file = run / "global_step_6" / "actor" / "role.json"
    entries = json.loads(file.read_text())
    file.write_text(json.dumps(entries | {"strategy": "other"}))
    with pytest.raises(CheckpointError, match=r"strategy 'other'; this command reads fsdp"):
        export(run, tmp_path / "out")
    file.write_text(json.dumps(entries | {"format": 2}))
    with pytest.raises(OSError, match=r"expected format 1, got 2"):
        export(run, tmp_path / "out")
    file.write_text("{")
    with pytest.raises(OSError, match=r"expected the folder of a saved role"):
        export(run / "global_step_6", tmp_path / "out")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "file").touch()
    with pytest.raises(CheckpointError, match=r"out is there already; .* --overwrite"):
        export(run, tmp_path / "out")


@pytest.mark.parametrize("where", [".", "global_step_6", "global_step_6/actor", "global_step_6/actor/model", "link"])
def test_export_never_replaces_the_checkpoint_that_it_reads(run, where):
    """`--overwrite` with the run's own folder deleted every checkpoint in it."""
    (run / "link").symlink_to(run / "global_step_6")
    with pytest.raises(CheckpointError, match=r"holds the checkpoint .*global_step_6/actor, or lies in it"):
        export(run, run / where, overwrite=True)
    assert (run / "global_step_6" / "actor" / "role.json").is_file()


def test_export_refuses_a_place_that_cannot_be_replaced_before_it_reads(run, tmp_path, monkeypatch):
    (tmp_path / "disk").mkdir()
    monkeypatch.setattr(Path, "is_mount", lambda path: path.name == "disk")
    with pytest.raises(CheckpointError, match=r"disk is where a disk is mounted.*give a folder in it"):
        export(run, tmp_path / "disk")


@pytest.mark.parametrize("size", ["0", "-1", "nan", "inf"])
def test_export_refuses_weight_files_of_no_size(run, tmp_path, size, capsys):
    assert main(["export", str(run), "--to", str(tmp_path / "out"), "--shard-gigabytes", size]) == 2
    assert f"expected a size above 0, got {size}" in capsys.readouterr().err


def test_export_command_tells_how_it_is_used_and_what_is_wrong(run, tmp_path, capsys):
    assert main(["export", "--help"]) == 0
    assert "ostinato-ppo export [-h] --to DIR" in capsys.readouterr().out
    assert main(["export", str(run)]) == 2
    assert "--to" in capsys.readouterr().err
    assert main(["export", str(run / "global_step_8"), "--to", str(tmp_path / "out")]) == 1
    error = capsys.readouterr().err
    assert error.startswith("ostinato-ppo export: ")
    assert "cut off" in error
    assert main(["--help"]) == 0
    assert "ostinato-ppo export CHECKPOINT --to DIR" in capsys.readouterr().out


@pytest.mark.parametrize(("size", "text"), [(306_432, "153 of 306 kB"), (538_000_000, "269 of 538 MB")])
def test_export_progress_of_small_and_large_models(size, text, capsys):
    _Progress()(size // 2, size)
    assert capsys.readouterr().err == f"{text} written\n"
