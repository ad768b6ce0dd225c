from __future__ import annotations

import pytest

from ostinato.workers.megatron.testing.comparisons import all_compared


def test_comparisons_are_all_made_before_any_failure_is_raised():
    made = []
    with pytest.raises(AssertionError) as caught, all_compared() as compared:  # noqa: PT012
        for number in range(3):
            with compared.within(f"model {number}"), compared.of("loss"):
                made.append(number)
                assert number == 1, f"got {number}"
    assert made == [0, 1, 2]
    text = str(caught.value)
    assert text.startswith("2 comparisons failed.\nmodel 0, loss: got 0")
    assert "\nmodel 2, loss: got 2" in text
    assert "model 1" not in text


def test_comparisons_that_failed_are_told_with_what_ends_a_run_sooner():
    with pytest.raises(RuntimeError) as caught, all_compared() as compared:  # noqa: PT012
        with compared.of("loss"):
            raise AssertionError("got 0")
        raise RuntimeError("out of memory")
    assert caught.value.__notes__ == ["before it: loss: got 0"]


def test_comparisons_let_other_failures_pass():
    """A rank that stops in a collective call cannot go on; only what is compared is put off."""
    with pytest.raises(AssertionError, match="inside"), all_compared() as compared, compared.within("model"):
        raise AssertionError("inside")
