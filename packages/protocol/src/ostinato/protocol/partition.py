"""Splits of ragged rows: parts of equal cost, and micro-batches under a token budget.

Everything here is a function of its arguments alone: every rank that asks gets the same answer.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left, insort
from collections.abc import Sequence

import numpy as np
import torch

from ostinato.protocol.errors import ArgumentError
from ostinato.protocol.rows import chunk_bounds, whole_number


def balanced_partition(costs: Sequence[float], k: int, sizes: Sequence[int] | None = None) -> list[list[int]]:
    """Split rows into k parts of prescribed sizes whose summed costs are as close as a greedy search gets them.

    Rows go from the dearest to the cheapest, each to the lightest part that has room; then the heaviest part swaps rows
    with lighter ones as long as that makes it lighter.

    Args:
        costs: cost of each row (tokens, or seconds), finite, >= 0.
        k: number of parts, at least 1.
        sizes: rows of each part, k of them, summing to the number of rows; None is equal sizes to within one, the
            longer parts first, as `chunk` cuts.

    Returns:
        k lists of row numbers in ascending order; together they hold each row once. Part i has sizes[i] rows.

    Raises:
        ArgumentError: a cost is negative or not finite, or sizes do not fit.
    """
    cost = _numbers("balanced_partition", "costs", costs)
    k = whole_number("balanced_partition", "k", k, 1)
    if sizes is None:
        sizes = [stop - start for start, stop in chunk_bounds(len(cost), k)]
    sizes = [whole_number("balanced_partition", "each of sizes", size, 0) for size in sizes]
    if len(sizes) != k or sum(sizes) != len(cost):
        raise ArgumentError(
            f"balanced_partition: sizes must be {k} numbers that sum to the {len(cost)} rows, got {sizes}, which are "
            f"{len(sizes)} and sum to {sum(sizes)}"
        )
    parts: list[list[int]] = [[] for _ in range(k)]
    heap = [(0.0, i) for i, size in enumerate(sizes) if size]
    for row in np.argsort(-cost, kind="stable").tolist():
        load, i = heapq.heappop(heap)
        parts[i].append(row)
        if len(parts[i]) < sizes[i]:
            heapq.heappush(heap, (load + float(cost[row]), i))
    _swap(cost, parts)
    return [sorted(part) for part in parts]


def _swap(cost: np.ndarray, parts: list[list[int]]) -> None:
    """Swap single rows out of the heaviest part while that makes it lighter; changes `parts`."""
    loads = np.array([cost[part].sum() for part in parts])
    for _ in range(4 * len(parts)):
        heavy = int(loads.argmax())
        for light in np.argsort(loads, kind="stable").tolist():
            gap = loads[heavy] - loads[light]
            pair = _best_pair(cost, parts[heavy], parts[light], gap)
            if pair is not None:
                break
        else:
            return
        a, b = pair
        mine, theirs = parts[heavy][a], parts[light][b]
        parts[heavy][a], parts[light][b] = theirs, mine
        loads[heavy], loads[light] = cost[parts[heavy]].sum(), cost[parts[light]].sum()


def _best_pair(cost: np.ndarray, heavy: list[int], light: list[int], gap: float) -> tuple[int, int] | None:
    """Places of the two rows whose swap brings two parts closest; None where none makes the heavier one lighter."""
    if gap <= 0 or not heavy or not light:
        return None
    mine, theirs = cost[heavy], cost[light]
    order = np.argsort(theirs, kind="stable")
    wanted = mine - gap / 2  # the partner that would level both
    right = np.searchsorted(theirs[order], wanted)
    near = np.stack([np.clip(right - 1, 0, len(light) - 1), np.clip(right, 0, len(light) - 1)])
    moved = mine - theirs[order][near]
    left = np.where((moved > gap * 1e-9) & (moved < gap), np.abs(moved - gap / 2), np.inf)
    best = int(left.argmin())
    side, a = divmod(best, len(heavy))
    return None if math.isinf(left[side, a]) else (a, int(order[near[side, a]]))


def token_budget_micro_batches(lengths: Sequence[int], max_tokens: int, *, min_count: int = 1) -> list[list[int]]:
    """Split rows into few micro-batches of at most `max_tokens` tokens each, of about equal size.

    Best-fit decreasing says how many are needed; the same number is then filled evenly, if that keeps the budget.

    Args:
        lengths: tokens of each row, >= 0.
        max_tokens: budget, at least 1. A row longer than that is a micro-batch of its own.
        min_count: return at least so many, some without rows where there are fewer rows; ranks that must run equally
            many micro-batches ask again with the largest number over ranks.

    Returns:
        Lists of row numbers in ascending order, longest micro-batch first; together they hold each row once.

    Raises:
        ArgumentError: an argument is out of range.
    """
    tokens = _numbers("token_budget_micro_batches", "lengths", lengths)
    budget = whole_number("token_budget_micro_batches", "max_tokens", max_tokens, 1)
    min_count = whole_number("token_budget_micro_batches", "min_count", min_count, 1)
    alone = [[int(row)] for row in np.flatnonzero(tokens > budget)]
    order = [row for row in np.argsort(-tokens, kind="stable").tolist() if tokens[row] <= budget]
    packed = _best_fit(tokens, order, budget)
    count = max(len(packed), min(min_count - len(alone), len(order)))
    even = _lightest_first(tokens, order, count)
    batches = alone + (even if all(tokens[batch].sum() <= budget for batch in even) else packed)
    while len(batches) < min_count and any(len(batch) > 1 for batch in batches):
        longest = max(
            (batch for batch in batches if len(batch) > 1), key=lambda batch: (tokens[batch].sum(), -batch[0])
        )
        batches.remove(longest)
        batches += _lightest_first(tokens, longest, 2)
    batches = sorted((sorted(batch) for batch in batches), key=lambda batch: (-tokens[batch].sum(), batch))
    return batches + [[] for _ in range(min_count - len(batches))]


def _best_fit(tokens: np.ndarray, order: list[int], budget: int) -> list[list[int]]:
    """Each row into the fullest micro-batch that still has room for it."""
    batches: list[list[int]] = []
    room: list[tuple[float, int]] = []
    for row in order:
        need = float(tokens[row])
        place = bisect_left(room, (need, -1))
        if place == len(room):
            left, i = float(budget), len(batches)
            batches.append([])
        else:
            left, i = room.pop(place)
        batches[i].append(row)
        insort(room, (left - need, i))
    return batches


def _lightest_first(tokens: np.ndarray, order: list[int], count: int) -> list[list[int]]:
    """Each row, longest first, into the micro-batch that is shortest so far, of those the one with fewest rows."""
    batches: list[list[int]] = [[] for _ in range(count)]
    heap = [(0.0, 0, i) for i in range(count)]
    for row in order:
        load, rows, i = heapq.heappop(heap)
        batches[i].append(row)
        heapq.heappush(heap, (load + float(tokens[row]), rows + 1, i))
    return batches


def _numbers(where: str, name: str, values: Sequence[float]) -> np.ndarray:
    given = values.detach().double().cpu().numpy() if isinstance(values, torch.Tensor) else values
    try:
        numbers = np.asarray(given, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise ArgumentError(f"{where}: {name} must be a 1-D list of numbers, got {values!r}") from error
    if numbers.ndim != 1 or not np.isfinite(numbers).all() or (numbers < 0).any():
        raise ArgumentError(f"{where}: {name} must be a 1-D list of finite numbers >= 0, got {values!r}")
    return numbers
