"""Policy losses: checked values, clip directions, gradients, masks, refusals."""

from __future__ import annotations

import math

import pytest
import torch

from ostinato.algos import (
    ArgumentError,
    PolicyLoss,
    ShapeError,
    UnknownNameError,
    aggregate,
    cispo,
    clip_cov,
    dppo_kl,
    dppo_tv,
    dro,
    geo_mean,
    get_policy_loss,
    get_token_selector,
    gpg_loss,
    gspo,
    keywords,
    kl_cov,
    masked_mean,
    policy_losses,
    sapo,
    vanilla,
)

F64 = torch.float64
OLD = torch.tensor([[-1, -2, -0.5, -3], [-1.5, -0.2, -1, -1]], dtype=F64)
NEW = torch.tensor([[-0.7, -2.3, -0.5, -1], [-1, -0.6, -1.1, -1]], dtype=F64)
ADVANTAGES = torch.tensor([[1, 1, 1, -1], [-2, -2, -2, 9]], dtype=F64)
MASK = torch.tensor([[1, 1, 1, 1], [1, 1, 1, 0]])


def call(name, log_probs, old, advantages, mask, weights=None, **options):
    fn = get_policy_loss(name)
    if "selected" in keywords(fn) and "selected" not in options:
        selector = get_token_selector(name)
        assert selector is not None
        options["selected"] = selector(log_probs.detach(), advantages, mask)
    return fn(log_probs, old, advantages, mask, weights=weights, **options)


def metric(result, name):
    return masked_mean(result.diagnostics[name], MASK).item()


@pytest.mark.parametrize(
    ("name", "mode", "expected"),
    [
        ("vanilla", "token-mean", 0.966614),
        ("gspo", "seq-mean-token-mean", 0.756090),
        ("sapo", "token-mean", 1.364477),
        ("sapo", "seq-mean-token-mean", 1.687044),
        ("gpg", "token-mean", -0.414286),
        ("cispo", "token-mean", -0.481520),
        # The paper's objective is a mean over sequences; the loss is the same on every token of a row.
        ("geo_mean", "seq-mean-token-mean", 0.666936),
    ],
)
def test_losses_give_the_checked_values(name, mode, expected):
    loss = aggregate(call(name, NEW, OLD, ADVANTAGES, MASK).loss, MASK, mode)
    assert loss.item() == pytest.approx(expected, abs=6e-7)


def test_vanilla_gives_the_checked_diagnostics_and_gradient():
    log_probs = NEW.clone().requires_grad_()
    result = vanilla(log_probs, OLD, ADVANTAGES, MASK)
    assert metric(result, "pg_clipfrac") == pytest.approx(0.28571, abs=5e-6)
    assert metric(result, "ppo_kl") == pytest.approx(-0.28571, abs=5e-6)
    assert metric(result, "pg_clipfrac_lower") == pytest.approx(0.14286, abs=5e-6)
    (gradient,) = torch.autograd.grad(aggregate(result.loss, MASK, "token-mean"), log_probs)
    expected = torch.tensor([[0, -0.10583, -0.14286, 0], [0.47106, 0, 0.25852, 0]], dtype=F64)
    torch.testing.assert_close(gradient, expected, rtol=0, atol=6e-6)


CLIPS = [
    (1.3, 1, -1.2, 0.0),
    (1.3, -1, 1.3, 1.3),
    (0.7, 1, -0.7, -0.7),
    (0.7, -1, 0.8, 0.0),
    (5.0, -1, 3.0, 0.0),
    (5.0, 1, -1.2, 0.0),
]


@pytest.mark.parametrize(("ratio", "advantage", "loss", "slope"), CLIPS)
def test_clip_directions(ratio, advantage, loss, slope):
    """H-24, and H-25: the c bound only where A < 0."""
    log_probs = torch.tensor([[math.log(ratio)]], dtype=F64, requires_grad=True)
    result = vanilla(log_probs, torch.zeros(1, 1, dtype=F64), torch.tensor([[advantage]], dtype=F64), torch.ones(1, 1))
    assert result.loss.item() == pytest.approx(loss)
    (gradient,) = torch.autograd.grad(result.loss.sum(), log_probs)
    assert gradient.item() == pytest.approx(slope)


def test_the_dual_clip_constant_is_used():
    """H-74: c = 2 changes the one line of H-24's table that it bounds."""
    ratios = torch.tensor([[r for r, *_ in CLIPS]], dtype=F64).log()
    advantages = torch.tensor([[a for _, a, *_ in CLIPS]], dtype=F64)
    zeros, ones = torch.zeros_like(ratios), torch.ones_like(ratios)
    two = vanilla(ratios, zeros, advantages, ones, clip_ratio_c=2.0).loss
    torch.testing.assert_close(two, torch.tensor([[-1.2, 1.3, -0.7, 0.8, 2, -1.2]], dtype=F64))
    none = vanilla(ratios, zeros, advantages, ones, clip_ratio_c=None)
    torch.testing.assert_close(none.loss, torch.tensor([[-1.2, 1.3, -0.7, 0.8, 5, -1.2]], dtype=F64))
    assert not none.diagnostics["pg_clipfrac_lower"].any()


@pytest.mark.parametrize("c", [0.5, 1.0, 0.0, -3.0, math.nan])
def test_a_dual_clip_constant_not_above_one_is_refused(c):
    """A-130."""
    with pytest.raises(ArgumentError, match="clip_ratio_c must be above 1"):
        vanilla(NEW, OLD, ADVANTAGES, MASK, clip_ratio_c=c)


@pytest.mark.parametrize("name", [n for n in policy_losses() if "clip_ratio_low" in keywords(get_policy_loss(n))])
@pytest.mark.parametrize("key", ["clip_ratio_low", "clip_ratio_high"])
def test_negative_clip_ranges_are_refused(name, key):
    with pytest.raises(ArgumentError, match=key):
        call(name, NEW, OLD, ADVANTAGES, MASK, **{key: -0.1})


def test_gspo_has_the_value_of_the_sequence_and_the_gradient_of_the_token():
    log_probs = NEW.clone().requires_grad_()
    advantages = torch.tensor([[1.0] * 4, [-2.0] * 4], dtype=F64)
    result = gspo(log_probs, OLD, advantages, MASK, clip_ratio_low=10, clip_ratio_high=10)
    d = NEW - OLD
    ratios = [d[0].mean().exp().item(), d[1, :3].mean().exp().item()]
    torch.testing.assert_close(result.loss[0], torch.full((4,), -ratios[0], dtype=F64))
    torch.testing.assert_close(result.loss[1, :3], torch.full((3,), 2 * ratios[1], dtype=F64))
    (gradient,) = torch.autograd.grad(result.loss.sum(), log_probs)
    torch.testing.assert_close(gradient, result.loss.detach())


def test_gspo_bounds_the_log_ratio_above():
    wide = gspo(torch.zeros(1, 2), torch.full((1, 2), -30.0), -torch.ones(1, 2), torch.ones(1, 2), clip_ratio_high=1e9)
    torch.testing.assert_close(wide.loss, torch.full((1, 2), math.exp(10.0)))


def test_sapo_at_ratio_one_has_the_gradient_of_the_plain_surrogate():
    log_probs = OLD.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(sapo(log_probs, OLD, ADVANTAGES, MASK).loss.sum(), log_probs)
    torch.testing.assert_close(gradient, torch.where(MASK.bool(), -ADVANTAGES, 0))
    with pytest.raises(ArgumentError, match="tau_neg"):
        sapo(OLD, OLD, ADVANTAGES, MASK, tau_neg=0.0)


def test_gpg_is_reinforce():
    torch.testing.assert_close(
        gpg_loss(NEW, OLD, ADVANTAGES, MASK).loss, torch.where(MASK.bool(), -ADVANTAGES * NEW, 0)
    )


def test_cispo_keeps_the_gradient_of_clipped_tokens_and_may_be_one_sided():
    log_probs = NEW.clone().requires_grad_()
    result = cispo(log_probs, OLD, ADVANTAGES, MASK)
    (gradient,) = torch.autograd.grad(result.loss.sum(), log_probs)
    assert gradient[MASK.bool()].all()
    clipped = (NEW - OLD).exp().clamp(0.8, 1.2)
    torch.testing.assert_close(gradient, torch.where(MASK.bool(), -clipped * ADVANTAGES, 0))
    one_sided = cispo(NEW, OLD, ADVANTAGES, MASK, clip_ratio_low=None).loss
    expected = -(NEW - OLD).exp().clamp(max=1.2) * ADVANTAGES * NEW
    torch.testing.assert_close(one_sided, torch.where(MASK.bool(), expected, 0))


def test_geo_mean_is_constant_along_a_row():
    result = geo_mean(NEW, OLD, ADVANTAGES, MASK)
    assert (result.loss[0] == result.loss[0, 0]).all()
    assert result.loss[1, 3] == 0


def test_geo_mean_with_a_zero_weight_is_zero_with_finite_gradient():
    log_probs = NEW.clone().requires_grad_()
    weights = torch.tensor([[1.0, 1, 0, 1], [2, 2, 2, math.nan]], dtype=F64)
    result = geo_mean(log_probs, OLD, ADVANTAGES, MASK, weights=weights)
    assert not result.loss[0].any()
    torch.testing.assert_close(result.loss[1], 2 * geo_mean(NEW, OLD, ADVANTAGES, MASK).loss[1])
    (gradient,) = torch.autograd.grad(result.loss.sum(), log_probs)
    assert torch.isfinite(gradient).all()


def test_dro_adds_a_quadratic_penalty():
    expected = -ADVANTAGES * NEW + 0.5 * 0.3 * (NEW - OLD) ** 2
    got = dro(NEW, OLD, ADVANTAGES, MASK, dro_beta=0.3).loss
    torch.testing.assert_close(got, torch.where(MASK.bool(), expected, 0))


@pytest.mark.parametrize(
    ("old", "new", "advantage", "inside"),
    [(0.1, 0.25, 1, True), (0.1, 0.35, 1, False), (0.5, 0.2, 1, True), (0.5, 0.2, -1, False), (0.3, 0.9, -1, True)],
)
def test_dppo_tv_bounds_the_move_of_the_probability(old, new, advantage, inside):
    log_probs = torch.tensor([[math.log(new)]], dtype=F64, requires_grad=True)
    result = dppo_tv(
        log_probs, torch.tensor([[math.log(old)]], dtype=F64), torch.tensor([[advantage]], dtype=F64), torch.ones(1, 1)
    )
    expected = -advantage * min(new / old, 20.0) * math.log(new) if inside else 0.0
    assert result.loss.item() == pytest.approx(expected)
    assert result.diagnostics["pg_clipfrac"].item() == (not inside)


def binary_kl(old, new):
    return old * math.log(old / new) + (1 - old) * math.log((1 - old) / (1 - new))


@pytest.mark.parametrize(("old", "new"), [(0.1, 0.2), (0.1, 0.6), (0.5, 0.2), (0.5, 0.01), (0.9, 0.95), (0.2, 0.999)])
@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_dppo_kl_bounds_the_binary_kl(old, new, advantage):
    result = dppo_kl(
        torch.tensor([[math.log(new)]], dtype=F64),
        torch.tensor([[math.log(old)]], dtype=F64),
        torch.tensor([[advantage]], dtype=F64),
        torch.ones(1, 1),
    )
    away = new > old if advantage > 0 else new < old
    outside = away and binary_kl(old, new) > 0.2
    assert result.diagnostics["pg_clipfrac"].item() == outside


@pytest.mark.parametrize("fn", [dppo_tv, dppo_kl])
def test_dppo_at_certainty_is_finite(fn):
    certain = torch.zeros(1, 2)
    result = fn(certain, torch.tensor([[0.0, -30.0]]), torch.ones(1, 2), torch.ones(1, 2))
    assert torch.isfinite(result.loss).all()


def test_clip_cov_drops_the_selected_tokens():
    selected = torch.tensor([[0, 1, 0, 0], [1, 0, 0, 1]])
    log_probs = NEW.clone().requires_grad_()
    result = clip_cov(log_probs, OLD, ADVANTAGES, MASK, selected=selected)
    plain = vanilla(NEW, OLD, ADVANTAGES, MASK, clip_ratio_c=None).loss
    torch.testing.assert_close(result.loss, torch.where(selected.bool(), 0, plain))
    (gradient,) = torch.autograd.grad(result.loss.sum(), log_probs)
    assert not gradient[selected.bool()].any()


def test_kl_cov_holds_the_selected_tokens_back():
    selected = torch.tensor([[0, 1, 0, 0], [1, 0, 0, 1]])
    result = kl_cov(NEW, OLD, ADVANTAGES, MASK, selected=selected, ppo_kl_coef=0.7)
    d = NEW - OLD
    expected = -ADVANTAGES * d.exp() + torch.where(selected.bool(), 0.7 * d.abs(), 0)
    torch.testing.assert_close(result.loss, torch.where(MASK.bool(), expected, 0))


def ragged(seed=0, num_rows=7, width=11):
    generator = torch.Generator().manual_seed(seed)
    mask = torch.rand(num_rows, width, generator=generator) < 0.6
    mask[2] = False

    def floats():
        return torch.randn(num_rows, width, generator=generator, dtype=F64)

    log_probs = -floats().abs()
    return log_probs, log_probs + 0.4 * floats(), floats(), mask, floats().exp()


@pytest.mark.parametrize("junk", [math.nan, math.inf, -math.inf, 1e30])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("name", policy_losses())
def test_losses_ignore_what_lies_under_the_mask_forward_and_backward(name, weighted, junk):
    log_probs, old, advantages, mask, weights = ragged()

    def run(fill):
        tensors = [torch.where(mask, x, fill) for x in (log_probs, old, advantages, weights)]
        before = [x.clone() for x in tensors]
        leaf = tensors[0].requires_grad_()
        result = call(name, leaf, tensors[1], tensors[2], mask.int(), tensors[3] if weighted else None)
        (gradient,) = torch.autograd.grad(aggregate(result.loss, mask, "token-mean"), leaf)
        for x, y in zip(tensors, before, strict=True):
            assert torch.equal(x.detach().nan_to_num(5.0), y.nan_to_num(5.0))
        return [result.loss.detach(), gradient, *result.diagnostics.values()]

    for clean, dirty in zip(run(0.0), run(junk), strict=True):
        assert torch.equal(clean, dirty)
        assert not dirty[~mask].any()
        assert torch.isfinite(dirty).all()


@pytest.mark.parametrize("name", policy_losses())
def test_weights_scale_the_loss_and_carry_no_gradient(name):
    log_probs, old, advantages, mask, weights = ragged()
    # geo_mean takes the geometric mean over the row, so a constant row shows the scale in every loss.
    weights = weights[:, :1].expand_as(log_probs).clone().requires_grad_()
    old = old.clone().requires_grad_()
    advantages = advantages.clone().requires_grad_()
    log_probs = log_probs.clone().requires_grad_()
    plain = call(name, log_probs, old, advantages, mask)
    weighed = call(name, log_probs, old, advantages, mask, weights)
    torch.testing.assert_close(weighed.loss, plain.loss * weights)
    weighed.loss.sum().backward()
    assert weights.grad is None
    assert old.grad is None
    assert advantages.grad is None
    assert log_probs.grad is not None
    assert not any(value.requires_grad for value in weighed.diagnostics.values())


STOPPED = ("gspo", "cispo", "dppo_tv", "dppo_kl")
"""Straight-through and stop-gradient forms: their gradient is not that of their value; they have their own tests."""


@pytest.mark.parametrize("name", [name for name in policy_losses() if name not in STOPPED])
def test_gradients_equal_finite_differences(name):
    log_probs, old, advantages, mask, weights = ragged(seed=3)
    options = {"selected": mask} if "selected" in keywords(get_policy_loss(name)) else {}

    def loss(x):
        return aggregate(call(name, x, old, advantages, mask, weights, **options).loss, mask, "token-mean")

    assert torch.autograd.gradcheck(loss, log_probs.clone().requires_grad_(), eps=1e-7, atol=1e-6)


@pytest.mark.parametrize("name", policy_losses())
@pytest.mark.parametrize("gap", [25.0, 1e4])
def test_extreme_ratios_stay_finite(name, gap):
    log_probs = torch.full((2, 2), -0.1, requires_grad=True)
    old = torch.tensor([[-gap, -0.1], [-gap, gap]])
    advantages = torch.tensor([[1.0, -1.0], [-1.0, 1.0]])
    result = call(name, log_probs, old, advantages, torch.ones(2, 2))
    (gradient,) = torch.autograd.grad(result.loss.sum(), log_probs)
    assert torch.isfinite(result.loss).all()
    assert torch.isfinite(gradient).all()


@pytest.mark.parametrize("name", policy_losses())
@pytest.mark.parametrize("shape", [(2, 3), (0, 3), (2, 0)])
def test_losses_of_an_empty_mask_are_zero(name, shape):
    log_probs = torch.full(shape, math.nan, requires_grad=True)
    zeros = torch.zeros(shape)
    result = call(name, log_probs, zeros, zeros, zeros)
    total = aggregate(result.loss, zeros, "token-mean")
    assert total.item() == 0.0
    (gradient,) = torch.autograd.grad(total, log_probs)
    assert not gradient.any()


@pytest.mark.parametrize("name", policy_losses())
def test_losses_report_named_per_token_diagnostics(name):
    log_probs, old, advantages, mask, _ = ragged()
    result = call(name, log_probs, old, advantages, mask)
    assert isinstance(result, PolicyLoss)
    assert set(result.diagnostics) <= {"pg_clipfrac", "pg_clipfrac_lower", "ppo_kl"}
    torch.testing.assert_close(result.diagnostics["ppo_kl"], torch.where(mask, old - log_probs, 0))
    for value in result.diagnostics.values():
        assert value.shape == mask.shape


@pytest.mark.parametrize("name", policy_losses())
def test_losses_refuse_shapes_that_do_not_fit(name):
    options = {"selected": torch.zeros(2, 3)} if "selected" in keywords(get_policy_loss(name)) else {}
    fn = get_policy_loss(name)
    x = torch.zeros(2, 3)
    with pytest.raises(ShapeError, match=r"advantages has shape \(2,\)"):
        fn(x, x, torch.zeros(2), x, **options)
    with pytest.raises(ShapeError, match="weights"):
        fn(x, x, x, x, weights=torch.zeros(2, 1), **options)
    with pytest.raises(ShapeError, match=r"\(B, R\)"):
        fn(*[torch.zeros(3)] * 4, **options)


def test_an_unknown_loss_lists_the_known_ones():
    """A-124."""
    with pytest.raises(UnknownNameError) as caught:
        get_policy_loss("no-such-mode")
    assert all(name in str(caught.value) for name in policy_losses())


def test_the_loss_names_are_those_of_the_field():
    assert policy_losses() == (
        "cispo",
        "clip_cov",
        "dppo_kl",
        "dppo_tv",
        "dro",
        "geo_mean",
        "gpg",
        "gspo",
        "kl_cov",
        "sapo",
        "vanilla",
    )
