from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from ostinato.rollout import SamplingParams
from ostinato.rollout.sampling import draw, sample, token_filter
from ostinato.rollout.seeding import row_uniforms


def test_log_prob_is_of_the_temperature_scaled_distribution():
    """H-47: logits 1 0 -1, T .5, token 1: -2.1429, not the -2.8152 of a divided T=1 value."""
    logits = torch.tensor([[1.0, 0.0, -1.0]])
    # The shares are .867, .117, .016: a uniform number of .9 picks token 1.
    tokens, log_probs = sample(logits, torch.tensor([0.9], dtype=torch.float64), SamplingParams(temperature=0.5))
    assert tokens.tolist() == [1]
    assert log_probs.item() == pytest.approx(-2.1429, abs=5e-5)


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_log_prob_equals_log_softmax(temperature, dtype):
    logits = (torch.randn(40, 50, generator=torch.Generator().manual_seed(0)) * 3).to(dtype)
    uniforms = torch.from_numpy(row_uniforms(0, 0, np.arange(40), 0, 1)[:, 0])
    tokens, log_probs = sample(logits, uniforms, SamplingParams(temperature=temperature))
    expected = (logits.double() / temperature).log_softmax(-1).gather(-1, tokens[:, None]).squeeze(-1)
    assert log_probs.dtype == torch.float32
    torch.testing.assert_close(log_probs.double(), expected, atol=1e-5, rtol=1e-6)


def test_draw_inverts_the_cumulative_distribution():
    shares = torch.tensor([[0.0, 0.25, 0.0, 0.5, 0.25, 0.0]])
    for u, token in ((1e-16, 1), (0.2499, 1), (0.2501, 3), (0.7499, 3), (0.7501, 4), (1 - 2.0**-53, 4)):
        assert draw(shares.log(), torch.tensor([u], dtype=torch.float64)).tolist() == [token]


@pytest.mark.parametrize("only", [0, 3, 6])
def test_draw_never_takes_a_masked_token(only):
    logits = torch.full((1, 7), -math.inf)
    logits[0, only] = -1e4
    for u in (1e-300, 0.5, 1 - 2.0**-53):
        assert draw(logits, torch.tensor([u], dtype=torch.float64)).tolist() == [only]


def test_draw_follows_the_distribution():
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0, -3.0])
    rows = 20000
    uniforms = torch.from_numpy(row_uniforms(1, 2, np.arange(rows), 0, 1)[:, 0])
    counts = torch.bincount(draw(logits.expand(rows, -1), uniforms), minlength=5)
    expected = logits.softmax(-1) * rows
    assert float(((counts - expected) ** 2 / expected).sum()) < 18.5  # 4 degrees of freedom, p of about 0.001


def test_greedy_needs_no_numbers_and_gives_log_probs():
    logits = torch.tensor([[1.0, 3.0, 2.0]])
    tokens, log_probs = sample(logits, None, SamplingParams(temperature=0))
    assert tokens.tolist() == [1]
    assert log_probs.item() == pytest.approx(float(logits.log_softmax(-1)[0, 1]))


@pytest.mark.parametrize(
    ("keys", "kept"),
    [({"top_k": 2}, [0, 1]), ({"top_p": 0.6}, [0, 1]), ({"min_p": 0.3}, [0, 1]), ({"top_k": 3, "top_p": 0.2}, [0])],
)
def test_restrictions_limit_what_is_drawn_and_not_the_log_prob(keys, kept):
    logits = torch.tensor([[2.0, 1.5, 0.0, -1.0]])
    sampling = SamplingParams(**keys)
    restrict = token_filter(sampling)
    assert restrict is not None
    assert restrict(logits).isfinite().nonzero()[:, 1].tolist() == kept
    for u in np.linspace(0.001, 0.999, 40):
        tokens, log_probs = sample(logits, torch.tensor([u]), sampling, restrict)
        assert tokens.item() in kept
        assert log_probs.item() == pytest.approx(float(logits.log_softmax(-1)[0, tokens.item()]), abs=1e-6)


def test_no_restriction_no_filter():
    assert token_filter(SamplingParams()) is None
    assert token_filter(SamplingParams(top_k=0)) is None
    assert token_filter(SamplingParams(temperature=0, top_p=0.5)) is None


def test_nan_logits_give_nan_log_probs():
    logits = torch.tensor([[float("nan")] * 3, [0.0, 1.0, 2.0]])
    tokens, log_probs = sample(logits, torch.tensor([0.5, 0.5], dtype=torch.float64), SamplingParams())
    assert bool((tokens < 3).all())
    assert log_probs.isnan().tolist() == [True, False]
