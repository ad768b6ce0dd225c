"""The GSM8K and MATH scorers."""

from __future__ import annotations

import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ostinato.ppo.rewards import gsm8k, math


def gsm(text: str, truth: Any, **kwargs: Any) -> float:
    return gsm8k.compute_score("openai/gsm8k", text, truth, **kwargs)


@pytest.mark.parametrize(
    "text",
    ["#### 18", "####18", "#### 18.", "#### $18", "#### 18.00", "#### \\$18", "so\n#### 18\nand more words",
     "#### 18 apples",     "#### 3 then #### 18", "#### 18 " + "and on " * 2000, "#### +18", "#### 18 ####"],
)  # fmt: skip
def test_gsm8k_strict_takes_the_last_marked_number(text: str):
    """R-306: equal numbers written otherwise; no window at the end."""
    assert gsm(text, "18") == 1.0


@pytest.mark.parametrize(
    "text", ["the answer is 18", "18", "#### ", "", "#### eighteen", "#### 18 then #### 3", "#### 181"]
)
def test_gsm8k_strict_wants_the_marked_form(text: str):
    assert gsm(text, "18") == 0.0


@pytest.mark.parametrize(
    ("text", "truth"),
    [("#### 1,234", "1234"), ("#### 1234", "1,234"), ("#### .5", "0.5"), ("#### 0.50", ".5"), ("#### -5", "-5"),
     ("#### -$5", "-5"), ("#### $-5", "-5"), ("#### −5", "-5"), ("#### 1,234,567.50", "1234567.5"), ("#### 18", 18),
     ("#### 18", 18.0), ("#### 18", "$18.00")],
)  # fmt: skip
def test_gsm8k_equal_numbers_count_as_equal(text: str, truth: Any):
    assert gsm(text, truth) == 1.0


def test_gsm8k_sign_counts():
    assert gsm("#### -5", "5") == 0.0
    assert gsm("#### 5", "-5") == 0.0


@pytest.mark.parametrize(
    ("text", "answer"),
    [("the answer is 18", 18), ("20 - 2 = 18.", 18), ("it costs $1,234.", 1234), ("so x = -2", -2), ("7-5", 5),
     ("(3) - 4", 4), ("first 1, 2, then 3", 3), ("no number", None), ("#### 18", 18)],
)  # fmt: skip
def test_gsm8k_flexible_takes_the_last_number(text: str, answer: float | None):
    assert gsm8k.extract_answer(text, "flexible") == answer


def test_gsm8k_form_can_be_chosen():
    """H-33: a right answer in another form gets 1 with `method=flexible`, 0 with strict."""
    assert gsm("the answer is 18", "18", method="flexible") == 1.0
    assert gsm("the answer is 18", "18") == 0.0
    with pytest.raises(ValueError, match="'strict' or 'flexible'; got 'lenient'"):
        gsm("18", "18", method="lenient")


def test_gsm8k_refuses_a_ground_truth_that_is_no_number():
    with pytest.raises(ValueError, match="ground_truth must be a number; got 'yes'"):
        gsm("#### 18", "yes")


@given(number=st.integers(-(10**9), 10**9))
def test_gsm8k_any_integer_is_found_however_written(number: int):
    for form in (f"#### {number}", f"####{number:,}", f"#### {number}.00 coins"):
        assert gsm(form, str(number)) == 1.0
    assert gsm(f"#### {number}", str(number + 1)) == 0.0


@given(st.text(alphabet="#$ -.,0123456789ab\n", max_size=60))
def test_gsm8k_takes_any_text(text: str):
    for method in ("strict", "flexible"):
        assert gsm(text, "3", method=method) in (0.0, 1.0)


def test_gsm8k_long_texts_cost_linear_time():
    start = time.monotonic()
    for text in ("#" * 10**6, "1," * 10**6, "#### " + " " * 10**6, "-" * 10**6):
        for method in ("strict", "flexible"):
            gsm(text, "3", method=method)
    assert time.monotonic() - start < 60  # quadratic time would be hours


@pytest.mark.parametrize(
    ("text", "content"),
    [(r"\boxed{3} and \boxed{5}", "5"), (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"), (r"\boxed{3} then \boxed{5", "3"),
     (r"\boxed{5", None), ("5", None), (r"\boxed{\boxed{7}}", "7"), (r"\boxed{\left\{1\right.}", r"\left\{1\right."),
     (r"\fbox{4}", "4"), (r"\boxed { 4 }", "4"), (r"{\boxed{1}} }", "1"), (r"\boxed{}", "")],
)  # fmt: skip
def test_math_takes_the_last_closed_box(text: str, content: str | None):
    """R-311: the last; one that never closes is no answer."""
    assert math.last_boxed(text) == content


def test_math_unclosed_boxes_cost_linear_time():
    start = time.monotonic()
    assert math.last_boxed("\\boxed{" * 10**5) is None
    assert time.monotonic() - start < 60


@pytest.mark.parametrize(
    ("answer", "truth"),
    [(r"\frac34", r"\frac{3}{4}"), (r"\dfrac{3}{4}", "0.75"), (r"\tfrac34", "3/4"), (r"\sqrt2", r"\sqrt{2}"),
     ("1,234", "1234"), ("1{,}234", "1234"), (r"10\,000", "10000"), ("5.0", "5"), (r"\frac{2}{4}", r"\frac12"),
     ("2/4", "1/2"),     ("x^2+1", "1+x^2"), ("(1,2)", "(1, 2)"), (r"\text{yes}", "yes"), ("x=5", "5"), (r"$5$", "5"),
     (r"\{1,2\}", r"\{2,1\}"), (r"90^\circ", "90")],
)  # fmt: skip
def test_math_equal_answers_count_as_equal(answer: str, truth: str):
    """H-34, R-312: shorthands, separators, decimals and unreduced fractions."""
    assert math.compute_score("math", rf"so \boxed{{{answer}}}.", truth) == 1.0


@pytest.mark.parametrize(
    ("answer", "truth"), [("3", "5"), ("(2,1)", "(1,2)"), ("", "5"), ("-5", "5"), (r"\frac43", r"\frac34")]
)
def test_math_other_answers_do_not(answer: str, truth: str):
    assert math.compute_score("math", rf"\boxed{{{answer}}}", truth) == 0.0


def test_math_no_box_or_an_open_one_scores_zero():
    assert math.compute_score("math", "it is 5", "5") == 0.0
    assert math.compute_score("math", r"\boxed{5", "5") == 0.0


def test_math_ground_truth_may_be_boxed():
    """H-32: an answer is extracted once, whether or not the truth stands in a box itself."""
    for truth in ("5", r"\boxed{5}", "$5$"):
        assert math.compute_score("math", r"\boxed{5}", truth) == 1.0


@given(st.text(alphabet="\\{}boxed fra123,.$^_", max_size=80))
def test_math_takes_any_text(text: str):
    assert math.compute_score("math", text, "3") in (0.0, 1.0)
