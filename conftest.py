"""What holds for every test of the workspace: none leaves anything registered behind for the next."""

from __future__ import annotations

import sys

import pytest

TABLES = {
    "ostinato.algos.registry": ("_ADV_ESTIMATORS", "_POLICY_LOSSES", "_TOKEN_SELECTORS"),
    "ostinato.controller.dispatch": ("_modes",),
    "ostinato.rollout.backends": ("_BACKENDS",),
    "ostinato.ppo.rewards.manager": ("_MANAGERS",),
    "ostinato.ppo.rewards.registry": ("_references",),
}


def tables() -> dict[tuple[str, str], dict]:
    """The registries of the modules that are loaded."""
    return {
        (module, name): getattr(sys.modules[module], name)
        for module, names in TABLES.items()
        if module in sys.modules
        for name in names
    }


@pytest.fixture(autouse=True)
def _registries_stay():
    """What a test registers is gone after it; a wheel that a test is the first to import keeps its own entries."""
    before = {key: dict(table) for key, table in tables().items()}
    yield
    for key, table in tables().items():
        if key in before:
            table.clear()
            table.update(before[key])
