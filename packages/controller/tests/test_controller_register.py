"""What `register` attaches, and what it refuses."""

from __future__ import annotations

import pytest

from ostinato.controller import Dispatch, Execute, LocalBackend, RegistrationError, UnknownDispatchMode, WorkerSpec
from ostinato.controller.register import register, registered_methods, registration_of
from ostinato.controller.worker import Worker


def test_register_attaches_a_record_and_returns_the_function():
    def method(self):
        return 1

    marked = register("DP_COMPUTE_PROTO", blocking=False, reads=["a"], writes=("b",), mesh="rollout")(method)
    record = registration_of(marked)
    assert marked is method
    assert record is not None
    assert record.dispatch_mode is Dispatch.DP_COMPUTE_PROTO
    assert (record.blocking, record.reads, record.writes, record.mutates) == (False, ("a",), ("b",), ())
    assert (record.execute_mode, record.mesh) == (Execute.ALL, "rollout")


def test_register_defaults_to_all_to_all_and_blocking():
    record = registration_of(register()(lambda self: None))
    assert record is not None
    assert record.dispatch_mode is Dispatch.ALL_TO_ALL
    assert record.blocking


def test_register_refuses_an_unknown_mode():
    with pytest.raises(UnknownDispatchMode, match="'DP_COMPUT'"):
        register("DP_COMPUT")


def test_register_refuses_rank_zero_where_rows_are_split():
    with pytest.raises(RegistrationError, match=r"DP_COMPUTE_PROTO.*Execute.RANK_ZERO"):
        register(Dispatch.DP_COMPUTE_PROTO, execute_mode=Execute.RANK_ZERO)


@pytest.mark.parametrize("field", ["reads", "writes", "mutates"])
def test_register_refuses_one_string_for_columns(field):
    with pytest.raises(RegistrationError, match=f"{field}='input_ids'"):
        register(**{field: "input_ids"})


class Base(Worker):
    @register(Dispatch.RANK_ZERO)
    def one(self) -> int:
        """Say one."""
        return 1

    def plain(self) -> int:
        return 2


class Derived(Base):
    def one(self) -> int:
        return 10

    @register(Dispatch.ONE_TO_ALL)
    def two(self) -> int:
        return 2


def test_an_override_keeps_the_registration_of_what_it_overrides():
    found = {name: (function, record.dispatch_mode) for name, function, record in registered_methods(Derived)}
    assert found == {"one": (Derived.one, Dispatch.RANK_ZERO), "two": (Derived.two, Dispatch.ONE_TO_ALL)}


def test_a_group_has_the_registered_methods_and_no_other():
    group = LocalBackend().launch({"base": WorkerSpec(Base)})["base"]
    assert group.one() == 1  # pyright: ignore[reportAttributeAccessIssue]
    assert group.one.__doc__ == "Say one."  # pyright: ignore[reportAttributeAccessIssue]
    assert not hasattr(group, "plain")


def test_a_method_named_like_something_of_the_group_is_refused():
    class Clash(Worker):
        @register()
        def places(self) -> None: ...

    with pytest.raises(RegistrationError, match=r"Clash.places.*rename"):
        LocalBackend().launch({"clash": WorkerSpec(Clash)})
