"""AdamW in 8 bits: it learns, it moves, it is saved and goes on bit by bit."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from ostinato.workers.core.optim import OptimConfig
from ostinato.workers.core.testing import tiny_causal_lm
from ostinato.workers.core.testing.oracle import assert_same_weights, make_rows, start
from ostinato.workers.fsdp.errors import FsdpConfigError
from ostinato.workers.fsdp.offload import Mover
from ostinato.workers.fsdp.quantized import is_quantized
from ostinato.workers.fsdp.testing import fsdp

pytestmark = pytest.mark.usefixtures("process_group")

EIGHT = OptimConfig(optimizer="AdamW8bit", lr=1e-3, eps=1e-4, lr_warmup_steps=2)


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    """A model with weights of 4096 entries and more: smaller ones keep their moments in full."""
    return tiny_causal_lm(tmp_path_factory.mktemp("wide"), hidden_size=64, num_layers=1)


@pytest.fixture(autouse=True)
def eager():
    """torchao compiles its step; what it computes is the same without."""
    torch.compiler.set_stance("force_eager")
    yield
    torch.compiler.set_stance("default")


def test_adamw8bit_learns_and_goes_on_bit_by_bit_after_moves_and_saves(wide, tmp_path):
    pytest.importorskip("torchao")
    driver = start(fsdp(), wide, optim=EIGHT)
    rows = make_rows(4, seed=1)
    losses = [driver.train(rows)[0] for _ in range(8)]
    assert losses[-1] < losses[0]
    assert sorted(losses, reverse=True) == losses
    moments = [value for state in driver.engine._optimizer.state.values() for value in state.values()]
    assert any(is_quantized(moment) for moment in moments)
    mover = Mover(torch.device("cpu"))
    mover.optimizer_to_host(driver.engine._optimizer)
    mover.optimizer_to_device(driver.engine._optimizer)
    driver.engine.save(tmp_path, background=True).wait()
    expected = [driver.train(rows) for _ in range(2)]
    resumed = start(fsdp(), wide, optim=EIGHT)
    resumed.engine.load(tmp_path)
    assert [resumed.train(rows) for _ in range(2)] == expected
    assert_same_weights(resumed.state(), driver.state(), rtol=0)


def test_adamw8bit_and_plain_adamw_read_each_other_s_checkpoints(wide, tmp_path):
    pytest.importorskip("torchao")
    plain, rows = OptimConfig(lr=1e-3, eps=1e-4, lr_warmup_steps=2), make_rows(4, seed=1)
    for name, first, second in (("a", EIGHT, plain), ("b", plain, EIGHT)):
        driver, other = start(fsdp(), wide, optim=first), start(fsdp(), wide, optim=second)
        driver.train(rows)
        driver.engine.save(tmp_path / name)
        other.engine.load(tmp_path / name)
        expected, got = driver.train(rows), other.train(rows)
        assert got[1].lr == expected[1].lr
        assert got[0] == expected[0]
        assert driver.train(rows)[0] == pytest.approx(other.train(rows)[0], rel=1e-3)


def test_adamw8bit_without_torchao_says_how_to_install_it(wide, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "torchao" else find(name, *rest)
    )
    with pytest.raises(FsdpConfigError, match=r"pip install 'ostinato-workers-fsdp\[adamw8bit\]'"):
        start(fsdp(), wide, optim=EIGHT)
