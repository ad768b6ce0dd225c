"""Dispatch modes over fake ranks: what each rank gets, and what comes back."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest
import torch

from ostinato.controller import (
    Broadcast,
    Call,
    CollectError,
    Dispatch,
    DispatchError,
    RegistrationError,
    Scatter,
    UnknownDispatchMode,
    by_argument,
    register_dispatch_mode,
)
from ostinato.controller import dispatch as module
from ostinato.controller.dispatch import as_list, dispatch_mode_named, plan_call
from ostinato.controller.topology import Coordinates, Mesh, grid
from ostinato.protocol import DataProto, Metric


def rows(n: int) -> DataProto:
    return DataProto.from_dict({"x": torch.arange(n)}, {"label": np.array([f"r{i}" for i in range(n)], dtype=object)})


def group_call(mode, coordinates, method, *args, reads=(), **kwargs):
    """Run `method(rank, *args, **kwargs)` for every rank that is called and collect, as a group does."""
    plan = plan_call(mode, Mesh(tuple(coordinates)), Call(args, kwargs), reads=reads)
    results = [
        None if call is None else method(rank, *call.args, **call.kwargs) for rank, call in enumerate(plan.calls)
    ]
    return plan.collect([results[rank] for rank in plan.answering])


def sizes_of(mode, coordinates, *args, **kwargs):
    plan = plan_call(mode, Mesh(tuple(coordinates)), Call(args, kwargs))
    return [len(next(iter([*call.args, *call.kwargs.values()]))) for call in plan.calls if call is not None]


@pytest.mark.parametrize(
    ("n", "ranks", "expected"),
    [(10, 4, [3, 3, 2, 2]), (8, 4, [2, 2, 2, 2]), (7, 4, [2, 2, 2, 1]), (2, 4, [1, 1, 0, 0]), (0, 3, [0, 0, 0])],
)
@pytest.mark.parametrize("by", ["position", "keyword"])
def test_proto_pieces_differ_by_at_most_one_row(n, ranks, expected, by):
    """H-07: by keyword and by position alike, whether or not the rows divide."""
    args, kwargs = ((rows(n),), {}) if by == "position" else ((), {"data": rows(n)})
    assert sizes_of(Dispatch.DP_COMPUTE_PROTO, grid(ranks), *args, **kwargs) == expected


@pytest.mark.parametrize("n", [0, 1, 3, 7, 8, 10])
@pytest.mark.parametrize("layout", [{}, {"tp": 2}, {"pp": 2}, {"cp": 2}, {"tp": 2, "pp": 2}, {"tp": 8}])
def test_proto_rows_come_back_in_order(n, layout):
    batch = rows(n)
    back = group_call(Dispatch.DP_COMPUTE_PROTO, grid(8, **layout), lambda rank, data: data, data=batch)
    assert back.batch["x"].tolist() == list(range(n))
    assert back.non_tensor_batch["label"].tolist() == [f"r{i}" for i in range(n)]


def test_padded_rows_come_back_in_order_by_keyword():
    """H-07: 7 rows, padding asked for."""
    padded, pad = rows(7).pad_to_multiple(4)
    assert sizes_of(Dispatch.DP_COMPUTE_PROTO, grid(4), data=padded) == [2, 2, 2, 2]
    back = group_call(Dispatch.DP_COMPUTE_PROTO, grid(4), lambda rank, data: data, data=padded).unpad(pad)
    assert back.batch["x"].tolist() == list(range(7))


def test_proto_rows_follow_dp_ranks_and_not_positions():
    """H-08: ranks 0, 1, 2 hold dp ranks 0, 2, 1."""
    coordinates = [Coordinates(dp, 3) for dp in (0, 2, 1)]
    seen = {}

    def method(rank, data):
        seen[rank] = data.batch["x"].tolist()
        return data

    back = group_call(Dispatch.DP_COMPUTE_PROTO, coordinates, method, rows(6))
    assert seen == {0: [0, 1], 1: [4, 5], 2: [2, 3]}
    assert back.batch["x"].tolist() == [0, 1, 2, 3, 4, 5]


def test_ranks_of_one_dp_rank_get_the_same_object():
    mesh = Mesh(grid(8, tp=2, cp=2))
    plan = plan_call(Dispatch.DP_COMPUTE_PROTO, mesh, Call((rows(5),)))
    pieces = [call.args[0] for call in plan.calls if call is not None]
    assert all(piece is pieces[0] for piece in pieces[:4])
    assert all(piece is pieces[4] for piece in pieces[4:])
    assert len({id(piece) for piece in pieces}) == mesh.dp_size == 2


def test_every_proto_argument_is_split_and_the_rest_is_broadcast():
    def method(rank, first, values, second, flag):
        assert values == [1, 2]  # as long as there are ranks, and still not scattered
        assert flag == "on"
        return DataProto.from_dict({"a": first.batch["x"], "b": second.batch["x"]})

    back = group_call(Dispatch.DP_COMPUTE_PROTO, grid(2), method, rows(3), [1, 2], second=rows(3), flag="on")
    assert back.batch["a"].tolist() == back.batch["b"].tolist() == [0, 1, 2]


def test_broadcast_sends_a_whole_proto():
    got = group_call(Dispatch.DP_COMPUTE_METRIC, grid(3), lambda rank, d: {"n": Metric.max(len(d))}, Broadcast(rows(5)))
    assert got["n"].value == 5


def test_scatter_gives_each_dp_rank_its_value():
    got = group_call(Dispatch.DP_COMPUTE, grid(4, tp=2), lambda rank, v, w: (rank, v, w), Scatter(["a", "b"]), w=[7, 8])
    assert got == [(0, "a", [7, 8]), (2, "b", [7, 8])]


@pytest.mark.parametrize("mode", [Dispatch.DP_COMPUTE, Dispatch.ALL_TO_ALL, Dispatch.DP_COMPUTE_PROTO])
def test_scatter_of_the_wrong_length_is_refused(mode):
    with pytest.raises(DispatchError, match=r"argument 'value'.*3 values for 2 ranks"):
        group_call(mode, grid(2), lambda rank, value: None, value=Scatter([1, 2, 3]))


@pytest.mark.parametrize("mode", [Dispatch.ONE_TO_ALL, Dispatch.RANK_ZERO])
def test_scatter_where_all_get_the_same_is_refused(mode):
    with pytest.raises(DispatchError, match="argument 0"):
        group_call(mode, grid(2), lambda rank, value: None, Scatter([1, 2]))


def test_one_to_all_returns_every_rank_whatever_the_mesh():
    assert group_call(Dispatch.ONE_TO_ALL, grid(4, tp=4), lambda rank, v: (rank, v), [1, 2, 3, 4]) == [
        (rank, [1, 2, 3, 4]) for rank in range(4)
    ]


def test_all_to_all_scatters_over_ranks_and_not_dp_ranks():
    got = group_call(Dispatch.ALL_TO_ALL, grid(4, tp=2), lambda rank, v: v, Scatter([3, 2, 1, 0]))
    assert got == [3, 2, 1, 0]


def test_rank_zero_calls_one_rank():
    called = []
    assert group_call(Dispatch.RANK_ZERO, grid(3), lambda rank, v: called.append(rank) or v, 5) == 5
    assert called == [0]


def test_execute_rank_zero_calls_one_rank_and_returns_its_value():
    plan = plan_call(Dispatch.ONE_TO_ALL, Mesh(grid(3)), Call((1,)), rank_zero=True)
    assert [call is not None for call in plan.calls] == [True, False, False]
    assert plan.answering == (0,)
    assert plan.collect(["value"]) == "value"


def test_with_func_hands_the_function_to_every_rank():
    back = group_call(Dispatch.DP_COMPUTE_PROTO_WITH_FUNC, grid(2), lambda rank, f, d: f(d), lambda d: d[::-1], rows(4))
    assert back.batch["x"].tolist() == [1, 0, 3, 2]
    with pytest.raises(DispatchError, match="expected a function"):
        group_call(Dispatch.DP_COMPUTE_PROTO_WITH_FUNC, grid(2), lambda rank, d: d, rows(4))


def test_metrics_merge_by_their_own_reduction():
    def method(rank, data):
        return {"rows": Metric.sum(len(data)), "mean": Metric.mean(float(rank), weight=len(data))}

    got = group_call(Dispatch.DP_COMPUTE_METRIC, grid(2), method, rows(3))
    assert got["rows"].value == 3
    assert got["mean"].value == pytest.approx(1 / 3)  # 2 rows of 0 and 1 row of 1


def test_metric_mode_refuses_plain_numbers():
    with pytest.raises(CollectError, match=r"dict of \['float'\].*Metric.mean"):
        group_call(Dispatch.DP_COMPUTE_METRIC, grid(2), lambda rank, data: {"loss": 1.0}, rows(2))


def test_proto_mode_merges_metrics_and_passes_none():
    assert group_call(Dispatch.DP_COMPUTE_PROTO, grid(2), lambda rank, d: {"n": Metric.sum(1)}, rows(2))["n"].value == 2
    assert group_call(Dispatch.DP_COMPUTE_PROTO, grid(2), lambda rank, d: None, rows(2)) is None


@pytest.mark.parametrize("result", [[1], {"a": 1}, 3])
def test_proto_mode_refuses_other_results(result):
    with pytest.raises(CollectError, match=r"expected a DataProto.*DP_COMPUTE"):
        group_call(Dispatch.DP_COMPUTE_PROTO, grid(2), lambda rank, d: result, rows(2))


def test_proto_mode_refuses_results_of_two_kinds():
    with pytest.raises(CollectError, match="DataProto, NoneType"):
        group_call(Dispatch.DP_COMPUTE_PROTO, grid(2), lambda rank, d: d if rank == 0 else None, rows(2))


def test_silent_ranks_may_return_anything():
    back = group_call(Dispatch.DP_COMPUTE_PROTO, grid(4, tp=2), lambda rank, d: d if rank % 2 == 0 else None, rows(3))
    assert len(back) == 3


def test_reads_limits_the_columns_that_travel():
    def method(rank, data, whole, parts):
        assert data.columns == whole.columns == parts.columns == ("x",)
        return data

    batch = rows(4)
    group_call(
        Dispatch.DP_COMPUTE_PROTO,
        grid(2),
        method,
        batch,
        Broadcast(batch),
        parts=Scatter([batch, batch]),
        reads=("x", "absent"),
    )
    assert batch.columns == ("x", "label")


def test_splitting_leaves_the_batch_alone():
    batch = rows(4)
    before = copy.deepcopy(batch)
    group_call(Dispatch.DP_COMPUTE_PROTO, grid(2), lambda rank, d: d.pop(["x"]), batch, reads=("x",))
    assert batch.columns == before.columns
    assert torch.equal(batch.batch["x"], before.batch["x"])


def test_pieces_without_columns_are_dispatched():
    empty = DataProto.from_dict(meta_info={"step": 3})
    back = group_call(Dispatch.DP_COMPUTE_PROTO, grid(3), lambda rank, d: d, empty)
    assert len(back) == 0
    assert back.meta_info["step"] == 3


@pytest.mark.parametrize(
    ("name", "twin"), [("MEGATRON_COMPUTE", "DP_COMPUTE"), ("MEGATRON_COMPUTE_PROTO", "DP_COMPUTE_PROTO")]
)
def test_megatron_names_are_the_same_modes(name, twin):
    one, other = dispatch_mode_named(name), dispatch_mode_named(twin)
    assert (one.split, one.collect) == (other.split, other.collect)


def test_pipeline_stages_as_data_parallel_ranks():
    seen = {}

    def method(rank, data):
        seen[rank] = data.batch["x"].tolist()
        return data

    back = group_call(Dispatch.MEGATRON_PP_AS_DP_PROTO, grid(8, tp=2, pp=2), method, rows(5))
    assert seen == {0: [0, 1], 1: [0, 1], 4: [2], 5: [2], 2: [3], 3: [3], 6: [4], 7: [4]}
    assert back.batch["x"].tolist() == [0, 1, 2, 3, 4]


def test_known_modes_are_listed_and_pickle_as_themselves():
    names = [name for name in vars(Dispatch) if name.isupper()]
    assert len(names) == 10
    for name in names:
        mode = getattr(Dispatch, name)
        assert mode.name == name
        assert pickle.loads(pickle.dumps(mode)) is mode


def test_added_mode_is_known_by_name(monkeypatch):
    monkeypatch.setattr(module, "_modes", dict(module._modes))

    def reversed_rule(where, value, size):
        return list(reversed(value.values)) if isinstance(value, Scatter) else [value] * size

    mode = register_dispatch_mode("BACKWARDS", by_argument(reversed_rule), as_list)
    assert dispatch_mode_named("BACKWARDS") is mode
    assert group_call(mode, grid(3), lambda rank, v: v, Scatter([1, 2, 3])) == [3, 2, 1]
    with pytest.raises(RegistrationError, match="'BACKWARDS' exists"):
        register_dispatch_mode("BACKWARDS", by_argument(reversed_rule), as_list)


def test_unknown_mode_names_the_known_ones():
    with pytest.raises(UnknownDispatchMode, match=r"'DP_COMPUTE_PROTOS'.*DP_COMPUTE_PROTO"):
        dispatch_mode_named("DP_COMPUTE_PROTOS")


def test_a_split_of_the_wrong_length_is_refused():
    mode = module.DispatchMode("SHORT", lambda mesh, call: [call], as_list)
    with pytest.raises(DispatchError, match="1 calls for 2 ranks"):
        group_call(mode, grid(2), lambda rank: None)
