"""Signals that are held back while the ranks of an engine exchange something."""

from __future__ import annotations

import signal
import threading

import pytest

from ostinato.rollout.backends.sglang_ranks import HeldSignals

NUMBERS = (signal.SIGINT, signal.SIGTERM)


class Came(Exception):
    """What the handlers raise."""


@pytest.fixture
def handlers():
    """Of both; each call is noted and raises."""

    def handle(number, _):
        handle.calls.append(number)
        raise Came(number)

    handle.calls = []

    before = [signal.signal(number, handle) for number in NUMBERS]
    yield [handle, handle]
    for number, handler in zip(NUMBERS, before, strict=True):
        signal.signal(number, handler)


def come(*numbers):
    for number in numbers:
        signal.raise_signal(number)


def in_force():
    return [signal.getsignal(number) for number in NUMBERS]


def test_held_signals_come_at_the_end_in_their_order_each_once(handlers):
    held = HeldSignals()
    held.__enter__()
    come(signal.SIGTERM, signal.SIGINT, signal.SIGTERM)
    assert handlers[0].calls == []
    with pytest.raises(Came):
        held.__exit__()
    assert handlers[0].calls == [signal.SIGTERM, signal.SIGINT]
    assert in_force() == handlers


def test_held_signals_come_at_once_where_they_are_let_through(handlers):
    with HeldSignals() as held:
        with pytest.raises(Came), held.let_through():
            come(signal.SIGINT)
        assert handlers[0].calls == [signal.SIGINT]
        assert handlers[0] not in in_force()
    assert in_force() == handlers


@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.parametrize("when", ["begin", "end"])
def test_held_signals_leave_every_handler_in_its_place_where_one_comes_in_between(handlers, monkeypatch, number, when):
    """Between the moments at which the one and the other is held, or is let go."""
    change = signal.signal

    def change_and_meet_one(which, handler):
        before = change(which, handler)
        other = which != number if when == "begin" else which == number
        if other and (handler not in handlers) == (when == "begin"):
            monkeypatch.undo()
            come(number)
        return before

    monkeypatch.setattr(signal, "signal", change_and_meet_one)
    with pytest.raises(Came, match=str(number.value)), HeldSignals():
        pass
    assert in_force() == handlers


def test_held_signals_in_another_thread_are_not_held(handlers):
    found = []

    def look():
        with HeldSignals():
            found.extend(in_force())

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert found == handlers
