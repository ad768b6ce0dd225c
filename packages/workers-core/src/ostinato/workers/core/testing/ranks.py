"""Data-parallel ranks as threads of one process: enough to test what depends on the number of ranks."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

import torch

T = TypeVar("T")


class ThreadRanks:
    """A group of ranks, one thread each, with a sum over all of them.

    Attributes:
        size: number of ranks.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._barrier = threading.Barrier(size)
        self._parts: list[torch.Tensor | None] = [None] * size

    def all_reduce(self, rank: int, values: torch.Tensor) -> torch.Tensor:
        """Sum over the ranks, in rank order, so that every rank gets the same bits.

        Args:
            rank: the caller's rank.
            values: its part; of one shape on all ranks.

        Returns:
            A new tensor.

        Raises:
            ValueError: the parts differ in shape: the ranks are not making the same call.
        """
        self._parts[rank] = values
        self._barrier.wait(timeout=60)
        parts = [part for part in self._parts if part is not None]
        shapes = {tuple(part.shape) for part in parts}
        if len(shapes) != 1:
            self._barrier.abort()
            raise ValueError(f"all_reduce: shapes differ over the ranks: {sorted(shapes)}")
        total = parts[0].clone()
        for part in parts[1:]:
            total += part
        self._barrier.wait(timeout=60)
        return total

    def run(self, fn: Callable[[int], T]) -> list[T]:
        """Call `fn(rank)` on every rank at once.

        Args:
            fn: what a rank does.

        Returns:
            The results in rank order.

        Raises:
            BaseException: the first rank's error that is not the echo of another's.
        """
        results: list[T | None] = [None] * self.size
        errors: list[BaseException | None] = [None] * self.size

        def call(rank: int) -> None:
            try:
                results[rank] = fn(rank)
            except BaseException as error:
                errors[rank] = error
                self._barrier.abort()

        threads = [threading.Thread(target=call, args=(rank,), daemon=True) for rank in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        raised = [error for error in errors if error is not None]
        if raised:
            raise next((e for e in raised if not isinstance(e, threading.BrokenBarrierError)), raised[0])
        return results  # type: ignore[return-value]
