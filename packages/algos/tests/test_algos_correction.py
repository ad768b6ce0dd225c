"""Rollout correction: weights, rejection, metrics."""

from __future__ import annotations

import math

import pytest
import torch

from ostinato.algos import (
    REJECTION_KINDS,
    ArgumentError,
    ShapeError,
    UnknownNameError,
    rollout_correction,
    rollout_probs_diff,
    vanilla,
)
from ostinato.algos.correction import parse_bounds

F64 = torch.float64
RATIOS = [0.6, 0.9, 1.5, 3.0]


def pair(ratios, base=-1.0):
    """(old, rollout, mask) with these ratios between them, one row."""
    d = torch.tensor([ratios], dtype=F64).log()
    rollout = torch.full_like(d, base)
    return rollout + d, rollout, torch.ones_like(d)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [0.6, 0.9, 1.5, 2]),
        ({"rollout_is_threshold": 2}, [0.6, 0.9, 1.5, 2]),
        ({"rollout_is_threshold": "0.5_2.0"}, [0.6, 0.9, 1.5, 0]),
        ({"rollout_is_batch_normalize": True}, [0.48, 0.72, 1.2, 1.6]),
    ],
)
def test_token_weights_give_the_checked_values(options, expected):
    result = rollout_correction(*pair(RATIOS), rollout_is="token", **options)
    assert result.weights is not None
    torch.testing.assert_close(result.weights, torch.tensor([expected], dtype=F64))
    assert torch.equal(result.response_mask, torch.ones(1, 4, dtype=F64))


def test_sequence_weights_are_the_product_of_the_ratios():
    result = rollout_correction(*pair([1.1, 1.2, 1.3]), rollout_is="sequence")
    assert result.weights is not None
    torch.testing.assert_close(result.weights, torch.full((1, 3), 1.1 * 1.2 * 1.3, dtype=F64))
    cut = rollout_correction(*pair([2.0, 2.0]), rollout_is="sequence", rollout_is_threshold="0.5_3.0").weights
    assert cut is not None
    assert not cut.any()


def test_sequence_weights_are_normalised_over_sequences():
    old = torch.tensor([[0.5, 0.5, 0.5], [1.5, 0, 0]], dtype=F64).log().nan_to_num(neginf=0.0)
    old[0] /= 3
    mask = torch.tensor([[1, 1, 1], [1, 0, 0]])
    result = rollout_correction(
        old, torch.zeros(2, 3, dtype=F64), mask, rollout_is="sequence", rollout_is_batch_normalize=True
    )
    torch.testing.assert_close(result.weights, torch.tensor([[0.5, 0.5, 0.5], [1.5, 0, 0]], dtype=F64))


def test_weights_come_from_the_old_policy_and_carry_no_gradient():
    """H-28: old −1.0, rollout −1.1, current −.7: weight exp(.1), whatever the current policy is."""
    old = torch.tensor([[-1.0]], requires_grad=True)
    rollout = torch.tensor([[-1.1]], requires_grad=True)
    mask = torch.ones(1, 1)
    result = rollout_correction(old, rollout, mask, rollout_is="token")
    assert result.weights is not None
    assert result.weights.item() == pytest.approx(1.1052, abs=5e-5)
    assert not result.weights.requires_grad
    current = torch.tensor([[-0.7]], requires_grad=True)
    vanilla(current, old, -mask, mask, weights=result.weights).loss.sum().backward()
    assert old.grad is None
    assert rollout.grad is None
    assert current.grad is not None
    assert current.grad.item() == pytest.approx(math.exp(0.3) * math.exp(0.1), rel=1e-6)


@pytest.mark.parametrize("kind", ["token_k1", "token_k2", "token_k3"])
def test_rejection_bounds_are_on_the_ratio(kind):
    """ours: "0.5_5.0" keeps a ratio of 3."""
    ratios = [0.3, 0.51, 0.9, 1.0, 3.0, 4.9, 5.1]
    result = rollout_correction(*pair(ratios), rollout_rs=kind, rollout_rs_threshold="0.5_5.0")
    assert result.response_mask.tolist() == [[0, 1, 1, 1, 1, 1, 0]]
    assert result.weights is None
    assert result.metrics["rollout_corr/rollout_rs_masked_fraction"].item() == pytest.approx(2 / 7)
    assert result.metrics["rollout_corr/rollout_rs_seq_masked_fraction"].item() == 0


@pytest.mark.parametrize("kind", [kind for kind in REJECTION_KINDS if not kind.startswith("token")])
@pytest.mark.parametrize(("ratio", "kept"), [(0.4, 0), (0.6, 1), (1.0, 1), (3.0, 1), (6.0, 0)])
def test_sequence_rejection_of_a_one_token_row_is_that_of_its_ratio(kind, ratio, kept):
    result = rollout_correction(*pair([ratio]), rollout_rs=kind, rollout_rs_threshold="0.5_5.0")
    assert result.response_mask.tolist() == [[kept]]
    assert result.metrics["rollout_corr/rollout_rs_seq_masked_fraction"].item() == 1 - kept


@pytest.mark.parametrize(
    ("kind", "kept"),
    [
        ("sequence_k1", 1),
        ("seq_sum_k1", 1),
        ("seq_mean_k1", 1),
        ("sequence_k2", 0),
        ("seq_sum_k2", 0),
        ("seq_mean_k2", 1),
        ("seq_max_k2", 0),
        ("seq_mean_k3", 1),
        ("seq_max_k3", 0),
    ],
)
def test_sequence_statistics_differ_in_what_they_see(kind, kept):
    """One token up by 2.5, one down by 2.5, six in between: the sum is 0, the largest is out of bounds."""
    result = rollout_correction(*pair([2.5, 1 / 2.5, *[1.0] * 6]), rollout_rs=kind, rollout_rs_threshold="2.0")
    assert result.response_mask.tolist() == [[kept] * 8]


def test_several_rejections_must_agree_and_weights_are_zero_where_rejected():
    result = rollout_correction(
        *pair(RATIOS),
        rollout_is="token",
        rollout_rs="token_k1,token_k3",
        rollout_rs_threshold="0.7_5.0,0.1_2.0",
    )
    assert result.response_mask.tolist() == [[0, 1, 1, 0]]
    torch.testing.assert_close(result.weights, torch.tensor([[0, 0.9, 1.5, 0]], dtype=F64))


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float32])
def test_the_mask_keeps_its_dtype(dtype):
    old, rollout, mask = pair([1.0, 9.0])
    result = rollout_correction(old, rollout, mask.to(dtype), rollout_rs="token_k1", rollout_rs_threshold="2.0")
    assert result.response_mask.dtype == dtype
    assert result.response_mask.tolist() == [[1, 0]]


def test_metrics_describe_the_weights():
    metrics = rollout_correction(*pair(RATIOS), rollout_is="token", rollout_is_threshold="0.7_2.0").metrics
    weights = torch.tensor([0, 0.9, 1.5, 0], dtype=F64)
    expected = {
        "mean": weights.mean(),
        "std": weights.std(),
        "min": weights.min(),
        "max": weights.max(),
        "eff_sample_size": weights.sum() ** 2 / (4 * weights.square().sum()),
        "ratio_fraction_high": torch.tensor(0.25),
        "ratio_fraction_low": torch.tensor(0.25),
    }
    for name, value in expected.items():
        got = metrics[f"rollout_corr/rollout_is_{name}"]
        torch.testing.assert_close(got, value.double(), msg=name)


def test_metrics_describe_the_gap():
    old = torch.tensor([[-1.0, -2.0], [-0.5, 9.0]], dtype=F64)
    rollout = torch.tensor([[-1.5, -2.0], [-0.4, 9.0]], dtype=F64)
    mask = torch.tensor([[1, 1], [1, 0]])
    metrics = rollout_correction(old, rollout, mask).metrics
    d = torch.tensor([0.5, 0.0, -0.1], dtype=F64)
    expected = {
        "kl": -d.mean(),
        "k3_kl": (d.exp() - 1 - d).mean(),
        "training_ppl": torch.tensor([1.5, 0.5], dtype=F64).exp().mean(),
        "rollout_ppl": torch.tensor([1.75, 0.4], dtype=F64).exp().mean(),
        "log_ppl_diff": torch.tensor([0.25, -0.1], dtype=F64).mean(),
    }
    for name, value in expected.items():
        torch.testing.assert_close(metrics[f"rollout_corr/{name}"], value)


def test_probs_diff_is_taken_before_any_clamp():
    old = torch.tensor([[math.log(0.9), math.log(0.2), math.log(0.5)]], dtype=F64)
    rollout = torch.tensor([[-80.0, math.log(0.25), math.log(0.5)]], dtype=F64)
    got = rollout_probs_diff(old, rollout, torch.ones(1, 3))
    gap = torch.tensor([0.9, 0.05, 0.0], dtype=F64)
    torch.testing.assert_close(got["training/rollout_probs_diff_mean"], gap.mean())
    torch.testing.assert_close(got["training/rollout_probs_diff_max"], gap.max())
    torch.testing.assert_close(got["training/rollout_probs_diff_std"], gap.std())
    both = torch.stack([old.exp()[0], rollout.exp()[0]])
    torch.testing.assert_close(got["training/rollout_actor_probs_pearson_corr"], torch.corrcoef(both)[0, 1])
    metrics = rollout_correction(old, rollout, torch.ones(1, 3), rollout_is="token").metrics
    assert metrics["training/rollout_probs_diff_max"] == got["training/rollout_probs_diff_max"]


FULL = {"rollout_is": "token", "rollout_is_batch_normalize": True, "rollout_rs": "seq_mean_k3,token_k1"}


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("junk", [math.nan, math.inf, -math.inf])
def test_nothing_under_the_mask_is_read_and_nothing_is_changed(junk, level):
    torch.manual_seed(0)
    mask = torch.rand(5, 6) < 0.6
    mask[1] = False
    old, rollout = -torch.rand(2, 5, 6)
    options = {**FULL, "rollout_is": level, "rollout_rs_threshold": "0.8_1.3"}
    clean = rollout_correction(torch.where(mask, old, 0), torch.where(mask, rollout, 0), mask, **options)
    dirty_old, dirty_rollout = torch.where(mask, old, junk), torch.where(mask, rollout, junk)
    copies = dirty_old.clone(), dirty_rollout.clone()
    dirty = rollout_correction(dirty_old, dirty_rollout, mask, **options)
    assert clean.weights is not None
    assert dirty.weights is not None
    assert torch.equal(clean.weights, dirty.weights)
    assert torch.equal(clean.response_mask, dirty.response_mask)
    assert clean.metrics.keys() == dirty.metrics.keys()
    for name, value in dirty.metrics.items():
        assert torch.isfinite(value)
        assert torch.equal(value, clean.metrics[name])
    assert not dirty.weights[~mask].any()
    assert torch.equal(dirty_old.nan_to_num(1.0), copies[0].nan_to_num(1.0))
    assert torch.equal(dirty_rollout.nan_to_num(1.0), copies[1].nan_to_num(1.0))


@pytest.mark.parametrize("shape", [(2, 3), (0, 3), (2, 0)])
def test_an_empty_mask_gives_zeros(shape):
    """A-117, its kind."""
    x = torch.full(shape, math.nan)
    result = rollout_correction(x, x, torch.zeros(shape), **FULL, rollout_rs_threshold="2.0")
    assert result.weights is not None
    assert not result.weights.any()
    assert not any(value.item() for value in result.metrics.values())


def test_extreme_gaps_stay_finite():
    old, rollout = torch.tensor([[0.0, -1e4]]), torch.tensor([[-1e4, 0.0]])
    result = rollout_correction(old, rollout, torch.ones(1, 2), rollout_is="token", rollout_is_threshold=1e30)
    assert result.weights is not None
    assert torch.isfinite(result.weights).all()
    assert all(torch.isfinite(v) for k, v in result.metrics.items() if "ppl" not in k)


@pytest.mark.parametrize("text", ["", "x", "1_2_3", "0.5_", "-1", "0.0_2.0", "nan", "inf", "0.5", "2.0_3.0", "1.0_1.0"])
def test_thresholds_that_cannot_be_bounds_of_a_ratio_are_refused(text):
    with pytest.raises(ArgumentError, match="rollout_is_threshold"):
        parse_bounds("rollout_is_threshold", text, band=False)


def test_bounds_are_read():
    assert parse_bounds("x", "0.5_5.0", band=True) == (0.5, 5.0)
    assert parse_bounds("x", 2.0, band=True) == (0.5, 2.0)
    assert parse_bounds("x", "2.0", band=False) == (None, 2.0)


def test_unknown_options_are_refused():
    """A-124."""
    old, rollout, mask = pair(RATIOS)
    with pytest.raises(UnknownNameError, match="token"):
        rollout_correction(old, rollout, mask, rollout_is="tokens")
    with pytest.raises(UnknownNameError, match="token_k1"):
        rollout_correction(old, rollout, mask, rollout_rs="k1", rollout_rs_threshold="2.0")
    with pytest.raises(ArgumentError, match=r"^rollout_rs_threshold: missing"):
        rollout_correction(old, rollout, mask, rollout_rs="token_k1")
    with pytest.raises(ArgumentError, match=r"3 entries for 2 kinds"):
        rollout_correction(old, rollout, mask, rollout_rs="token_k1,token_k2", rollout_rs_threshold="2,2,2")
    with pytest.raises(ShapeError):
        rollout_correction(old, rollout[:, :2], mask)
