"""The small values beside the columns: `meta_info` and its reserved key for metrics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ostinato.protocol.cells import copy_containers, same
from ostinato.protocol.errors import MetaConflictError
from ostinato.protocol.metrics import merge_metrics

METRICS = "metrics"
"""The reserved key: dict of name -> Metric, merged by reduction where other keys must be equal."""


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
