"""The GSM8K scorer: 1 where the final number equals the ground truth, else 0."""

from __future__ import annotations

import re
from collections import deque
from decimal import Decimal
from typing import Any, Literal

NUMBER = r"(?:\d{1,3}(?:,\d{2,3})*,\d{3}(?!\d)|\d+)(?:\.\d+)?|\.\d+"
"""Digits, with or without thousands separators (`1,234`, `1,00,000`) and decimals; no full stop behind."""

SIGNED = rf"(?P<sign>[-−–]?)\s?[$€£¥]?(?P<inner>[-−–]?)(?P<number>{NUMBER})"

_STRICT = re.compile(rf"####\s*(?:\\?[$€£¥])?\+?{SIGNED}")
_FLEXIBLE = re.compile(SIGNED)
_WORD_BEFORE = re.compile(r"[\w)\]]\s?$")

Method = Literal["strict", "flexible"]


def parse_number(text: str) -> Decimal | None:
    """Return the value of a text that is one number, or None.

    `18.`, `$18`, `18.00` and `1,800` are numbers: a currency sign, thousands separators, a closing full stop and white
    space do not count.
    """
    match = re.fullmatch(rf"\s*\+?{SIGNED}\.?\s*%?\s*", text)
    return _value(match) if match else None


def _value(match: re.Match[str]) -> Decimal:
    value = Decimal(match["number"].replace(",", ""))
    return -value if match["sign"] or match["inner"] else value


def extract_answer(solution_str: str, method: Method = "strict") -> Decimal | None:
    """Return the number that a solution gives as its answer.

    Args:
        solution_str: the whole response; there is no window at its end.
        method: `strict` takes the number behind the last `####` that has one, `flexible` the last number of the text.

    Returns:
        The number, or None where there is none.

    Raises:
        ValueError: an unknown method.
    """
    if method not in ("strict", "flexible"):
        raise ValueError(f"gsm8k: method must be 'strict' or 'flexible'; got {method!r}")
    found = deque((_STRICT if method == "strict" else _FLEXIBLE).finditer(solution_str), maxlen=1)
    if not found:
        return None
    last = found.pop()
    value = _value(last)
    if method == "flexible" and last["sign"] and _WORD_BEFORE.search(solution_str[: last.start()]):
        # `20 - 2` and `5-2` hold a minus, `is -2` a sign: behind a digit or a bracket it is an operator.
        before = solution_str[: last.start()].rstrip()[-1:]
        if before.isdigit() or before in ")]":
            return abs(value)
    return value


def answer(solution_str: str, method: Method = "strict") -> str:
    """Return the answer in one way of writing it, for votes; empty where there is none."""
    value = extract_answer(solution_str, method)
    return "" if value is None else f"{value.normalize():f}"


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: dict[str, Any] | None = None,
    method: Method = "strict",
) -> float:
    """Score one response.

    Args:
        data_source: not used.
        solution_str: the response's text.
        ground_truth: the right number, as text or number.
        extra_info: not used.
        method: see `extract_answer`.

    Returns:
        1.0 where the numbers are equal, else 0.0.

    Raises:
        ValueError: the ground truth is no number.
    """
    truth = parse_number(str(ground_truth))
    if truth is None:
        raise ValueError(f"gsm8k: ground_truth must be a number; got {ground_truth!r}")
    return 1.0 if extract_answer(solution_str, method) == truth else 0.0
