"""How `spawn` ends where a rank does not return; that it brings values back is seen wherever an engine is tested."""

from __future__ import annotations

import time

import pytest

from ostinato.workers.core.testing import spawn as module
from ostinato.workers.core.testing.spawn import SpawnError, spawn


class Slow:
    """Takes a minute to unpickle, as an import that hangs would."""

    def __reduce__(self):
        return time.sleep, (60,)


def test_spawn_tells_how_each_rank_failed():
    with pytest.raises(
        SpawnError, match=r"2 of 2 ranks failed(?s:.*)rank 1 \(exit status 1\):(?s:.*)ValueError: .*'x'"
    ):
        spawn(int, 2, "x")


def test_spawn_ends_what_does_not_end(monkeypatch):
    with pytest.raises(SpawnError, match=r"1 of 1 ranks did not end within 1 s(?s:.*)exit status -9"):
        spawn(time.sleep, 1, 60, deadline=1)
    monkeypatch.setattr(module, "START_SECONDS", 0)
    with pytest.raises(SpawnError, match=r"1 of 1 ranks did not end within 2 s(?s:.*)not started"):
        spawn(print, 1, Slow(), deadline=2)
