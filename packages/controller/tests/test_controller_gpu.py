"""Pools of GPUs: each rank on a device of its own, NCCL between them; CPU pools do not see the GPUs."""

from __future__ import annotations

import pytest
import torch

from ostinato.controller import ResourcePool, ResourcePoolManager, WorkerSpec
from ostinato.controller.ray import RayBackend, ray_session
from ostinato.controller.testing import EchoWorker


@pytest.mark.multigpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_gpu_ranks_have_devices_of_their_own():
    pytest.importorskip("ray")
    with ray_session(log_to_driver=False):
        pools = [ResourcePool("gpu", [2], use_gpu=True), ResourcePool("cpu", [1])]
        backend = RayBackend(ResourcePoolManager(pools))
        spec = WorkerSpec(EchoWorker)
        groups = backend.launch({"a": spec, "b": spec, "c": spec}, {"a": "gpu", "b": "gpu", "c": "cpu"})
        # Two ranks on one device would make NCCL fail.
        assert groups["a"].all_reduce() == groups["b"].all_reduce() == [3.0, 3.0]
        visible = [described["visible"].split(",") for described in groups["a"].describe()]
        assert visible[0] == visible[1]
        assert len(set(visible[0])) == 2
        assert groups["c"].describe()[0]["visible"] == ""
        backend.shutdown()
