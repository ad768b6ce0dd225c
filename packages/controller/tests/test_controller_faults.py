"""What happens to a group call on Ray when a rank raises, ends or is killed."""

from __future__ import annotations

import os
import re
import sys
import time

import pytest
import torch

from ostinato.controller import (
    CallTimedOut,
    ControllerError,
    GroupStopped,
    LocalBackend,
    RayNotRunning,
    ResourcePool,
    ResourcePoolManager,
    WorkerDied,
    WorkerFailed,
    WorkerHung,
    WorkerSpec,
)
from ostinato.controller.ray import RayBackend, init_ray
from ostinato.controller.ray.driver import run_on_cluster
from ostinato.controller.testing import EchoWorker, FailsToBuild, FaultyWorker, UnpicklableError
from ostinato.protocol import DataProto


@pytest.fixture
def backend_of(ray_here):
    backends = []

    def make(processes: int, **options) -> RayBackend:
        backends.append(RayBackend(ResourcePoolManager([ResourcePool("p", [processes])]), grace_s=1.0, **options))
        return backends[-1]

    yield make
    for backend in backends:
        backend.shutdown()


def wait_until_gone(pids: list[int], seconds: float = 10.0) -> list[int]:
    deadline = time.monotonic() + seconds
    while (left := [pid for pid in pids if os.path.exists(f"/proc/{pid}")]) and time.monotonic() < deadline:
        time.sleep(0.05)
    return left


@pytest.mark.parametrize(
    ("how", "processes", "reason"),
    [
        ("sys.exit", 4, r"called sys.exit\(3\)"),
        ("os._exit", 2, r"its process ended \(ActorDiedError\)"),
        ("kill", 2, r"its process ended \(ActorDiedError\)"),
        ("SIGSTOP", 2, r"its process is stopped \(state T"),
    ],
)
def test_death_of_one_rank_ends_the_call_and_stops_the_others(backend_of, how, processes, reason):
    """H-11: one rank exits, the others sleep for a minute; the call ends within seconds and names the rank."""
    backend = backend_of(processes, look_s=1.0)
    groups = backend.launch({"bad": WorkerSpec(FaultyWorker), "echo": WorkerSpec(EchoWorker)})
    pids = groups["bad"].pid()
    begun = time.monotonic()
    with pytest.raises(WorkerDied, match=rf"role 'bad', rank 1 on node .*method 'fail': {reason}") as caught:
        groups["bad"].fail(how, 1, others_wait_s=60.0)
    assert time.monotonic() - begun < 15
    assert caught.value.rank == 1
    assert isinstance(caught.value, WorkerHung) == (how == "SIGSTOP")
    assert wait_until_gone(pids) == []
    for call in (groups["bad"].pid, groups["echo"].describe):
        with pytest.raises(GroupStopped, match="rank 1"):
            call()


def test_exceptions_and_stuck_ranks(backend_of):
    group = backend_of(2).launch({"bad": WorkerSpec(FaultyWorker)})["bad"]
    pids = group.pid()

    with pytest.raises(ValueError, match="bad row on rank 1") as caught:
        group.fail("ValueError", 1)
    cause = caught.value.__cause__
    assert isinstance(cause, WorkerFailed)
    assert (cause.role, cause.rank, cause.method) == ("bad", 1, "fail")
    assert 'raise ValueError(f"bad row' in cause.traceback
    assert "colocate.py" not in cause.traceback
    assert any("rank 1" in note for note in caught.value.__notes__)

    with pytest.raises(WorkerFailed, match=r"rank 1.*UnpicklableError: 1 is not 2"):
        group.fail("unpicklable", 1)

    with pytest.raises(ValueError, match="bad row") as caught:
        group.fail("ValueError", -1)
    assert sum("also failed: rank" in note for note in caught.value.__notes__) == 1

    # All ranks had ended: the group goes on.
    assert group.pid() == pids

    # One raises, the others stay in the call: after the grace they are stopped.
    begun = time.monotonic()
    with pytest.raises(ValueError, match="bad row on rank 0") as caught:
        group.fail("ValueError", 0, others_wait_s=60.0)
    assert time.monotonic() - begun < 10
    assert "stopped in the call: rank(s) [1]" in caught.value.__notes__
    assert any(note.startswith("Where rank 1 stood:") and "in fail" in note for note in caught.value.__notes__)
    assert wait_until_gone(pids) == []
    with pytest.raises(GroupStopped, match="bad row"):
        group.pid()


def test_arguments_that_fail_on_the_way_builds_that_fail_and_deadlines(backend_of):
    backend = backend_of(1, call_timeout_s=1.0)
    with pytest.raises(FileNotFoundError, match="no model for rank 0"):
        backend.launch({"model": WorkerSpec(FailsToBuild)})
    groups = backend.launch({"bad": WorkerSpec(FaultyWorker), "echo": WorkerSpec(EchoWorker)})
    with pytest.raises(WorkerFailed, match=r"'echo', rank 0.*'mine': the call could not be run"):
        groups["echo"].mine(BreaksOnArrival())
    pending = groups["echo"].echo_later(DataProto.from_dict({"x": torch.arange(2)}), seconds=30.0)
    with pytest.raises(
        CallTimedOut, match=r"'echo', method 'echo_later': no answer within 1 s from rank\(s\) 0 on"
    ) as hung:
        pending.get()
    assert "time.sleep" in str(hung.value) or "in echo_later" in str(hung.value), "where the worker stood"
    with pytest.raises(CallTimedOut):
        pending.get()


def test_a_death_is_named_by_the_calls_that_need_what_it_took(ray_here):
    """A group on other processes waits for rows of a process that dies: the error names the one that died."""
    backend = RayBackend(ResourcePoolManager([ResourcePool("p", [2]), ResourcePool("q", [1])]), grace_s=1.0)
    try:
        specs = {"bad": WorkerSpec(FaultyWorker), "echo": WorkerSpec(EchoWorker), "apart": WorkerSpec(EchoWorker)}
        groups = backend.launch(specs, {"bad": "p", "echo": "p", "apart": "q"})
        batch = DataProto.from_dict({"x": torch.arange(4)})
        kept = groups["echo"].double(batch).wait()
        f = groups["echo"].double(batch, seconds=3.0)
        needs = groups["apart"].total(batch.union(f))
        os.kill(backend._processes["p"].places[1].mark.pid, 9)
        with pytest.raises(WorkerDied, match=r"role 'echo', rank 1 .*method 'double': its process ended"):
            needs.get()
        with pytest.raises(WorkerDied, match="rank 1"):
            f.get()
        with pytest.raises(GroupStopped):
            groups["echo"].describe()
        assert kept.get().batch["double"].tolist() == [0, 2, 4, 6], "rows outlive the process that made them"
        assert len(groups["apart"].describe()) == 1
    finally:
        backend.shutdown()


def test_local_build_that_fails_comes_as_its_own_type():
    with pytest.raises(FileNotFoundError, match="no model for rank 0"):
        LocalBackend().launch({"model": WorkerSpec(FailsToBuild)})


def test_local_worker_that_exits_does_not_end_the_driver():
    backend = LocalBackend()
    group = backend.launch({"bad": WorkerSpec(FaultyWorker)})["bad"]
    with pytest.raises(WorkerDied, match=r"role 'bad', rank 0.*called sys.exit\(3\)"):
        group.fail("sys.exit", 0)
    with pytest.raises(ValueError, match="bad row on rank 0"):
        group.fail("ValueError", 0)
    backend.shutdown()


def use_workers(how: str, *, emit) -> None:
    """What a driver does: here, a group of its own."""
    emit("begun")
    if how == "bug":
        raise LookupError("no such step")
    if how == "unpicklable":
        raise UnpicklableError(1, 2)
    if how == "kill":
        os.kill(os.getpid(), 9)
    backend = RayBackend(ResourcePoolManager([ResourcePool("p", [1])]))
    try:
        backend.launch({"bad": WorkerSpec(FaultyWorker)})["bad"].fail("ValueError", 0)
    finally:
        backend.shutdown()


@pytest.mark.parametrize(
    ("how", "error", "role", "reason", "frame"),
    [
        ("worker", ValueError, "bad", "ValueError: bad row on rank 0", 'raise ValueError(f"bad row'),
        ("bug", LookupError, "driver", "LookupError: no such step", 'raise LookupError("no such step")'),
        ("unpicklable", WorkerFailed, "driver", "UnpicklableError: 1 is not 2", "raise UnpicklableError(1, 2)"),
        ("kill", WorkerDied, "driver", r"its process ended \(ActorDiedError\)", ""),
    ],
)
def test_failures_keep_their_place_and_traceback_on_the_way_from_the_driver_actor(
    ray_here, how, error, role, reason, frame
):
    from ray import cloudpickle

    cloudpickle.register_pickle_by_value(sys.modules[__name__])  # a test module cannot be imported by other processes
    events = []
    with pytest.raises(error) as caught:
        run_on_cluster(use_workers, how, on_event=events.append)
    assert events == ["begun"] or how == "kill"  # what a process has not sent when it dies is lost
    failed = caught.value if isinstance(caught.value, WorkerFailed) else caught.value.__cause__
    assert isinstance(failed, WorkerFailed)
    assert failed.role == role
    assert re.fullmatch(reason, failed.reason)
    assert frame in failed.traceback
    assert "ray/driver.py" not in failed.traceback
    if role == "bad":
        assert any("role 'bad', rank 0" in note for note in caught.value.__notes__)


def test_address_where_nothing_answers_is_refused_soon(monkeypatch):
    ray = pytest.importorskip("ray")
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    begun = time.monotonic()
    with pytest.raises(RayNotRunning, match=r"no Ray answers at 127\.0\.0\.1:1 .*RAY_ADDRESS"):
        init_ray(address="127.0.0.1:1")
    assert time.monotonic() - begun < 5


class BreaksOnArrival:
    """Pickles, and fails to unpickle."""

    def __reduce__(self):
        return (int, ("not a number",))


def test_errors_share_one_root():
    for error in (WorkerDied, WorkerFailed, GroupStopped, CallTimedOut):
        assert issubclass(error, ControllerError)
