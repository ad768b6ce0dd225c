"""Worker groups on Ray: one actor a slot, all roles of a pool in the same actors."""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast

from ostinato.controller.dispatch import Call
from ostinato.controller.errors import GroupStopped, PlacementError, WorkerDied
from ostinato.controller.group import WorkerGroup
from ostinato.controller.pool import ResourcePoolManager, SubPool
from ostinato.controller.ray.actor import HostActor, ProcessPlace
from ostinato.controller.ray.env import require_ray
from ostinato.controller.ray.liveness import Ending, Patience, Reply, wait_for_replies
from ostinato.controller.ray.pool import Slot, release, reserve
from ostinato.controller.topology import RankPlace, assign_ranks
from ostinato.controller.worker import Worker, WorkerContext, WorkerSpec

logger = logging.getLogger(__name__)

W = TypeVar("W", bound=Worker)

_SMALL = (bool, int, float, complex, type(None))
_SMALL_TEXT = 1024


class RayProcesses:
    """The actors of one pool in rank order, and what became of them.

    Args:
        actors: one handle a rank.
        places: where each came up.
        ranks: its rank and place on its node.
        device_type: "cuda" or "cpu".
    """

    def __init__(
        self, actors: Sequence[Any], places: Sequence[ProcessPlace], ranks: Sequence[RankPlace], device_type: str
    ) -> None:
        self.actors = list(actors)
        self.places = list(places)
        self.ranks = list(ranks)
        self.device_type = device_type
        self.stopped: str | None = None

    def context(self, rank: int, role: str) -> WorkerContext:
        """Return what the worker of a role is told at a rank."""
        first, place = self.places[0], self.ranks[rank]
        return WorkerContext(
            rank=rank,
            world_size=len(self.actors),
            local_rank=place.local_rank,
            local_world_size=place.local_world_size,
            master_addr=first.address,
            master_port=first.port,
            role=role,
            node=place.node,
            device_type=self.device_type,
        )

    def env_vars(self, rank: int) -> dict[str, str]:
        """Return a rank's environment, under the names that launchers of SPMD programs use.

        On GPU pools a process sees the pool's GPUs of its node in the order of local ranks: its own device is the one
        of its local rank, and those of its peers are visible to it.
        """
        context = self.context(rank, "")
        env = {
            "RANK": str(rank),
            "WORLD_SIZE": str(context.world_size),
            "LOCAL_RANK": str(context.local_rank),
            "LOCAL_WORLD_SIZE": str(context.local_world_size),
            "MASTER_ADDR": context.master_addr,
            "MASTER_PORT": str(context.master_port),
        }
        if self.device_type == "cuda":
            peers = [p for p in self.places if p.node_id == self.places[rank].node_id]
            env["CUDA_VISIBLE_DEVICES"] = ",".join(device for peer in peers for device in peer.devices)
        return env

    def stop(self, reason: str) -> None:
        """Kill every actor at once; later calls say why."""
        import ray

        self.stopped = self.stopped or reason
        for actor in self.actors:
            ray.kill(actor, no_restart=True)


@dataclass(frozen=True)
class Ticket:
    """A group call under way."""

    method: str
    replies: dict[int, Reply]


class RayTransport:
    """Carries the calls of one role to a pool's processes."""

    def __init__(self, processes: RayProcesses, role: str, patience: Patience) -> None:
        self._processes = processes
        self._role = role
        self._patience = patience

    @property
    def places(self) -> Sequence[RankPlace]:
        """Each rank's place, in rank order."""
        return self._processes.ranks

    def start(self, method: str, calls: Sequence[Call | None], answering: Sequence[int]) -> Ticket:
        """Put each argument in the store once, then send the calls."""
        if self._processes.stopped:
            raise GroupStopped(f"role {self._role!r}, method {method!r}: {self._processes.stopped}")
        stored: dict[int, Any] = {}
        packed = {rank: _pack(call, stored) for rank, call in enumerate(calls) if call is not None}
        wanted = set(answering)
        replies = {}
        for rank, (keywords, values) in packed.items():
            call = self._processes.actors[rank].call.options(num_returns=2)
            replies[rank] = Reply(rank, *call.remote(self._role, method, rank in wanted, keywords, *values))
        return Ticket(method, replies)

    def finish(self, ticket: Ticket) -> Mapping[int, int]:
        """Wait for all ranks; on a death, or when ranks hang after a failure, stop all processes of the pool."""
        replies = list(ticket.replies.values())
        ending = wait_for_replies(replies, ticket.method, self._locate, self._patience)
        _settle(ending, self._processes)
        return ending.revisions

    def fetch(self, ticket: Ticket, ranks: Sequence[int]) -> list[Any]:
        """Bring the values of these ranks here."""
        import ray
        from ray.exceptions import RayError

        try:
            return ray.get([ticket.replies[rank].value for rank in ranks])
        except RayError as error:
            # The call had ended; its value was lost with its owner or its node.
            role, rank, node = self._locate(ranks[0])
            raise WorkerDied(role, rank, node, ticket.method, str(error), "its result was lost") from error

    def _locate(self, rank: int) -> tuple[str, int, str]:
        return self._role, rank, self._processes.ranks[rank].node


class RayBackend:
    """Starts groups on Ray.

    Args:
        pools: the pools; a pool's slots are reserved when a role is first placed there.
        reserve_timeout_s: how long to wait for resources that others hold now.
        start_timeout_s: how long processes may take to come up.
        grace_s: how long the other ranks get to end once one has raised, before they are stopped.
        call_timeout_s: deadline of a group call; None sets none.
        env_vars: environment of the workers' processes.

    Raises:
        RayNotRunning: this process has not joined a cluster.
    """

    def __init__(
        self,
        pools: ResourcePoolManager,
        *,
        reserve_timeout_s: float = 10.0,
        start_timeout_s: float = 180.0,
        grace_s: float = 5.0,
        call_timeout_s: float | None = None,
        env_vars: Mapping[str, str] | None = None,
    ) -> None:
        require_ray()
        self._pools = pools
        self._reserve_timeout_s = reserve_timeout_s
        self._starting = Patience(grace_s, start_timeout_s)
        self._patience = Patience(grace_s, call_timeout_s)
        self._env_vars = dict(env_vars or {})
        self._slots: dict[str, list[Slot]] = {}
        self._used: Counter[tuple[str, int]] = Counter()
        self._reserved: set[str] = set()
        self._processes: dict[str, RayProcesses] = {}

    def launch(
        self, roles: Mapping[str, WorkerSpec[Any]], placement: Mapping[str, str] | None = None
    ) -> dict[str, WorkerGroup]:
        """Start the workers; roles of one pool share its processes, also over several calls.

        Raises:
            ResourcesUnavailable: a pool does not fit the cluster.
            PlacementError: a role has no pool, a pool is not known, or its slots hold `max_colocate` processes already.
            WorkerFailed: a process did not come up. A worker's exception comes as its own type where it pickles.
        """
        placed = self._pools.place(roles, placement)
        # All pools are reserved before any process starts: what does not fit is known within seconds.
        for name in placed:
            self._reserve(self._pools[name])
        for name in placed:
            if name not in self._processes:
                self._processes[name] = self._start_processes(self._pools[name])
        for name, of_pool in placed.items():
            for role in of_pool:
                self._build(self._processes[name], role, roles[role])
        pool_of = {role: name for name, of_pool in placed.items() for role in of_pool}
        return {
            role: WorkerGroup(
                role, spec.worker_class, RayTransport(self._processes[pool_of[role]], role, self._patience)
            )
            for role, spec in roles.items()
        }

    def launch_one(self, role: str, spec: WorkerSpec[W], pool: str | None = None) -> W:
        """Start one role; the group is typed as its worker class."""
        return cast("W", self.launch({role: spec}, None if pool is None else {role: pool})[role])

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
                    ending = wait_for_replies(replies, "close", _locator(name, processes), Patience(1.0, timeout_s))
                    if ending.error is not None:
                        logger.warning("pool %r: a worker did not close: %s", name, ending.error)
                processes.stop("this backend was shut down")
            for slots in self._slots.values():
                release(slots)
        self._processes.clear()
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
            self._slots[pool.parent.name] = reserve(pool.parent, self._reserve_timeout_s)
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
            ).remote(f"{pool.name}/{index}")
            for index, slot in enumerate(self._slots[whole.name][pool.first : pool.first + pool.size])
        ]
        places = self._everywhere(pool.name, actors, "place", [()] * len(actors))
        processes = in_rank_order(actors, places, "cuda" if whole.use_gpu else "cpu")
        arguments = [(processes.env_vars(rank), rank == 0) for rank in range(len(actors))]
        self._everywhere(pool.name, processes.actors, "prepare", arguments)
        return processes

    def _process_env(self, pool: SubPool) -> dict[str, str]:
        whole = pool.parent
        env = {"OMP_NUM_THREADS": str(whole.threads_per_process or _fair_threads(max(whole.processes_on_nodes)))}
        # Ray leaves a CPU actor every GPU of its node; on GPU pools the devices are set once the ranks are known.
        env |= {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"} if whole.use_gpu else {"CUDA_VISIBLE_DEVICES": ""}
        return env | self._env_vars

    def _build(self, processes: RayProcesses, role: str, spec: WorkerSpec[Any]) -> None:
        import ray
        from ray import cloudpickle

        _ = spec.worker_class  # a wrong class is refused here and not on every rank
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
        locate = _locator(role, processes)
        ending = wait_for_replies(replies, "__init__" if method == "build" else method, locate, self._starting)
        _settle(ending, processes or RayProcesses(actors, [], [], "cpu"))
        return ray.get([reply.value for reply in replies])


def in_rank_order(actors: Sequence[Any], places: Sequence[ProcessPlace], device_type: str) -> RayProcesses:
    """Order a pool's actors by the ranks that their nodes and slots give them.

    Args:
        actors: one handle a slot, in slot order.
        places: where each came up, in slot order.
        device_type: "cuda" or "cpu".
    """
    ranks = assign_ranks([place.node_id for place in places])
    named = [RankPlace(r.rank, r.local_rank, r.local_world_size, p.node) for r, p in zip(ranks, places, strict=True)]
    order = sorted(range(len(actors)), key=lambda slot: named[slot].rank)
    return RayProcesses([actors[i] for i in order], [places[i] for i in order], [named[i] for i in order], device_type)


def _settle(ending: Ending, processes: RayProcesses) -> None:
    if ending.broken:
        reason = str(ending.error).splitlines()[0] if str(ending.error) else type(ending.error).__name__
        processes.stop(f"its processes were stopped after a failure: {reason}")
    if ending.error is not None:
        raise ending.error


def _locator(role: str, processes: RayProcesses | None) -> Any:
    return lambda rank: (role, rank, processes.ranks[rank].node if processes else "not known yet")


def _pack(call: Call, stored: dict[int, Any]) -> tuple[tuple[str, ...], list[Any]]:
    """Lay the arguments out flat; what is not small is replaced by a reference, one for each object."""
    import ray

    def sent(value: Any) -> Any:
        if isinstance(value, (*_SMALL, ray.ObjectRef)) or (isinstance(value, str) and len(value) < _SMALL_TEXT):
            return value
        if id(value) not in stored:
            stored[id(value)] = ray.put(value)
        return stored[id(value)]

    return tuple(call.kwargs), [sent(value) for value in (*call.args, *call.kwargs.values())]


def _fair_threads(processes: int) -> int:
    """The driver's OMP_NUM_THREADS where it is set, otherwise a node's CPUs over its processes (the smallest node)."""
    import ray

    said = os.environ.get("OMP_NUM_THREADS", "")
    if said.isdigit() and int(said) > 0:
        return int(said)
    cpus = min((node["Resources"].get("CPU", 1.0) for node in ray.nodes() if node["Alive"]), default=1.0)
    return max(1, int(cpus) // processes)
