from __future__ import annotations

import pytest
import torch.distributed as dist

from ostinato.workers.core.testing.oracle import prepare


@pytest.fixture(scope="session")
def workspace(tmp_path_factory):
    folder = tmp_path_factory.mktemp("workspace")
    prepare(folder)
    return folder


@pytest.fixture(scope="session")
def _own_group(tmp_path_factory):
    store = dist.FileStore(str(tmp_path_factory.mktemp("store") / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def process_group(request):
    """A default process group of one rank; another wheel's tests may have made one already in this process."""
    if not dist.is_initialized():
        request.getfixturevalue("_own_group")
