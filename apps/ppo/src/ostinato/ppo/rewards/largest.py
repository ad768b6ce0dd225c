"""The scorer of the shipped toy task: name the largest of some digits."""

from __future__ import annotations

import re
from typing import Any


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any] | None = None
) -> dict[str, float]:
    """Score an answer: 1 where it is the digit and nothing else, half where the right digit is only named first.

    Args:
        data_source: not used; every scorer has it.
        solution_str: the response, end token left out.
        ground_truth: the largest digit.
        extra_info: not used.

    Returns:
        `score` in {0, .5, 1} and `acc`, 1 where the answer is exact, else 0.
    """
    exact = solution_str.strip() == ground_truth
    first = re.search(r"\d", solution_str)
    named = first is not None and first[0] == ground_truth
    return {"score": 1.0 if exact else 0.5 * named, "acc": float(exact)}
