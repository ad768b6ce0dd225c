"""H-56: what is moved comes back the same, into host memory that is allocated once."""

from __future__ import annotations

import pytest
import torch

from ostinato.workers.core.testing.oracle import assert_same_weights, make_rows, start
from ostinato.workers.fsdp.offload import HostCopies, Mover
from ostinato.workers.fsdp.testing import fsdp

pytestmark = pytest.mark.usefixtures("process_group")

HOST = torch.device("cpu")


def addresses(engine):
    module, optimizer = engine._module, engine._optimizer
    moments = [state["exp_avg"] for state in optimizer.state.values()]
    return [tensor.to_local().data_ptr() for tensor in (*module.parameters(), *moments)]


@pytest.mark.parametrize("model", ["lm", "tied"])
def test_offload_there_and_back_changes_nothing_and_reuses_host_memory(workspace, model):
    plain, moving = start(fsdp(), workspace / model), start(fsdp(), workspace / model)
    engine, mover = moving.engine, Mover(HOST)
    before = addresses(engine)
    hosted = []
    for round_ in range(3):
        mover.parameters_to_host(engine._module)
        mover.optimizer_to_host(engine._optimizer)
        hosted.append(addresses(engine))
        assert_same_weights(moving.state(), plain.state(), rtol=0)
        mover.parameters_to_device(engine._module)
        mover.optimizer_to_device(engine._optimizer)
        mover.wait()
        assert moving.train(make_rows(2, seed=round_)) == plain.train(make_rows(2, seed=round_))
        assert_same_weights(moving.state(), plain.state(), rtol=0)
    assert not set(before) & set(hosted[0]), "the first move copied nothing"
    assert set(hosted[0]) <= set(hosted[1])
    assert hosted[1] == hosted[2]


def test_offload_before_the_first_step_keeps_an_empty_state_empty(workspace):
    """H-56: offload, load, step."""
    driver = start(fsdp(), workspace / "lm")
    mover, optimizer = Mover(HOST), driver.engine._optimizer
    mover.optimizer_to_host(optimizer)
    mover.optimizer_to_device(optimizer)
    assert not optimizer.state
    driver.train(make_rows(2, seed=1))
    steps = [state["step"] for state in optimizer.state.values()]
    mover.optimizer_to_host(optimizer)
    assert all(state["step"] is step for state, step in zip(optimizer.state.values(), steps, strict=True))


def test_host_copies_are_independent_and_made_anew_for_another_shape():
    copies = HostCopies(pinned=False)
    tensor = torch.arange(4.0)
    first = copies.take("a", tensor)
    tensor.zero_()
    assert first.tolist() == [0, 1, 2, 3]
    assert copies.take("a", torch.ones(4)) is first
    assert first.tolist() == [1, 1, 1, 1]
    assert copies.take("a", torch.ones(2)).shape == (2,)
    assert copies.take("a", torch.ones(2, dtype=torch.float64)).dtype == torch.float64
