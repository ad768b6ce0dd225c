"""Metrics: each value knows how it reduces over ranks, micro-batches and steps."""

from __future__ import annotations

import itertools
import math
import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ostinato.protocol import DataProto, Metric, merge_metrics
from ostinato.protocol.errors import MetricError

FINITE = st.floats(-1e6, 1e6)


@pytest.mark.parametrize(("ranks", "micro_batches"), itertools.product([1, 2, 3], [1, 4, 7]))
def test_means_do_not_grow_with_ranks_or_accumulation(ranks, micro_batches):
    """H-75: .5 each time, to the bit."""
    parts = [{"actor/pg_loss": Metric.mean(0.5, 100)} for _ in range(ranks * micro_batches)]
    assert merge_metrics(*parts)["actor/pg_loss"].value == 0.5
    odd = [{"m": Metric.mean(0.1, 3)} for _ in range(ranks * micro_batches)]
    assert merge_metrics(*odd)["m"].value == 0.1


def test_means_take_every_micro_batch_in():
    """H-76: 1 then 3 over equal tokens is 2, not the last one."""
    assert merge_metrics({"kl_loss": Metric.mean(1.0, 8)}, {"kl_loss": Metric.mean(3.0, 8)})["kl_loss"].value == 2.0


def test_means_are_weighted():
    """H-77: .8 over 100 and .6 over 200 is .6667."""
    merged = Metric.mean(0.8, 100).merge(Metric.mean(0.6, 200))
    assert round(merged.value, 4) == 0.6667
    assert merged.weight == 300


@given(st.lists(st.tuples(FINITE, st.floats(0, 1e3)), min_size=1, max_size=8), st.integers(1, 7))
def test_means_do_not_depend_on_how_parts_are_grouped(parts, cut):
    """The kind of H-75 and H-77: however values fall on ranks and micro-batches, it is the plain weighted mean."""
    metrics = [{"m": Metric.mean(v, w)} for v, w in parts]
    halves = [merge_metrics(*half) for half in (metrics[:cut], metrics[cut:])]
    total = sum(w for _, w in parts)
    for merged in (merge_metrics(*metrics)["m"], merge_metrics(*halves)["m"]):
        assert merged.weight == pytest.approx(total)
        if total > 1e-3:
            scale = max(abs(v) for v, _ in parts)
            assert merged.value == pytest.approx(sum(v * w for v, w in parts) / total, abs=1e-9 * (1 + scale))


def test_a_part_of_no_weight_says_nothing():
    """A rank without a valid token has 0/0 to say."""
    for parts in ([(math.nan, 0), (2.0, 3)], [(2.0, 3), (math.nan, 0)], [(math.inf, 0), (2.0, 1)]):
        merged = merge_metrics(*({"m": Metric.mean(v, w)} for v, w in parts))
        assert merged["m"].value == 2.0
    assert Metric.mean(0.0, 0).merge(Metric.mean(0.0, 0)) == Metric.mean(0.0, 0)
    assert math.isnan(Metric.mean(math.nan, 1).merge(Metric.mean(1.0, 1)).value)


@pytest.mark.parametrize(
    ("make", "expected"), [(Metric.sum, 6.0), (Metric.max, 3.0), (Metric.min, 1.0), (Metric.list, (2.0, 1.0, 3.0))]
)
def test_other_reductions_do_as_they_are_named(make, expected):
    assert merge_metrics(*({"m": make(v)} for v in (2, 1, 3)))["m"].value == expected


def test_extremes_pass_nan_on():
    for make in (Metric.max, Metric.min):
        assert math.isnan(make(1).merge(make(math.nan)).value)
        assert math.isnan(make(math.nan).merge(make(1)).value)


def test_names_of_some_parts_are_kept_and_parts_unchanged():
    a, b = {"x": Metric.sum(1)}, {"x": Metric.sum(2), "y": Metric.max(3)}
    assert merge_metrics(a, None, b) == {"x": Metric("3", "sum", 2), "y": Metric.max(3)}
    assert a == {"x": Metric.sum(1)}
    assert merge_metrics() == {}


def test_values_of_any_number_type_are_taken():
    assert Metric.mean(torch.tensor(0.5), torch.tensor(3)) == Metric(0.5, "mean", 3.0)
    assert Metric.list(torch.tensor(2.0)).value == (2.0,)
    assert Metric(True).value == 1.0
    assert type(Metric.sum(3).value) is float


@pytest.mark.parametrize(
    "args",
    [
        (1, "median"),
        ("x",),
        (None,),
        (torch.ones(2),),
        ([1, 2],),
        (1, "mean", -1),
        (1, "mean", math.nan),
        (1, "mean", "w"),
    ],
)
def test_what_is_no_metric_is_refused(args):
    with pytest.raises(MetricError, match="Metric"):
        Metric(*args)


def test_conflicts_are_named():
    with pytest.raises(MetricError, match=r"'loss'.*'mean'.*'sum'"):
        merge_metrics({"loss": Metric.mean(1)}, {"loss": Metric.sum(1)})
    with pytest.raises(MetricError, match=r"'loss'.*float"):
        merge_metrics({"loss": 1.0})
    with pytest.raises(MetricError, match="dict"):
        merge_metrics([Metric.sum(1)])
    with pytest.raises(MetricError, match="'loss'"):
        DataProto.concat([DataProto(meta_info={"metrics": {"loss": 0.5}})])


def test_metrics_are_frozen_and_pickle():
    metric = Metric.mean(0.5, 3)
    with pytest.raises(AttributeError):
        metric.value = 1.0
    assert pickle.loads(pickle.dumps(metric)) == metric


def test_metrics_travel_with_a_batch_in_every_way():
    x = DataProto.from_dict({"a": torch.ones(2)}).with_metrics(
        {"m": Metric.mean(math.nan, 2), "l": Metric.list([1, 2]), "s": Metric.sum(3)}
    )
    assert DataProto.from_bytes(x.to_bytes()) == x
    assert pickle.loads(pickle.dumps(x)) == x
    merged = x.union(DataProto.from_dict({"b": torch.ones(2)}, meta_info={"metrics": {"s": Metric.sum(4)}}))
    assert merged.metrics["s"].value == 7.0
    assert x.metrics["s"].value == 3.0
