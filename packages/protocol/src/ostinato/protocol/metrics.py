"""Metrics: a number that knows how it reduces over ranks, micro-batches and steps."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from ostinato.protocol.errors import MetricError

Reduction = Literal["mean", "sum", "max", "min", "list"]
REDUCTIONS: tuple[str, ...] = get_args(Reduction)


@dataclass(frozen=True)
class Metric:
    """One value, how it reduces, and what it counts for in a mean.

    mean: `sum(w_i v_i) / sum(w_i)`, where a part of weight 0 says nothing, not even NaN; sum, max, min: as named, NaN
    is passed on; list: all values in order.

    Attributes:
        value: a float; for `list` a tuple of floats. Anything that `float` takes is taken (a 0-d tensor too), and for
            `list` a list, an array or a tensor of such.
        reduction: one of "mean", "sum", "max", "min", "list".
        weight: tokens, rows or seconds behind a mean, >= 0; merged weights add up.
    """

    value: float | tuple[float, ...]
    reduction: Reduction = "mean"
    weight: float = 1.0

    def __post_init__(self) -> None:
        if self.reduction not in REDUCTIONS:
            raise MetricError(f"Metric: reduction must be one of {', '.join(REDUCTIONS)}, got {self.reduction!r}")
        try:
            object.__setattr__(self, "value", self._number())
            object.__setattr__(self, "weight", float(self.weight))
        except (TypeError, ValueError, RuntimeError) as error:
            raise MetricError(
                f"Metric: value and weight must be numbers, got {self.value!r} and {self.weight!r}"
            ) from error
        if not (0 <= self.weight < math.inf):
            raise MetricError(f"Metric: weight must be finite and >= 0, got {self.weight}")

    def _number(self) -> float | tuple[float, ...]:
        value: Any = self.value
        if self.reduction != "list":
            return float(value)
        if isinstance(value, list | tuple) or getattr(value, "ndim", 0) > 0:
            return tuple(float(v) for v in value)
        return (float(value),)

    @classmethod
    def mean(cls, value: Any, weight: Any = 1.0) -> Metric:
        """A mean over `weight` tokens, rows or whatever it was taken over."""
        return cls(value, "mean", weight)

    @classmethod
    def sum(cls, value: Any) -> Metric:
        """A count or an amount that adds up over parts."""
        return cls(value, "sum")

    @classmethod
    def max(cls, value: Any) -> Metric:
        """A largest value."""
        return cls(value, "max")

    @classmethod
    def min(cls, value: Any) -> Metric:
        """A smallest value."""
        return cls(value, "min")

    @classmethod
    def list(cls, values: Any) -> Metric:
        """One value or several that are kept apart, such as one timing a rank."""
        return cls(values, "list")

    def merge(self, other: Metric) -> Metric:
        """Reduce two parts of one metric.

        Args:
            other: the other part; comes after this one where the reduction is a list.

        Returns:
            The metric of both parts together; its weight is the sum.

        Raises:
            MetricError: the reductions differ, or `other` is no Metric.
        """
        if not isinstance(other, Metric) or other.reduction != self.reduction:
            kind = other.reduction if isinstance(other, Metric) else type(other).__name__
            raise MetricError(f"cannot merge a metric of reduction {self.reduction!r} with one of {kind!r}")
        return Metric(_MERGE[self.reduction](self, other), self.reduction, self.weight + other.weight)


def _mean(a: Metric, b: Metric) -> float:
    x, y = _scalar(a), _scalar(b)
    if b.weight == 0 or x == y:
        return x
    if a.weight == 0:
        return y
    total = a.weight + b.weight
    return x * (a.weight / total) + y * (b.weight / total)


def _extreme(a: Metric, b: Metric) -> float:
    x, y = _scalar(a), _scalar(b)
    if math.isnan(x) or math.isnan(y):
        return math.nan
    return max(x, y) if a.reduction == "max" else min(x, y)


def _scalar(metric: Metric) -> float:
    assert isinstance(metric.value, float)
    return metric.value


def _joined(a: Metric, b: Metric) -> tuple[float, ...]:
    assert isinstance(a.value, tuple)
    assert isinstance(b.value, tuple)
    return a.value + b.value


_MERGE = {
    "mean": _mean,
    "sum": lambda a, b: _scalar(a) + _scalar(b),
    "max": _extreme,
    "min": _extreme,
    "list": _joined,
}


def merge_metrics(*parts: Mapping[str, Metric] | None) -> dict[str, Metric]:
    """Merge the metrics of several parts by name, each by its own reduction.

    Args:
        parts: dicts of name -> Metric; None counts as an empty one. A name that only some parts hold is kept.

    Returns:
        A new dict, names in order of first appearance.

    Raises:
        MetricError: a value is no Metric, or two parts reduce one name in different ways; the text names the metric.
    """
    merged: dict[str, Metric] = {}
    for name, metric in _items(parts):
        if not isinstance(metric, Metric):
            raise MetricError(
                f"metric {name!r}: expected a Metric, got {type(metric).__name__}; write Metric.mean(value, weight), "
                "Metric.sum(value), Metric.max(value), ..., so that it is known how ranks reduce it"
            )
        try:
            merged[name] = merged[name].merge(metric) if name in merged else metric
        except MetricError as error:
            raise MetricError(f"metric {name!r}: {error}") from error
    return merged


def _items(parts: Iterable[Mapping[str, Metric] | None]) -> Iterable[tuple[str, Metric]]:
    for part in parts:
        if part is None:
            continue
        if not isinstance(part, Mapping):
            raise MetricError(f"metrics must be a dict of name -> Metric, got {type(part).__name__}")
        yield from part.items()
