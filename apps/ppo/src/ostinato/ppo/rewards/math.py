r"""The MATH scorer: 1 where the last closed `\boxed{}` equals the ground truth by math-verify's rules, else 0."""

from __future__ import annotations

import logging
import re
from functools import cache
from typing import Any

_BRACES = re.compile(r"(?P<box>\\(?:boxed|fbox)\s*\{)|\\.|(?P<open>\{)|(?P<close>\})", re.DOTALL)
_THIN_SPACE = re.compile(r"(?<=\d)\\[,! ](?=\d{3}(?!\d))")
_PLAIN_NUMBER = re.compile(r"[-+]?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d*)?|[-+]?\.\d+")


def last_boxed(text: str) -> str | None:
    r"""Return what stands in the last closed `\boxed{}` of a text.

    A box whose brace never closes is no answer; of nested boxes the innermost of the last one counts. Escaped
    braces are text.

    Returns:
        The content, stripped, or None where there is no closed box.
    """
    opened: list[int | None] = []  # for each brace that is open: where its box begins, None for a plain brace
    start, content = -1, None
    for match in _BRACES.finditer(text):
        if match["box"]:
            opened.append(match.end())
        elif match["open"]:
            opened.append(None)
        elif match["close"] and opened:
            box = opened.pop()
            if box is not None and box > start:
                start, content = box, text[box : match.start()].strip()
    return content


def answer(solution_str: str) -> str:
    """Return the answer as it is written, for votes; empty where there is none."""
    return last_boxed(solution_str) or ""


def prepare() -> None:
    """Import what scoring needs, so that no row's time limit pays for it."""
    _parse("1")


@cache
def _library() -> tuple[Any, Any, list[Any]]:
    import math_verify
    from math_verify import ExprExtractionConfig, LatexExtractionConfig

    # It warns that its own signal-based limits are off. They are: the pool that runs the scorer has the limit.
    for name in ("math_verify.parser", "math_verify.grader"):
        logging.getLogger(name).setLevel(logging.ERROR)
    return math_verify.parse, math_verify.verify, [LatexExtractionConfig(), ExprExtractionConfig()]


def _parse(answer: str) -> list[Any]:
    parse, _, configs = _library()
    return parse(f"\\boxed{{{_THIN_SPACE.sub('', answer)}}}", extraction_config=configs, parsing_timeout=None)


def is_equal(answer: str, truth: str) -> bool:
    r"""Tell whether two answers, in LaTeX or plain, are the same value by math-verify's rules.

    `1,234` = `1234`, `5.0` = `5`, `\frac34` = `\frac{3}{4}` = `0.75`, `(1,2)` = `(1, 2)`; order counts in tuples only.
    """
    if not answer:
        return False
    if answer == truth:
        return True
    if _PLAIN_NUMBER.fullmatch(answer) and _PLAIN_NUMBER.fullmatch(truth):
        from decimal import Decimal

        return Decimal(answer.replace(",", "")) == Decimal(truth.replace(",", ""))
    _, verify, _ = _library()
    return bool(verify(_parse(truth), _parse(answer), timeout_seconds=None))


def compute_score(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any] | None = None
) -> float:
    r"""Score one response.

    Args:
        data_source: not used.
        solution_str: the response's text.
        ground_truth: the right answer, bare or within `\boxed{}`.
        extra_info: not used.

    Returns:
        1.0 where the last closed box equals the ground truth, else 0.0.
    """
    answer = last_boxed(solution_str)
    if answer is None:
        return 0.0
    truth = str(ground_truth)
    boxed = last_boxed(truth)
    return float(is_equal(answer, (truth if boxed is None else boxed).strip().strip("$").strip()))
