"""What the tests of the controller share: a Ray on this machine."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="package")
def ray_ends() -> Iterator[None]:
    """Whatever Ray runs here ends after the last test of this folder: other folders start one of their own."""
    yield
    from ostinato.controller.ray import shutdown_ray

    shutdown_ray()


@pytest.fixture(scope="module")
def ray_here(ray_ends: None) -> None:
    """Ray with two CPUs, one for all modules; where a module had another one, it is started again."""
    ray = pytest.importorskip("ray")
    from ostinato.controller.ray import init_ray

    if not ray.is_initialized():
        init_ray(num_cpus=2, object_store_memory=200 * 1024**2, log_to_driver=False)
