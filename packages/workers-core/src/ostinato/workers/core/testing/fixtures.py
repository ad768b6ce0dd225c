"""Fixtures for tests of engines; a `conftest.py` imports them by name."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch.distributed as dist
from torch.distributed import FileStore  # pyright: ignore[reportPrivateImportUsage]


@pytest.fixture(scope="session")
def own_process_group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A default process group of one rank, until the session ends."""
    store = FileStore(str(tmp_path_factory.mktemp("store") / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def process_group(request: pytest.FixtureRequest) -> None:
    """A default process group of one rank; another wheel's tests may have made one already in this process."""
    if not dist.is_initialized():
        request.getfixturevalue("own_process_group")
