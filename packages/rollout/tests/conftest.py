from __future__ import annotations

from typing import Any

import pytest

from ostinato.rollout.testing import Setting, build_here, kept_engines
from ostinato.rollout.testing.setting import MakeRollout


@pytest.fixture(scope="module")
def engines():
    """One engine a configuration and folder serves all tests of a module."""
    with kept_engines(build_here) as make:
        yield make


@pytest.fixture
def engine(engines: MakeRollout, setting: Setting) -> Any:
    """The one of the module's own `setting`."""
    return engines(setting.config(), setting.model()[0])
