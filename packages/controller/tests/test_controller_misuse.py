"""Wrong use of public names: refused by name before anything starts, and nothing is left half done."""

from __future__ import annotations

import math

import pytest
import torch

from ostinato.controller import (
    CollectError,
    Dispatch,
    DispatchError,
    LocalBackend,
    PlacementError,
    RegistrationError,
    ResourcePool,
    ResourcePoolManager,
    Scatter,
    WorkerSpec,
    register,
    register_dispatch_mode,
)
from ostinato.controller.testing import EchoWorker
from ostinato.protocol import DataProto, Metric


@pytest.mark.parametrize(
    ("roles", "says"),
    [
        ([WorkerSpec(EchoWorker)], "expected a dict of role -> WorkerSpec, got list"),
        ({"echo": EchoWorker}, r"role 'echo' needs a recipe, got EchoWorker; write WorkerSpec\(EchoWorker, \.\.\.\)"),
        ({"echo": EchoWorker()}, r"write WorkerSpec\(EchoWorker, \.\.\.\)"),
        ({3: WorkerSpec(EchoWorker)}, "a role is text and not empty, got 3"),
    ],
)
def test_launch_wants_recipes_by_role(roles, says):
    with pytest.raises(PlacementError, match=says):
        LocalBackend().launch(roles)


def test_a_wrong_recipe_is_refused_before_another_one_is_built():
    built = []

    class Notes(EchoWorker):
        def __init__(self) -> None:
            super().__init__()
            built.append(self)

    with pytest.raises(TypeError, match="expected a subclass of Worker, got <class 'dict'>"):
        LocalBackend().launch({"first": WorkerSpec(Notes), "second": WorkerSpec(dict)})  # pyright: ignore
    assert built == []


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"dispatch_mode": lambda self: 1}, r"got function; write @register\(\.\.\.\) with brackets"),
        ({"dispatch_mode": 3}, "expected a dispatch mode or its name, got int"),
        ({"execute_mode": "all"}, "execute_mode is Execute.ALL or Execute.RANK_ZERO.*got 'all'"),
        ({"blocking": "no"}, "blocking True, False or None.*'no'"),
        ({"mesh": None}, "mesh a name; got .*None"),
        ({"reads": None}, "reads must be a tuple of column names, got None"),
        ({"writes": (1, 2)}, r"writes must be a tuple of column names, got \(1, 2\)"),
        ({"requires": "x"}, "requires='x' is one string"),
    ],
)
def test_register_says_what_it_takes(arguments, says):
    with pytest.raises(RegistrationError, match=says):
        register(**arguments)


@pytest.mark.parametrize("name", [3, "", "two words"])
def test_modes_have_names(name):
    with pytest.raises(RegistrationError, match="expected a name in capitals and two functions"):
        register_dispatch_mode(name, Dispatch.DP_COMPUTE.split, Dispatch.DP_COMPUTE.collect)
    with pytest.raises(RegistrationError, match="two functions"):
        register_dispatch_mode("MINE", None, Dispatch.DP_COMPUTE.collect)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("values", ["ab", b"ab", 3, iter([1])])
def test_scatter_takes_no_text_and_nothing_without_a_length(values):
    with pytest.raises(DispatchError, match="one value for each rank, got"):
        Scatter(values)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"processes_on_nodes": 4}, r"a positive number a node, e.g. \[4, 4\], got 4"),
        ({"processes_on_nodes": "22"}, "got '22'"),
        ({"processes_on_nodes": [1.5]}, r"got \[1.5\]"),
        ({"processes_on_nodes": [True]}, r"got \[True\]"),
        ({"max_colocate": 1.5}, "max_colocate must be a whole number"),
        ({"cpus_per_process": math.nan}, "cpus_per_process > 0"),
        ({"threads_per_process": 0}, "threads_per_process must be None or"),
        ({"name": ""}, "its name must be text"),
    ],
)
def test_pools_are_counted_in_whole_numbers(wrong, says):
    with pytest.raises(PlacementError, match=says):
        ResourcePool(**{"name": "p", "processes_on_nodes": [1], **wrong})


def test_managers_take_pools_and_splits_are_whole_or_not_there():
    with pytest.raises(PlacementError, match="expected a list of ResourcePool, got 'p'"):
        ResourcePoolManager({"p": [1]})  # pyright: ignore[reportArgumentType]
    pools = ResourcePoolManager(ResourcePool("p", [4]))
    for sizes, says in (
        ({"a": 1, "p": 1}, r"\['p'\] already"),
        ([1, 1], "4 slots"),
        ({"a": 1.5}, "4 slots"),
        ({}, "4"),
    ):
        with pytest.raises(PlacementError, match=says):
            pools.split("p", sizes)  # pyright: ignore[reportArgumentType]
    assert pools.names == ("p",)


@pytest.mark.parametrize(("value", "says"), [(None, "None"), ({"n": Metric.sum(1)}, "metrics")])
def test_an_annotation_that_is_wrong_is_named_when_rows_are_wanted(value, says):
    backend = LocalBackend()
    group = backend.launch_one("echo", WorkerSpec(EchoWorker))
    result = group.apply(lambda batch: value, DataProto.from_dict({"x": torch.arange(2)}))
    with pytest.raises(CollectError, match=f"'apply': is annotated to return a DataProto and returned {says}"):
        result.get()
    backend.shutdown()
