"""The small values beside the columns: `meta_info` and its reserved key for metrics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ostinato.protocol.cells import copy_containers, same
from ostinato.protocol.errors import ArgumentError, MetaConflictError, MetricError
from ostinato.protocol.metrics import merge_metrics

METRICS = "metrics"
"""The reserved key: dict of name -> Metric, merged by reduction where other keys must be equal."""


def checked_meta(meta: Any) -> dict[str, Any]:
    """Check meta entries that come from outside.

    Args:
        meta: entries; None is none.

    Returns:
        The entries, the metrics as a dict.

    Raises:
        ArgumentError: no dict.
        MetricError: "metrics" is no dict of name -> Metric.
    """
    if meta is None:
        return {}
    if not isinstance(meta, Mapping):
        raise ArgumentError(f"meta_info must be a dict of small JSON-like values, got {type(meta).__name__}")
    if METRICS not in meta:
        return dict(meta)
    if not isinstance(meta[METRICS], Mapping):
        raise MetricError(f"metrics must be a dict of name -> Metric, got {type(meta[METRICS]).__name__}")
    return {**meta, METRICS: merge_metrics(meta[METRICS])}


def copy_meta(meta: Mapping[str, Any] | None, *, metrics: bool = True) -> dict[str, Any]:
    """Copy meta entries so that writing into the copy leaves the source alone.

    Args:
        meta: entries; None is none.
        metrics: False leaves the metrics out; no metrics at all are no entry either way.

    Returns:
        A new dict; nested dicts and lists are new too.
    """
    return {key: copy_containers(value) for key, value in (meta or {}).items() if key != METRICS or (metrics and value)}


def merge_meta(where: str, metas: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Merge the meta entries of several batches.

    Args:
        where: the operation, for the error's text.
        metas: one mapping a batch. A key that only some hold is kept.

    Returns:
        A new dict; equal values stay (NaN equals NaN), metrics are merged by their reductions.

    Raises:
        MetaConflictError: two batches differ in a key; the text names it and both values.
        MetricError: the metrics cannot be merged.
    """
    merged: dict[str, Any] = {}
    for meta in metas:
        for key, value in meta.items():
            if key == METRICS:
                continue
            if key in merged and not same(merged[key], value):
                raise MetaConflictError(
                    f"{where}: meta_info[{key!r}] is {merged[key]!r} in one batch and {value!r} in another; make them "
                    "equal with with_meta(...), or carry what differs by part as a Metric under 'metrics'"
                )
            merged.setdefault(key, value)
    merged = copy_meta(merged)
    metrics = merge_metrics(*(meta[METRICS] for meta in metas if METRICS in meta))
    return {**merged, METRICS: metrics} if metrics else merged
