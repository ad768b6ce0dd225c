"""Validation statistics: what N answers to each prompt say about one answer, the best of n, and a vote of n.

All of them are expectations in closed form over n draws with replacement from a prompt's N answers; nothing is sampled.
Pure functions over arrays, one row a prompt.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import numpy as np

from ostinato.protocol import Metric

SCORE = "reward"
"""Name of the variable that the score itself is."""


def validation_metrics(
    data_sources: Sequence[Hashable],
    uids: Sequence[Hashable],
    variables: Mapping[str, Any],
    predictions: Sequence[Any] | None = None,
) -> dict[str, Metric]:
    """Return `val-core|val-aux/{data_source}/{variable}/{statistic}` over all answers of a validation.

    `val-core` are mean@N, best@N and maj@N of a data source's main variable: `acc` where it has one, else the score.

    Args:
        data_sources: (A,) of each answer.
        uids: (A,) which prompt each answers.
        variables: name -> (A,) numbers; one of them is the score, `reward`. NaN marks answers without the variable:
            a prompt with such an answer is left out for that variable.
        predictions: (A,) what each answer says (any hashable, None where it says nothing), for maj@n; None leaves the
            votes out.

    Returns:
        Means over prompts, weighted by their number.
    """
    sources, prompts = label_index(data_sources), label_index(uids)
    votes = None if predictions is None else label_index([str(prediction) for prediction in predictions])
    columns = {name: np.asarray(values, dtype=np.float64) for name, values in variables.items()}
    metrics: dict[str, Metric] = {}
    for number, source in enumerate(dict.fromkeys(data_sources)):
        rows = np.flatnonzero(sources == number)
        core = "acc" if "acc" in columns and np.isfinite(columns["acc"][rows]).any() else SCORE
        for name, values in columns.items():
            for order in by_prompt(prompts[rows]):
                scores = values[rows][order]
                whole = np.isfinite(scores).all(axis=1)
                if not whole.any():
                    continue
                answers = None if votes is None else votes[rows][order][whole]
                metrics |= _named(f"{source}/{name}", name == core, prompt_statistics(scores[whole], answers))
    return metrics


def _named(name: str, is_core: bool, statistics: Mapping[str, np.ndarray]) -> dict[str, Metric]:
    """The means over prompts under their full names."""
    most = max(int(key.partition("@")[2]) for key in statistics)
    named = {}
    for key, values in statistics.items():
        core = is_core and key in (f"mean@{most}", f"best@{most}", f"maj@{most}")
        named[f"val-{'core' if core else 'aux'}/{name}/{key}"] = Metric.mean(values.mean(), weight=len(values))
    return named


def label_index(labels: Sequence[Hashable]) -> np.ndarray:
    """Number labels in the order of their first appearance; returns (len(labels),) int64."""
    numbers: dict[Hashable, int] = {}
    return np.asarray([numbers.setdefault(label, len(numbers)) for label in labels], dtype=np.int64)


def by_prompt(prompts: np.ndarray) -> list[np.ndarray]:
    """Sort answers by prompt.

    Args:
        prompts: (A,) int64, which prompt each answer belongs to.

    Returns:
        One (prompts, N) int64 array of places in `prompts` for each number N of answers that occurs, the answers of a
        prompt in their order.
    """
    order = np.argsort(prompts, kind="stable")
    _, counts = np.unique(prompts, return_counts=True)
    starts = np.cumsum(counts) - counts
    return [order[starts[counts == n][:, None] + np.arange(n)] for n in np.unique(counts)]


def prompt_statistics(scores: np.ndarray, answers: np.ndarray | None = None) -> dict[str, np.ndarray]:
    """Return the statistics of each prompt.

    Args:
        scores: (P, N) float64, the scores of N answers to each of P prompts.
        answers: (P, N) int64, equal numbers for answers that say the same; None leaves the votes out.

    Returns:
        Name -> (P,): mean@N, std@N (of the N scores, ddof 0), and for n = 2, 4, … and N: best@n, worst@n, maj@n. With
        N = 1 only mean@1.
    """
    n_all = scores.shape[1]
    statistics = {f"mean@{n_all}": scores.mean(1)}
    if n_all == 1:
        return statistics
    statistics[f"std@{n_all}"] = scores.std(1)
    draws = draw_counts(n_all)
    for n in draws:
        statistics[f"best@{n}"] = best_of(scores, n)
        statistics[f"worst@{n}"] = -best_of(-scores, n)
    if answers is not None:
        statistics |= {f"maj@{n}": value for n, value in majority_of(scores, answers, draws).items()}
    return statistics


def draw_counts(n_all: int) -> list[int]:
    """2, 4, 8, … below N, and N."""
    return [*(2**power for power in range(1, n_all.bit_length()) if 2**power < n_all), n_all]


def best_of(scores: np.ndarray, n: int) -> np.ndarray:
    """Return the expected best of n draws with replacement: Σ x_i [(i/N)^n − ((i−1)/N)^n] over sorted scores.

    Args:
        scores: (P, N) float64.
        n: draws.

    Returns:
        (P,) float64.
    """
    n_all = scores.shape[1]
    at_most = (np.arange(n_all + 1) / n_all) ** n
    return np.sort(scores, axis=1) @ np.diff(at_most)


def majority_of(scores: np.ndarray, answers: np.ndarray, draws: Sequence[int]) -> dict[int, np.ndarray]:
    """Return the expected score of the answer that most of n draws with replacement give; a tie is broken evenly.

    The score of an answer is the mean over those that say the same. The draws of the K different answers are
    multinomial: with p_k = c_k/N, the chance that the largest count is m and a set T reaches it is the coefficient
    n! [xⁿ] Π_{k∈T} (p_k x)^m/m! · Π_{k∉T} Σ_{i<m} (p_k x)^i/i!. The sum over sets is taken one answer after the other,
    keeping the number of winners and the sum of their scores.

    Args:
        scores: (P, N) float64.
        answers: (P, N) int64, equal numbers for answers that say the same.
        draws: the n's.

    Returns:
        n -> (P,) float64.
    """
    shares, values = _answer_table(scores, answers)
    # Prompts often show the same picture (10 of one right answer, 6 others): each picture is worked out once.
    table, inverse = np.unique(np.concatenate([shares, values], 1), axis=0, return_inverse=True)
    half, most = shares.shape[1], max(draws)
    expected = _expected_vote(table[:, :half] / scores.shape[1], table[:, half:], most)
    return {n: expected[:, n][inverse.reshape(-1)] for n in draws}


def _answer_table(scores: np.ndarray, answers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Counts and mean scores (P, N) of each prompt's different answers, most frequent first; unused places hold 0."""
    num_prompts, n_all = answers.shape
    same = answers[:, :, None] == answers[:, None, :]
    first = same.argmax(2) == np.arange(n_all)
    counts = np.where(first, same.sum(2), 0)
    means = np.where(first, (same * scores[:, None, :]).sum(2) / same.sum(2), 0.0)
    order = np.lexsort((-means, -counts), axis=1)
    rows = np.arange(num_prompts)[:, None]
    return counts[rows, order].astype(np.float64), means[rows, order]


def _expected_vote(shares: np.ndarray, values: np.ndarray, most: int) -> np.ndarray:
    """Expected score of the winner for 0..most draws, (P, most + 1).

    Args:
        shares: (P, K) chance of each answer; 0 where there is none.
        values: (P, K) score of each answer.
        most: draws.
    """
    num_prompts, num_answers = shares.shape
    factorial = np.asarray([math.factorial(i) for i in range(most + 1)], dtype=np.float64)
    # terms[:, k, i] = p_k^i / i!, the weight of drawing answer k exactly i times
    terms = shares[:, :, None] ** np.arange(most + 1) / factorial
    lag = np.arange(most + 1)[:, None] - np.arange(most + 1)
    expected = np.zeros((num_prompts, most + 1))
    for top in range(1, most + 1):
        ties = most // top
        weight = np.zeros((num_prompts, most + 1, ties + 1))  # by draws used and winners so far
        weight[:, 0, 0] = 1.0
        total = np.zeros_like(weight)  # the same, times the sum of the winners' scores
        for k in range(num_answers):
            if not shares[:, k].any():
                break
            below = np.where((lag >= 0) & (lag < top), terms[:, k][:, np.abs(lag)], 0.0)
            win = terms[:, k, top, None, None]
            new_weight, new_total = below @ weight, below @ total
            used, fewer = slice(top, None), slice(0, most + 1 - top)
            new_weight[:, used, 1:] += win * weight[:, fewer, :-1]
            new_total[:, used, 1:] += win * (total[:, fewer, :-1] + values[:, k, None, None] * weight[:, fewer, :-1])
            weight, total = new_weight, new_total
        expected += total[:, :, 1:] @ (1.0 / np.arange(1, ties + 1))
    return expected * factorial
