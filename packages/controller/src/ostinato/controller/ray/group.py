"""Worker groups on Ray: one actor a slot, all roles of a pool in the same actors."""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar, cast

from ostinato.controller.errors import PlacementError
from ostinato.controller.group import WorkerGroup
from ostinato.controller.pool import ResourcePoolManager, SubPool
from ostinato.controller.ray import detached
from ostinato.controller.ray.actor import HostActor, ProcessPlace
from ostinato.controller.ray.env import require_ray
from ostinato.controller.ray.liveness import Patience, Reply, wait_for_replies
from ostinato.controller.ray.pool import Slot, release, reserve
from ostinato.controller.ray.transport import Ledger, RayProcesses, RayTransport
from ostinato.controller.topology import RankPlace, assign_ranks
from ostinato.controller.worker import Worker, WorkerSpec, checked_roles

logger = logging.getLogger(__name__)

W = TypeVar("W", bound=Worker)

_INLINE_BYTES = 4096


class RayBackend:
    """Starts groups on Ray.

    Args:
        pools: the pools; a pool's slots are reserved when a role is first placed there.
        reserve_timeout_s: how long to wait for resources that others hold now.
        start_timeout_s: how long processes may take to come up.
        grace_s: how long the other ranks get to end once one has raised, before they are stopped.
        call_timeout_s: deadline of a group call, from when the calls before it have ended; None sets none.
        look_s: seconds between two looks at the processes of a long call; one that is stopped at two looks counts as
            hung. None never looks.
        env_vars: environment of the workers' processes.
        futures: whether calls that give rows return a `DataProtoFuture` at once; False waits and brings the rows here.
        check_writes: debug mode: a method that writes into a column that it shares with others is named.
        name: makes the groups detached: they outlive this driver until a `shutdown`, and another driver of the cluster
            finds them by this name with `RayBackend.attach(name)`. Text without a slash.

    Attributes:
        groups: role -> group, of all roles launched or attached to.

    Raises:
        RayNotRunning: this process has not joined a cluster.
        PlacementError: the name cannot be one.
    """

    def __init__(
        self,
        pools: ResourcePoolManager,
        *,
        reserve_timeout_s: float = 10.0,
        start_timeout_s: float = 180.0,
        grace_s: float = 5.0,
        call_timeout_s: float | None = 3600.0,
        look_s: float | None = 10.0,
        env_vars: Mapping[str, str] | None = None,
        futures: bool = True,
        check_writes: bool = False,
        name: str | None = None,
    ) -> None:
        require_ray()
        self._name = None if name is None else detached.checked_name(name)
        self._attached = False
        self.groups: dict[str, WorkerGroup] = {}
        self._pools = pools
        self._reserve_timeout_s = reserve_timeout_s
        self._starting = Patience(grace_s, start_timeout_s, look_s)
        self._patience = Patience(grace_s, call_timeout_s, look_s)
        self._env_vars = dict(env_vars or {})
        self._options = {"futures": futures, "check_writes": check_writes}
        self._slots: dict[str, list[Slot]] = {}
        self._used: Counter[tuple[str, int]] = Counter()
        self._reserved: set[str] = set()
        self._processes: dict[str, RayProcesses] = {}
        self._ledger = Ledger()

    def launch(
        self, roles: Mapping[str, WorkerSpec[Any]], placement: Mapping[str, str] | None = None
    ) -> dict[str, WorkerGroup]:
        """Start the workers; roles of one pool share its processes, also over several calls.

        Raises:
            ResourcesUnavailable: a pool does not fit the cluster.
            PlacementError: a role has no pool, a pool is not known, its slots hold `max_colocate` processes already, a
                role was launched before, or this backend was attached.
            GroupsExist: the groups are to be detached, and others have their name.
            WorkerFailed: a process did not come up. A worker's exception comes as its own type where it pickles.
        """
        roles = checked_roles(roles)
        if self._attached:
            raise PlacementError(
                f"this backend was attached to {self._name!r} and has no pools of its own; launch with another backend"
            )
        if again := [role for role in roles if role in self.groups]:
            raise PlacementError(f"role(s) {again} were launched by this backend already; they are in its `groups`")
        if self._name is not None and not self._reserved:
            detached.require_unused(self._name)
        try:
            return self._launch(roles, placement)
        except BaseException:
            if self._name is not None and not self.groups:
                self.shutdown()  # nobody else would end what outlives this driver
            raise

    def _launch(
        self, roles: Mapping[str, WorkerSpec[Any]], placement: Mapping[str, str] | None
    ) -> dict[str, WorkerGroup]:
        placed = self._pools.place(roles, placement)
        # All pools are reserved before any process starts: what does not fit is known within seconds.
        for name in placed:
            self._reserve(self._pools[name])
        for name in placed:
            if name not in self._processes:
                self._processes[name] = self._start_processes(self._pools[name])
        if self._name is not None:
            self._tell_sizes()
        for name, of_pool in placed.items():
            for role in of_pool:
                self._build(self._processes[name], role, roles[role])
        pool_of = {role: name for name, of_pool in placed.items() for role in of_pool}
        launched = {role: self._group(role, spec.worker_class, pool_of[role]) for role, spec in roles.items()}
        self.groups |= launched
        return launched

    def _group(self, role: str, worker_class: type[Worker], pool: str) -> WorkerGroup:
        transport = RayTransport(self._processes[pool], role, self._patience)
        return WorkerGroup(role, worker_class, transport, **self._options)

    @classmethod
    def attach(cls, name: str, **options: Any) -> RayBackend:
        """Find the groups that a driver of this cluster started as `RayBackend(..., name=name)`.

        Args:
            name: their name.
            options: as for `RayBackend`, for the calls of this driver.

        Returns:
            A backend whose `groups` are those; its `shutdown` ends them.

        Raises:
            GroupsNotFound: there are none of this name.
            GroupStopped: some of their processes have ended.
        """
        backend = cls(ResourcePoolManager([]), name=name, **options)
        found = detached.find_detached(name, backend._ledger, backend._starting)
        backend._attached = True
        backend._slots[name] = detached.slots_of(name)
        for pool, (processes, classes) in found.items():
            backend._processes[pool] = processes
            for role, worker_class in classes.items():
                backend.groups[role] = backend._group(role, worker_class, pool)
        return backend

    @staticmethod
    def discard(name: str) -> None:
        """End detached groups that `attach` refuses, or that nobody needs to close: their processes are killed.

        Raises:
            GroupsNotFound: there are none of this name.
        """
        require_ray()
        detached.discard(name)

    def launch_one(self, role: str, spec: WorkerSpec[W], pool: str | None = None) -> W:
        """Start one role; the group is typed as its worker class."""
        return cast("W", self.launch({role: spec}, None if pool is None else {role: pool})[role])

    def wait(self) -> None:
        """Wait for every call that was sent to any group; raise the first failure, which names the call."""
        for processes in self._processes.values():
            processes.finish_all(self._patience)

    def shutdown(self, timeout_s: float = 10.0) -> None:
        """Close the workers, stop their processes and give the slots back; a second call does nothing.

        A worker that does not close within `timeout_s`, or fails to, is logged and stopped all the same.
        """
        import ray

        if ray.is_initialized():
            for name, processes in self._processes.items():
                if processes.stopped is None:
                    replies = [
                        Reply(rank, *actor.close.options(num_returns=2).remote())
                        for rank, actor in enumerate(processes.actors)
                    ]
                    ending = wait_for_replies(replies, "close", processes.locator(name), Patience(1.0, timeout_s, None))
                    if ending.error is not None:
                        logger.warning("pool %r: a worker did not close: %s", name, ending.error)
                processes.stop("this backend was shut down")
            for slots in self._slots.values():
                release(slots)
        self._processes.clear()
        self.groups.clear()
        self._ledger = Ledger()
        self._slots.clear()
        self._used.clear()
        self._reserved.clear()

    def _reserve(self, pool: SubPool) -> None:
        if pool.name in self._reserved:
            return
        for slot in range(pool.first, pool.first + pool.size):
            if self._used[pool.parent.name, slot] >= pool.parent.max_colocate:
                raise PlacementError(
                    f"pool {pool.name!r}: slot {slot} of {pool.parent.name!r} holds {pool.parent.max_colocate} "
                    "process(es) already; raise max_colocate, or use sub-pools that do not overlap"
                )
        if pool.parent.name not in self._slots:
            name = detached.slots_name(self._name)
            self._slots[pool.parent.name] = reserve(pool.parent, self._reserve_timeout_s, name=name)
        self._used.update((pool.parent.name, slot) for slot in range(pool.first, pool.first + pool.size))
        self._reserved.add(pool.name)

    def _start_processes(self, pool: SubPool) -> RayProcesses:
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        whole = pool.parent
        share = {name: amount / whole.max_colocate for name, amount in whole.bundle().items()}
        actor_class = ray.remote(HostActor)
        actors = [
            actor_class.options(
                num_cpus=share["CPU"],
                num_gpus=share.get("GPU", 0),
                max_restarts=0,
                runtime_env={"env_vars": self._process_env(pool)},
                scheduling_strategy=PlacementGroupSchedulingStrategy(slot.group, slot.bundle),
                **detached.actor_name(self._name, pool.name, index),
            ).remote(f"{pool.name}/{index}")
            for index, slot in enumerate(self._slots[whole.name][pool.first : pool.first + pool.size])
        ]
        places = self._everywhere(pool.name, actors, "place", [()] * len(actors))
        processes = in_rank_order(actors, places, "cuda" if whole.use_gpu else "cpu", self._ledger)
        arguments = [
            (processes.env_vars(rank), processes.ranks[rank], processes.device_type) for rank in range(len(actors))
        ]
        self._everywhere(pool.name, processes.actors, "prepare", arguments)
        return processes

    def _tell_sizes(self) -> None:
        """Let every process know of all, so that a driver that attaches later knows if one is missing."""
        sizes = {name: len(processes.actors) for name, processes in self._processes.items()}
        for name, processes in self._processes.items():
            self._everywhere(name, processes.actors, "remember", [(sizes,)] * len(processes.actors), processes)

    def _process_env(self, pool: SubPool) -> dict[str, str]:
        whole = pool.parent
        env = {"OMP_NUM_THREADS": str(whole.threads_per_process or _fair_threads(max(whole.processes_on_nodes)))}
        # Ray leaves a CPU actor every GPU of its node; on GPU pools the devices are set once the ranks are known.
        env |= {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"} if whole.use_gpu else {"CUDA_VISIBLE_DEVICES": ""}
        # Ray would send results of up to 100 kB to the driver's memory; rows stay in the store, whatever their size.
        env["RAY_max_direct_call_object_size"] = str(_INLINE_BYTES)
        return env | self._env_vars

    def _build(self, processes: RayProcesses, role: str, spec: WorkerSpec[Any]) -> None:
        import ray
        from ray import cloudpickle

        recipe = ray.put(cloudpickle.dumps(spec))  # pyright: ignore[reportPrivateImportUsage]
        arguments = [(role, recipe, processes.context(rank, role)) for rank in range(len(processes.actors))]
        self._everywhere(role, processes.actors, "build", arguments, processes)

    def _everywhere(
        self,
        role: str,
        actors: Sequence[Any],
        method: str,
        arguments: Sequence[tuple[Any, ...]],
        processes: RayProcesses | None = None,
    ) -> list[Any]:
        import ray

        replies = [
            Reply(rank, *getattr(actor, method).options(num_returns=2).remote(*arguments[rank]))
            for rank, actor in enumerate(actors)
        ]
        known = processes or RayProcesses(actors, [], [], "cpu", Ledger())
        shown = "__init__" if method == "build" else method
        known.settle(wait_for_replies(replies, shown, known.locator(role), self._starting))
        return ray.get([reply.value for reply in replies])


def in_rank_order(
    actors: Sequence[Any], places: Sequence[ProcessPlace], device_type: str, ledger: Ledger
) -> RayProcesses:
    """Order a pool's actors by the ranks that their nodes and slots give them.

    Args:
        actors: one handle a slot, in slot order.
        places: where each came up, in slot order.
        device_type: "cuda" or "cpu".
        ledger: of the backend.
    """
    ranks = assign_ranks([place.node_id for place in places])
    named = [RankPlace(r.rank, r.local_rank, r.local_world_size, p.node) for r, p in zip(ranks, places, strict=True)]
    order = sorted(range(len(actors)), key=lambda slot: named[slot].rank)
    return RayProcesses(
        [actors[i] for i in order], [places[i] for i in order], [named[i] for i in order], device_type, ledger
    )


def _fair_threads(processes: int) -> int:
    """The driver's OMP_NUM_THREADS where it is set, otherwise a node's CPUs over its processes (the smallest node)."""
    import ray

    said = os.environ.get("OMP_NUM_THREADS", "")
    if said.isdigit() and int(said) > 0:
        return int(said)
    cpus = min((node["Resources"].get("CPU", 1.0) for node in ray.nodes() if node["Alive"]), default=1.0)
    return max(1, int(cpus) // processes)
