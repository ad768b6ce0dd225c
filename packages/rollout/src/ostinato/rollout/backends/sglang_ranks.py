"""How the ranks of one SGLang engine act together, and what a signal may not break off half way."""

from __future__ import annotations

import pickle
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch

from ostinato.rollout.errors import EngineStateError

T = TypeVar("T")

ACT_TIMEOUT = timedelta(days=7)
"""How long ranks wait for what the first one does; torch's 30 minutes are less than a call of the trainer's may take.

A rank that has ended is seen at once, and one that hangs by the trainer's own deadline.
"""


class HeldSignals:
    """Holds back SIGINT and SIGTERM, as far as Python handles them, and raises them at the block's end.

    Elsewhere than in the main thread, where Python runs no handlers, nothing is held.
    """

    def __init__(self) -> None:
        self._handlers: dict[signal.Signals, Any] = {}
        self._came: list[int] = []

    def __enter__(self) -> HeldSignals:
        """Hold from here on."""
        try:
            self._hold()
        except BaseException:  # of the one that was not held yet
            self._release()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        """Raise what came."""
        self._release()

    @contextmanager
    def let_through(self) -> Iterator[None]:
        """Within, signals come as they would without this."""
        try:
            self._release()
            yield
        finally:
            self._hold()

    def _hold(self) -> None:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                handler = signal.getsignal(number)
                if callable(handler):
                    self._handlers[number] = handler
                    signal.signal(number, lambda came, _: self._came.append(came))

    def _release(self) -> None:
        try:
            self._restore()
        except BaseException:  # of a handler that is back already; the others must not stay held
            self._restore()
            raise
        came, self._came = dict.fromkeys(self._came), []
        with ExitStack() as each:  # also after one whose handler raises
            for number in reversed(came):
                each.callback(signal.raise_signal, number)

    def _restore(self) -> None:
        for number in [*self._handlers]:
            signal.signal(number, self._handlers[number])
            del self._handlers[number]


class EngineRanks:
    """The ranks that one engine spans: the first one acts, and all go on together or fail together.

    What one rank says is matched with what another waits for by its place in the order of the calls, so that a signal
    must not break off an exchange, and the others are told of an act that one broke off.

    Args:
        size: consecutive ranks of the default process group; making more than one is collective over all its ranks.
    """

    def __init__(self, size: int):
        self.size = size
        self.first = True
        self._group: Any = None
        self._calls = 0
        self._turn = threading.RLock()
        if size > 1:
            world, rank = torch.distributed.get_world_size(), torch.distributed.get_rank()
            for start in range(0, world, size):
                ranks = list(range(start, start + size))
                group = torch.distributed.new_group(ranks, backend="gloo", timeout=ACT_TIMEOUT)
                if start <= rank < start + size:
                    self._group, self._leader, self.first = group, start, rank == start

    def call(self, act: Callable[..., T], *args: Any) -> T:
        """Let the first rank act; what it returns or raises is there on all ranks.

        Raises:
            EngineStateError: on the other ranks, where the first one failed or was interrupted, or is at another call;
                on each, where the connection to one that has ended is lost.
        """
        return act(*args) if self._group is None else self._together(act, args, None)

    def call_with_each(self, act: Callable[..., T], *args: Any, own: Any) -> T:
        """Let the first rank act with what every rank has; otherwise as `call`.

        Args:
            act: is called with `args` and, last, the list of what each rank gave, in their order.
            args: of the first rank alone.
            own: what this rank gives.

        Raises:
            EngineStateError: as `call` does; also on all ranks where one of them is at another call.
        """
        return act(*args, [own]) if self._group is None else self._together(act, args, [own])

    def _together(self, act: Callable[..., T], args: tuple[Any, ...], own: list[Any] | None) -> T:
        failure: BaseException | None = None
        result: Any = None
        with self._turn, HeldSignals() as held:
            self._calls += 1
            mine = (self._calls, act.__name__)
            box: list[Any] = [mine, None, None]
            told = [] if own is None else self._gather((mine, *own))
            if self.first:
                try:
                    if own is not None:
                        args = (*args, self._of_one_call(mine, told))
                    with held.let_through():
                        result = act(*args)
                        box[1] = pickle.dumps(result)  # what cannot be told must not break off the exchange
                except BaseException as error:  # the others wait for an answer, and this is one
                    failure, box[2] = error, f"{type(error).__name__}: {error}"
            try:
                with self._connected(mine[1]):
                    torch.distributed.broadcast_object_list(box, src=self._leader, group=self._group)
            finally:
                if failure is not None:  # also where a rank that should hear of it has ended
                    raise failure
        if box[0] != mine:
            raise _apart(f"rank {self._leader}, which holds the engine,", box[0], "this rank", mine)
        if box[2] is not None:
            raise EngineStateError(f"sglang rollout: rank {self._leader}, which holds the engine, failed: {box[2]}")
        return result if self.first else pickle.loads(box[1])

    @contextmanager
    def _connected(self, act: str) -> Iterator[None]:
        """Name what is met where a rank has ended."""
        try:
            yield
        except RuntimeError as error:
            raise EngineStateError(
                f"sglang rollout, {act}: the ranks {self._leader} to {self._leader + self.size - 1}, which share an "
                f"engine, have lost their connection: one has ended, and its own log says why. {error}"
            ) from error

    def _gather(self, value: tuple[tuple[int, str], Any]) -> list[tuple[tuple[int, str], Any]]:
        """What each rank gave, in their order; on the first rank alone."""
        values: list[Any] | None = [None] * self.size if self.first else None
        with self._connected(value[0][1]):
            torch.distributed.gather_object(value, values, dst=self._leader, group=self._group)
        return values or []

    def _of_one_call(self, mine: tuple[int, str], told: list[tuple[tuple[int, str], Any]]) -> list[Any]:
        """What the ranks gave, once each of them is known to be at this call."""
        for place, (call, _) in enumerate(told):
            if call != mine:
                raise _apart("this rank", mine, f"rank {self._leader + place}", call)
        return [value for _, value in told]


def _apart(one: str, call: tuple[int, str], other: str, others: tuple[int, str]) -> EngineStateError:
    return EngineStateError(
        f"sglang rollout: {one} is at call {call[0]} ({call[1]}) and {other} at call {others[0]} ({others[1]}): one of "
        "them was interrupted. Start the run again."
    )
