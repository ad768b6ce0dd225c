from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from ostinato.workers.core.config import ModelConfig
from ostinato.workers.core.testing.lora import ADAPTER
from ostinato.workers.core.testing.oracle import STILL, assert_same_weights, make_rows, start
from ostinato.workers.fsdp.activations import ActivationOffload
from ostinato.workers.fsdp.errors import FsdpConfigError
from ostinato.workers.fsdp.scaling import FIRST_EXPONENT, GROWTH_INTERVAL, LossScale, first_scale
from ostinato.workers.fsdp.testing import check_activation_offload, fsdp

group = pytest.mark.usefixtures("process_group")


def test_loss_scale_halves_and_doubles():
    scale = first_scale(torch.float16)
    assert scale.factor == 2.0**FIRST_EXPONENT
    assert scale.after(finite=False).factor == scale.factor / 2
    for _ in range(GROWTH_INTERVAL):
        scale = LossScale.of(scale.counters).after(finite=True)
    assert scale == LossScale(FIRST_EXPONENT + 1)
    assert LossScale(0).after(finite=False).factor == 1.0
    for dtype in (torch.float32, torch.bfloat16):
        scale = first_scale(dtype)
        assert (scale.factor, scale.counters, scale.after(finite=False)) == (1.0, {}, scale)


@group
@pytest.mark.parametrize(("dtype", "tolerance"), [("fp16", 5e-3), ("bf16", 5e-2)])
def test_half_precision_trains_close_to_float32(workspace, dtype, tolerance):
    """Masters stay float32, reductions too; a float16 gradient below its smallest number is not lost."""
    exact, half = start(fsdp(), workspace / "lm", optim=STILL), start(fsdp(dtype=dtype), workspace / "lm", optim=STILL)
    rows = make_rows(8, seed=3)
    (loss, stats), (expected_loss, expected) = half.train(rows, 4), exact.train(rows, 4)
    assert loss == pytest.approx(expected_loss, rel=tolerance)
    assert stats.grad_norm == pytest.approx(expected.grad_norm, rel=tolerance)
    assert not stats.skipped
    assert {parameter.dtype for parameter in half.engine._module.parameters()} == {torch.float32}
    packed = half.packed(rows, 8)
    tiny = 1e-7

    def loss_of(outputs, _):
        return outputs.log_probs.sum() * tiny, None

    norms = []
    for driver in (half, exact):
        driver.engine.forward_backward(packed, loss_of)
        norms.append(driver.engine.optimizer_step().grad_norm)
    assert norms[0] == pytest.approx(norms[1], rel=tolerance)


@group
def test_float16_overflow_skips_the_step_and_halves_the_scale(workspace, tmp_path):
    driver = start(fsdp(dtype="fp16"), workspace / "lm")
    before = driver.state()
    packed = driver.packed(make_rows(4, seed=1), 4)
    driver.engine.forward_backward(packed, lambda outputs, _: (outputs.log_probs.sum() * 1e3, None))
    stats = driver.engine.optimizer_step()
    assert stats.skipped
    assert not math.isfinite(stats.grad_norm)
    assert driver.engine.skipped_steps == 1
    assert driver.engine._loss_scale == LossScale(FIRST_EXPONENT - 1)
    assert_same_weights(driver.state(), before, rtol=0)
    assert not driver.train(make_rows(4, seed=1))[1].skipped
    driver.engine.save(tmp_path)
    resumed = start(fsdp(dtype="fp16"), workspace / "lm")
    resumed.engine.load(tmp_path)
    assert resumed.engine._loss_scale == LossScale(FIRST_EXPONENT - 1, 1)
    exact = start(fsdp(), workspace / "lm")
    exact.engine.load(tmp_path)
    exact.engine.save(tmp_path / "exact")
    resumed.engine.load(tmp_path / "exact")
    assert resumed.engine._loss_scale == LossScale(FIRST_EXPONENT - 1, 1), "a checkpoint without a scale leaves it"
    assert resumed.engine.skipped_steps == 1


@group
@pytest.mark.parametrize(("folder", "head", "model"), [("lm", "lm", {}), ("value", "value", ADAPTER)])
def test_weights_that_are_trained_do_not_lie_in_float16(workspace, folder, head, model):
    """AdamW made them infinite in its first step. What is frozen may lie in it, adapters never do."""
    half = fsdp(model_dtype="fp16", dtype="fp16")
    with pytest.raises(FsdpConfigError, match=r"model_dtype=fp16.*set fsdp_config\.dtype=fp16"):
        start(half, workspace / folder, head=head, **model)
    half(head=head, model=ModelConfig(path=str(workspace / folder)), trainable=False).build()
    driver = start(half, workspace / "lm", **ADAPTER)
    losses = [driver.train(make_rows(4, seed=1))[0] for _ in range(2)]
    assert losses[1] < losses[0]


@group
def test_activation_offload_changes_no_number(workspace):
    check_activation_offload(fsdp(), workspace, torch.device("cpu"))


def test_activation_offload_parks_activations_once_and_parameters_never():
    torch.manual_seed(0)
    layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
    first = nn.Linear(8, 8)
    x = torch.randn(4, 8)

    def loss():
        hidden = first(x)
        return sum(layer(hidden).square().sum() for layer in layers)

    leaves = [*first.parameters(), *layers.parameters()]
    expected = torch.autograd.grad(loss(), leaves)
    offload = ActivationOffload(torch.device("cpu"), min_bytes=0)
    for small, parked in ((0, 4), (10**6, 0)):
        offload._min_bytes = small
        with offload.parking():
            total = loss()
        assert offload.num_parked == parked, "the layers' input once, and each output"
        for got, want in zip(torch.autograd.grad(total, leaves), expected, strict=True):
            assert torch.equal(got, want)
