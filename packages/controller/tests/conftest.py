"""What the tests of the controller share: a Ray on this machine."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module")
def ray_here() -> Iterator[None]:
    """Ray with two CPUs; of the module and not of the session: other modules start a Ray of their own."""
    pytest.importorskip("ray")
    from ostinato.controller.ray import init_ray, shutdown_ray

    init_ray(num_cpus=2, object_store_memory=200 * 1024**2, log_to_driver=False)
    yield
    shutdown_ray()
