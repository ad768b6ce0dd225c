"""Conformance to polgrad's reference semantics, where polgrad is installed; deviations: docs/deviations.md."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from ostinato.algos import (
    aggregate,
    count_valid,
    gae,
    get_policy_loss,
    grpo,
    kl_penalty,
    masked_whiten,
    place_outcome,
    rewards_with_kl,
    rloo,
    rollout_correction,
    value_loss,
)

polgrad = pytest.importorskip("polgrad")
testing = pytest.importorskip("polgrad.testing")

TOLERANCE = {"loss_rtol": 1e-9, "grad_rtol": 1e-9}

OURS = {
    "ppo": ("vanilla", "token-mean", {"clip_ratio_c": None}),
    "grpo": ("vanilla", "seq-mean-token-mean", {"clip_ratio_c": None}),
    "dr_grpo": ("vanilla", "seq-mean-token-sum-norm", {"clip_ratio_c": None}),
    "dapo": ("vanilla", "token-mean", {"clip_ratio_high": 0.28, "clip_ratio_c": None}),
    "gspo_token": ("gspo", "seq-mean-token-mean", {"clip_ratio_low": 3e-4, "clip_ratio_high": 4e-4}),
    # With one advantage a row (polgrad's batches) the two forms of GSPO have the same gradient.
    "gspo": ("gspo", "seq-mean-token-mean", {"clip_ratio_low": 3e-4, "clip_ratio_high": 4e-4}),
    "cispo": ("cispo", "token-mean", {"clip_ratio_low": None}),
    "rloo": ("gpg", "seq-mean-token-sum", {}),
    "reinforce_pp": ("vanilla", "seq-mean-token-mean", {"clip_ratio_c": None}),
}
NORM_LENGTH = 16


def ours(name, mode, options, weights=None):
    def fn(logprobs, old_logprobs, advantages, response_mask, **_):
        wide = advantages[:, None].expand_as(logprobs) if advantages.dim() == 1 else advantages
        loss = get_policy_loss(name)(logprobs, old_logprobs, wide, response_mask, weights=weights, **options).loss
        scale = NORM_LENGTH if mode == "seq-mean-token-sum-norm" else None
        return aggregate(loss, response_mask, mode, scale_factor=scale)

    return fn


def test_every_algorithm_that_polgrad_knows_is_compared():
    assert set(OURS) | {"grpo_tis"} == set(polgrad.ALGORITHMS)


@pytest.mark.parametrize("algorithm", sorted(OURS))
def test_losses_conform(algorithm):
    reference = polgrad.ALGORITHMS[algorithm].loss
    if algorithm == "dr_grpo":
        reference = dataclasses.replace(reference, norm_len=NORM_LENGTH)
    testing.assert_conforms(ours(*OURS[algorithm]), reference, **TOLERANCE)


@pytest.mark.parametrize("cap", [1.5, 3.0, 10.0])
def test_dual_clip_conforms(cap):
    config = polgrad.PolicyLossConfig(
        ratio=polgrad.RatioKind.TOKEN,
        surrogate=polgrad.SurrogateKind.PG_CLIP,
        clip=polgrad.ClipConfig(eps_low=0.2, eps_high=0.2, ratio_cap=cap),
        aggregation=polgrad.Aggregation.TOKEN_MEAN,
    )
    testing.assert_conforms(ours("vanilla", "token-mean", {"clip_ratio_c": cap}), config, **TOLERANCE)


def test_two_sided_cispo_conforms():
    config = polgrad.PolicyLossConfig(
        ratio=polgrad.RatioKind.TOKEN,
        surrogate=polgrad.SurrogateKind.CISPO,
        clip=polgrad.ClipConfig(eps_low=0.2, eps_high=0.28),
        aggregation=polgrad.Aggregation.SEQ_MEAN_TOKEN_MEAN,
    )
    testing.assert_conforms(ours("cispo", "seq-mean-token-mean", {"clip_ratio_high": 0.28}), config, **TOLERANCE)


def cases():
    return testing.random_batches(16, ((4, 8), (2, 12), (5, 1)), seed=3)


def apart(a, b) -> str:
    """How two tensors differ, beyond rounding; empty where they do not."""
    try:
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)
    except AssertionError as error:
        return str(error)
    return ""


def value_and_gradient(loss, batch):
    leaf = batch["logprobs"].detach().clone().requires_grad_()
    value = loss(**{**batch, "logprobs": leaf})
    return value.detach(), torch.autograd.grad(value, leaf)[0]


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_truncated_importance_weights_conform(level):
    """grpo_tis, which assert_conforms does not take, and its sequence form."""
    reference = dataclasses.replace(
        polgrad.ALGORITHMS["grpo_tis"].loss, kl=None, is_correction=polgrad.ISCorrectionConfig(cap=2.0, level=level)
    )
    reads = ("logprobs", "old_logprobs", "advantages", "response_mask", "rollout_logprobs")
    for batch in cases():
        weights = rollout_correction(
            batch["old_logprobs"],
            batch["rollout_logprobs"],
            batch["response_mask"],
            rollout_is=level,
            rollout_is_threshold=2.0,
        ).weights
        inputs = {name: batch[name] for name in reads}
        expected = value_and_gradient(lambda **given: polgrad.policy_loss(reference, **given).loss, inputs)
        fn = ours("vanilla", "seq-mean-token-mean", {"clip_ratio_c": None}, weights)
        for got, wanted in zip(value_and_gradient(fn, inputs), expected, strict=True):
            assert not apart(got, wanted)


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"])
def test_aggregation_conforms(mode):
    norm = NORM_LENGTH if mode.endswith("norm") else None
    name = "token_sum_norm" if norm else mode.replace("-", "_")
    for batch in cases():
        x, mask = batch["logprobs"].detach(), batch["response_mask"]
        expected = polgrad.aggregate(x, mask, polgrad.Aggregation(name), norm_len=norm)
        assert not apart(aggregate(x, mask, mode, scale_factor=norm), expected)


@pytest.mark.parametrize("kind", ["k1", "k2", "k3", "abs"])
def test_kl_estimators_conform(kind):
    for batch in cases():
        x, y, mask = batch["logprobs"].detach(), batch["ref_logprobs"], batch["response_mask"]
        expected = polgrad.kl_estimate(x, y, polgrad.KLEstimator(kind), response_mask=mask)
        assert not apart(kl_penalty(x, y, kind, mask), expected)
        shaped = polgrad.kl_in_reward(x, x, y, polgrad.KLEstimator(kind), 0.3, response_mask=mask)
        assert not apart(rewards_with_kl(x, x, y, mask, 0.3, kind), torch.where(mask, shaped, 0))


def test_estimators_conform():
    for batch in cases():
        rewards, values, mask = batch["logprobs"].detach(), batch["old_logprobs"], batch["response_mask"]
        advantages, returns = polgrad.gae(
            rewards, values, config=polgrad.GAEConfig(gamma=0.9, lam=0.8), response_mask=mask
        )
        got, got_returns = gae(rewards, mask, values=values, gamma=0.9, lam=0.8)
        assert not apart(got_returns, returns)
        assert not apart(got, polgrad.whiten(advantages, mask))
        assert not apart(
            masked_whiten(rewards, mask, shift_mean=False), polgrad.whiten(rewards, mask, shift_mean=False)
        )

        labels = torch.arange(len(rewards)) % 2
        if len(rewards) < 4:
            labels = torch.zeros_like(labels)
        scores = batch["advantages"]
        placed = place_outcome(scores, mask)
        for by_std, scale in ((True, "std"), (False, "none")):
            config = polgrad.GroupNormConfig(eps=1e-6, scale=scale)
            expected = polgrad.broadcast_to_tokens(polgrad.grpo_advantages(scores, labels, config), mask)
            assert not apart(grpo(placed, mask, groups=labels, norm_adv_by_std_in_grpo=by_std)[0], expected)
        expected = polgrad.broadcast_to_tokens(polgrad.rloo_advantages(scores, labels), mask)
        assert not apart(rloo(placed, mask, groups=labels)[0], expected)


@pytest.mark.parametrize("clip", [None, 0.2])
def test_value_loss_conforms(clip):
    for batch in cases():
        v, old, target = batch["logprobs"].detach(), batch["old_logprobs"], batch["old_logprobs"] * 0.7
        mask = batch["response_mask"]
        expected = polgrad.value_loss(v, old, target, mask, clip_eps=clip, aggregation=polgrad.Aggregation.TOKEN_MEAN)
        loss, clipped = value_loss(v, target, old, mask, clip)
        assert not apart(aggregate(loss, mask, "token-mean"), expected.loss)
        assert (clipped.sum() / count_valid(mask)[0]).item() == pytest.approx(expected.clipped_frac)


def test_deviations_have_the_size_that_is_written_down():
    """docs/deviations.md: the cap of k3, and GSPO with advantages that differ along a row."""
    x, y, mask = torch.tensor([[-8.0]]), torch.tensor([[-3.0]]), torch.ones(1, 1, dtype=torch.bool)
    assert kl_penalty(x, y, "k3").item() == 10.0
    k3 = polgrad.kl_estimate(x, y, polgrad.KLEstimator.K3, response_mask=mask)
    assert k3.item() == pytest.approx(142.4132, abs=1e-4)
    clip = {"clip_ratio_low": 3e-4, "clip_ratio_high": 4e-4}
    for index, batch in enumerate(cases()):
        generator = torch.Generator().manual_seed(index)
        per_token = torch.randn(batch["logprobs"].shape, generator=generator, dtype=torch.float64)
        inputs = {name: batch[name] for name in ("logprobs", "old_logprobs", "response_mask")} | {
            "advantages": per_token
        }
        got = value_and_gradient(ours("gspo", "seq-mean-token-mean", clip), inputs)
        for algorithm in ("gspo", "gspo_token"):
            config = polgrad.ALGORITHMS[algorithm].loss
            expected = value_and_gradient(
                lambda config=config, **given: polgrad.policy_loss(config, **given).loss, inputs
            )
            assert not apart(got[0], expected[0])
            if algorithm == "gspo_token":
                assert not apart(got[1], expected[1])
