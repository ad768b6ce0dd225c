"""What the ranks of an engine exchange, and the signals that are held back meanwhile."""

from __future__ import annotations

import pickle
import signal
import threading
import time
from datetime import timedelta
from typing import Any

import pytest
import torch

from ostinato.rollout.backends.sglang_ranks import EngineRanks, HeldSignals
from ostinato.rollout.errors import EngineStateError

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


@pytest.fixture
def group(monkeypatch) -> dict[str, Any]:
    """The first rank of two, with what it gave and told the other one and how their group was made.

    What the other one gives, and at which call, is "other".
    """
    seen: dict[str, Any] = {"told": [], "given": []}
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)
    monkeypatch.setattr(torch.distributed, "new_group", lambda ranks, **options: seen.update(options) or object())

    def broadcast(box, **_):
        seen["told"].append(pickle.loads(pickle.dumps(box)))

    def gather(value, values, **_):
        seen["given"].append(value)
        values[:] = [value, seen.get("other", (value[0], "of the other"))]

    monkeypatch.setattr(torch.distributed, "broadcast_object_list", broadcast)
    monkeypatch.setattr(torch.distributed, "gather_object", gather)
    return seen


def test_ranks_are_told_of_an_answer_that_cannot_be_told(group):
    """The other one waits for this call: nothing said would make it take the next call's answer."""

    def secret():
        return lambda: None

    ranks = EngineRanks(2)
    with pytest.raises((AttributeError, pickle.PicklingError), match="pickle"):
        ranks.call(secret)
    [(call, answer, failure)] = group["told"]
    assert (call, answer) == ((1, "secret"), None)
    assert "pickle" in failure
    assert ranks.call(lambda: 7) == 7


def test_ranks_act_with_what_each_of_them_gives(group):
    def act(word, values):
        return word, values

    ranks = EngineRanks(2)
    assert ranks.call_with_each(act, "all", own="mine") == ("all", ["mine", "of the other"])
    assert group["given"] == [((1, "act"), "mine")]
    assert pickle.loads(group["told"][0][1]) == ("all", ["mine", "of the other"])
    assert EngineRanks(1).call_with_each(act, "one", own=7) == ("one", [7])


@pytest.mark.parametrize("call", [(1, "act"), (3, "act"), (2, "other")])
def test_ranks_do_not_act_with_what_was_given_for_another_call(group, call):
    """A rank that was interrupted is a call behind or ahead; the others hear of it, and nothing was done."""

    def act(values):
        raise AssertionError(f"acted with {values}")

    ranks = EngineRanks(2)
    ranks.call(lambda: 7)
    group["other"] = (call, "of another call")
    reason = rf"this rank is at call 2 \(act\) and rank 1 at call {call[0]} \({call[1]}\): one of them was interrupted"
    with pytest.raises(EngineStateError, match=reason):
        ranks.call_with_each(act, own="mine")
    told = group["told"][-1]
    assert told[:2] == [(2, "act"), None]
    assert "rank 1 at call" in told[2]


def test_ranks_name_a_connection_that_is_lost(group, monkeypatch):
    def lost(*_, **__):
        raise RuntimeError("Connection closed by peer")

    ranks = EngineRanks(2)
    for name, exchange in (
        ("broadcast_object_list", lambda: ranks.call(lambda: 7)),
        ("gather_object", lambda: ranks.call_with_each(lambda values: values, own=7)),
    ):
        monkeypatch.setattr(torch.distributed, name, lost)
        with pytest.raises(EngineStateError, match=r"ranks 0 to 1, .* have lost their connection.*closed by peer"):
            exchange()


def test_ranks_wait_longer_than_a_call_may_take(group):
    """`trainer.call_timeout_seconds` is an hour where nothing is set; torch's own limit is half of it."""
    EngineRanks(2)
    assert group["timeout"] >= timedelta(days=1)


def test_ranks_make_one_call_after_another_from_whatever_thread(group):
    ranks, under_way, most = EngineRanks(2), [], []

    def act():
        under_way.append(1)
        most.append(len(under_way))
        time.sleep(0.05)
        under_way.pop()

    threads = [threading.Thread(target=ranks.call, args=(act,)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == [1, 1, 1]
    assert [told[0] for told in group["told"]] == [(1, "act"), (2, "act"), (3, "act")]
