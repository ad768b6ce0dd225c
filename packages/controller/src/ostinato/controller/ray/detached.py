"""Groups that outlive their driver: actors with names, which say themselves what they are."""

from __future__ import annotations

from typing import Any

from ostinato.controller.errors import GroupsNotFound
from ostinato.controller.ray.actor import Identity
from ostinato.controller.ray.liveness import Patience, Reply, wait_for_replies
from ostinato.controller.ray.pool import Slot
from ostinato.controller.ray.transport import Ledger, RayProcesses
from ostinato.controller.worker import Worker

NAMESPACE = "ostinato"
"""Ray namespace of detached groups, whatever namespace a driver is in."""


def actor_name(name: str | None, pool: str, index: int) -> dict[str, Any]:
    """Options of a pool's actor: what makes it detached, or nothing."""
    if name is None:
        return {}
    return {"name": f"{name}/{pool}/{index}", "namespace": NAMESPACE, "lifetime": "detached"}


def find_detached(
    name: str, ledger: Ledger, patience: Patience
) -> dict[str, tuple[RayProcesses, dict[str, type[Worker]], list[Slot]]]:
    """Find the processes of detached groups.

    Args:
        name: of the groups.
        ledger: of the backend that will call them.
        patience: how long the processes may take to answer; one that is in a call answers after it.

    Returns:
        Pool -> processes in rank order, role -> worker class, slots.

    Raises:
        GroupsNotFound: there are none of this name.
    """
    import ray
    from ray import cloudpickle
    from ray.util import list_named_actors

    listed: list[Any] = list_named_actors(all_namespaces=True)
    known = [one["name"] for one in listed if one["namespace"] == NAMESPACE]
    mine = sorted(actor for actor in known if actor.rpartition("/")[0].rpartition("/")[0] == name)
    if not mine:
        names = sorted({actor.rpartition("/")[0].rpartition("/")[0] for actor in known})
        raise GroupsNotFound(f"no detached groups are named {name!r} on this cluster; there are: {names or 'none'}")
    actors: list[Any] = [ray.get_actor(actor, namespace=NAMESPACE) for actor in mine]
    replies = [Reply(place, *actor.identity.options(num_returns=2).remote()) for place, actor in enumerate(actors)]
    ending = wait_for_replies(replies, "identity", lambda place: (mine[place], place, "not known yet"), patience)
    if ending.make is not None:
        raise ending.make()
    told: list[Identity] = ray.get([reply.value for reply in replies])
    found = {}
    for pool in dict.fromkeys(one.pool for one in told):
        members = sorted((i for i, one in enumerate(told) if one.pool == pool), key=lambda i: told[i].rank.rank)
        first = told[members[0]]
        processes = RayProcesses(
            [actors[i] for i in members],
            [told[i].place for i in members],
            [told[i].rank for i in members],
            first.device_type,
            ledger,
        )
        classes = {role: cloudpickle.loads(pickled) for role, pickled in first.classes.items()}
        found[pool] = processes, classes, _slots({told[i].placement_group for i in members})
    return found


def _slots(groups: set[str]) -> list[Slot]:
    from ray._raylet import PlacementGroupID
    from ray.util.placement_group import PlacementGroup

    return [Slot(PlacementGroup(PlacementGroupID(bytes.fromhex(group))), 0) for group in sorted(groups) if group]
