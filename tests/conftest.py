"""What tests that span wheels share: the toy task and one Ray."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

os.environ.setdefault("OMP_NUM_THREADS", "1")  # of the processes that tests start
torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))  # and of this one, where a plugin has imported torch before


@pytest.fixture(scope="session")
def toy(tmp_path_factory) -> Path:
    """A folder with the toy task's model and data."""
    from ostinato.ppo.prepare import largest

    folder = tmp_path_factory.mktemp("largest")
    largest.prepare(folder, seed=0)
    return folder


@pytest.fixture(scope="session")
def ray_session():
    """One Ray for the whole session; its processes find the modules beside this file, as this one does."""
    from ostinato.controller.ray import env

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=os.pathsep)
        with env.ray_session() as session:
            yield session
