from __future__ import annotations

import pytest

from ostinato.workers.core.testing.fixtures import own_process_group, process_group
from ostinato.workers.core.testing.oracle import prepare

__all__ = ["own_process_group", "process_group"]


@pytest.fixture(scope="session")
def workspace(tmp_path_factory):
    folder = tmp_path_factory.mktemp("workspace")
    prepare(folder)
    return folder
