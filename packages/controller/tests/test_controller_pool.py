"""Pools as declarations: sizes, sub-pools, placement, and which nodes can hold them."""

from __future__ import annotations

import pytest

from ostinato.controller import PlacementError, ResourcePool, ResourcePoolManager
from ostinato.controller.ray.actor import ProcessPlace
from ostinato.controller.ray.group import in_rank_order
from ostinato.controller.ray.pool import fits
from ostinato.controller.ray.transport import Ledger


def test_pool_counts_its_slots_and_what_they_reserve():
    pool = ResourcePool("global", [2, 4], use_gpu=True, max_colocate=2, cpus_per_process=0.5)
    assert pool.size == 6
    assert pool.bundle() == {"CPU": 1.0, "GPU": 1.0}
    assert pool.asked() == {"CPU": 6.0, "GPU": 6.0}


@pytest.mark.parametrize("wrong", [{"processes_on_nodes": []}, {"processes_on_nodes": [2, 0]}, {"max_colocate": 0}])
def test_pool_refuses_sizes_that_make_no_sense(wrong):
    with pytest.raises(PlacementError, match="'p'"):
        ResourcePool(**{"name": "p", "processes_on_nodes": [1], **wrong})


def test_default_cpu_pool_fits_a_host_with_one_core():
    assert fits(ResourcePool("p", [2]), [{"CPU": 1.0}])
    assert fits(ResourcePool("p", [8]), [{"CPU": 1.0}])


@pytest.mark.parametrize(
    ("pool", "nodes", "fit"),
    [
        (ResourcePool("p", [16], use_gpu=True), [{"CPU": 64, "GPU": 8}], False),
        (ResourcePool("p", [8, 8], use_gpu=True), [{"CPU": 64, "GPU": 8}], False),
        (ResourcePool("p", [8, 8], use_gpu=True), [{"CPU": 64, "GPU": 8}] * 2, True),
        (ResourcePool("p", [8], cpus_per_process=3), [{"CPU": 16}], False),
        (ResourcePool("p", [5], cpus_per_process=3), [{"CPU": 16}], True),
        (ResourcePool("p", [2, 4], use_gpu=True), [{"CPU": 9, "GPU": 2}, {"CPU": 9, "GPU": 4}], True),
        (ResourcePool("p", [3, 3], use_gpu=True), [{"CPU": 9, "GPU": 2}, {"CPU": 9, "GPU": 4}], False),
        (ResourcePool("p", [1, 2, 4], use_gpu=True), [{"CPU": 9, "GPU": 3}, {"CPU": 9, "GPU": 4}], True),
        (ResourcePool("p", [1], use_gpu=True), [{"CPU": 8}], False),
    ],
)
def test_pool_fits_only_where_every_entry_has_a_node(pool, nodes, fit):
    """H-10: more than the nodes have, of GPUs or of CPUs, is known before anything waits."""
    assert fits(pool, nodes) is fit


def test_sub_pools_are_runs_of_slots():
    pools = ResourcePoolManager([ResourcePool("global", [2, 2])])
    train, judge = pools.split("global", {"train": 3, "judge": 1})
    assert [(p.name, p.first, p.size) for p in (train, judge)] == [("train", 0, 3), ("judge", 3, 1)]
    assert pools.names == ("global", "train", "judge")
    with pytest.raises(PlacementError, match="4 slots"):
        pools.split("global", {"a": 3, "b": 2})
    with pytest.raises(PlacementError, match="'train'"):
        pools.split("global", {"train": 1})


def test_roles_go_to_the_only_pool_or_where_they_are_placed():
    one = ResourcePoolManager([ResourcePool("global", [1])])
    assert one.place(["actor", "critic"], None) == {"global": ["actor", "critic"]}
    two = ResourcePoolManager([ResourcePool("a", [1]), ResourcePool("b", [1])])
    assert two.place(["x", "y", "z"], {"x": "b", "y": "a", "z": "b"}) == {"b": ["x", "z"], "a": ["y"]}
    for placement, text in ((None, "there are several"), ({"x": "c"}, "'c' is not known"), ({"y": "a"}, "'x' has no")):
        with pytest.raises(PlacementError, match=text):
            two.place(["x"], placement)


def test_two_pools_of_one_name_are_refused():
    with pytest.raises(PlacementError, match="'a'"):
        ResourcePoolManager([ResourcePool("a", [1]), ResourcePool("a", [2])])


def place(node: str, port: int, *devices: str) -> ProcessPlace:
    return ProcessPlace(f"{node}-0123456789", f"10.0.0.{ord(node)}", node, 100 + port, devices, port)


def test_processes_are_ordered_by_rank_and_not_by_slot():
    """H-08: slots on nodes A, B, A hold ranks 0, 2, 1."""
    processes = in_rank_order(["s0", "s1", "s2"], [place("A", 1), place("B", 2), place("A", 3)], "cpu", Ledger())
    assert processes.actors == ["s0", "s2", "s1"]
    contexts = [processes.context(rank, "actor") for rank in range(3)]
    assert [(c.rank, c.local_rank, c.local_world_size) for c in contexts] == [(0, 0, 2), (1, 1, 2), (2, 0, 1)]
    assert {(c.master_addr, c.master_port) for c in contexts} == {("10.0.0.65", 1)}


def test_gpu_processes_see_their_nodes_devices_in_order_of_local_ranks():
    places = [place("A", 1, "3"), place("B", 2, "0"), place("A", 3, "1")]
    processes = in_rank_order(["s0", "s1", "s2"], places, "cuda", Ledger())
    env = [processes.env_vars(rank) for rank in range(3)]
    assert [e["CUDA_VISIBLE_DEVICES"] for e in env] == ["3,1", "3,1", "0"]
    assert [(e["RANK"], e["LOCAL_RANK"], e["LOCAL_WORLD_SIZE"]) for e in env] == [
        ("0", "0", "2"),
        ("1", "1", "2"),
        ("2", "0", "1"),
    ]
    assert processes.context(1, "actor").device_type == "cuda"
