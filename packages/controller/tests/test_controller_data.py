"""The data plane: rows stay where they are, in this process and on Ray alike."""

from __future__ import annotations

import gc
import time

import numpy as np
import pytest
import torch

from ostinato.controller import (
    Broadcast,
    ColumnWritten,
    LocalBackend,
    RegistrationError,
    ResourcePool,
    ResourcePoolManager,
    ResultMismatch,
    WorkerFailed,
    WorkerSpec,
    register,
    watch,
)
from ostinato.controller.ray import RayBackend
from ostinato.controller.testing import EchoWorker
from ostinato.protocol import DataProto, DataProtoFuture
from ostinato.protocol.errors import ColumnMismatchError, MissingColumnError
from ostinato.protocol.testing import assert_equal


def made(kind: str, **options):
    if kind == "local":
        return LocalBackend(**options)
    pools = ResourcePoolManager([ResourcePool("p", [2]), ResourcePool("q", [1])])
    return RayBackend(pools, grace_s=1.0, **options)


@pytest.fixture(scope="module", params=["local", "ray"])
def backend(request):
    if request.param == "ray":
        request.getfixturevalue("ray_here")
    backend = made(request.param)
    yield backend
    backend.shutdown()


@pytest.fixture(scope="module")
def groups(backend):
    roles = {"first": WorkerSpec(EchoWorker), "second": WorkerSpec(EchoWorker), "apart": WorkerSpec(EchoWorker)}
    return backend.launch(roles, {"first": "p", "second": "p", "apart": "q"})


@pytest.fixture
def strict(request, backend):
    """The same, in debug mode."""
    strict = made("local" if isinstance(backend, LocalBackend) else "ray", check_writes=True)
    yield strict.launch({"strict": WorkerSpec(EchoWorker)}, {"strict": "q"})["strict"]
    strict.shutdown()


def rows(n: int, **more) -> DataProto:
    return DataProto.from_dict({"x": torch.arange(n), **more}, {"label": [f"r{i}" for i in range(n)]})


def test_a_step_of_calls_on_several_groups_equals_the_same_step_here(groups):
    batch = rows(7)
    order = [6, 0, 5, 1, 4, 2, 3]
    f = batch.union(groups["first"].double(batch))
    f = f.reorder(order).union(DataProto.from_dict({"here": torch.arange(7.0)}))
    f = f.union(groups["apart"].total(f)).union(groups["second"].echo(f, scale=2).rename({"rank": "r", "seen": "s"}))
    assert isinstance(f, DataProtoFuture)
    x = torch.tensor(order)
    assert set(f.columns) == {"x", "label", "double", "here", "total", "y", "r", "s"}
    back = f.get()
    assert back.batch["double"].tolist() == (2 * x).tolist()
    assert back.batch["total"].tolist() == (3 * x).tolist()
    assert back.batch["y"].tolist() == (2 * x).tolist()
    assert back.batch["here"].tolist() == list(range(7))
    assert back.non_tensor_batch["label"].tolist() == [f"r{i}" for i in order]
    assert back.metrics["rows"].value == 14
    assert_equal(f[2:5].get(["total"]), back[2:5].get(["total"]).with_metrics({}))


def test_promised_rows_are_known_before_the_call_has_ended(groups):
    group = groups["first"]
    group.coordinates()
    begun = time.monotonic()
    f = group.double(rows(5), seconds=2)
    issued = time.monotonic() - begun
    assert (len(f), f.columns) == (5, ("double",))
    g = groups["apart"].total(rows(5).union(f))
    if group.world_size > 1:
        assert issued < 2, "the call was waited for"
        assert time.monotonic() - begun < 2
    assert g.get().batch["total"].tolist() == [0, 3, 6, 9, 12]


@pytest.mark.parametrize("n", [0, 1, 2, 7])
def test_more_ranks_than_rows_and_no_rows(groups, n):
    f = groups["first"].double(rows(n))
    g = groups["second"].total(rows(n).union(f)[::-1])
    assert g.get().batch["total"].tolist() == [3 * i for i in range(n)][::-1]


def test_broken_promises_are_named(groups):
    with pytest.raises(ResultMismatch, match=r"keeps_rows=True: expected the columns \['double'\], \d rows"):
        groups["first"].breaks_promise(rows(4)).get()
    assert groups["first"].double(rows(1)).get().batch["double"].tolist() == [0]


def test_columns_that_a_method_requires_are_looked_for_before_anything_is_sent(groups):
    group = groups["first"]
    values = torch.zeros(3, 4)
    whole = rows(3, values=values, unread=torch.zeros(3))
    for batch in (whole, DataProtoFuture.of(whole), group.echo_later(whole)):
        assert set(group.needs(batch).meta_info["columns"]) == {"x", "label", "values"}
        assert set(group.needs(other=rows(3), batch=batch).meta_info["columns"]) == {"x", "label", "values"}
    says = r"role 'first', method 'needs': the batch lacks 'values' \(from critic.compute_values\); it has \['x', 'la"
    for batch in (rows(3), DataProtoFuture.of(rows(3)), Broadcast(rows(3))):
        with pytest.raises(MissingColumnError, match=says):
            group.needs(batch, other=whole)
    with pytest.raises(MissingColumnError, match=r"'values'.*, 'x'; it has no columns"):
        group.needs(DataProto())
    with pytest.raises(ColumnMismatchError, match=r"'needs': column 'values' must be torch.float32, got torch.float64"):
        group.needs(rows(3, values=values.double()))


def test_registration_of_a_promise_needs_columns_and_rows():
    with pytest.raises(RegistrationError, match="keeps_rows"):
        register("DP_COMPUTE_PROTO", keeps_rows=True)
    with pytest.raises(RegistrationError, match="keeps_rows"):
        register("DP_COMPUTE", writes=("x",), keeps_rows=True)


def test_the_failing_call_is_named_wherever_its_error_is_met(groups):
    group, apart = groups["first"], groups["apart"]

    def issue():
        f = group.fails(rows(4))
        return apart.total(rows(4).union(f))

    for meet in (lambda g: g.get(), lambda g: g.metrics, lambda g: apart.apply(lambda b: b, g).get()):
        with pytest.raises(LookupError, match="no double on rank 0") as caught:
            meet(issue())
        if group.world_size > 1:
            cause = caught.value.__cause__
            assert isinstance(cause, WorkerFailed)
            assert (cause.role, cause.rank, cause.method) == ("first", 0, "fails")
    assert group.double(rows(2)).get().batch["double"].tolist() == [0, 2]


def test_an_error_that_nobody_waits_for_comes_with_the_next_use_of_the_group(groups, backend):
    group = groups["first"]
    if group.world_size == 1:
        with pytest.raises(LookupError):
            group.fails(rows(4))
        backend.wait()
        return
    group.fails(rows(4), rank=1)
    with pytest.raises(LookupError, match="rank 1"):
        group.describe()
    group.describe()
    group.fails(rows(4), rank=1)
    with pytest.raises(LookupError, match="rank 1"):
        backend.wait()
    backend.wait()


def test_columns_that_are_read_are_shared_and_columns_that_are_changed_are_copies(groups):
    """H-05: a worker's edit is seen by nobody else."""
    batch = DataProtoFuture.of(rows(4, m=torch.zeros(4, dtype=torch.int64)))
    for _ in range(2):
        assert groups["first"].add_in_place(batch).get().batch["m"].tolist() == [1] * 4
    assert batch.get().batch["m"].tolist() == [0] * 4
    stored = groups["first"].grow(batch, 2)  # no reads declared: all copies
    groups["second"].apply(lambda b: (b.batch["x"].add_(9), b)[1], stored).wait()
    assert stored.get().batch["x"].tolist() == [0, 1, 2, 3]


def test_debug_mode_names_a_method_that_writes_into_shared_columns(strict):
    with pytest.raises(ColumnWritten, match=r"'add_in_secret' wrote into \['x'\].*mutates"):
        strict.add_in_secret(rows(4)).get()
    assert strict.add_in_place(rows(4, m=torch.zeros(4, dtype=torch.int64))).get().batch["m"].tolist() == [1] * 4
    assert_equal(strict.echo_later(rows(3)).get(), rows(3))


def test_futures_can_be_switched_off(backend):
    plain = made("local" if isinstance(backend, LocalBackend) else "ray", futures=False)
    try:
        group = plain.launch({"plain": WorkerSpec(EchoWorker)}, {"plain": "q"})["plain"]
        back = group.double(rows(3))
        assert isinstance(back, DataProto)
        assert back.batch["double"].tolist() == [0, 2, 4]
        with pytest.raises(LookupError):
            group.fails(rows(3))
    finally:
        plain.shutdown()


def test_waits_are_booked_to_the_stage_that_sent_the_call(groups):
    group = groups["first"]
    group.coordinates()
    with watch() as sender:
        f = group.double(rows(2), seconds=0.4)
    with watch() as waiter:
        f.wait()
    assert sender.seconds >= 0.35
    assert waiter.seconds < 0.2


# --- Ray alone -----------------------------------------------------------------------------------------------------


def stored() -> tuple[float, int]:
    """Bytes that this cluster's store holds, and references that this driver holds."""
    import ray

    kind = "object_store_memory"
    used = ray.cluster_resources()[kind] - ray.available_resources().get(kind, 0.0)
    return used, len(ray._private.worker.global_worker.core_worker.get_all_reference_counts())


def until_as(before: tuple[float, int], seconds: float = 15.0) -> tuple[float, int]:
    """What is stored, once it is no more than before, or after a while."""
    deadline = time.monotonic() + seconds
    while (now := stored()) > before or now[1] > before[1]:
        if time.monotonic() > deadline:
            break
        time.sleep(0.2)
    return now


def training_step(groups, fails: bool = False) -> None:
    batch = DataProto.from_dict({"x": torch.arange(4096)}, {"label": [str(i) for i in range(4096)]})
    f = groups["first"].grow(batch, 64)
    f = f.union(groups["apart"].double(f)).reorder(np.arange(4096)[::-1])
    f = f.union(groups["second"].total(f)).union(DataProto.from_dict({"here": torch.ones(4096, 32)}))
    if fails:
        groups["first"].fails(f).wait()
    groups["first"].echo(f).wait()
    f.get(["here", "total"])


@pytest.mark.parametrize("backend", ["ray"], indirect=True)
def test_the_store_is_empty_after_fifty_steps_and_after_a_failed_one(backend, groups):
    groups["first"].describe()
    gc.collect()
    before = until_as((0.0, len(groups) * 8))
    f = groups["first"].grow(DataProto.from_dict({"x": torch.arange(4096)}), 64).wait()
    assert until_as(before, 1.0) > before, "what is measured shows rows that are held"
    del f
    for _ in range(50):
        training_step(groups)
    backend.wait()  # a call that nobody waited for is remembered until it has ended, without its rows
    assert until_as(before) <= before
    gc.disable()  # dropped with the last reference, not when a collector happens to run
    try:
        with pytest.raises(LookupError):
            training_step(groups, fails=True)
        assert until_as((before[0], 10)) <= (before[0], 10)
        backend.wait()
        assert until_as(before) <= before
    finally:
        gc.enable()
    training_step(groups)
    backend.wait()
    assert until_as(before) <= before
