from __future__ import annotations

import pytest
import torch.distributed as dist

from ostinato.workers.core.testing import oracle
from ostinato.workers.megatron.testing import runs


@pytest.fixture(scope="session")
def megatron_workspace(tmp_path_factory):
    folder = tmp_path_factory.mktemp("megatron")
    oracle.prepare(folder)
    runs.prepare(folder)
    return folder


@pytest.fixture(scope="session")
def _own_group(tmp_path_factory):
    store = dist.FileStore(str(tmp_path_factory.mktemp("store") / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def megatron_on_cpu(request):
    """Megatron-Core on the CPU and a default process group of one rank, another wheel's tests' where they made one."""
    from ostinato.workers.megatron.testing import cpu

    cpu.install()
    if not dist.is_initialized():
        request.getfixturevalue("_own_group")
    # Megatron's groups stay for the next test: on one rank they all ask for the same.
    yield
    cpu.uninstall()
