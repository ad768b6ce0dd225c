"""What tests that span wheels share: the toy task and one Ray."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture(scope="session")
def toy(tmp_path_factory) -> Path:
    """A folder with the toy task's model and data."""
    from ostinato.ppo.prepare import largest

    folder = tmp_path_factory.mktemp("largest")
    largest.prepare(folder, seed=0)
    return folder


@pytest.fixture(scope="session")
def ray_session():
    """One Ray for the whole session."""
    from ostinato.controller.ray import env

    with env.ray_session() as session:
        yield session
