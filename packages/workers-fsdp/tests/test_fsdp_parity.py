"""Parity with one plain process, over every way in which the engine can be set to compute."""

from __future__ import annotations

from dataclasses import asdict
from itertools import combinations

import pytest

from ostinato.workers.fsdp.testing import parity


def test_parity_table_has_every_pair_of_settings():
    lines = [asdict(setting) for setting in parity.TABLE]
    levels = {axis: {line[axis] for line in lines} for axis in lines[0]}
    assert {axis: len(found) for axis, found in levels.items()} == {
        "model": 3,
        "sharding": 3,
        "reduced": 2,
        "rows": 3,
        "split": 3,
        "sequence": 2,
        "state": 3,
        "recompute": 2,
        "parked": 2,
        "adapter": 2,
        "fused": 2,
    }
    for one, other in combinations(levels, 2):
        met = {(line[one], line[other]) for line in lines}
        wanted = {(a, b) for a in levels[one] for b in levels[other] if not parity.excluded({one: a, other: b})}
        assert met == wanted, f"{one} × {other}"


@pytest.mark.usefixtures("process_group")
def test_parity_of_one_rank_with_a_plain_process(workspace):
    """On two and four ranks: `test_fsdp_many_ranks`."""
    assert len(parity.check_parity_table(workspace)) == len(parity.TABLE)
