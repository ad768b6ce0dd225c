"""Resource pools: how many processes on how many nodes, and which roles share them. Declarations only, no Ray."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from ostinato.controller.errors import PlacementError

DEFAULT_CPUS_PER_PROCESS = 0.1


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


class Role(StrEnum):
    """Names of the usual roles. A role is any string; these save typing errors."""

    ACTOR = "actor"
    ROLLOUT = "rollout"
    REFERENCE = "reference"
    CRITIC = "critic"
    REWARD_MODEL = "reward_model"


@dataclass(frozen=True)
class ResourcePool:
    """Slots for processes: one GPU or one CPU process each.

    Attributes:
        name: name of the pool.
        processes_on_nodes: number of slots of each node, e.g. `[4, 4]`. The slots of one entry come to lie on one node;
            two entries may come to lie on the same node where it has room.
        use_gpu: one GPU a slot; otherwise CUDA is hidden from the processes.
        max_colocate: how many processes may share one slot (sub-pools that overlap, or a pool and its sub-pool). Roles
            of one pool share one process and count once.
        cpus_per_process: what Ray reserves for a process. A token by default, so that any number of processes fits on a
            small host; set it to whole numbers to let Ray count CPUs.
        threads_per_process: OMP_NUM_THREADS of the processes; None takes the driver's value where it is set, otherwise
            a fair share of the node's CPUs.
    """

    name: str
    processes_on_nodes: tuple[int, ...] | list[int]
    use_gpu: bool = False
    max_colocate: int = 1
    cpus_per_process: float = DEFAULT_CPUS_PER_PROCESS
    threads_per_process: int | None = None

    def __post_init__(self) -> None:
        where, counts = f"resource pool {self.name!r}", self.processes_on_nodes
        if not isinstance(self.name, str) or not self.name:
            raise PlacementError(f"{where}: its name must be text and not empty")
        if not isinstance(counts, Sequence) or not counts or not all(_is_count(count) for count in counts):
            raise PlacementError(
                f"{where}: processes_on_nodes must hold a positive number a node, e.g. [4, 4], got {counts!r}"
            )
        object.__setattr__(self, "processes_on_nodes", tuple(counts))
        if not _is_count(self.max_colocate) or not 0 < self.cpus_per_process < math.inf:
            raise PlacementError(
                f"{where}: max_colocate must be a whole number >= 1 and cpus_per_process > 0, got "
                f"{self.max_colocate} and {self.cpus_per_process}"
            )
        if self.threads_per_process is not None and not _is_count(self.threads_per_process):
            raise PlacementError(
                f"{where}: threads_per_process must be None or a whole number >= 1, got {self.threads_per_process}"
            )

    @property
    def size(self) -> int:
        """Number of slots."""
        return sum(self.processes_on_nodes)

    def bundle(self) -> dict[str, float]:
        """Return what one slot reserves: resource name -> amount."""
        resources = {"CPU": round(self.cpus_per_process * self.max_colocate, 4)}
        return resources | {"GPU": 1.0} if self.use_gpu else resources

    def asked(self) -> dict[str, float]:
        """Return what the whole pool reserves: resource name -> amount."""
        return {name: round(amount * self.size, 4) for name, amount in self.bundle().items()}


@dataclass(frozen=True)
class SubPool:
    """A run of slots of a pool under a name of its own; its processes form a world of their own.

    Attributes:
        name: name of the sub-pool.
        parent: the pool whose slots it uses.
        first: its first slot.
        size: number of slots.
    """

    name: str
    parent: ResourcePool
    first: int
    size: int


class ResourcePoolManager:
    """The pools of a run by name.

    Args:
        pools: pools with distinct names; a lone one is taken too.

    Raises:
        PlacementError: two pools have one name.
    """

    def __init__(self, pools: Iterable[ResourcePool] | ResourcePool) -> None:
        self._pools: dict[str, SubPool] = {}
        for pool in [pools] if isinstance(pools, ResourcePool) else pools:
            if not isinstance(pool, ResourcePool):
                raise PlacementError(f"ResourcePoolManager: expected a list of ResourcePool, got {pool!r} in it")
            self._add(SubPool(pool.name, pool, 0, pool.size))

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all pools and sub-pools."""
        return tuple(self._pools)

    def __getitem__(self, name: str) -> SubPool:
        """Return a pool (as the sub-pool of all its slots) or a sub-pool.

        Raises:
            PlacementError: there is none of this name.
        """
        if name not in self._pools:
            raise PlacementError(f"resource pool {name!r} is not known; known: {list(self._pools)}")
        return self._pools[name]

    def split(self, name: str, sizes: Mapping[str, int]) -> list[SubPool]:
        """Cut a pool into sub-pools, from its first slot on.

        Args:
            name: the pool.
            sizes: name -> number of slots, in order; together at most the pool's size.

        Returns:
            The sub-pools, known by their names from now on.

        Raises:
            PlacementError: the sizes do not fit, or a name is taken.
        """
        whole = self[name]
        fits = isinstance(sizes, Mapping) and sizes and all(_is_count(size) for size in sizes.values())
        if not fits or sum(sizes.values()) > whole.size:
            raise PlacementError(
                f"split of pool {name!r}: {sizes} does not fit its {whole.size} slots; give name -> number of slots"
            )
        if taken := [part for part in sizes if part in self._pools]:
            raise PlacementError(f"split of pool {name!r}: there are resource pools of the names {taken} already")
        first = whole.first
        parts = []
        for part, size in sizes.items():
            parts.append(SubPool(part, whole.parent, first, size))
            self._add(parts[-1])
            first += size
        return parts

    def place(self, roles: Iterable[str], placement: Mapping[str, str] | None) -> dict[str, list[str]]:
        """Return pool name -> roles, in order.

        Args:
            roles: the roles to place.
            placement: role -> pool name; None where there is one pool only.

        Raises:
            PlacementError: a role has no pool, or a pool is not known.
        """
        if placement is None:
            if len(self._pools) != 1:
                raise PlacementError(f"which pool a role goes to must be said, there are several: {list(self._pools)}")
            placement = dict.fromkeys(roles, next(iter(self._pools)))
        placed: dict[str, list[str]] = {}
        for role in roles:
            if role not in placement:
                raise PlacementError(f"role {role!r} has no pool; placement names {list(placement)}")
            placed.setdefault(self[placement[role]].name, []).append(role)
        return placed

    def _add(self, pool: SubPool) -> None:
        if pool.name in self._pools:
            raise PlacementError(f"two resource pools have the name {pool.name!r}")
        self._pools[pool.name] = pool
