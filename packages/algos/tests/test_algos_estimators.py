"""What holds for every advantage estimator: masks, gradients, shapes and types, and the registry."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ostinato.algos import (
    ArgumentError,
    ShapeError,
    UnknownNameError,
    adv_estimators,
    gae,
    get_adv_estimator,
    grpo,
    keywords,
    register_adv_est,
)
from ostinato.algos.registry import _ADV_ESTIMATORS

F64 = torch.float64

pytestmark = pytest.mark.filterwarnings("ignore::ostinato.algos.SingletonGroupWarning")


@pytest.mark.parametrize("name", adv_estimators())
def test_estimators_do_not_depend_on_the_order_of_rows(name, estimate):
    """H-17, its kind: shuffling the rows shuffles the result."""
    torch.manual_seed(1)
    mask = (torch.rand(11, 6) < 0.7).int()
    rewards = torch.randn(11, 6, dtype=F64)
    order, labels = torch.randperm(11), list("aaaabbbcccc")
    plain = estimate(name, rewards, mask, labels)
    shuffled = estimate(name, rewards[order], mask[order], [labels[i] for i in order])
    for a, b in zip(plain, shuffled, strict=True):
        torch.testing.assert_close(a[order], b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", adv_estimators())
@pytest.mark.parametrize("junk", [float("nan"), float("inf"), -1e30])
def test_estimators_ignore_what_lies_under_the_mask_and_change_no_input(name, junk, estimate):
    torch.manual_seed(3)
    mask = torch.rand(6, 9) < 0.6
    mask[4] = False
    columns = {key: torch.randn(6, 9) for key in ("rewards", "values", "log_probs", "sum_pi_squared")}
    labels = np.array(list("aabbab"), dtype=object)

    def run(fill):
        filled = {key: torch.where(mask, value, fill) for key, value in columns.items()}
        before = {key: value.clone() for key, value in filled.items()}
        scores = {"all": torch.arange(6.0)}
        result = estimate(
            name,
            filled["rewards"],
            mask,
            labels,
            values=filled["values"],
            log_probs=filled["log_probs"],
            sum_pi_squared=filled["sum_pi_squared"],
            reward_baselines=torch.ones(6),
            reward_scores=scores,
        )
        for key, value in filled.items():
            assert torch.equal(value[mask], before[key][mask])
            assert torch.equal(value.nan_to_num(7.0), before[key].nan_to_num(7.0))
        assert torch.equal(scores["all"], torch.arange(6.0))
        return result

    for clean, dirty in zip(run(0.0), run(junk), strict=True):
        assert torch.equal(clean, dirty)
        assert clean.dtype == torch.float32
        assert not clean[~mask].any()
        assert torch.isfinite(clean).all()
        assert clean.any()


@pytest.mark.parametrize("name", adv_estimators())
@pytest.mark.parametrize("shape", [(3, 5), (0, 5), (3, 0)])
def test_estimators_of_an_empty_mask_are_zero(name, shape, estimate):
    """A-117, its kind."""
    rewards, mask = torch.full(shape, float("nan")), torch.zeros(shape)
    for result in estimate(name, rewards, mask, [0] * shape[0]):
        assert result.shape == shape
        assert not result.any()


@pytest.mark.parametrize("name", adv_estimators())
def test_estimators_carry_no_gradient(name, estimate):
    rewards = torch.randn(4, 3, requires_grad=True)
    assert not any(result.requires_grad for result in estimate(name, rewards, torch.ones(4, 3), [0, 0, 1, 1]))


@pytest.mark.parametrize("name", adv_estimators())
def test_estimators_refuse_shapes_that_do_not_fit(name):
    fn = get_adv_estimator(name)
    nothing = {key: None for key, needed in keywords(fn).items() if needed}
    with pytest.raises(ShapeError, match=r"response_mask has shape \(4, 2\)"):
        fn(torch.zeros(4, 3), torch.zeros(4, 2), **nothing)
    with pytest.raises(ShapeError, match=r"\(B, R\)"):
        fn(torch.zeros(4), torch.zeros(4), **nothing)


@pytest.mark.parametrize("name", adv_estimators())
@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.bool])
def test_estimators_refuse_whole_numbers(name, dtype):
    """Advantages have the dtype of the rewards; of 0 and 1 as integers they would all be cut off."""
    fn = get_adv_estimator(name)
    nothing = {key: None for key, needed in keywords(fn).items() if needed}
    nothing |= {key: torch.zeros(4, 2) for key in ("values", "log_probs", "sum_pi_squared") if key in nothing}
    with pytest.raises(ArgumentError, match=rf"{name}: token_level_rewards must be floating.*\.float\(\)"):
        fn(torch.ones(4, 2).to(dtype), torch.ones(4, 2), **nothing)


@pytest.mark.parametrize("name", adv_estimators())
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("mask_dtype", [torch.bool, torch.uint8, torch.int64, torch.bfloat16, torch.float64])
def test_estimators_take_any_floats_masks_and_strides(name, dtype, mask_dtype, estimate):
    """The result has the rewards' dtype, is finite, and does not depend on how its inputs lie in memory."""
    torch.manual_seed(5)
    tensors = {key: torch.randn(6, 40).to(dtype) for key in ("rewards", "values", "log_probs", "sum_pi_squared")}
    tensors["mask"] = (torch.rand(6, 40) < 0.6).to(mask_dtype)
    tensors["mask"][4] = 0

    def run(given):
        others = {key: given[key] for key in ("values", "log_probs", "sum_pi_squared")}
        scores = {"all": torch.arange(6).to(dtype)}
        return estimate(name, given["rewards"], given["mask"], list("aabbab"), reward_scores=scores, **others)

    plain = run(tensors)
    strided = run({key: torch.stack([value.T, value.T], 1)[:, 1].T for key, value in tensors.items()})
    for a, b in zip(plain, strided, strict=True):
        assert a.dtype == dtype
        assert torch.isfinite(a).all()
        assert torch.equal(a, b)


def test_an_unknown_estimator_lists_the_known_ones():
    """A-124."""
    with pytest.raises(UnknownNameError) as caught:
        get_adv_estimator("no-such-mode")
    assert all(name in str(caught.value) for name in adv_estimators())
    with pytest.raises(UnknownNameError, match="did you mean 'grpo'"):
        get_adv_estimator("grpoo")


def test_the_names_are_those_of_the_field():
    assert adv_estimators() == (
        "gae",
        "gdpo",
        "gpg",
        "grpo",
        "grpo_passk",
        "opo",
        "optimal_token_baseline",
        "reinforce_plus_plus",
        "reinforce_plus_plus_baseline",
        "remax",
        "rloo",
    )


def test_registering_adds_a_name_and_refuses_a_taken_one():
    def own(token_level_rewards, response_mask, *, gamma=1.0):
        return token_level_rewards, token_level_rewards

    try:
        assert register_adv_est("own")(own) is own
        assert get_adv_estimator("own") is own
        register_adv_est("own")(own)
        assert keywords(own) == {"gamma": False}
        with pytest.raises(ArgumentError, match="'grpo' is already"):
            register_adv_est("grpo")(own)
    finally:
        _ADV_ESTIMATORS.pop("own", None)


def test_keywords_tell_what_must_be_given():
    assert keywords(gae) == {"values": True, "gamma": False, "lam": False}
    assert keywords(grpo)["groups"] is True
