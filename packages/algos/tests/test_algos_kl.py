"""KL estimators, the full divergence, and the coefficient controllers."""

from __future__ import annotations

import math

import pytest
import torch

from ostinato.algos import (
    KL_KINDS,
    AdaptiveKLController,
    ArgumentError,
    FixedKLController,
    ShapeError,
    UnknownNameError,
    aggregate,
    full_kl,
    get_policy_loss,
    grpo,
    kl_penalty,
)

F64 = torch.float64
ESTIMATORS = [kind for kind in KL_KINDS if kind != "full"]
BASE = {"kl": "k1", "mse": "k2", "low_var_kl": "k3"}


def row(*numbers):
    return torch.tensor([numbers], dtype=F64)


def test_k3_gives_the_checked_values():
    d = row(0.2, -1, 0, -29.9)
    torch.testing.assert_close(
        kl_penalty(d, torch.zeros_like(d), "k3"), row(0.018731, 0.718282, 0, 10), rtol=0, atol=6e-7
    )


@pytest.mark.parametrize(
    ("kind", "expected"), [("k1", -0.3), ("kl", -0.3), ("abs", 0.3), ("k2", 0.045), ("mse", 0.045), ("k3", 0.04986)]
)
def test_the_direction_is_policy_over_reference(kind, expected):
    """H-26."""
    assert kl_penalty(row(-1.2), row(-0.9), kind).item() == pytest.approx(expected, abs=2e-6)
    assert kl_penalty(row(-1.2), row(-0.9), kind + "+").item() == pytest.approx(expected, abs=2e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_k3_is_never_negative(dtype):
    """H-26, its kind: also where exp(−d) − 1 + d loses all its digits."""
    d = torch.cat([torch.linspace(-1e-3, 1e-3, 4001), torch.logspace(-12, 1.3, 500), -torch.logspace(-12, 1.3, 500)])
    value = kl_penalty(d[None].to(dtype), torch.zeros(1, d.numel(), dtype=dtype), "k3")
    assert (value >= 0).all()
    assert (value <= 10).all()


@pytest.mark.parametrize(("kind", "other"), BASE.items())
def test_names_mean_the_same(kind, other):
    d = torch.linspace(-30, 30, 61, dtype=F64)[None]
    assert torch.equal(kl_penalty(d, 0 * d, kind), kl_penalty(d, 0 * d, other))


@pytest.mark.parametrize("kind", [kind for kind in ESTIMATORS if kind.endswith("+")])
def test_a_plus_keeps_the_value_and_takes_the_gradient_of_k2(kind):
    d = row(0.2, -1, 0.5, -29.9, 25).requires_grad_()
    value = kl_penalty(d, torch.zeros_like(d), kind)
    torch.testing.assert_close(value, kl_penalty(d, torch.zeros_like(d), kind[:-1]))
    (gradient,) = torch.autograd.grad(value.sum(), d)
    torch.testing.assert_close(gradient, d.detach())


def test_gradients_of_the_plain_estimators():
    d = row(0.2, -1, 0.5, -29.9, 25).requires_grad_()
    inside = torch.tensor([[1, 1, 1, 0, 0]])
    expected = {
        "k1": torch.ones(1, 5, dtype=F64),
        "abs": d.detach().sign(),
        "k2": d.detach(),
        # Clamped and capped values have a zero gradient, never NaN.
        "k3": torch.where(inside.bool(), 1 - (-d.detach()).exp(), 0),
    }
    for kind, gradient in expected.items():
        (got,) = torch.autograd.grad(kl_penalty(d, torch.zeros_like(d), kind).sum(), d)
        torch.testing.assert_close(got, gradient)


@pytest.mark.parametrize("junk", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("kind", ESTIMATORS)
def test_the_mask_keeps_junk_out_of_value_and_gradient(kind, junk):
    log_probs = row(-1.0, junk, junk, -2.0).requires_grad_()
    reference = row(-0.5, junk, -1.0, -2.5)
    mask = torch.tensor([[1, 0, 0, 1]])
    value = kl_penalty(log_probs, reference, kind, mask)
    assert value[0, 1] == 0
    assert value[0, 2] == 0
    (gradient,) = torch.autograd.grad(aggregate(value, mask, "token-mean"), log_probs)
    assert torch.isfinite(value).all()
    assert torch.isfinite(gradient).all()
    assert not gradient[mask == 0].any()


def test_k3_of_an_impossible_token_is_capped_without_nan():
    log_probs = row(-math.inf, -1.0).requires_grad_()
    value = kl_penalty(log_probs, row(-1.0, -math.inf), "k3")
    assert value.tolist() == [[10.0, 10.0]]
    (gradient,) = torch.autograd.grad(value.sum(), log_probs)
    assert gradient.tolist() == [[0.0, 0.0]]


@pytest.mark.parametrize("kind", ["no-such-mode", "k3++", "+", "", "K3", "full+"])
def test_unknown_kinds_are_refused(kind):
    """A-124."""
    with pytest.raises(UnknownNameError, match="low_var_kl"):
        kl_penalty(row(0.0), row(0.0), kind)


def test_full_is_refused_on_log_probs_by_name():
    with pytest.raises(ArgumentError, match="full_kl"):
        kl_penalty(row(0.0), row(0.0), "full")
    with pytest.raises(ShapeError):
        kl_penalty(row(0.0), row(0.0, 1.0), "k1")


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("chunk_size", [None, 1, 3])
def test_full_kl_equals_the_plain_form(temperature, chunk_size):
    torch.manual_seed(0)
    logits = torch.randn(7, 11, dtype=F64, requires_grad=True)
    reference = torch.randn(7, 11, dtype=F64)
    got = full_kl(logits, reference, temperature, chunk_size=chunk_size)
    p, q = (logits / temperature).log_softmax(-1), (reference / temperature).log_softmax(-1)
    expected = (p.exp() * (p - q)).sum(-1)
    torch.testing.assert_close(got, expected)
    weights = torch.randn(7, dtype=F64)
    (a,) = torch.autograd.grad((got * weights).sum(), logits, retain_graph=True)
    (b,) = torch.autograd.grad((expected * weights).sum(), logits)
    torch.testing.assert_close(a, b)


def test_full_kl_of_equal_logits_is_zero_and_masked_vocabulary_is_harmless():
    """A-143, its kind."""
    logits = torch.tensor([[1.0, 2.0, -math.inf], [0.0, 0.0, 0.0]], requires_grad=True)
    other = torch.tensor([[2.0, 2.0, -math.inf], [0.0, 0.0, 0.0]])
    value = full_kl(logits, other)
    two = full_kl(logits[:1, :2], other[:1, :2])
    torch.testing.assert_close(value, torch.cat([two, torch.zeros(1)]))
    (gradient,) = torch.autograd.grad(value.sum(), logits)
    assert torch.isfinite(gradient).all()
    assert gradient[0, 2] == 0
    with pytest.raises(ShapeError, match="ref_logits"):
        full_kl(logits, other[:, :2])


def test_a_group_without_spread_keeps_its_kl_gradient():
    """H-31: equal rewards give advantage 0, and with KL in the loss (β .1) the gradient of the KL term alone."""
    rewards, mask = torch.full((4, 3), 0.5), torch.ones(4, 3)
    advantages, _ = grpo(rewards, mask, groups=[0] * 4)
    log_probs = torch.full((4, 3), -1.2, requires_grad=True)
    reference = torch.full((4, 3), -0.9)
    policy = get_policy_loss("vanilla")(log_probs, log_probs.detach(), advantages, mask).loss
    kl = kl_penalty(log_probs, reference, "k3", mask)
    (gradient,) = torch.autograd.grad(
        aggregate(policy, mask, "token-mean") + 0.1 * aggregate(kl, mask, "token-mean"), log_probs
    )
    torch.testing.assert_close(gradient, torch.full((4, 3), 0.1 * (1 - math.exp(0.3)) / 12))


def test_the_fixed_controller_stays():
    controller = FixedKLController(0.05)
    controller.update(100.0, 512)
    assert controller.value == 0.05
    assert controller.state_dict() == {"value": 0.05}


@pytest.mark.parametrize(
    ("kl", "factor"), [(0.1, 1.0), (0.11, 1 + 0.1 * 0.1), (0.5, 1 + 0.2 * 0.1), (0.0, 1 - 0.2 * 0.1), (math.inf, 1.02)]
)
def test_the_adaptive_controller_steers_to_its_target(kl, factor):
    controller = AdaptiveKLController(0.2, target_kl=0.1, horizon=1000)
    controller.update(kl, 100)
    assert controller.value == pytest.approx(0.2 * factor)
    resumed = AdaptiveKLController(0.9, target_kl=0.1, horizon=1000)
    resumed.load_state_dict(controller.state_dict())
    assert resumed.value == controller.value


def test_controllers_refuse_numbers_out_of_range():
    controller = AdaptiveKLController(0.2, target_kl=0.1, horizon=1000)
    with pytest.raises(ArgumentError, match="NaN"):
        controller.update(math.nan, 1)
    assert controller.value == 0.2
    with pytest.raises(ArgumentError, match="target_kl"):
        AdaptiveKLController(0.2, target_kl=0.0, horizon=1000)
    with pytest.raises(ArgumentError, match="kl_coef"):
        FixedKLController(-1.0)
