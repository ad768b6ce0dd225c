"""What every training engine must do: plain callables that compare it with one plain process.

Each check takes `(make_engine, workspace)` and raises `AssertionError`. It is collective: call it on every rank of an
initialised default process group, at any number of ranks. `make_engine(head=..., model=..., optim=..., trainable=...)`
returns an engine that is not built yet, for instance `functools.partial(FsdpEngine, engine=FsdpConfig())`; engines of
this suite run in float32. `workspace` is a folder that `oracle.prepare` has filled and that all ranks see.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from ostinato.protocol import DataProto
from ostinato.workers.core.config import ModelConfig
from ostinato.workers.core.optim import OptimConfig, lr_factor
from ostinato.workers.core.testing.oracle import (
    OPTIM,
    STILL,
    Driver,
    MakeEngine,
    Oracle,
    assert_near,
    assert_same_weights,
    batch_of,
    make_rows,
    start,
    two_rows,
    without_response,
)

Check = Callable[[MakeEngine, Path], None]


def check_log_probs(make_engine: MakeEngine, workspace: Path) -> None:
    """Log-probabilities, entropies and Σπ² of packed rows are those of each row alone, at a temperature."""
    for name in ("lm", "tied"):
        driver = start(make_engine, workspace / name)
        oracle = Oracle(workspace / name, "lm", OPTIM, driver.engine.device)
        rows = make_rows(7, seed=1)
        for size in (1, 3, 7):
            collected = driver.outputs(rows, size)
            if collected is None:
                continue
            log_probs, entropy = oracle.all_outputs(driver.mine(rows))
            torch.testing.assert_close(torch.cat([c["log_probs"] for c in collected]), log_probs, rtol=1e-5, atol=5e-6)
            torch.testing.assert_close(torch.cat([c["entropy"] for c in collected]), entropy, rtol=1e-5, atol=5e-6)
            squares = torch.cat([c["sum_pi_squared"] for c in collected])
            expected = oracle.sum_pi_squared(driver.mine(rows))
            torch.testing.assert_close(squares, expected, rtol=1e-5, atol=5e-6)


def check_boundaries(make_engine: MakeEngine, workspace: Path) -> None:
    """H-57: no label and no attention crosses from one packed row into the next."""
    driver = start(make_engine, workspace / "lm")
    dp_size = driver.engine.coordinates.dp_size
    # Two rows on every rank: [1 2 3] and [4 5], and the same behind another first row.
    rows = DataProto.concat([two_rows([1, 2, 3], [4, 5])] * dp_size)
    other = DataProto.concat([two_rows([9, 8, 7], [4, 5])] * dp_size)
    packed = driver.packed(driver.mine(rows), 2)[0]
    assert packed.labels.tolist() == [2, 3, 5], f"labels: expected [2, 3, 5], got {packed.labels.tolist()}"
    assert packed.predict.tolist() == [0, 1, 3], f"predict: expected [0, 1, 3], got {packed.predict.tolist()}"
    first, second = driver.outputs(rows, 2), driver.outputs(other, 2)
    if first is not None and second is not None:
        torch.testing.assert_close(first[0]["log_probs"][1], second[0]["log_probs"][1], rtol=0, atol=1e-6)
        assert (first[0]["log_probs"][0, 0] - second[0]["log_probs"][0, 0]).abs() > 1e-4


def check_values(make_engine: MakeEngine, workspace: Path) -> None:
    """H-29: a value belongs to the state before its token; the mask is the response mask, not shifted."""
    driver = start(make_engine, workspace / "value", head="value")
    oracle = Oracle(workspace / "value", "value", OPTIM, driver.engine.device)
    rows = make_rows(5, seed=2)
    for size in (1, 5):
        collected = driver.outputs(rows, size)
        if collected is not None:
            values, _ = oracle.all_outputs(driver.mine(rows))
            torch.testing.assert_close(torch.cat([c["values"] for c in collected]), values, rtol=1e-5, atol=5e-6)


def check_parity(make_engine: MakeEngine, workspace: Path) -> None:
    """Loss, gradient norm, learning rate and weights of three steps equal one plain process (H-54, H-58)."""
    optim = OptimConfig(lr=2e-3, eps=1e-4, weight_decay=0.1, grad_clip=0.05, lr_warmup_steps=2)
    for name, head in (("lm", "lm"), ("tied", "lm"), ("value", "value")):
        driver = start(make_engine, workspace / name, head=head, optim=optim)
        oracle = Oracle(workspace / name, head, optim, driver.engine.device)
        for step in range(3):
            rows = make_rows(8, seed=10 + step)
            loss, stats = driver.train(rows, size=1 + step)
            expected_loss = oracle.loss(rows)
            expected = oracle.step()
            assert_near(f"{name} loss of step {step}", loss, expected_loss)
            assert_near(f"{name} gradient norm of step {step}", stats.grad_norm, expected.grad_norm)
            assert_near(f"{name} learning rate of step {step}", stats.lr, expected.lr)
            assert expected.grad_norm > optim.grad_clip, "the suite's gradients must be clipped to test clipping"
            assert not stats.skipped
        assert_same_weights(driver.state(), oracle.state())


def check_padded(make_engine: MakeEngine, workspace: Path) -> None:
    """`use_remove_padding=False` gives the same numbers as packing, for both heads."""
    for name, head in (("lm", "lm"), ("value", "value")):
        packed = start(make_engine, workspace / name, head=head, optim=STILL)
        padded = start(make_engine, workspace / name, head=head, optim=STILL, use_remove_padding=False)
        rows = make_rows(5, seed=3)
        first, second = packed.train(rows, 3), padded.train(rows, 3)
        assert_near("loss", second[0], first[0])
        assert_near("gradient norm", second[1].grad_norm, first[1].grad_norm)


def check_logits(make_engine: MakeEngine, workspace: Path) -> None:
    """`use_fused_kernels=False` gives the same numbers as the default, tied or not."""
    for name in ("lm", "tied"):
        fused = start(make_engine, workspace / name, optim=STILL)
        plain = start(make_engine, workspace / name, optim=STILL, use_fused_kernels=False)
        rows = make_rows(5, seed=3)
        first, second = fused.train(rows, 3), plain.train(rows, 3)
        assert_near("loss", second[0], first[0])
        assert_near("gradient norm", second[1].grad_norm, first[1].grad_norm)
        got, expected = fused.outputs(rows, 3), plain.outputs(rows, 3)
        for ours, theirs in zip(got or [], expected or [], strict=True):
            for key, value in ours.items():
                torch.testing.assert_close(value, theirs[key], rtol=1e-5, atol=5e-6)


def check_split_invariance(make_engine: MakeEngine, workspace: Path) -> None:
    """H-58: loss and gradient do not depend on how rows are split over micro-batches; gradients are plain sums."""
    driver = start(make_engine, workspace / "lm", optim=STILL)
    oracle = Oracle(workspace / "lm", "lm", STILL, driver.engine.device)
    rows = make_rows(8, seed=4)
    expected_loss, expected = oracle.loss(rows), oracle.step()
    for size in (1, 2, 3, 8):
        loss, stats = driver.train(rows, size)
        assert_near(f"loss in micro-batches of {size}", loss, expected_loss)
        assert_near(f"gradient norm in micro-batches of {size}", stats.grad_norm, expected.grad_norm)
    driver.accumulate(rows, 2)
    driver.accumulate(rows, 3)
    twice = driver.engine.optimizer_step()
    assert_near("gradient norm of two calls", twice.grad_norm, 2 * expected.grad_norm)


def check_empty_micro_batches(make_engine: MakeEngine, workspace: Path) -> None:
    """Micro-batches without rows, on some ranks or on all, add exactly nothing and hang nobody."""
    driver = start(make_engine, workspace / "lm", optim=STILL)
    oracle = Oracle(workspace / "lm", "lm", STILL, driver.engine.device)
    for num_rows in (5, 1):
        rows = make_rows(num_rows, seed=5)
        expected_loss, expected = oracle.loss(rows), oracle.step()
        for extra in (0, 2):
            loss = driver.accumulate(rows, 2, extra=extra)
            stats = driver.engine.optimizer_step()
            assert_near(f"loss with {extra} empty micro-batches", loss, expected_loss)
            assert_near(f"gradient norm with {extra} empty micro-batches", stats.grad_norm, expected.grad_norm)
    before = driver.state()
    loss = driver.accumulate(make_rows(0), 2, extra=2)
    stats = driver.engine.optimizer_step()
    assert (loss, stats.grad_norm, stats.skipped) == (0.0, 0.0, False), f"no rows at all: {loss}, {stats}"
    assert_same_weights(driver.state(), before, rtol=0)
    assert driver.outputs(make_rows(1), 1) is not None or not driver.engine.coordinates.answers


def check_rank_without_tokens(make_engine: MakeEngine, workspace: Path) -> None:
    """A rank whose rows hold no policy token contributes exactly zero."""
    for name, head in (("lm", "lm"), ("value", "value")):
        driver = start(make_engine, workspace / name, head=head, optim=STILL)
        oracle = Oracle(workspace / name, head, STILL, driver.engine.device)
        rows = make_rows(4, seed=6)
        # The first half of the rows lies on the first rank of two, or in the first micro-batch of one.
        rows = DataProto.concat([without_response(rows[:2]), rows[2:]])
        expected_loss, expected = oracle.loss(rows), oracle.step()
        loss, stats = driver.train(rows, 2)
        assert_near("loss", loss, expected_loss)
        assert_near("gradient norm", stats.grad_norm, expected.grad_norm)
        loss, stats = driver.train(without_response(rows), 2)
        assert (loss, stats.grad_norm) == (0.0, 0.0), f"no token anywhere: loss {loss}, norm {stats.grad_norm}"


def check_non_finite_gradient(make_engine: MakeEngine, workspace: Path) -> None:
    """A gradient that is not finite on one rank skips the step on all; the next step is as if nothing had been."""
    driver = start(make_engine, workspace / "lm")
    before = driver.state()
    rows = make_rows(4, seed=7)
    for bad in (math.inf, math.nan):
        broken = rows.drop(["advantages"])
        advantages = batch_of(rows)["advantages"].clone()
        advantages[0][batch_of(rows)["response_mask"][0].bool()] = bad
        _, stats = driver.train(broken.union(DataProto.from_dict(tensors={"advantages": advantages})))
        assert stats.skipped, f"advantage {bad}: expected a skipped step, got {stats}"
        assert not math.isfinite(stats.grad_norm), f"advantage {bad}: expected a norm that is not finite, got {stats}"
        assert_same_weights(driver.state(), before, rtol=0)
    oracle = Oracle(workspace / "lm", "lm", OPTIM, driver.engine.device)
    loss, stats = driver.train(rows)
    assert_near("loss after a skipped step", loss, oracle.loss(rows))
    assert_near("gradient norm after a skipped step", stats.grad_norm, oracle.step().grad_norm)
    assert_same_weights(driver.state(), oracle.state())


def check_weight_source(make_engine: MakeEngine, workspace: Path) -> None:
    """Names and shapes are the folder's; a plain model that takes them gives the same logits."""
    for name in ("lm", "tied"):
        driver = start(make_engine, workspace / name)
        driver.train(make_rows(4, seed=8))
        # A forward without a backward leaves some engines with gathered weights.
        driver.outputs(make_rows(4, seed=8), 2)
        source = driver.engine.weight_source()
        specs, folder = source.specs(), _folder_shapes(workspace / name)
        assert {key: spec.shape for key, spec in specs.items()} == folder, (
            f"{name}: names or shapes differ from the folder's: {sorted(specs.keys() ^ folder.keys())}"
        )
        state: dict[str, torch.Tensor] = {}
        for key, tensor in source.weights():
            assert key not in state, f"{key} came twice"
            assert (tuple(tensor.shape), tensor.dtype) == (specs[key].shape, specs[key].dtype), (
                f"{key}: not as in specs"
            )
            state[key] = tensor.clone()
        assert list(state) == list(specs), "weights must come in the order of specs"
        oracle = Oracle(workspace / name, "lm", OPTIM, driver.engine.device)
        missing, unexpected = oracle.module.load_state_dict(state, strict=False)
        assert not unexpected, f"unknown to a plain model: {unexpected}"
        assert set(missing) <= {"lm_head.weight"}, f"never came: {missing}"
        rows = make_rows(4, seed=9)
        collected = driver.outputs(rows, 4)
        if collected is not None:
            expected, _ = oracle.all_outputs(driver.mine(rows))
            torch.testing.assert_close(torch.cat([c["log_probs"] for c in collected]), expected, rtol=1e-5, atol=5e-6)


def _folder_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    from safetensors import safe_open

    with safe_open(folder / "model.safetensors", framework="pt") as file:
        return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118


def check_offload(make_engine: MakeEngine, workspace: Path) -> None:
    """H-56: moving state away and back changes nothing, before the first step too."""
    plain, moving = start(make_engine, workspace / "lm"), start(make_engine, workspace / "lm")
    for step in range(3):
        rows = make_rows(4, seed=20 + step)
        for _ in range(2):
            moving.engine.offload()
        moving.engine.onload(params=True, optimizer=False)
        assert_same_weights(moving.state(), plain.state(), rtol=0)
        moving.outputs(rows, 2)
        moving.engine.offload(params=True, optimizer=False)
        moving.engine.onload()
        moving.engine.onload()
        expected, got = plain.train(rows), moving.train(rows)
        assert got == expected, f"step {step}: expected {expected}, got {got}"
    assert_same_weights(moving.state(), plain.state(), rtol=0)


def check_save_load(make_engine: MakeEngine, workspace: Path) -> None:
    """Save and load, before the first step and after two: the run continues bit by bit, learning rate too (H-60)."""
    optim = OptimConfig(lr=1e-3, eps=1e-4, lr_warmup_steps=10)
    for done in (0, 2):
        driver = start(make_engine, workspace / "lm", optim=optim)
        for step in range(done):
            driver.train(make_rows(4, seed=30 + step))
        path = workspace / "checkpoints" / f"step{done}-{driver.engine.coordinates.dp_size}"
        driver.engine.save(path)
        random = torch.rand(3)
        expected = [driver.train(make_rows(4, seed=40 + step)) for step in range(2)]
        resumed = start(make_engine, workspace / "lm", optim=optim)
        # What is loaded replaces what an engine has done, its optimizer state included.
        resumed.train(make_rows(4, seed=50))
        resumed.engine.load(path)
        assert torch.equal(torch.rand(3), random), "the random state was not restored"
        got = [resumed.train(make_rows(4, seed=40 + step)) for step in range(2)]
        assert got == expected, f"after {done} steps: expected {expected}, got {got}"
        assert_near("learning rate", got[-1][1].lr, 1e-3 * (done + 2) / 10)
        assert_same_weights(resumed.state(), driver.state(), rtol=0)


def check_schedules(make_engine: MakeEngine, workspace: Path) -> None:
    """The learning rate of each step is the schedule's: warm-up, constant, cosine with a floor, and beyond the end."""
    schedules = (
        OptimConfig(lr=1e-3),
        OptimConfig(lr=1e-3, lr_warmup_steps=2),
        OptimConfig(
            lr=1e-3, lr_scheduler_type="cosine", total_training_steps=4, lr_warmup_steps_ratio=0.25, min_lr_ratio=0.1
        ),
    )
    for optim in schedules:
        driver = start(make_engine, workspace / "lm", optim=optim)
        for step in range(5):
            driver.accumulate(make_rows(2, seed=step), 2)
            assert_near(f"{optim} at {step}", driver.engine.optimizer_step().lr, 1e-3 * lr_factor(step, optim))


def check_reduce(make_engine: MakeEngine, workspace: Path) -> None:
    """`reduce` sums over data-parallel ranks, keeps type and device, and leaves its operand as it was."""
    driver = start(make_engine, workspace / "lm")
    place = driver.engine.coordinates
    for dtype in (torch.float64, torch.float32, torch.int64):
        values = torch.tensor([place.dp_rank + 1, 1], dtype=dtype)
        total = driver.engine.reduce(values)
        assert total.tolist() == [place.dp_size * (place.dp_size + 1) / 2, place.dp_size]
        assert (total.dtype, total.device) == (values.dtype, values.device)
        assert values.tolist() == [place.dp_rank + 1, 1]


def check_frozen(make_engine: MakeEngine, workspace: Path) -> None:
    """A frozen engine scores, exports and moves like any other, and has the folder's weights."""
    engine = make_engine(head="lm", model=ModelConfig(path=str(workspace / "tied")), optim=None, trainable=False)
    engine.build()
    driver = Driver(engine, "lm")
    oracle = Oracle(workspace / "tied", "lm", STILL, engine.device)
    engine.offload()
    engine.onload()
    rows = make_rows(3, seed=11)
    collected = driver.outputs(rows, 2, entropy=False)
    if collected is not None:
        assert all("entropy" not in entry for entry in collected), "entropy came without being asked for"
        expected, _ = oracle.all_outputs(driver.mine(rows))
        torch.testing.assert_close(torch.cat([c["log_probs"] for c in collected]), expected, rtol=1e-5, atol=5e-6)
    assert_same_weights(driver.state(), oracle.state(), rtol=0)


CHECKS: tuple[Check, ...] = (
    check_log_probs,
    check_boundaries,
    check_values,
    check_parity,
    check_padded,
    check_logits,
    check_split_invariance,
    check_empty_micro_batches,
    check_rank_without_tokens,
    check_non_finite_gradient,
    check_weight_source,
    check_offload,
    check_save_load,
    check_schedules,
    check_reduce,
    check_frozen,
)
"""Every check of this suite that one group of ranks can run alone."""


def run_checks(make_engine: MakeEngine, workspace: Path, checks: Sequence[Check] = CHECKS) -> list[str]:
    """Run checks one after another on every rank; the names of those that passed.

    Raises:
        AssertionError: The first check that failed; its name is added to the text.
    """
    passed: list[str] = []
    for check in checks:
        try:
            check(make_engine, workspace)
        except BaseException as error:
            error.add_note(f"in {check.__name__} on rank {dist.get_rank()} of {dist.get_world_size()}")
            raise
        passed.append(check.__name__)
    return passed


def save_for_other_world(make_engine: MakeEngine, workspace: Path) -> None:
    """First half of the check across world sizes: train, save, and write down how the run goes on."""
    driver = start(make_engine, workspace / "lm")
    for step in range(2):
        driver.train(make_rows(4, seed=60 + step))
    driver.engine.save(workspace / "other-world")
    expected = driver.train(make_rows(4, seed=70))
    state = driver.state()
    if dist.get_rank() == 0:
        torch.save(state, workspace / "other-world.pt")
        numbers = {"loss": expected[0], "grad_norm": expected[1].grad_norm, "lr": expected[1].lr}
        (workspace / "other-world.json").write_text(json.dumps(numbers))


def load_from_other_world(make_engine: MakeEngine, workspace: Path) -> None:
    """Second half, at another number of ranks: the run goes on as it would have, to within rounding."""
    driver = start(make_engine, workspace / "lm")
    driver.engine.load(workspace / "other-world")
    loss, stats = driver.train(make_rows(4, seed=70))
    expected = json.loads((workspace / "other-world.json").read_text())
    assert_near("loss", loss, expected["loss"])
    assert_near("gradient norm", stats.grad_norm, expected["grad_norm"])
    assert_near("learning rate", stats.lr, expected["lr"])
    assert_same_weights(driver.state(), torch.load(workspace / "other-world.pt"))
