"""Reserving a pool's slots on the cluster: one placement group a node entry, refused soon when they do not fit."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ostinato.controller.errors import ResourcesUnavailable
from ostinato.controller.pool import ResourcePool

if TYPE_CHECKING:
    from ray.util.placement_group import PlacementGroup

_POLL_S = 0.25


@dataclass(frozen=True)
class Slot:
    """Room for one process (or `max_colocate` of them): a bundle of a placement group."""

    group: PlacementGroup
    bundle: int


def reserve(pool: ResourcePool, timeout_s: float, *, name: str | None = None) -> list[Slot]:
    """Reserve all slots of a pool.

    Args:
        pool: what to reserve.
        timeout_s: how long to wait for resources that the cluster has but that are not free now.
        name: of the placement groups, which then stay when this driver ends; None for ones that go with it.

    Returns:
        The slots, in the order of `processes_on_nodes`.

    Raises:
        ResourcesUnavailable: at once if the cluster's nodes can never hold the pool; after `timeout_s` if they are not
            free by then.
    """
    import ray
    from ray.util.placement_group import placement_group, remove_placement_group

    deadline = time.monotonic() + timeout_s
    _check_nodes(pool, [dict(node["Resources"]) for node in ray.nodes() if node["Alive"]])
    while missing := _missing(pool.asked(), ray.available_resources()):
        if time.monotonic() >= deadline:
            raise _not_free(pool, f"{', '.join(missing)} still held after {timeout_s:g} s")
        time.sleep(_POLL_S)
    # Largest first: a small entry must not take the one node on which a large one fits.
    counts = pool.processes_on_nodes
    lifetime = None if name is None else "detached"
    made = {
        entry: placement_group(
            [pool.bundle()] * counts[entry],
            strategy="STRICT_PACK",
            name="" if name is None else f"{name}/{pool.name}/{entry}",
            lifetime=lifetime,
        )
        for entry in sorted(range(len(counts)), key=lambda entry: -counts[entry])
    }
    groups = [made[entry] for entry in range(len(counts))]
    ready, _ = ray.wait(
        [group.ready() for group in groups], num_returns=len(groups), timeout=max(1.0, deadline - time.monotonic())
    )
    if len(ready) < len(groups):
        for group in groups:
            remove_placement_group(group)
        raise _not_free(
            pool, f"no nodes had room for {list(counts)} processes, each entry on one node, within {timeout_s:g} s"
        )
    return [Slot(group, bundle) for group in groups for bundle in range(group.bundle_count)]


def release(slots: list[Slot]) -> None:
    """Give the slots' placement groups back; processes still in them are killed by Ray."""
    from ray.util.placement_group import remove_placement_group

    for group in {slot.group.id: slot.group for slot in slots}.values():
        remove_placement_group(group)


def fits(pool: ResourcePool, nodes: list[dict[str, float]]) -> bool:
    """Whether nodes with these resources can hold the pool, each entry on one node (largest first, first fit)."""
    left = [dict(node) for node in nodes]
    for count in sorted(pool.processes_on_nodes, reverse=True):
        entry = {name: amount * count for name, amount in pool.bundle().items()}
        for node in left:
            if not _missing(entry, node):
                for name, amount in entry.items():
                    node[name] -= amount
                break
        else:
            return False
    return True


def _check_nodes(pool: ResourcePool, nodes: list[dict[str, float]]) -> None:
    if fits(pool, nodes):
        return
    import ray

    holds = "; ".join(", ".join(f"{node.get(name, 0):g} {name}" for name in sorted(pool.asked())) for node in nodes)
    raise ResourcesUnavailable(
        pool.name,
        pool.asked(),
        _named(pool, ray.available_resources()),
        f"The cluster can never hold {list(pool.processes_on_nodes)} processes on one node each entry; its "
        f"{len(nodes)} node(s) have: {holds}. Ask for fewer processes, or add nodes.",
    )


def _not_free(pool: ResourcePool, what: str) -> ResourcesUnavailable:
    import ray

    free = _named(pool, ray.available_resources())
    return ResourcesUnavailable(
        pool.name, pool.asked(), free, f"{what}. Another job or pool holds the rest: end it, or ask for less."
    )


def _missing(asked: Mapping[str, float], free: Mapping[str, float]) -> list[str]:
    return [name for name, amount in asked.items() if amount > free.get(name, 0.0) + 1e-4]


def _named(pool: ResourcePool, amounts: Mapping[str, float]) -> dict[str, float]:
    return {name: round(amounts.get(name, 0.0), 4) for name in pool.asked()}
