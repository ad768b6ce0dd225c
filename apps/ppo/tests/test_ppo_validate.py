"""Validation statistics against loops over all draws."""

from __future__ import annotations

import itertools
import time
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ostinato.ppo.validate import best_of, by_prompt, draw_counts, majority_of, prompt_statistics, validation_metrics

SCORES = st.lists(st.floats(-5, 5, width=16), min_size=1, max_size=4)


def expected(values: list[float], n: int) -> float:
    """The mean of `max` over all N^n draws with replacement."""
    return float(np.mean([max(draw) for draw in itertools.product(values, repeat=n)]))


def expected_vote(scores: list[float], answers: list[int], n: int) -> float:
    """The mean score of the winner over all draws, a tie broken evenly."""
    mean = {answer: np.mean([s for s, a in zip(scores, answers, strict=True) if a == answer]) for answer in answers}
    total = 0.0
    for draw in itertools.product(answers, repeat=n):
        counts = Counter(draw)
        winners = [answer for answer in counts if counts[answer] == max(counts.values())]
        total += float(np.mean([mean[answer] for answer in winners]))
    return total / len(answers) ** n


def test_best_of_has_the_checked_value():
    """2 of 4 right: best@4 = .9375."""
    assert best_of(np.asarray([[1.0, 0.0, 0.0, 1.0]]), 4).tolist() == [0.9375]


@given(SCORES, st.integers(1, 5))
def test_best_and_worst_equal_the_loop_over_all_draws(scores: list[float], n: int):
    row = np.asarray([scores])
    assert best_of(row, n)[0] == pytest.approx(expected(scores, n), abs=1e-9)
    assert -best_of(-row, n)[0] == pytest.approx(-expected([-score for score in scores], n), abs=1e-9)


@settings(deadline=None)
@given(st.data(), st.integers(1, 5), st.integers(1, 5))
def test_vote_equals_the_loop_over_all_draws(data: st.DataObject, n_all: int, n: int):
    scores = data.draw(st.lists(st.floats(-5, 5, width=16), min_size=n_all, max_size=n_all))
    answers = data.draw(st.lists(st.integers(0, 3), min_size=n_all, max_size=n_all))
    found = majority_of(np.asarray([scores]), np.asarray([answers]), [n])[n][0]
    assert found == pytest.approx(expected_vote(scores, answers, n), abs=1e-9)


def test_vote_of_one_draw_is_the_mean_and_of_many_the_plurality():
    scores, answers = np.asarray([[1.0, 1.0, 1.0, 0.0, 0.0]]), np.asarray([[4, 4, 4, 1, 2]])
    found = majority_of(scores, answers, [1, 5, 60])
    assert found[1][0] == pytest.approx(0.6)
    assert found[1][0] < found[5][0] < found[60][0]
    assert found[60][0] > 0.99


def test_statistics_of_a_prompt_have_their_names():
    names = list(prompt_statistics(np.ones((2, 6)), np.zeros((2, 6), dtype=np.int64)))
    assert names == ["mean@6", "std@6", *(f"{kind}@{n}" for n in (2, 4, 6) for kind in ("best", "worst")),
                     "maj@2", "maj@4", "maj@6"]  # fmt: skip
    assert list(prompt_statistics(np.ones((2, 1)))) == ["mean@1"]


@pytest.mark.parametrize(
    ("n_all", "draws"), [(2, [2]), (3, [2, 3]), (4, [2, 4]), (16, [2, 4, 8, 16]), (17, [2, 4, 8, 16, 17])]
)
def test_draw_counts_are_powers_of_two_and_all(n_all: int, draws: list[int]):
    assert draw_counts(n_all) == draws


def test_answers_are_grouped_by_prompt_whatever_their_order():
    found = by_prompt(np.asarray([2, 0, 2, 1, 0]))
    assert [rows.tolist() for rows in found] == [[[3]], [[1, 4], [0, 2]]]


def test_metrics_have_the_fields_names_and_weights():
    metrics = validation_metrics(
        ["gsm8k"] * 4 + ["math"] * 2,
        ["a", "b", "a", "b", "c", "c"],
        {"reward": [1, 0, 0, 0, 1, 1], "acc": [np.nan] * 4 + [0, 1], "len": [3, 4, 5, 6, np.nan, 8]},
        ["7", "8", "9", "8", "x", "x"],
    )
    assert {name: metric.value for name, metric in metrics.items() if name.startswith("val-core/")} == pytest.approx(
        {
            "val-core/gsm8k/reward/mean@2": 0.25, "val-core/gsm8k/reward/best@2": 0.375,
            "val-core/gsm8k/reward/maj@2": 0.25,
            "val-core/math/acc/mean@2": 0.5, "val-core/math/acc/best@2": 0.75, "val-core/math/acc/maj@2": 0.5,
        }
    )  # fmt: skip
    assert metrics["val-core/gsm8k/reward/mean@2"].weight == 2
    assert metrics["val-aux/gsm8k/len/mean@2"].value == 4.5
    assert metrics["val-aux/gsm8k/reward/std@2"].value == 0.25
    assert metrics["val-aux/math/reward/worst@2"].value == 1
    assert "val-aux/math/len/mean@2" not in metrics  # a prompt with an answer that lacks it is left out
    assert "val-aux/gsm8k/acc/mean@2" not in metrics


def test_one_answer_a_prompt_gives_the_mean_alone():
    metrics = validation_metrics(["s"] * 3, [0, 1, 2], {"reward": [1, 0, 0]})
    assert {name: metric.value for name, metric in metrics.items()} == {
        "val-core/s/reward/mean@1": pytest.approx(1 / 3)
    }


def test_no_answers_give_no_metrics():
    assert validation_metrics([], [], {"reward": []}) == {}


def test_a_whole_validation_takes_well_under_a_second():
    rng = np.random.default_rng(0)
    prompts, n_all = 1319, 16
    scores = (rng.random((prompts, n_all)) < rng.random((prompts, 1))).astype(float)
    answers = np.where(scores > 0, 0, rng.integers(1, 12, (prompts, n_all)))
    start = time.perf_counter()
    metrics = validation_metrics(
        ["s"] * scores.size,
        np.repeat(np.arange(prompts), n_all).tolist(),
        {"reward": scores.reshape(-1)},
        answers.reshape(-1).tolist(),
    )
    assert time.perf_counter() - start < 30  # .2 s on an idle core; a bootstrap takes minutes
    assert metrics["val-core/s/reward/mean@16"].value == pytest.approx(scores.mean())
    assert metrics["val-core/s/reward/maj@16"].value > scores.mean()
