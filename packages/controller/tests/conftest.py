"""What the tests of the controller share: a Ray on this machine."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def ray_here() -> None:
    """Ray with two CPUs, one for all modules; where a module had another one, it is started again."""
    ray = pytest.importorskip("ray")
    from ostinato.controller.ray import init_ray

    if not ray.is_initialized():
        init_ray(num_cpus=2, object_store_memory=200 * 1024**2, log_to_driver=False)


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """End that Ray after the last test of this folder: other folders start one of their own."""
    last = nextitem is None or Path(__file__).parent not in nextitem.path.parents
    if last and "ray" in sys.modules:
        from ostinato.controller.ray import shutdown_ray

        shutdown_ray()
