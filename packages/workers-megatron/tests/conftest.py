from __future__ import annotations

import pytest

from ostinato.workers.core.testing import oracle
from ostinato.workers.core.testing.fixtures import own_process_group, process_group
from ostinato.workers.megatron.testing import runs

__all__ = ["own_process_group", "process_group"]


@pytest.fixture(scope="session")
def megatron_workspace(tmp_path_factory):
    folder = tmp_path_factory.mktemp("megatron")
    oracle.prepare(folder)
    runs.prepare(folder)
    return folder


@pytest.fixture
def megatron_on_cpu(request):
    """Megatron-Core on the CPU and a default process group of one rank, another wheel's tests' where they made one."""
    from ostinato.workers.megatron.testing import cpu

    cpu.install()
    request.getfixturevalue("process_group")
    # Megatron's groups stay for the next test: on one rank they all ask for the same.
    yield
    cpu.uninstall()
