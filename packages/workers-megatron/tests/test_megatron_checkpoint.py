from __future__ import annotations

import errno
import gc
import pickle
import resource
import shutil
import threading
from unittest.mock import Mock

import pytest
import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import FileSystemWriter

from ostinato.workers.core.config import ModelConfig
from ostinato.workers.core.optim import OptimConfig
from ostinato.workers.core.testing.oracle import Driver, assert_same_weights, make_rows, start
from ostinato.workers.megatron import parallel, writing
from ostinato.workers.megatron.errors import CheckpointError
from ostinato.workers.megatron.saved import SavedWeights
from ostinato.workers.megatron.testing.runs import PLAIN, megatron

pytestmark = pytest.mark.usefixtures("megatron_on_cpu")


def test_megatron_checkpoint_that_is_missing_cut_off_or_anothers_is_refused(megatron_workspace, tmp_path):
    driver = start(megatron(), megatron_workspace / "lm")
    with pytest.raises(CheckpointError, match="cut off"):
        driver.engine.load(tmp_path / "nothing")
    driver.engine.save(tmp_path / "whole")
    with pytest.raises(CheckpointError, match="another model"):
        start(megatron(), megatron_workspace / "tied").engine.load(tmp_path / "whole")
    model, tied = (ModelConfig(path=str(megatron_workspace / name)) for name in ("lm", "tied"))
    with pytest.raises(CheckpointError, match=r"linear_qkv.bias\. It belongs to another model"):
        SavedWeights(tmp_path / "whole", tied, "lm")
    deeper = ModelConfig(path=model.path, override_config={"num_hidden_layers": 3})
    with pytest.raises(CheckpointError, match=r"has shape \(2, .*another model"):
        SavedWeights(tmp_path / "whole", deeper, "lm")
    saved = SavedWeights(tmp_path / "whole", model, "lm")
    for file in (tmp_path / "whole").glob("*.distcp"):
        file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(CheckpointError, match="whole cannot be read: ") as caught:
        driver.engine.load(tmp_path / "whole")
    with pytest.raises(CheckpointError, match="whole cannot be read: "):
        list(saved.weights())
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)
    (tmp_path / "whole" / "metadata.json").unlink()
    for read in (driver.engine.load, lambda path: SavedWeights(path, model, "lm")):
        with pytest.raises(CheckpointError, match="cut off"):
            read(tmp_path / "whole")


def test_megatron_checkpoint_with_a_broken_mark_is_refused(megatron_workspace, tmp_path):
    """Of `metadata.json` the reader without Megatron-Core asks only that it is there."""
    driver = start(megatron(), megatron_workspace / "lm")
    driver.engine.save(tmp_path / "whole")
    model = ModelConfig(path=str(megatron_workspace / "lm"))
    pickles = (None, b"", b"no pickle", b"cnowhere\nThing\n.", pickle.dumps([]))
    for name, contents in (("metadata.json", (b"", b"[]", b"\xff")), (".metadata", pickles)):
        for content in contents:
            shutil.copytree(tmp_path / "whole", tmp_path / "broken", dirs_exist_ok=True)
            if content is None:
                (tmp_path / "broken" / name).unlink()
            else:
                (tmp_path / "broken" / name).write_bytes(content)
            with pytest.raises(CheckpointError, match=r"broken cannot be read: .*Resume from an earlier one\."):
                driver.engine.load(tmp_path / "broken")
            if name == ".metadata":
                with pytest.raises(CheckpointError, match=r"broken cannot be read: .*Resume from an earlier one\."):
                    SavedWeights(tmp_path / "broken", model, "lm")


def test_megatron_checkpoint_keeps_skipped_steps_and_the_runs_own_settings(megatron_workspace, tmp_path):
    driver = start(megatron(), megatron_workspace / "lm")
    driver.train(make_rows(2, seed=1))
    driver.engine.forward_backward(
        driver.packed(make_rows(2), 2), lambda outputs, _: (outputs.log_probs.sum() * float("inf"), None)
    )
    assert driver.engine.optimizer_step().skipped
    driver.engine.save(tmp_path / "one")
    other = start(
        megatron(), megatron_workspace / "lm", optim=OptimConfig(lr=1e-2, weight_decay=0.5, lr_warmup_steps=4)
    )
    other.engine.offload()
    other.engine.load(tmp_path / "one")
    other.engine.onload()
    assert other.engine.skipped_steps == 1
    _, stats = other.train(make_rows(2, seed=1))
    assert stats.lr == pytest.approx(1e-2 * 3 / 4)
    assert {group["weight_decay"] for group in other.engine._optimizer.param_groups} == {0.5}
    with pytest.raises(CheckpointError, match="use_distributed_optimizer=True"):
        start(megatron(**PLAIN), megatron_workspace / "lm").engine.load(tmp_path / "one")


def test_megatron_folder_that_cannot_be_made_is_the_checkpoints_failure(megatron_workspace, tmp_path):
    """Rank 0 makes it, and the others wait for what it says."""
    driver = start(megatron(), megatron_workspace / "lm")
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(CheckpointError, match="file/1 cannot be written: rank 0: NotADirectoryError"):
        driver.engine.save(tmp_path / "file" / "1")


def test_megatron_save_after_a_rank_has_died_is_the_checkpoints_failure(megatron_workspace, tmp_path, monkeypatch):
    """The ranks that are left meet it in the first collective, before anything is written."""
    driver = start(megatron(), megatron_workspace / "lm")
    driver.engine.save(tmp_path)
    lost = RuntimeError("Connection closed by peer")
    for owner, name in ((dist, "broadcast_object_list"), (type(driver.engine._built.modules[0]), "sharded_state_dict")):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, Mock(side_effect=lost))
            with pytest.raises(CheckpointError, match=r"cannot be written: rank 0: RuntimeError: Connection closed"):
                driver.engine.save(tmp_path)


def test_megatron_frozen_model_reads_a_trained_ones_checkpoint(megatron_workspace, tmp_path):
    trained = start(megatron(), megatron_workspace / "lm")
    trained.train(make_rows(2, seed=1))
    trained.engine.save(tmp_path)
    frozen = megatron()(head="lm", model=ModelConfig(path=str(megatron_workspace / "lm")), trainable=False)
    frozen.build()
    frozen.load(tmp_path)
    assert_same_weights(Driver(frozen, "lm").state(), trained.state(), rtol=0)


def test_megatron_saved_weights_of_a_critic_and_of_bf16_are_the_engines(megatron_workspace, tmp_path):
    """In a process that has no Megatron layout; the types are those of the engine's own weights."""
    for name, head, config in (("value", "value", {}), ("tied", "lm", {"dtype": "bf16"})):
        driver = start(megatron(**config), megatron_workspace / name, head=head)
        driver.train(make_rows(2, seed=1))
        driver.engine.save(tmp_path / name)
        expected, specs = driver.state(), driver.engine.weight_source().specs()
        parallel.shutdown()
        saved = SavedWeights(tmp_path / name, ModelConfig(path=str(megatron_workspace / name)), head)
        assert list(saved.specs().items()) == list(specs.items())
        assert_same_weights(dict(saved.weights()), expected, rtol=0)


@pytest.mark.parametrize("config", [{}, PLAIN, {"dtype": "bf16"}], ids=["distributed", "plain", "bf16"])
def test_megatron_save_in_the_background_is_of_the_moment_at_which_it_was_asked_for(
    config, megatron_workspace, tmp_path, monkeypatch
):
    """Training goes on, and changes nothing of what is written; a second save waits for the first.

    The engine and a process without Megatron-Core read what is there as if it had been written at once.
    """
    driver = start(megatron(**config), megatron_workspace / "tied")
    driver.train(make_rows(2, seed=1))
    gate, write = threading.Event(), FileSystemWriter.write_data

    def slow(self, *args, **kwargs):
        assert gate.wait(30)
        return write(self, *args, **kwargs)

    monkeypatch.setattr(FileSystemWriter, "write_data", slow)
    weights = driver.state()
    driver.engine.offload()
    first = driver.engine.save(tmp_path / "first", background=True)
    driver.engine.onload()
    expected = [driver.train(make_rows(2, seed=seed)) for seed in (2, 3)]
    assert not first.done()
    assert not (tmp_path / "first" / "metadata.json").exists()
    gate.set()
    second = driver.engine.save(tmp_path / "second", background=True)
    assert first.done()
    first.wait()
    second.wait()
    saved = SavedWeights(tmp_path / "first", ModelConfig(path=str(megatron_workspace / "tied")), "lm")
    assert_same_weights(dict(saved.weights()), weights, rtol=0)
    resumed = start(megatron(**config), megatron_workspace / "tied")
    resumed.engine.load(tmp_path / "first")
    assert [resumed.train(make_rows(2, seed=seed)) for seed in (2, 3)] == expected
    resumed.engine.load(tmp_path / "second")
    assert_same_weights(resumed.state(), driver.state(), rtol=0)


@pytest.mark.parametrize("in_background", [True, False], ids=["background", "foreground"])
def test_megatron_save_that_fails_names_rank_and_reason(in_background, megatron_workspace, tmp_path, monkeypatch):
    """In the background it is told where the checkpoint is waited for."""
    driver = start(megatron(), megatron_workspace / "lm")

    def save() -> None:
        pending = driver.engine.save(tmp_path / "full", background=in_background)
        assert (pending is not None) is in_background
        if pending is not None:
            try:
                pending.wait()
            finally:
                assert pending.done()

    save()
    full = OSError(errno.ENOSPC, "No space left on device")
    for owner, name, error, text in (
        (FileSystemWriter, "write_data", full, r"OSError: .*No space left"),
        (writing, "_mark", full, r"OSError: .*No space left"),
        (writing, "_mark", TypeError("no JSON"), "TypeError: no JSON"),
        (writing, "_on_host", RuntimeError("can't allocate memory"), "RuntimeError: can't allocate memory"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, Mock(side_effect=error))
            with pytest.raises(CheckpointError, match=f"full cannot be written: rank 0: {text}"):
                save()
        with pytest.raises(CheckpointError, match="cut off"):  # what was written over is not taken for whole
            driver.engine.load(tmp_path / "full")
    save()
    driver.engine.load(tmp_path / "full")


def test_megatron_save_on_a_disk_that_takes_only_a_part_names_the_disk(megatron_workspace, tmp_path):
    """A limit of size stands for the full disk; the next save works, and nothing that was left ends the process."""
    driver = start(megatron(), megatron_workspace / "lm")
    driver.engine.save(tmp_path / "full")  # a group is made, and its store is a file too
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    for limit in (4096, 8192, 40960):
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
        try:
            with pytest.raises(CheckpointError, match=r"rank 0: .*(the disk is full|OSError: .*File too large)"):
                driver.engine.save(tmp_path / "full")
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        gc.collect()
    driver.engine.save(tmp_path / "full")
    driver.engine.load(tmp_path / "full")
