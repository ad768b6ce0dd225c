"""Workers alone: context, coordinates, recipes, the process group, and several roles in one process."""

from __future__ import annotations

import pickle
import socket
from datetime import timedelta

import pytest
from torch import distributed as dist

from ostinato.controller import rendezvous
from ostinato.controller.colocate import RoleHost, capture, restore
from ostinato.controller.errors import PlacementError, ProcessGroupMismatch, WorkerDied, WorkerFailed
from ostinato.controller.testing import EchoWorker, UnpicklableError
from ostinato.controller.topology import Coordinates
from ostinato.controller.worker import Worker, WorkerContext, WorkerSpec


@pytest.fixture(autouse=True)
def _no_process_group():
    yield
    rendezvous.leave_process_group()


def test_a_worker_alone_is_rank_zero_of_one():
    worker = Worker()
    assert (worker.rank, worker.world_size, worker.local_rank, worker.local_world_size) == (0, 1, 0, 1)


def test_a_context_holds_for_its_block_only():
    with WorkerContext(rank=1, world_size=3, role="actor").activate():
        worker = Worker()
    assert (worker.rank, worker.world_size, worker.role) == (1, 3, "actor")
    assert WorkerContext.current().world_size == 1


def test_unregistered_mesh_makes_each_rank_its_own_dp_rank():
    with WorkerContext(rank=1, world_size=3).activate():
        worker = Worker()
    assert worker.coordinates("train") == Coordinates(1, 3)
    worker.register_mesh("train", Coordinates(0, 1))
    assert worker.coordinates("train") == Coordinates(0, 1)
    assert worker.coordinates("rollout") == Coordinates(1, 3)


def test_spec_survives_pickling_and_builds_at_a_place():
    spec = pickle.loads(pickle.dumps(WorkerSpec(EchoWorker, tag={"a": 1})))
    worker = spec.build(WorkerContext(rank=2, world_size=4))
    assert (worker.rank, worker.tag) == (2, {"a": 1})


def test_spec_refuses_what_is_no_worker():
    with pytest.raises(TypeError, match="subclass of Worker"):
        _ = WorkerSpec(dict).worker_class  # pyright: ignore[reportArgumentType, reportCallIssue]


def test_spec_names_a_worker_that_skips_the_base_init():
    class Careless(Worker):
        def __init__(self) -> None:
            self.ready = True

    with pytest.raises(TypeError, match=r"Careless.__init__ must call super\(\).__init__"):
        WorkerSpec(Careless).build(WorkerContext())


def test_process_group_of_one_needs_no_port_and_is_made_once():
    first, second = Worker(), Worker()
    first.init_process_group("cpu")
    group = dist.group.WORLD
    second.init_process_group()
    assert dist.group.WORLD is group
    assert (dist.get_world_size(), dist.get_backend()) == (1, "gloo")


def test_process_group_of_another_world_is_refused():
    Worker().init_process_group("cpu")
    with WorkerContext(rank=1, world_size=2, master_port=1, role="critic").activate():
        other = Worker()
    with pytest.raises(ProcessGroupMismatch, match=r"'critic'.*rank 1 of 2.*rank 0 of 1"):
        other.init_process_group("cpu")


def test_process_group_of_another_device_is_refused():
    with pytest.raises(ProcessGroupMismatch, match="'tpu'"):
        Worker().init_process_group("tpu")
    assert not dist.is_initialized()


def test_process_group_of_several_needs_a_port():
    with WorkerContext(world_size=2).activate():
        worker = Worker()
    with pytest.raises(ProcessGroupMismatch, match="no master_port"):
        worker.init_process_group("cpu")


def test_held_port_belongs_to_this_process_until_the_store_takes_it():
    port = rendezvous.hold_port()
    with pytest.raises(OSError, match="in use"), socket.socket(socket.AF_INET6) as other:
        other.bind(("", port))
    store = rendezvous.make_store(WorkerContext(world_size=2, master_port=port), timedelta(seconds=10))
    with_client = rendezvous.make_store(WorkerContext(rank=1, world_size=2, master_port=port), timedelta(seconds=10))
    store.set("here", "yes")
    assert with_client.get("here") == b"yes"


def test_released_port_is_free_again():
    port = rendezvous.hold_port()
    rendezvous.release_ports()
    with socket.socket(socket.AF_INET6) as other:
        other.bind(("", port))
        assert other.getsockname()[1] == port


def test_host_keeps_roles_apart():
    host = RoleHost()
    host.build("actor", WorkerSpec(EchoWorker, tag="a"), WorkerContext(role="actor"))
    host.build("critic", WorkerSpec(EchoWorker, tag="c"), WorkerContext(role="critic"))
    assert [host.call(role, "describe", (), {})["tag"] for role in ("actor", "critic")] == ["a", "c"]
    with pytest.raises(PlacementError, match="'actor'"):
        host.build("actor", WorkerSpec(EchoWorker), WorkerContext(role="actor"))


def test_host_closes_every_worker_even_if_one_fails():
    closed = []

    class Closing(Worker):
        def close(self) -> None:
            closed.append(self.role)
            if self.role == "second":
                raise OSError("no")

    host = RoleHost()
    for role in ("first", "second", "third"):
        host.build(role, WorkerSpec(Closing), WorkerContext(role=role))
    with pytest.raises(OSError, match="no"):
        host.close()
    assert closed == ["third", "second", "first"]


def raised(error: BaseException) -> BaseException:
    try:
        raise error
    except BaseException as caught:
        return caught


def travel(error: BaseException) -> BaseException:
    failure = capture(raised(error), pickle.dumps, pickle.loads)
    return restore(pickle.loads(pickle.dumps(failure)), "actor", 1, "node7", "update_actor", pickle.loads)


def test_exception_that_pickles_comes_back_as_itself():
    error = travel(KeyError("input_ids"))
    assert isinstance(error, KeyError)
    assert error.args == ("input_ids",)
    assert error.__notes__ == ["raised by role 'actor', rank 1 on node node7, method 'update_actor'"]
    assert isinstance(error.__cause__, WorkerFailed)
    assert "in raised" in error.__cause__.traceback


class ChangesOnTheWay(Exception):
    def __reduce__(self):
        return (ChangesOnTheWay, ("something else",))


class HoldsAFunction(Exception):
    pass


def test_exception_that_does_not_pickle_comes_as_a_stand_in():
    for error in (UnpicklableError(1, 2), ChangesOnTheWay("text"), HoldsAFunction(lambda: 0)):
        stand_in = travel(error)
        assert type(stand_in) is WorkerFailed
        assert (stand_in.role, stand_in.rank, stand_in.node, stand_in.method) == ("actor", 1, "node7", "update_actor")
        assert type(error).__name__ in stand_in.reason
        assert "Traceback" in str(stand_in)


def test_exception_whose_class_is_missing_here_comes_as_a_stand_in():
    failure = capture(raised(ValueError("x")), pickle.dumps, pickle.loads)

    def loads(data):
        raise ModuleNotFoundError("their_package")

    stand_in = restore(failure, "actor", 0, "n", "m", loads)
    assert isinstance(stand_in, WorkerFailed)
    assert stand_in.reason == "ValueError: x"


def test_system_exit_is_the_death_of_the_worker():
    error = travel(SystemExit(3))
    assert isinstance(error, WorkerDied)
    assert error.reason == "called sys.exit(3)"
