"""Token selection: what is selected by covariance, and which loss has which selector."""

from __future__ import annotations

import math

import pytest
import torch

from ostinato.algos import (
    ArgumentError,
    PolicyLoss,
    UnknownNameError,
    get_policy_loss,
    get_token_selector,
    keywords,
    policy_losses,
    register_policy_loss,
    select_clip_cov,
    select_kl_cov,
)
from ostinato.algos.registry import _POLICY_LOSSES, _TOKEN_SELECTORS

F64 = torch.float64


def covariance_batch(num_rows=40, width=30, seed=0):
    generator = torch.Generator().manual_seed(seed)
    log_probs = -3 * torch.rand(num_rows, width, generator=generator, dtype=F64)
    advantages = 2 * torch.randn(num_rows, width, generator=generator, dtype=F64)
    mask = torch.rand(num_rows, width, generator=generator) < 0.8
    return log_probs, advantages, mask


def covariances(log_probs, advantages, mask):
    a, lp = advantages[mask], log_probs[mask]
    out = torch.full_like(advantages, -math.inf)
    out[mask] = (a - a.mean()) * (lp - lp.mean())
    return out


@pytest.mark.parametrize("ratio", [0.0, 0.0002, 0.01, 0.5, 1.0])
def test_clip_cov_selects_a_seeded_share_between_the_bounds(ratio):
    log_probs, advantages, mask = covariance_batch()
    chosen = select_clip_cov(log_probs, advantages, mask, clip_cov_ratio=ratio, seed=5)
    covariance = covariances(log_probs, advantages, mask)
    eligible = (covariance > 1.0) & (covariance < 5.0)
    assert not (chosen & ~eligible).any()
    assert chosen.sum() == min(max(int(ratio * mask.sum().item()), 1), eligible.sum().item())
    assert torch.equal(chosen, select_clip_cov(log_probs, advantages, mask, clip_cov_ratio=ratio, seed=5))
    if ratio == 0.01:
        assert not torch.equal(chosen, select_clip_cov(log_probs, advantages, mask, clip_cov_ratio=ratio, seed=6))


@pytest.mark.parametrize("ratio", [0.0002, 0.05, 1.0])
def test_kl_cov_selects_the_largest(ratio):
    log_probs, advantages, mask = covariance_batch()
    chosen = select_kl_cov(log_probs, advantages, mask, kl_cov_ratio=ratio)
    covariance = covariances(log_probs, advantages, mask)
    count = max(int(ratio * mask.sum().item()), 1)
    assert chosen.sum() == count
    assert covariance[chosen].min() == covariance[mask].sort(descending=True).values[count - 1]


@pytest.mark.parametrize("select", [select_clip_cov, select_kl_cov])
def test_selection_reads_nothing_under_the_mask_and_takes_any_shape(select):
    log_probs, advantages, mask = covariance_batch()
    clean = select(log_probs, advantages, mask)
    junk = select(torch.where(mask, log_probs, math.nan), torch.where(mask, advantages, math.inf), mask)
    assert torch.equal(clean, junk)
    flat = select(log_probs[mask], advantages[mask], torch.ones(int(mask.sum())))
    assert select is select_clip_cov or torch.equal(flat, clean[mask])
    assert not select(log_probs, advantages, torch.zeros_like(mask)).any()
    assert select(torch.zeros(0), torch.zeros(0), torch.zeros(0)).shape == (0,)


def test_selectors_belong_to_their_losses():
    assert get_token_selector("clip_cov") is select_clip_cov
    assert get_token_selector("kl_cov") is select_kl_cov
    assert get_token_selector("vanilla") is None
    with pytest.raises(UnknownNameError):
        get_token_selector("no-such-mode")
    wanting = [name for name in policy_losses() if "selected" in keywords(get_policy_loss(name))]
    assert wanting == [name for name in policy_losses() if get_token_selector(name) is not None]


def test_registering_a_loss_with_a_selector():
    def own(log_probs, old_log_probs, advantages, response_mask, *, selected, weights=None):
        return PolicyLoss(log_probs, {})

    try:
        register_policy_loss("own", selector=select_kl_cov)(own)
        assert get_policy_loss("own") is own
        assert get_token_selector("own") is select_kl_cov
        with pytest.raises(ArgumentError, match="'vanilla' is already"):
            register_policy_loss("vanilla")(own)
    finally:
        _POLICY_LOSSES.pop("own", None)
        _TOKEN_SELECTORS.pop("own", None)
