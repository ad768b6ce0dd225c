"""Groups that outlive their driver: actors and placement groups with names.

The processes say themselves what they are; nothing else keeps a list of them. The placement groups bear the name too,
so that what dead processes held can still be found and given back.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ostinato.controller.errors import GroupsExist, GroupsNotFound, GroupStopped, PlacementError
from ostinato.controller.ray.actor import Identity
from ostinato.controller.ray.liveness import Patience, Reply, wait_for_replies
from ostinato.controller.ray.pool import Slot
from ostinato.controller.ray.transport import Ledger, RayProcesses
from ostinato.controller.worker import Worker

if TYPE_CHECKING:
    from collections.abc import Sequence

NAMESPACE = "ostinato"
"""Ray namespace of detached groups, whatever namespace a driver is in."""

Found = dict[str, tuple[RayProcesses, dict[str, type[Worker]]]]
"""Pool -> processes in rank order, role -> worker class."""


def checked_name(name: object) -> str:
    """Check the name of detached groups.

    Raises:
        PlacementError: it is no text, empty, or has a slash.
    """
    if not isinstance(name, str) or not name or "/" in name:
        raise PlacementError(f"detached groups: their name must be text without '/' and not empty, got {name!r}")
    return name


def actor_name(name: str | None, pool: str, index: int) -> dict[str, Any]:
    """Options of a pool's actor: what makes it detached, or nothing."""
    if name is None:
        return {}
    return {"name": f"{name}/{pool}/{index}", "namespace": NAMESPACE, "lifetime": "detached"}


def slots_name(name: str | None) -> str | None:
    """What the names of a run's placement groups begin with; None for groups that go with their driver."""
    return None if name is None else f"{NAMESPACE}/{name}"


def require_unused(name: str) -> None:
    """Refuse a name that groups of this cluster have.

    Raises:
        GroupsExist: some have it, alive or not.
    """
    if _actors(name) or slots_of(name):
        raise GroupsExist(
            f"detached groups are named {name!r} on this cluster already; RayBackend.attach({name!r}) gives them, "
            f"RayBackend.discard({name!r}) ends them, or choose another name"
        )


def find_detached(name: str, ledger: Ledger, patience: Patience) -> Found:
    """Find the processes of detached groups.

    Args:
        name: of the groups.
        ledger: of the backend that will call them.
        patience: how long the processes may take to answer; one that is in a call answers after it.

    Returns:
        What there is, by pool.

    Raises:
        GroupsNotFound: there are none of this name.
        GroupStopped: some or all of their processes have ended.
    """
    import ray
    from ray import cloudpickle

    mine = _actors(name)
    if not mine:
        raise _ended(name, "all of their processes have ended") if slots_of(name) else _not_found(name)
    try:
        actors: list[Any] = [ray.get_actor(actor, namespace=NAMESPACE) for actor in mine]
    except ValueError as error:  # one has ended since the list was made
        raise _ended(name, str(error)) from error
    replies = [Reply(place, *actor.identity.options(num_returns=2).remote()) for place, actor in enumerate(actors)]
    ending = wait_for_replies(replies, "identity", lambda place: (mine[place], place, "not known yet"), patience)
    if ending.make is not None:
        raise ending.make()
    told: list[Identity] = ray.get([reply.value for reply in replies])
    _require_whole(name, told)
    found: Found = {}
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
        found[pool] = processes, {role: cloudpickle.loads(pickled) for role, pickled in first.classes.items()}
    return found


def slots_of(name: str) -> list[Slot]:
    """The placement groups that detached groups hold, one slot each; they are there even if all processes ended."""
    from ray._raylet import PlacementGroupID
    from ray.util.placement_group import PlacementGroup, placement_group_table

    table: dict[str, Any] = placement_group_table()
    begins = f"{slots_name(name)}/"
    held = [key for key, one in table.items() if one["name"].startswith(begins) and one["state"] != "REMOVED"]
    return [Slot(PlacementGroup(PlacementGroupID(bytes.fromhex(key))), 0) for key in sorted(held)]


def discard(name: str) -> None:
    """End all processes of detached groups, without closing them, and give back what they held.

    Raises:
        GroupsNotFound: there are none of this name.
    """
    from ray.util.placement_group import remove_placement_group

    held = slots_of(name)
    if not held:
        raise _not_found(name)
    for slot in held:
        remove_placement_group(slot.group)


def _actors(name: str | None) -> list[str]:
    """Names of the actors of these detached groups, or of all, that are alive."""
    from ray.util import list_named_actors

    listed: list[Any] = list_named_actors(all_namespaces=True)
    known = sorted(one["name"] for one in listed if one["namespace"] == NAMESPACE)
    return known if name is None else [actor for actor in known if actor.partition("/")[0] == name]


def _require_whole(name: str, told: Sequence[Identity]) -> None:
    sizes: dict[str, int] = {}
    for one in told:
        sizes |= one.sizes
    there = {pool: {one.rank.rank for one in told if one.pool == pool} for pool in sizes}
    lost = {pool: sorted(set(range(size)) - there[pool]) for pool, size in sizes.items()}
    if any(lost.values()):
        text = ", ".join(f"rank(s) {ranks} of {sizes[pool]} of pool {pool!r}" for pool, ranks in lost.items() if ranks)
        raise _ended(name, f"{text} have ended")


def _not_found(name: str) -> GroupsNotFound:
    names = sorted({actor.partition("/")[0] for actor in _actors(None)})
    return GroupsNotFound(f"no detached groups are named {name!r} on this cluster; there are: {names or 'none'}")


def _ended(name: str, what: str) -> GroupStopped:
    return GroupStopped(
        f"detached groups {name!r}: {what}; RayBackend.discard({name!r}) ends the rest and gives back what they hold"
    )
