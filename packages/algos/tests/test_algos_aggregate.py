"""Aggregation, and that every loss gives the same result however its rows are split."""

from __future__ import annotations

import math

import pytest
import torch

from ostinato.algos import (
    AGGREGATION_MODES,
    ArgumentError,
    ShapeError,
    UnknownNameError,
    aggregate,
    count_valid,
    get_policy_loss,
    get_token_selector,
    keywords,
    kl_penalty,
    masked_mean,
    policy_losses,
    value_loss,
)

F64 = torch.float64
MASK = torch.arange(4) < torch.tensor([3, 2, 4, 1, 3])[:, None]
VALUES = torch.arange(1.0, 21.0).view(5, 4)


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("token-mean", 9.692307),
        ("token-sum", 126),
        ("seq-mean-token-sum", 25.2),
        ("seq-mean-token-sum-norm", 6.3),
        ("seq-mean-token-mean", 9.8),
    ],
)
def test_modes_give_the_checked_values(mode, expected):
    assert aggregate(VALUES, MASK, mode).item() == pytest.approx(expected, abs=1e-6)
    counted = count_valid(MASK)
    assert [count.item() for count in counted] == [13, 5]
    assert aggregate(VALUES, MASK, mode, num_tokens=13, num_sequences=5).item() == pytest.approx(expected, abs=1e-6)
    assert aggregate(
        VALUES, MASK, mode, num_tokens=counted[0], num_sequences=counted[1].float()
    ).item() == pytest.approx(expected, abs=1e-6)


def test_the_fixed_length_replaces_the_padded_width():
    assert aggregate(VALUES, MASK, "seq-mean-token-sum-norm", scale_factor=8).item() == pytest.approx(3.15)
    wide, mask = torch.nn.functional.pad(VALUES, (0, 6)), torch.nn.functional.pad(MASK, (0, 6))
    assert aggregate(wide, mask, "seq-mean-token-sum-norm", scale_factor=4).item() == pytest.approx(6.3)


@pytest.mark.parametrize("mode", AGGREGATION_MODES)
def test_rows_without_tokens_are_no_sequences(mode):
    values = torch.cat([VALUES, torch.full((2, 4), math.nan)])
    mask = torch.cat([MASK, torch.zeros(2, 4, dtype=torch.bool)])
    assert aggregate(values, mask, mode).item() == pytest.approx(aggregate(VALUES, MASK, mode).item())


@pytest.mark.parametrize("mode", AGGREGATION_MODES)
@pytest.mark.parametrize("shape", [(5, 4), (0, 4), (5, 0)])
@pytest.mark.parametrize("counts", [{}, {"num_tokens": 0, "num_sequences": 0}, {"num_tokens": 7, "num_sequences": 2}])
def test_nothing_valid_gives_zero_and_a_zero_gradient(mode, shape, counts):
    """A-117; a micro-batch without a valid token contributes exactly 0 whatever the global counts are."""
    values = torch.full(shape, math.nan, requires_grad=True)
    total = aggregate(values, torch.zeros(shape), mode, **counts)
    assert total.item() == 0.0
    (gradient,) = torch.autograd.grad(total, values)
    assert not gradient.any()


@pytest.mark.parametrize("junk", [math.nan, math.inf])
@pytest.mark.parametrize("mode", AGGREGATION_MODES)
def test_junk_under_the_mask_reaches_neither_value_nor_gradient(mode, junk):
    values = torch.where(MASK, VALUES, junk).requires_grad_()
    total = aggregate(values, MASK, mode)
    assert torch.equal(total, aggregate(VALUES, MASK, mode))
    (gradient,) = torch.autograd.grad(total, values)
    assert torch.isfinite(gradient).all()
    assert not gradient[~MASK].any()
    assert gradient[MASK].all()


def test_unknown_modes_and_unfit_shapes_are_refused():
    """A-124."""
    with pytest.raises(UnknownNameError, match="seq-mean-token-sum-norm"):
        aggregate(VALUES, MASK, "no-such-mode")
    with pytest.raises(ShapeError):
        aggregate(VALUES, MASK[:, :3], "token-mean")
    with pytest.raises(ShapeError, match=r"\(B, R\)"):
        aggregate(VALUES[0], MASK[0], "token-mean")
    with pytest.raises(ArgumentError, match="scale_factor"):
        aggregate(VALUES, MASK, "seq-mean-token-sum-norm", scale_factor=0)


def test_two_micro_batches_of_unlike_size_add_up():
    """H-23: 100 tokens of 2.0 and 900 of .5 are .65."""
    parts = [(torch.full((1, 1000), 2.0), 100), (torch.full((1, 1000), 0.5), 900)]
    masks = [torch.arange(1000)[None] < count for _, count in parts]
    tokens = sum(count_valid(mask)[0] for mask in masks)
    shares = [
        aggregate(values, mask, "token-mean", num_tokens=tokens).item()
        for (values, _), mask in zip(parts, masks, strict=True)
    ]
    assert sum(shares) == pytest.approx(0.65)


SPLITS = {
    "halves": [[0, 1, 2, 3], [4, 5, 6, 7, 8]],
    "rows": [[i] for i in range(9)],
    "uneven": [[8], [1, 0, 7, 2, 5], [6, 3, 4], []],
    "one_rank_without_tokens": [[2], [0, 1, 3, 4, 5, 6, 7, 8]],
}


def ragged(seed=0):
    generator = torch.Generator().manual_seed(seed)
    mask = torch.rand(9, 6, generator=generator) < 0.6
    mask[2] = False

    def floats():
        x = torch.randn(9, 6, generator=generator, dtype=F64)
        return torch.where(mask, x, math.nan)

    log_probs = -floats().abs()
    return log_probs, log_probs + 0.5 * floats(), floats(), mask, floats().exp()


def loss_and_gradient(term, log_probs, mask, mode, parts):
    """Sum over the parts of each part's share, divided by the counts of the whole, and its gradient."""
    num_tokens, num_sequences = count_valid(mask)
    leaf = log_probs.clone().requires_grad_()
    total = torch.zeros((), dtype=F64)
    for rows in parts:
        values = term(leaf[rows], rows)
        total = total + aggregate(values, mask[rows], mode, num_tokens=num_tokens, num_sequences=num_sequences)
    (gradient,) = torch.autograd.grad(total, leaf)
    return total.detach(), gradient


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("mode", AGGREGATION_MODES)
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("name", policy_losses())
def test_every_loss_is_invariant_to_the_split(name, weighted, mode, split):
    """H-23 and H-30: any split over micro-batches and ranks gives the same loss and gradient."""
    log_probs, old, advantages, mask, weights = ragged()
    fn, selector = get_policy_loss(name), get_token_selector(name)
    chosen = None if selector is None else selector(log_probs, advantages, mask)

    def term(part, rows):
        options = {} if chosen is None else {"selected": chosen[rows]}
        return fn(
            part, old[rows], advantages[rows], mask[rows], weights=weights[rows] if weighted else None, **options
        ).loss

    whole = loss_and_gradient(term, log_probs, mask, mode, [list(range(9))])
    for got, expected in zip(loss_and_gradient(term, log_probs, mask, mode, SPLITS[split]), whole, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)
        assert torch.isfinite(got).all()


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("mode", AGGREGATION_MODES)
@pytest.mark.parametrize("term", ["kl", "value"])
def test_kl_and_value_loss_are_invariant_to_the_split(term, mode, split):
    """H-30, its kind: the KL term and the critic's loss go through the same aggregation."""
    log_probs, old, advantages, mask, _ = ragged()
    terms = {
        "kl": lambda part, rows: kl_penalty(part, old[rows], "low_var_kl", mask[rows]),
        "value": lambda part, rows: value_loss(part, advantages[rows], old[rows], mask[rows], 0.2)[0],
    }
    whole = loss_and_gradient(terms[term], log_probs, mask, mode, [list(range(9))])
    for got, expected in zip(loss_and_gradient(terms[term], log_probs, mask, mode, SPLITS[split]), whole, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", policy_losses())
def test_no_loss_reduces_on_its_own(name):
    """H-30: what a loss returns is per token; it has no aggregation mode among its keywords."""
    log_probs, old, advantages, mask, _ = ragged()
    options = {"selected": mask} if "selected" in keywords(get_policy_loss(name)) else {}
    result = get_policy_loss(name)(log_probs, old, advantages, mask, **options)
    assert result.loss.shape == mask.shape
    assert not {"loss_agg_mode", "mode"} & set(keywords(get_policy_loss(name)))


@pytest.mark.parametrize("hidden", [10.0, 1e6, math.nan])
def test_a_sequence_advantage_is_the_mean_over_its_own_tokens(hidden):
    """H-27."""
    advantages = torch.tensor([[1.0, 1.0, hidden, hidden]])
    mask = torch.tensor([[1, 1, 0, 0]])
    assert masked_mean(advantages, mask, dim=-1).tolist() == [1.0]
    geo_mean = get_policy_loss("geo_mean")
    zeros = torch.zeros(1, 4)
    assert geo_mean(zeros, zeros, advantages, mask).loss.tolist() == [[-1.0, -1.0, 0.0, 0.0]]
