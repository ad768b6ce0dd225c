"""Groups: the same tests in this process and on Ray, on a simulated cluster of two nodes with one and two CPUs."""

from __future__ import annotations

import os
import sys
import time

import pytest
import torch

from ostinato.controller import (
    CollectError,
    GroupStopped,
    LocalBackend,
    PendingCall,
    PlacementError,
    RayNotRunning,
    ResourcePool,
    ResourcePoolManager,
    ResourcesUnavailable,
    Scatter,
    WorkerGroup,
    WorkerSpec,
)
from ostinato.controller.dispatch import Call, Dispatch, plan_call
from ostinato.controller.ray import RayBackend, init_ray, ray_session, shutdown_ray
from ostinato.controller.ray.driver import run_on_cluster
from ostinato.controller.ray.transport import Packer
from ostinato.controller.testing import EchoWorker
from ostinato.controller.topology import Mesh, grid
from ostinato.protocol import DataProto, DataProtoFuture
from ostinato.protocol.testing import assert_equal


@pytest.fixture(scope="module")
def cluster():
    pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    shutdown_ray()  # what other modules share
    store = 100 * 1024**2
    two_nodes = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "object_store_memory": store})
    two_nodes.add_node(num_cpus=2, object_store_memory=store)
    init_ray(address=two_nodes.address, log_to_driver=False)
    yield two_nodes
    shutdown_ray()
    two_nodes.shutdown()


@pytest.fixture(scope="module", params=["local", "ray"])
def groups(request):
    """Two roles of one pool: world size 1 here, 3 on Ray (one process on the small node, two on the large one)."""
    if request.param == "local":
        backend = LocalBackend()
    else:
        request.getfixturevalue("cluster")
        # So much CPU a process that the two entries cannot share a node.
        backend = RayBackend(ResourcePoolManager([ResourcePool("global", [1, 2], cpus_per_process=0.7)]))
    specs = {"first": WorkerSpec(EchoWorker, tag="a"), "second": WorkerSpec(EchoWorker, tag="b")}
    yield backend.launch(specs)
    backend.shutdown()
    backend.shutdown()


@pytest.fixture
def echo(groups):
    groups["first"].init_model()
    return groups["first"].typed(EchoWorker)


def rows(n: int) -> DataProto:
    return DataProto.from_dict({"x": torch.arange(n)})


@pytest.mark.parametrize("n", [0, 1, 2, 7, 10])
def test_group_splits_and_concatenates_rows(echo, n):
    """H-07: rows by keyword, whether they divide or not; more ranks than rows too."""
    world = echo.world_size
    for back in (echo.echo(rows(n), scale=3), echo.echo(batch=rows(n), scale=3)):
        assert back.batch["y"].tolist() == [3 * i for i in range(n)]
        sizes = [n // world + (rank < n % world) for rank in range(world)]
        assert back.batch["rank"].tolist() == [rank for rank in range(world) for _ in range(sizes[rank])]
        assert back.metrics["rows"].value == n


def test_group_splits_every_proto(echo):
    back = echo.echo(rows(6), other=rows(3))
    assert back.batch["seen"].tolist() == [3 // echo.world_size] * 6


def test_keywords_count_in_the_order_of_the_parameters(echo):
    """Which batch is the first, and which argument the function, does not hang on how a call is written."""
    assert echo.seen_columns(batch=rows(3)).meta_info["columns"] == ["x"]
    assert len(echo.apply(batch=rows(3), function=lambda batch: batch)) == 3
    assert echo.scaled_rows(by=rows(1), batch=rows(5)).get().batch["scaled"].tolist() == [0, 1, 2, 3, 4]


def test_group_sends_only_the_columns_that_are_read(echo):
    batch = DataProto.from_dict({"x": torch.arange(3), "unread": torch.zeros(3, 1000)})
    assert echo.seen_columns(batch).meta_info["columns"] == ["x"]


def test_group_reports_places(groups, echo):
    """H-09: ranks, local ranks and local world sizes on nodes of one and two processes."""
    described = echo.describe()
    assert [d["rank"] for d in described] == list(range(echo.world_size))
    places = groups["first"].places
    assert [(d["local_rank"], d["local_world_size"]) for d in described] == [
        (place.local_rank, place.local_world_size) for place in places
    ]
    if echo.world_size == 3:
        assert sorted(place.local_world_size for place in places) == [1, 2, 2]
        by_node = {}
        for place in places:
            by_node.setdefault(place.node, []).append((place.rank, place.local_rank))
        assert sorted(len(ranks) for ranks in by_node.values()) == [1, 2]
        assert all([local for _, local in ranks] == list(range(len(ranks))) for ranks in by_node.values())
        assert all(d["visible"] == "" for d in described)
        threads = os.environ.get("OMP_NUM_THREADS", "1")
        assert {d["threads"] for d in described} == {int(threads)}


def test_roles_of_a_pool_share_processes(groups):
    first, second = groups["first"].describe(), groups["second"].describe()
    assert [d["pid"] for d in first] == [d["pid"] for d in second]
    assert {(d["role"], d["tag"]) for d in (*first, *second)} == {("first", "a"), ("second", "b")}


def test_process_group_spans_the_ranks_and_is_shared_by_roles(groups):
    world = groups["first"].world_size
    expected = [world * (world + 1) / 2] * world
    assert groups["first"].all_reduce() == expected
    assert groups["second"].all_reduce() == expected


def test_mesh_registered_later_is_seen(groups):
    group = groups["second"]
    assert group.dp_size() == group.world_size
    group.init_model(tp=group.world_size)
    assert group.dp_size() == 1
    assert group.coordinates().answering == (0,)
    back = group.echo(rows(4))
    assert back.batch["rank"].tolist() == [0] * 4
    assert back.metrics["rows"].value == 4
    group.init_model()
    assert group.dp_size() == group.world_size


def test_rows_follow_dp_ranks(groups):
    """H-08: ranks 0, 1, 2 hold dp ranks 0, 2, 1; rows come back in order and every worker knows its own rank."""
    group = groups["second"]
    dp_ranks = (0, 2, 1)[: group.world_size]
    assert group.take_dp_rank(dp_ranks) == list(range(group.world_size))
    back = group.echo(rows(6))
    assert back.batch["y"].tolist() == list(range(6))
    if group.world_size == 3:
        assert back.batch["rank"].tolist() == [0, 0, 2, 2, 1, 1]
    group.init_model()


def test_one_rank_or_all(echo):
    world = echo.world_size
    assert echo.rank_of_first() == echo.executed_by() == 0
    assert echo.mine("same") == [(rank, "same") for rank in range(world)]
    assert echo.mine(Scatter(list("abc")[:world])) == list(zip(range(world), "abc", strict=False))
    assert echo.scaled(Scatter([1.0, 2.0, 3.0][:world]), by=2.0) == [2.0, 4.0, 6.0][:world]


def test_functions_and_metrics(echo):
    assert echo.apply(lambda batch: batch[::-1], rows(3)).batch["x"].tolist() in ([2, 1, 0], [0, 1, 2])
    counted = echo.count(rows(5))
    assert counted["rows"].value == 5
    assert counted["largest"].value == -(-5 // echo.world_size)


def test_not_blocking_returns_a_handle(echo):
    later = [echo.echo_later(rows(4)), echo.echo_later(rows(2))]
    assert all(isinstance(call, DataProtoFuture) for call in later)
    assert_equal(later[1].get(), rows(2))
    assert_equal(later[0].get(), rows(4))
    pending = echo.rank_later()
    assert isinstance(pending, PendingCall)
    assert pending.get() == list(range(echo.world_size))
    assert pending.get() is pending.get()


def test_wrong_results_name_role_and_method(echo):
    with pytest.raises(CollectError, match=r"'first'.*'wrong_result'.*int"):
        echo.wrong_result(rows(3))


def test_wrong_arguments_are_refused_before_any_worker_is_called(echo):
    with pytest.raises(TypeError, match="batches"):
        echo.echo(rows(3), batches=rows(3))
    with pytest.raises(TypeError, match="batch"):
        echo.echo()


def test_typed_group_is_the_group(groups):
    assert groups["first"].typed(EchoWorker) is groups["first"]
    assert isinstance(groups["first"], WorkerGroup)
    with pytest.raises(TypeError, match="EchoWorker"):
        groups["first"].typed(type("Other", (EchoWorker,), {}))


def test_local_group_raises_in_this_process():
    backend = LocalBackend()
    group = backend.launch_one("echo", WorkerSpec(EchoWorker))
    with pytest.raises(ZeroDivisionError) as caught:
        group.apply(lambda batch: 1 / 0, rows(1))
    frames = [entry.name for entry in caught.traceback]
    assert "apply" in frames, "a debugger must find the worker's own frames"
    assert "role 'echo', rank 0" in caught.value.__notes__[0]
    backend.shutdown()
    with pytest.raises(GroupStopped, match="shut down"):
        group.describe()


def test_a_piece_is_stored_once_for_the_ranks_that_share_it(cluster):
    class Big:
        pass

    plan = plan_call(
        Dispatch.DP_COMPUTE_PROTO, Mesh(grid(8, tp=4)), Call((rows(5), "text", 3, Big()), {"other": rows(2)})
    )
    packer = Packer()
    packed = [packer.pack(call) for call in plan.calls if call is not None]
    first, same, other = packed[0][1], packed[3][1], packed[4][1]
    assert [first[0], first[3], first[4]] == [same[0], same[3], same[4]]  # references
    assert first[0] != other[0]
    assert first[3] == other[3]
    assert len({reference for _, values in packed for reference in (values[0], values[4])}) == 4
    assert first[1:3] == ["text", 3]
    assert packed[0][0].keywords == ("other",)


@pytest.mark.parametrize(
    ("pool", "asked"),
    [
        (ResourcePool("much", [16], use_gpu=True), "16 GPU"),
        (ResourcePool("much", [8], cpus_per_process=3), "24 CPU"),
        (ResourcePool("much", [2, 2], cpus_per_process=1), "4 CPU"),
    ],
)
def test_more_than_the_cluster_has_is_refused_at_once(cluster, pool, asked):
    """H-10: more GPUs, more CPUs, or more on one node than there are."""
    backend = RayBackend(ResourcePoolManager([pool]))
    begun = time.monotonic()
    with pytest.raises(ResourcesUnavailable, match=rf"'much' asks for .*{asked}.*free: .*can never hold"):
        backend.launch({"echo": WorkerSpec(EchoWorker)})
    assert time.monotonic() - begun < 3


def test_pools_and_sub_pools_are_separate_processes(cluster):
    pools = ResourcePoolManager([ResourcePool("whole", [2]), ResourcePool("hungry", [1], cpus_per_process=2)])
    pools.split("whole", {"left": 1, "right": 1})
    backend = RayBackend(pools, reserve_timeout_s=1.0)
    groups = backend.launch(
        {"x": WorkerSpec(EchoWorker), "y": WorkerSpec(EchoWorker)}, placement={"x": "left", "y": "right"}
    )
    described = [groups[role].describe() for role in ("x", "y")]
    assert [len(one) for one in described] == [1, 1]
    assert described[0][0]["pid"] != described[1][0]["pid"]
    assert [groups[role].all_reduce() for role in ("x", "y")] == [[1.0], [1.0]]
    with pytest.raises(PlacementError, match="max_colocate"):
        backend.launch({"z": WorkerSpec(EchoWorker)}, placement={"z": "whole"})
    # Held by the other pools: what is asked for exists and is not free.
    with pytest.raises(ResourcesUnavailable, match=r"'hungry' asks for 2 CPU; free: [0-9.]+ CPU"):
        backend.launch({"z": WorkerSpec(EchoWorker)}, placement={"z": "hungry"})
    backend.shutdown()


def emit_then_fail(count: int, *, emit) -> None:
    for i in range(count):
        emit({"step": i})
    raise LookupError("no more")


def test_driver_actor_streams_events_and_raises_what_the_function_raised(cluster):
    from ray import cloudpickle

    cloudpickle.register_pickle_by_value(sys.modules[__name__])  # a test module cannot be imported by other processes
    events = []
    with pytest.raises(LookupError, match="no more"):
        run_on_cluster(emit_then_fail, 3, on_event=events.append)
    assert events == [{"step": 0}, {"step": 1}, {"step": 2}]


def test_ray_session_leaves_a_running_ray_alone(cluster):
    import ray

    with ray_session():
        pass
    assert ray.is_initialized()


def test_ray_backend_without_ray_says_what_to_call(monkeypatch):
    ray = pytest.importorskip("ray")
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    with pytest.raises(RayNotRunning, match="init_ray"):
        RayBackend(ResourcePoolManager([ResourcePool("p", [1])]))
