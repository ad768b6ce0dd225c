"""Groups that outlive their driver: another driver of the cluster finds them by name."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time

import pytest
import torch

from ostinato.controller import GroupsNotFound, ResourcePool, ResourcePoolManager, Role, WorkerDied, WorkerSpec
from ostinato.controller.ray import RayBackend, init_ray, shutdown_ray
from ostinato.controller.testing import EchoWorker
from ostinato.protocol import DataProto

OTHER = """
import json, sys, torch
from ostinato.controller.ray import RayBackend, init_ray
from ostinato.protocol import DataProto
init_ray(address=sys.argv[1], log_to_driver=False)
groups = RayBackend.attach("run").groups
rows = groups["actor"].double(DataProto.from_dict({"x": torch.arange(5)}))
told = {role: [(d["rank"], d["pid"], d["role"]) for d in group.describe()] for role, group in groups.items()}
print(json.dumps([told, rows.get().batch["double"].tolist(), groups["actor"].all_reduce()]))
"""


@pytest.fixture(scope="module")
def ray_here():
    pytest.importorskip("ray")
    init_ray(num_cpus=2, object_store_memory=100 * 1024**2, log_to_driver=False)
    yield
    shutdown_ray()


def test_another_driver_attaches_to_named_groups(ray_here):
    import ray

    pools = ResourcePoolManager([ResourcePool("p", [2]), ResourcePool("q", [1])])
    spec = WorkerSpec(EchoWorker)
    first = RayBackend(pools, name="run")
    groups = first.launch(
        {Role.ACTOR: spec, Role.CRITIC: spec, "apart": spec}, {Role.ACTOR: "p", Role.CRITIC: "p", "apart": "q"}
    )
    expected = {role: [[d["rank"], d["pid"], d["role"]] for d in group.describe()] for role, group in groups.items()}
    assert set(expected) == {"actor", "critic", "apart"}
    address = ray.get_runtime_context().gcs_address
    done = subprocess.run(
        [sys.executable, "-c", OTHER, address], capture_output=True, text=True, timeout=120, env={**os.environ}
    )
    assert done.returncode == 0, done.stderr
    told, rows, total = json.loads(done.stdout.splitlines()[-1])
    assert told == expected
    assert rows == [0, 2, 4, 6, 8]
    assert total == [3.0, 3.0]
    # The other driver has gone, and the groups go on.
    assert groups["actor"].double(DataProto.from_dict({"x": torch.arange(2)})).get().batch["double"].tolist() == [0, 2]

    second = RayBackend.attach("run")
    free = ray.available_resources().get("CPU", 0.0)
    second.shutdown()
    with pytest.raises(GroupsNotFound, match="'run'"):
        RayBackend.attach("run")
    with pytest.raises(WorkerDied):  # the first driver did not stop them itself
        groups["actor"].describe()
    deadline = time.monotonic() + 10
    while ray.available_resources().get("CPU", 0.0) < free + 0.29 and time.monotonic() < deadline:
        time.sleep(0.2)
    assert ray.available_resources().get("CPU", 0.0) >= free + 0.29, "the slots were given back"
    first.shutdown()


def test_names_that_nobody_has_are_refused(ray_here):
    with pytest.raises(GroupsNotFound, match=r"'no-such'.*there are: none"):
        RayBackend.attach("no-such")


def test_roles_are_strings():
    assert {Role.ACTOR: 1}["actor"] == 1
    assert f"{Role.REWARD_MODEL}" == "reward_model"
