from __future__ import annotations

from pathlib import Path

import pytest

from ostinato.workers.core.engine import TrainEngine
from ostinato.workers.core.testing import PlainEngine, conformance, oracle


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("conformance")
    oracle.prepare(path)
    return path


@pytest.mark.parametrize("check", conformance.CHECKS, ids=lambda check: check.__name__)
def test_plain_engine_conforms(check, workspace):
    check(PlainEngine, workspace)


def test_plain_engine_is_a_train_engine():
    members = {name for name in vars(TrainEngine) if not name.startswith("_")}
    assert len(members) <= 12
    assert all(hasattr(PlainEngine, name) for name in members)
