"""A run whose steps are all done, started again: it says so, and starts nothing."""

from __future__ import annotations

import re

import pytest

from ostinato.ppo import placement, run
from ostinato.ppo.cli import main
from ostinato.ppo.config import PpoConfig
from ostinato.ppo.run_folder import MARKER
from ostinato.ppo.testing import GSM8K_ROW, write_rows


@pytest.fixture
def finished(command, tmp_path, monkeypatch):
    """A run of two steps that has ended; after it no worker starts."""
    done = {"trainer.save_freq": 1, "trainer.total_training_steps": 2}
    code, _, error = command(**done)
    assert code == 0, error
    monkeypatch.setattr(placement, "open_backend", lambda config: pytest.fail("workers were started"))
    return tmp_path / "run"


def test_finished_run_says_so_before_any_worker_starts(finished, command):
    """H-63: at the budget and beyond it, from a checkpoint that is named too, and without Ray."""
    before = (finished / "metrics.jsonl").read_text()
    named = {"trainer.resume_mode": "resume_path", "trainer.resume_from_path": finished / "global_step_2"}
    for changes, budget in (
        ({"trainer.total_training_steps": 2}, "trainer.total_training_steps=2. "),
        ({"trainer.total_training_steps": 1}, "trainer.total_training_steps=1. "),
        (named | {"trainer.default_local_dir": finished.parent / "other"}, "trainer.total_training_steps=1. "),
        ({"trainer.total_training_steps": 2, "trainer.backend": "ray"}, "trainer.total_training_steps=2. "),
    ):
        code, printed, error = command(**changes)
        assert code == 0, error
        assert f"nothing to do: the checkpoint {finished}/global_step_2 is of step 2, and {budget}" in printed
    code, _, error = command(**{"trainer.total_training_steps": "null", "data.train_max_samples": 8})
    assert code == 1
    assert "other training data (prompts: 800 then, 8 now" in error  # other data is refused, done or not
    assert (finished / "metrics.jsonl").read_text() == before


def test_finished_run_counts_epochs(command, toy, tmp_path, monkeypatch):
    changes = {"trainer.save_freq": 1, "trainer.total_training_steps": "null", "data.train_max_samples": 8}
    assert command(**changes)[0] == 0
    monkeypatch.setattr(placement, "open_backend", lambda config: pytest.fail("workers were started"))
    code, printed, _ = command(**changes)
    assert code == 0
    assert re.search(r"is of step 1, and trainer\.total_epochs=1 × 1 an epoch = 1\. Raise that", printed)
    with pytest.raises(pytest.fail.Exception, match="workers were started"):
        command(**changes, **{"trainer.total_epochs": 2})


def test_finished_is_told_from_the_files_and_never_too_soon(tmp_path):
    """Filtering only lowers the number of steps, so what counts all prompts holds no run for finished that is not."""
    folder = tmp_path / "run"
    (folder / "global_step_2" / "actor").mkdir(parents=True)
    (folder / "global_step_2" / MARKER).write_text("2")
    train = write_rows(tmp_path / "train.parquet", [GSM8K_ROW] * 6)

    def is_finished(estimator="grpo", **changes):
        data = {"train_files": train, "train_batch_size": 2, **changes.pop("data", {})}
        trainer = {"default_local_dir": str(folder), **changes}
        config = {"data": data, "trainer": trainer, "algorithm": {"adv_estimator": estimator}}
        return run.finished(PpoConfig.from_mapping(config))

    assert not is_finished()  # 3 steps
    assert is_finished(data={"train_batch_size": 3})
    assert is_finished(data={"train_max_samples": 5})
    assert is_finished(total_training_steps=2)
    assert not is_finished(total_training_steps=3)
    assert not is_finished(total_training_steps=2, resume_mode="disable")
    assert not is_finished("gae", total_training_steps=2)  # it holds no critic
    assert not is_finished(data={"train_files": str(tmp_path / "gone")})
    named = {"resume_mode": "resume_path", "total_training_steps": 2}
    assert is_finished(**named, resume_from_path=str(folder / "global_step_2"))
    assert not is_finished(**named, resume_from_path=str(tmp_path / "renamed"))
    assert not is_finished(total_training_steps=1, default_local_dir=str(tmp_path / "empty"))


def test_plan_says_what_a_run_goes_on_from(base, capsys, tmp_path):
    folder = tmp_path / "run"
    for expected in ("resume auto\n", "resume auto, from global_step_20\n"):
        assert main([*base, f"trainer.default_local_dir={folder}"]) == 0
        assert expected in capsys.readouterr().out
        for step in (3, 20):
            (folder / f"global_step_{step}").mkdir(parents=True, exist_ok=True)
            (folder / f"global_step_{step}" / MARKER).write_text(str(step))
