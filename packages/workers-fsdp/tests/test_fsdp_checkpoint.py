from __future__ import annotations

import errno
import resource
import signal
import threading

import pytest
from torch.distributed.checkpoint.filesystem import FileSystemWriter

from ostinato.workers.core.config import ModelConfig
from ostinato.workers.core.testing.oracle import Driver, assert_same_weights, make_rows, start
from ostinato.workers.core.testing.spawn import SpawnError, spawn
from ostinato.workers.fsdp.errors import CheckpointError
from ostinato.workers.fsdp.saved import SavedWeights
from ostinato.workers.fsdp.testing import fsdp
from ostinato.workers.fsdp.testing.runs import two_ranks_lose_one

pytestmark = pytest.mark.usefixtures("process_group")


def test_load_of_a_missing_or_cut_off_checkpoint_is_an_error(workspace, tmp_path):
    driver = start(fsdp(), workspace / "lm")
    with pytest.raises(CheckpointError, match="cut off"):
        driver.engine.load(tmp_path / "nothing")
    driver.engine.save(tmp_path / "whole")
    (tmp_path / "whole" / ".metadata").unlink()
    with pytest.raises(CheckpointError, match="cut off"):
        driver.engine.load(tmp_path / "whole")


def test_disk_that_is_full_and_files_that_are_broken_are_errors_of_this_wheel(workspace, tmp_path, monkeypatch):
    """torch wraps what a rank raises into something that is no `Exception`."""
    driver = start(fsdp(), workspace / "lm")

    def full(self, *args, **kwargs):
        raise OSError(errno.ENOSPC, "No space left on device")

    driver.engine.save(tmp_path / "full")
    with monkeypatch.context() as patch:
        patch.setattr(FileSystemWriter, "write_data", full)
        with pytest.raises(
            CheckpointError, match=r"full cannot be written: rank 0: OSError: .*No space left.*before this one stays"
        ):
            driver.engine.save(tmp_path / "full")
    with pytest.raises(CheckpointError, match="cut off"):  # what was written over is not taken for whole
        driver.engine.load(tmp_path / "full")
    driver.engine.save(tmp_path / "broken")
    for file in (tmp_path / "broken").glob("*.distcp"):
        file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(CheckpointError, match="broken cannot be read: rank 0: "):
        driver.engine.load(tmp_path / "broken")


def test_load_of_a_mark_that_is_no_index_is_an_error_of_this_wheel(workspace, tmp_path):
    """It is a pickle: what is cut off, empty or something else raises all kinds of errors."""
    driver = start(fsdp(), workspace / "lm")
    driver.engine.save(tmp_path)
    whole = (tmp_path / ".metadata").read_bytes()
    for broken in (b"", whole[:100], whole[:-1], b"cnowhere\nnothing\n.", b"(dp0\n.", b"no pickle at all"):
        (tmp_path / ".metadata").write_bytes(broken)
        with pytest.raises(CheckpointError, match=rf"{tmp_path} cannot be read: \.metadata: .*Resume from an earlier"):
            driver.engine.load(tmp_path)
        with pytest.raises(CheckpointError, match=r"cannot be read: \.metadata: "):
            SavedWeights(tmp_path, ModelConfig(path=str(workspace / "lm")), "lm")


def test_ctrl_c_during_a_save_stays_what_it_is(workspace, tmp_path, monkeypatch):
    driver = start(fsdp(), workspace / "lm")

    def interrupted(self, *args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(FileSystemWriter, "write_data", interrupted)
    with pytest.raises(KeyboardInterrupt):
        driver.engine.save(tmp_path)


def test_load_of_another_model_names_the_first_difference(workspace, tmp_path):
    start(fsdp(), workspace / "lm").engine.save(tmp_path)
    with pytest.raises(CheckpointError, match="another model"):
        start(fsdp(), workspace / "tied").engine.load(tmp_path)


def test_load_with_an_adapter_more_or_less_names_the_key(workspace, tmp_path):
    plain, adapted = start(fsdp(), workspace / "lm"), start(fsdp(), workspace / "lm", lora_rank=4)
    plain.engine.save(tmp_path / "plain")
    adapted.engine.save(tmp_path / "adapted")
    with pytest.raises(CheckpointError, match=r"it trains an adapter and the run does not; set model\.lora_rank"):
        plain.engine.load(tmp_path / "adapted")
    with pytest.raises(CheckpointError, match=r"the run trains an adapter and it does not; set model\.lora_rank"):
        adapted.engine.load(tmp_path / "plain")
    for other in ({"lora_rank": 8}, {"lora_rank": 4, "target_modules": ["q_proj"]}):
        with pytest.raises(CheckpointError, match=r"Only its adapters are other ones; set model\.lora_rank, "):
            start(fsdp(), workspace / "lm", **other).engine.load(tmp_path / "adapted")


def test_load_into_offloaded_engine_equals_load_on_device(workspace, tmp_path):
    first = start(fsdp(), workspace / "lm")
    first.train(make_rows(2, seed=1))
    first.engine.save(tmp_path)
    second = start(fsdp(), workspace / "lm")
    second.engine.offload()
    second.engine.load(tmp_path)
    second.engine.onload()
    assert second.train(make_rows(2, seed=2)) == first.train(make_rows(2, seed=2))


def test_frozen_model_reads_a_trained_ones_checkpoint(workspace, tmp_path):
    trained = start(fsdp(), workspace / "lm")
    trained.train(make_rows(2, seed=1))
    trained.engine.save(tmp_path)
    frozen = fsdp()(head="lm", model=ModelConfig(path=str(workspace / "lm")), trainable=False)
    frozen.build()
    frozen.load(tmp_path)
    assert_same_weights(Driver(frozen, "lm").state(), trained.state(), rtol=0)


def test_skipped_steps_are_counted_and_kept(workspace, tmp_path):
    driver = start(fsdp(), workspace / "lm")
    packed = driver.packed(make_rows(2, seed=1), 2)
    driver.engine.forward_backward(packed, lambda outputs, _: (outputs.log_probs.sum() * float("inf"), None))
    assert driver.engine.optimizer_step().skipped
    assert driver.engine.skipped_steps == 1
    driver.engine.save(tmp_path)
    other = start(fsdp(), workspace / "lm")
    other.engine.load(tmp_path)
    assert other.engine.skipped_steps == 1


def test_save_in_the_background_is_of_the_moment_at_which_it_was_asked_for(workspace, tmp_path, monkeypatch):
    """Training goes on, and changes nothing of what is written; a second save waits for the first."""
    driver = start(fsdp(), workspace / "lm")
    driver.train(make_rows(2, seed=1))
    gate, write = threading.Event(), FileSystemWriter.write_data

    def slow(self, *args, **kwargs):
        assert gate.wait(30)
        return write(self, *args, **kwargs)

    monkeypatch.setattr(FileSystemWriter, "write_data", slow)
    first = driver.engine.save(tmp_path / "first", background=True)
    expected = [driver.train(make_rows(2, seed=seed)) for seed in (2, 3)]
    assert not first.done()
    assert not (tmp_path / "first" / ".metadata").exists()
    gate.set()
    second = driver.engine.save(tmp_path / "second", background=True)
    assert first.done()
    second.wait()
    resumed = start(fsdp(), workspace / "lm")
    resumed.engine.load(tmp_path / "first")
    assert [resumed.train(make_rows(2, seed=seed)) for seed in (2, 3)] == expected
    resumed.engine.load(tmp_path / "second")
    assert_same_weights(resumed.state(), driver.state(), rtol=0)


def test_save_in_the_background_tells_its_failure_where_it_is_waited_for(workspace, tmp_path, monkeypatch):
    driver = start(fsdp(), workspace / "lm")

    def full(self, *args, **kwargs):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(FileSystemWriter, "write_data", full)
        failed = driver.engine.save(tmp_path / "full", background=True)
        with pytest.raises(CheckpointError, match=r"full cannot be written: rank 0: OSError: .*No space left"):
            failed.wait()
    driver.engine.save(tmp_path / "whole", background=True).wait()
    driver.engine.load(tmp_path / "whole")


def test_save_on_a_disk_that_takes_only_a_part_names_the_disk(workspace, tmp_path):
    """torch hides the system's error behind a position in the file; here a limit of size stands for the full disk."""
    driver = start(fsdp(), workspace / "lm")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        with pytest.raises(CheckpointError, match=r"full cannot be written: rank 0: .*the disk is full"):
            driver.engine.save(tmp_path / "full")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_save_in_the_background_that_loses_a_rank_says_so_and_leaves_the_earlier_one(workspace, tmp_path):
    (tmp_path / "lm").symlink_to(workspace / "lm")
    with pytest.raises(SpawnError, match=rf"rank 1 \(exit status {-signal.SIGKILL}\)"):
        spawn(two_ranks_lose_one, 2, tmp_path)
    seen = (tmp_path / "seen.txt").read_text()
    assert seen.startswith(f"checkpoint {tmp_path / 'torn'} cannot be written: rank 0: RuntimeError: ")
    assert "the checkpoint before this one stays in force" in seen
    assert "start the run again" in seen
    driver = start(fsdp(), workspace / "lm")
    driver.engine.load(tmp_path / "whole")
    with pytest.raises(CheckpointError, match="cut off"):
        driver.engine.load(tmp_path / "torn")
