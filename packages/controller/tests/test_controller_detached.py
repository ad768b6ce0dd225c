"""Groups that outlive their driver: another driver of the cluster finds them by name."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time

import pytest
import torch

from ostinato.controller import (
    GroupsExist,
    GroupsNotFound,
    GroupStopped,
    PlacementError,
    ResourcePool,
    ResourcePoolManager,
    Role,
    WorkerDied,
    WorkerSpec,
)
from ostinato.controller.ray import RayBackend
from ostinato.controller.testing import EchoWorker, FailsToBuild
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


def free_cpus(wanted: float = 0.0, seconds: float = 10.0) -> float:
    """CPUs that are free, once it is as many as wanted, or after a while."""
    import ray

    deadline = time.monotonic() + seconds
    while (free := ray.available_resources().get("CPU", 0.0)) < wanted - 0.01 and time.monotonic() < deadline:
        time.sleep(0.1)
    return free


def until_refused(name: str, says: str = "have ended", seconds: float = 20.0) -> str:
    """What `attach` says once the cluster knows of the deaths."""
    deadline = time.monotonic() + seconds
    text = ""
    while says not in text and time.monotonic() < deadline:
        time.sleep(0.2)
        with pytest.raises((GroupStopped, WorkerDied)) as caught:
            RayBackend.attach(name)
        text = str(caught.value)
    return text


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
    assert second.groups["actor"].typed(EchoWorker).rank_of_first() == 0
    with pytest.raises(PlacementError, match="attached to 'run'"):
        second.launch({"more": spec})
    with pytest.raises(PlacementError, match=r"\['actor'\] were launched"):
        first.launch({"actor": spec}, {"actor": "q"})
    free = free_cpus()
    second.shutdown()
    with pytest.raises(GroupsNotFound, match="'run'"):
        RayBackend.attach("run")
    with pytest.raises(WorkerDied):  # the first driver did not stop them itself
        groups["actor"].describe()
    assert free_cpus(free + 0.29) >= free + 0.29, "the slots were given back"
    first.shutdown()


def test_dead_processes_are_named_and_what_they_held_is_given_back(ray_here):
    free = free_cpus(2.0)
    pools = ResourcePoolManager([ResourcePool("p", [3])])
    pools.split("p", {"left": 2, "right": 1})
    first = RayBackend(pools, name="half")
    spec = WorkerSpec(EchoWorker)
    groups = first.launch({"x": spec, "y": spec}, {"x": "left", "y": "right"})
    with pytest.raises(GroupsExist, match=r"'half' on this cluster already.*attach.*discard"):
        RayBackend(pools, name="half").launch({"x": spec}, {"x": "left"})
    pids = [one["pid"] for role in ("x", "y") for one in groups[role].describe()]
    os.kill(pids[1], 9)
    os.kill(pids[2], 9)
    assert until_refused("half") == (
        "detached groups 'half': rank(s) [1] of 2 of pool 'left', rank(s) [0] of 1 of pool 'right' have ended; "
        "RayBackend.discard('half') ends the rest and gives back what they hold"
    )
    os.kill(pids[0], 9)
    assert "all of their processes have ended" in until_refused("half", "all of")
    with pytest.raises(GroupsExist):
        RayBackend(pools, name="half").launch({"x": spec}, {"x": "left"})
    assert free_cpus() < free - 0.25
    RayBackend.discard("half")
    assert free_cpus(free) >= free - 0.01
    with pytest.raises(GroupsNotFound, match="'half'"):
        RayBackend.discard("half")
    first.shutdown()


def test_detached_groups_that_do_not_come_up_leave_nothing(ray_here):
    free = free_cpus(2.0)
    backend = RayBackend(ResourcePoolManager([ResourcePool("p", [1])]), name="broken")
    with pytest.raises(FileNotFoundError, match="no model"):
        backend.launch({"model": WorkerSpec(FailsToBuild)})
    with pytest.raises(GroupsNotFound, match="'broken'"):
        RayBackend.attach("broken")
    assert free_cpus(free) >= free - 0.01


@pytest.mark.parametrize("name", ["", "a/b", 3])
def test_names_that_cannot_be_are_refused(ray_here, name):
    with pytest.raises(PlacementError, match=rf"name must be text.*got {name!r}"):
        RayBackend(ResourcePoolManager([]), name=name)


def test_names_that_nobody_has_are_refused(ray_here):
    with pytest.raises(GroupsNotFound, match=r"'no-such'.*there are: none"):
        RayBackend.attach("no-such")


def test_roles_are_strings():
    assert {Role.ACTOR: 1}["actor"] == 1
    assert f"{Role.REWARD_MODEL}" == "reward_model"
