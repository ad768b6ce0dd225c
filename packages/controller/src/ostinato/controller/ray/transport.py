"""Calls to the actors of a pool: sent in the driver's order, ended in that order, whoever waits for which."""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from ostinato.controller.arrival import Arguments, Contract
from ostinato.controller.calls import Ended
from ostinato.controller.dispatch import Call
from ostinato.controller.errors import GroupStopped, WorkerDied
from ostinato.controller.ray.actor import ProcessPlace
from ostinato.controller.ray.liveness import Ending, Patience, Reply, wait_for_replies
from ostinato.controller.ray.sentinel import Sentinels
from ostinato.controller.ray.store import RAY
from ostinato.controller.topology import RankPlace
from ostinato.controller.watch import Watch, book, current_watch
from ostinato.controller.worker import WorkerContext
from ostinato.protocol import DataProto, DataProtoFuture
from ostinato.protocol.lanes import Store

MOST_AHEAD = 256
"""Calls that may be under way on a pool; one more waits for the oldest."""

_SMALL = (bool, int, float, complex, type(None))
_SMALL_TEXT = 1024


class Ledger:
    """What the pools of one backend know of each other's calls.

    Attributes:
        pools: their processes.
        numbers: gives each call its number.
        told: failed calls whose failure was raised already, by a call that needed them.
    """

    def __init__(self) -> None:
        self.pools: list[RayProcesses] = []
        self.numbers = itertools.count()
        self.told: set[int] = set()


class Ticket:
    """A group call under way; it holds no references to rows, so that a batch dies with its last future."""

    def __init__(self, number: int, role: str, method: str, replies: list[Reply], values: dict[int, list[Any]]) -> None:
        self.number = number
        self.role, self.method, self.replies = role, method, replies
        self.values: dict[int, list[Any]] = values
        self.watch: Watch | None = current_watch()
        self.ending: Ending | None = None


class RayProcesses:
    """The actors of one pool in rank order, the calls under way on them, and what became of them.

    Args:
        actors: one handle a rank.
        places: where each came up.
        ranks: its rank and place on its node.
        device_type: "cuda" or "cpu".
        ledger: shared with the other pools of the backend; these processes enter themselves.
    """

    def __init__(
        self,
        actors: Sequence[Any],
        places: Sequence[ProcessPlace],
        ranks: Sequence[RankPlace],
        device_type: str,
        ledger: Ledger,
    ) -> None:
        self.actors = list(actors)
        self.places = list(places)
        self.ranks = list(ranks)
        self.device_type = device_type
        self.stopped: str | None = None
        self.sentinels = Sentinels([place.node_id for place in places], [place.mark for place in places])
        self.ledger = ledger
        ledger.pools.append(self)
        self._under_way: deque[Ticket] = deque()

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

    def sent(self, ticket: Ticket, patience: Patience) -> None:
        """Take note of a call that was sent."""
        self._under_way.append(ticket)
        while len(self._under_way) > MOST_AHEAD:
            self._end_oldest(patience)

    def finish(self, ticket: Ticket, patience: Patience) -> Ending:
        """Wait for a call, and for those sent before it, which its actors run before it; raise the first failure."""
        while ticket.ending is None:
            if self.stopped or ticket not in self._under_way:
                reason = self.stopped or "the call is not known here"
                raise GroupStopped(f"role {ticket.role!r}, method {ticket.method!r}: {reason}")
            self._end_oldest(patience, ticket)
        if ticket.ending.error is not None:
            raise ticket.ending.error
        return ticket.ending

    def finish_all(self, patience: Patience) -> None:
        """Wait for every call that was sent; raise the first failure."""
        while self._under_way and not self.stopped:
            self._end_oldest(patience)

    def _end_oldest(self, patience: Patience, wanted: Ticket | None = None) -> None:
        oldest = self._under_way[0]
        begun = time.perf_counter()
        ending = wait_for_replies(oldest.replies, oldest.method, self.locator(oldest.role), patience, self.sentinels)
        book(time.perf_counter() - begun, oldest.watch)
        self._under_way.popleft()
        oldest.ending, oldest.replies = ending, []
        if ending.lost:  # another pool's process took what this call needs with it: that is the failure to name
            for other in self.ledger.pools:
                if other is not self:
                    other.finish_all(patience)
        needed = ending.failed_calls - {oldest.number}
        if oldest is not wanted and (oldest.number in self.ledger.told or needed & self.ledger.told):
            return
        self.ledger.told |= needed
        self.settle(ending)

    def settle(self, ending: Ending) -> None:
        """Stop all processes where the call left some unusable; raise what it raised."""
        if ending.broken:
            error = ending.error
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            if ending.stopped:
                self.sentinels.kill(ending.stopped)
            self.stop(f"its processes were stopped after a failure: {reason}")
        if ending.make is not None:
            raise ending.make()

    def stop(self, reason: str) -> None:
        """Kill every actor at once; later calls say why."""
        import ray

        self.stopped = self.stopped or reason
        self._under_way.clear()
        for actor in self.actors:
            ray.kill(actor, no_restart=True)
        self.sentinels.close()

    def locator(self, role: str) -> Any:
        """Return rank -> (role, rank, node), for error texts."""
        return lambda rank: (role, rank, self.ranks[rank].node if self.ranks else "not known yet")


class RayTransport:
    """Carries the calls of one role to a pool's processes."""

    store = RAY

    def __init__(self, processes: RayProcesses, role: str, patience: Patience) -> None:
        self._processes = processes
        self._role = role
        self._patience = patience

    @property
    def places(self) -> Sequence[RankPlace]:
        """Each rank's place, in rank order."""
        return self._processes.ranks

    def start(self, method: str, calls: Sequence[Call | None], answering: Sequence[int], contract: Contract) -> Ticket:
        """Put each argument in the store once, then send the calls."""
        if self._processes.stopped:
            raise GroupStopped(f"role {self._role!r}, method {method!r}: {self._processes.stopped}")
        packer = Packer()
        packed = {rank: packer.pack(call) for rank, call in enumerate(calls) if call is not None}
        wanted = set(answering)
        replies, values = [], {}
        number = next(self._processes.ledger.numbers)
        for rank, (arguments, given) in packed.items():
            call = self._processes.actors[rank].call.options(num_returns=1 + contract.num_slots)
            status, *slots = call.remote(number, self._role, method, rank in wanted, contract, arguments, *given)
            replies.append(Reply(rank, status, slots[0]) if not contract.gives_rows else Reply(rank, status, status))
            if rank in wanted:
                values[rank] = slots
        ticket = Ticket(number, self._role, method, replies, values)
        self._processes.sent(ticket, self._patience)
        return ticket

    def finish(self, ticket: Ticket) -> Mapping[int, Ended]:
        """Wait for all ranks; on a death, or when ranks hang after a failure, stop all processes of the pool."""
        ending = self._processes.finish(ticket, self._patience)
        return {rank: Ended(status.revision, status.left) for rank, status in ending.statuses.items()}

    def fetch(self, ticket: Ticket, ranks: Sequence[int]) -> list[Any]:
        """Bring the values of these ranks here."""
        import ray
        from ray.exceptions import RayError

        try:
            return ray.get([ticket.values[rank][0] for rank in ranks])
        except RayError as error:
            # The call had ended; its value was lost with its owner or its node.
            role, rank, node = self._processes.locator(self._role)(ranks[0])
            raise WorkerDied(role, rank, node, ticket.method, str(error), "its result was lost") from error

    def slots(self, ticket: Ticket, rank: int) -> Sequence[Any]:
        """References of what the call leaves on a rank; the ticket lets go of them."""
        return ticket.values.pop(rank)


class Packer:
    """Lays arguments out flat; what is not small is replaced by a reference, one for each object.

    Args:
        store: where rows go that are not there yet.

    Attributes:
        stored: references of plain values, by the value's identity.
    """

    def __init__(self, store: Store = RAY) -> None:
        self._store = store
        self.stored: dict[int, Any] = {}
        self._layouts: dict[int, tuple[Any, Any, list[Any]]] = {}

    def pack(self, call: Call) -> tuple[Arguments, list[Any]]:
        """The arguments of one rank's call, and the values and references that they need."""
        entries: list[Any] = []
        values: list[Any] = []
        for value in (*call.args, *call.kwargs.values()):
            if isinstance(value, DataProto | DataProtoFuture):
                layout, references = self._laid_out(value)
                entries.append((layout, tuple(range(len(values), len(values) + len(references)))))
                values += references
            else:
                entries.append(len(values))
                values.append(self._sent(value))
        return Arguments(tuple(entries), tuple(call.kwargs)), values

    def _laid_out(self, value: DataProto | DataProtoFuture) -> tuple[Any, list[Any]]:
        if id(value) not in self._layouts:
            layout, references = DataProtoFuture.of(value).layout(self._store)
            self._layouts[id(value)] = value, layout, [reference for _, reference in references]
        return self._layouts[id(value)][1:]

    def _sent(self, value: Any) -> Any:
        import ray

        if isinstance(value, (*_SMALL, ray.ObjectRef)) or (isinstance(value, str) and len(value) < _SMALL_TEXT):
            return value
        if id(value) not in self.stored:
            self.stored[id(value)] = ray.put(value)
        return self.stored[id(value)]
