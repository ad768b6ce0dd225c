"""What is chosen by name (aggregation, KL estimator, rejection, importance weight) against slow references in loops.

And what no choice may depend on: how a mini-batch is split, how wide it is padded, in which order its rows come, and
what lies under the mask.
"""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ostinato.algos import (
    AGGREGATION_MODES,
    IMPORTANCE_LEVELS,
    KL_KINDS,
    REJECTION_KINDS,
    adv_estimators,
    aggregate,
    count_valid,
    get_adv_estimator,
    get_policy_loss,
    get_token_selector,
    keywords,
    kl_penalty,
    policy_losses,
    rollout_correction,
    value_loss,
)

pytestmark = pytest.mark.filterwarnings("ignore::ostinato.algos.SingletonGroupWarning")

F64 = torch.float64


def ragged(seed, rows=None, width=None):
    """log_probs, others like them, and a mask with gaps and empty rows; NaN under it."""
    generator = torch.Generator().manual_seed(seed)
    rows, width = rows or 1 + seed % 7, width or 1 + seed % 11
    mask = torch.rand(rows, width, generator=generator) < 0.6
    mask &= torch.rand(rows, 1, generator=generator) < 0.8

    def floats(scale=1.0):
        x = scale * torch.randn(rows, width, generator=generator, dtype=F64)
        return torch.where(mask, x, math.nan)

    log_probs = -floats().abs()
    return log_probs, log_probs + floats(0.7), floats(), mask


def lists(x, mask):
    """The valid values of each row."""
    return [[v for v, on in zip(*pair, strict=True) if on] for pair in zip(x.tolist(), mask.tolist(), strict=True)]


SLOW_MODES = {
    "token-mean": lambda rows, width: sum(map(sum, rows)) / sum(map(len, rows)),
    "token-sum": lambda rows, width: sum(map(sum, rows)),
    "seq-mean-token-sum": lambda rows, width: sum(map(sum, rows)) / len(rows),
    "seq-mean-token-sum-norm": lambda rows, width: sum(map(sum, rows)) / len(rows) / width,
    "seq-mean-token-mean": lambda rows, width: sum(sum(row) / len(row) for row in rows) / len(rows),
}


def k3(d):
    return min(math.exp(-d) - 1 + d, 10.0) if d > -20 else 10.0


SLOW_KL = {"k1": lambda d: d, "abs": abs, "k2": lambda d: d * d / 2, "k3": k3}
SLOW_KL |= {"kl": SLOW_KL["k1"], "mse": SLOW_KL["k2"], "low_var_kl": SLOW_KL["k3"]}

DIVERGENCE = {"k1": lambda d: d, "k2": lambda d: d * d / 2, "k3": lambda d: math.exp(d) - 1 - d}


def slow_kept(kind, ds, lower, upper):
    """Which tokens of one row stay."""
    level, k = kind.rsplit("_", 1)

    def inside(statistic, direction):
        if k == "k1":
            return math.log(lower) <= statistic <= math.log(upper)
        return statistic <= DIVERGENCE[k](math.log(upper if direction > 0 else lower))

    values = [DIVERGENCE[k](d) for d in ds]
    if level == "token":
        return [inside(value, d) for value, d in zip(values, ds, strict=True)]
    if not ds:
        return []
    whole = {"sequence": sum, "seq_sum": sum, "seq_mean": lambda x: sum(x) / len(x), "seq_max": max}[level](values)
    return [inside(whole, sum(ds))] * len(ds)


SLOW_WEIGHT = {
    "token": lambda ds: [math.exp(d) for d in ds],
    "sequence": lambda ds: [math.exp(sum(ds))] * len(ds),
}
LEVELS = ("token", "sequence", "seq_sum", "seq_mean", "seq_max")


def test_every_name_has_a_slow_reference():
    assert set(SLOW_MODES) == set(AGGREGATION_MODES)
    assert set(SLOW_KL) | {f"{name}+" for name in SLOW_KL} | {"full"} == set(KL_KINDS)
    assert set(SLOW_WEIGHT) == set(IMPORTANCE_LEVELS)
    assert {f"{level}_{kind}" for level in LEVELS for kind in DIVERGENCE} - {"seq_max_k1"} == set(REJECTION_KINDS)


@pytest.mark.parametrize("seed", range(16))
@pytest.mark.parametrize("mode", AGGREGATION_MODES)
def test_aggregation_equals_its_loop(mode, seed):
    x, _, _, mask = ragged(seed)
    rows = [row for row in lists(x, mask) if row]
    expected = SLOW_MODES[mode](rows, mask.shape[1]) if rows else 0.0
    assert aggregate(x, mask, mode).item() == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("kind", [kind for kind in KL_KINDS if kind != "full"])
def test_kl_equals_its_loop(kind, seed):
    x, y, _, mask = ragged(seed)
    y = y * (1 + 5 * (seed % 3))
    got = lists(kl_penalty(x, y, kind, mask), mask)
    for row, ds in zip(got, lists(x - y, mask), strict=True):
        assert row == pytest.approx([SLOW_KL[kind.removesuffix("+")](d) for d in ds], rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("bounds", [("0.5_2.0", 0.5, 2.0), ("1.5", 1 / 1.5, 1.5), ("0.2_1.2", 0.2, 1.2)])
@pytest.mark.parametrize("kind", REJECTION_KINDS)
def test_rejection_equals_its_loop(kind, bounds, seed):
    old, rollout, _, mask = ragged(seed)
    text, lower, upper = bounds
    got = rollout_correction(old, rollout, mask, rollout_rs=kind, rollout_rs_threshold=text).response_mask
    for row, ds in zip(lists(got, mask), lists(old - rollout, mask), strict=True):
        assert row == slow_kept(kind, ds, lower, upper)
    assert not got[~mask].any()


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("bounds", [("2.0", 0.0, 2.0), ("0.5_2.0", 0.5, 2.0)])
@pytest.mark.parametrize("level", IMPORTANCE_LEVELS)
def test_importance_weights_equal_their_loop(level, bounds, seed):
    old, rollout, _, mask = ragged(seed)
    text, lower, upper = bounds
    got = rollout_correction(old, rollout, mask, rollout_is=level, rollout_is_threshold=text).weights
    for row, ds in zip(lists(got, mask), lists(old - rollout, mask), strict=True):
        ratios = SLOW_WEIGHT[level](ds)
        banded = [0.0 if "_" in text and not lower <= w <= upper else min(w, upper) for w in ratios]
        assert row == pytest.approx(banded, rel=1e-12)


@st.composite
def layouts(draw):
    """One mini-batch and another way to lay it out: parts, row order, padding, and what lies under the mask."""
    rows = draw(st.integers(1, 9))
    order = draw(st.permutations(range(rows)))
    cuts = sorted(draw(st.lists(st.integers(0, rows), max_size=4)))
    parts = [order[a:b] for a, b in zip([0, *cuts], [*cuts, rows], strict=True)]
    pads = [draw(st.integers(0, 40)) for _ in parts]
    junk = draw(st.sampled_from([0.0, math.nan, math.inf, -math.inf, 1e300]))
    return draw(st.integers(0, 10**6)), rows, parts, pads, junk


def laid_out(x, mask, rows, pad, junk):
    """Some rows, wider, with junk under the mask."""
    kept = torch.where(mask[rows], x[rows], junk) if x.is_floating_point() else x[rows]
    return torch.nn.functional.pad(kept, (0, pad), value=junk if x.is_floating_point() else 0)


def term_of(name):
    """A loss per token of (log_probs, old, advantages, mask, selected)."""
    if name == "kl":
        return lambda lp, old, adv, mask, chosen: kl_penalty(lp, old, "low_var_kl", mask)
    if name == "value":
        return lambda lp, old, adv, mask, chosen: value_loss(lp, adv, old, mask, 0.2)[0]
    fn = get_policy_loss(name)
    if get_token_selector(name) is None:
        return lambda lp, old, adv, mask, chosen: fn(lp, old, adv, mask).loss
    return lambda lp, old, adv, mask, chosen: fn(lp, old, adv, mask, selected=chosen).loss


@pytest.mark.parametrize("name", [*policy_losses(), "kl", "value"])
@settings(max_examples=15, deadline=None)
@given(layout=layouts())
def test_losses_do_not_depend_on_the_layout(name, layout):
    """H-23, H-30: parts, order, padding and junk change neither the loss nor the gradient, in any mode."""
    seed, rows, parts, pads, junk = layout
    log_probs, old, advantages, mask = ragged(seed, rows=rows)
    selector = get_token_selector(name) if name in policy_losses() else None
    chosen = mask if selector is None else selector(log_probs, advantages, mask)
    term, (num_tokens, num_sequences) = term_of(name), count_valid(mask)

    def run(mode, pieces):
        leaf = torch.where(mask, log_probs, 0.0).requires_grad_()
        total = torch.zeros((), dtype=F64)
        for piece, pad, filling in pieces:
            inputs = [laid_out(x, mask, piece, pad, filling) for x in (leaf, old, advantages, mask, chosen)]
            total = total + aggregate(
                term(*inputs), inputs[3], mode,
                num_tokens=num_tokens, num_sequences=num_sequences, scale_factor=float(mask.shape[1]),
            )  # fmt: skip
        return total.detach(), torch.autograd.grad(total, leaf)[0]

    for mode in AGGREGATION_MODES:
        whole = run(mode, [(list(range(rows)), 0, 0.0)])
        other = run(mode, [(part, pad, junk) for part, pad in zip(parts, pads, strict=True)])
        for a, b in zip(other, whole, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", adv_estimators())
@settings(max_examples=15, deadline=None)
@given(layout=layouts())
def test_estimators_do_not_depend_on_the_layout(name, layout):
    """Order of rows, padding and junk; the batch is whole, as groups and whitening need it."""
    seed, rows, parts, pads, junk = layout
    order, pad = [row for part in parts for row in part], pads[0]
    log_probs, values, rewards, mask = ragged(seed, rows=rows)
    generator = torch.Generator().manual_seed(seed)
    groups = torch.randint(0, 3, (rows,), generator=generator).tolist()
    scores = torch.randn(rows, generator=generator, dtype=F64)

    def run(index, extra, filling):
        x, v, r = (laid_out(each, mask, index, extra, filling) for each in (log_probs, values, rewards))
        supply = {
            "groups": [groups[i] for i in index], "values": v, "gamma": 0.9, "lam": 0.8, "log_probs": x,
            "sum_pi_squared": v.abs(), "reward_baselines": scores[index], "reward_scores": {"a": scores[index]},
        }  # fmt: skip
        fn = get_adv_estimator(name)
        on = laid_out(mask, mask, index, extra, filling)
        return fn(r, on, **{key: supply[key] for key in keywords(fn) if key in supply})

    whole = run(list(range(rows)), 0, 0.0)
    for a, b in zip(run(order, pad, junk), whole, strict=True):
        torch.testing.assert_close(a[:, : mask.shape[1]], b[order], rtol=1e-12, atol=1e-12)
        assert not a[:, mask.shape[1] :].any()
