"""The process of one slot: a Ray actor around a `RoleHost`. Every method returns a `Status` first."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from ostinato.controller.arrival import Absent, Arguments, Contract, packed, served
from ostinato.controller.colocate import RoleHost, Status, capture
from ostinato.controller.ray.sentinel import Mark, mark_here
from ostinato.controller.rendezvous import hold_port, release_ports
from ostinato.controller.topology import RankPlace
from ostinato.controller.worker import WorkerContext


@dataclass(frozen=True)
class ProcessPlace:
    """Where a process came up.

    Attributes:
        node_id: Ray's id of the node; ranks are grouped by it.
        address: the node's address.
        host: its host name.
        mark: how the process is found from outside.
        devices: ids of the GPUs that Ray gave it, as the node numbers them.
        port: a port of the node on which this process listens for the rendezvous.
    """

    node_id: str
    address: str
    host: str
    mark: Mark
    devices: tuple[str, ...]
    port: int

    @property
    def node(self) -> str:
        """The node's name in error texts."""
        return f"{self.host} ({self.address}, {self.node_id[:8]})"


@dataclass(frozen=True)
class Identity:
    """What another driver needs to know of a process.

    Attributes:
        pool: name of its pool.
        place: where it is.
        rank: its rank and place on its node.
        device_type: "cuda" or "cpu".
        classes: role -> pickled class of its worker.
        sizes: pool -> number of processes, of all pools that it has heard of.
    """

    pool: str
    place: ProcessPlace
    rank: RankPlace
    device_type: str
    classes: dict[str, bytes]
    sizes: dict[str, int]


class HostActor:
    """Hosts the workers of all roles of one slot. Calls run one after another, in the order in which they were sent.

    Args:
        name: pool and slot; Ray puts it before the process's output.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._host = RoleHost()
        self._place: ProcessPlace | None = None
        self._rank: tuple[RankPlace, str] | None = None
        self._sizes: dict[str, int] = {}

    def __repr__(self) -> str:
        return self._name

    def place(self) -> tuple[Status, ProcessPlace | None]:
        """Say where this process is, and hold a port."""

        def here() -> ProcessPlace:
            import ray

            context = ray.get_runtime_context()
            devices = tuple(str(device) for device in context.get_accelerator_ids().get("GPU", []))
            address = ray.util.get_node_ip_address()
            node, host = context.get_node_id(), socket.gethostname()
            self._place = ProcessPlace(node, address, host, mark_here(), devices, hold_port())
            return self._place

        return self._guard("", here)

    def prepare(self, env_vars: dict[str, str], rank: RankPlace, device_type: str) -> tuple[Status, None]:
        """Set the environment of this rank; all ranks but rank 0 give their port back."""
        keeps_port = rank.rank == 0

        def settle() -> None:
            self._rank = rank, device_type
            os.environ.update(env_vars)
            if not keeps_port:
                release_ports()

        return self._guard("", settle)

    def remember(self, sizes: dict[str, int]) -> tuple[Status, None]:
        """Keep how many processes each pool of the run has, for drivers that attach when some of them have ended."""
        return self._guard("", partial(self._sizes.update, sizes))

    def identity(self) -> tuple[Status, Identity | None]:
        """Say what another driver needs to know."""

        def here() -> Identity:
            from ray import cloudpickle

            assert self._place is not None
            assert self._rank is not None
            dumps = cloudpickle.dumps  # pyright: ignore[reportPrivateImportUsage]
            classes = {role: dumps(cls) for role, cls in self._host.classes().items()}
            return Identity(self._name.rpartition("/")[0], self._place, *self._rank, classes, self._sizes)

        return self._guard("", here)

    def build(self, role: str, spec: bytes, context: WorkerContext) -> tuple[Status, None]:
        """Unpickle a role's recipe and build its worker."""
        from ray import cloudpickle

        return self._guard(role, lambda: self._host.build(role, cloudpickle.loads(spec), context))

    def call(
        self, number: int, role: str, method: str, answers: bool, contract: Contract, arguments: Arguments, *values: Any
    ) -> tuple[Any, ...]:
        """Call a method of a role's worker.

        Args:
            number: of the call, told where it fails.
            role: the role.
            method: the method.
            answers: whether the result is wanted; otherwise it is dropped here.
            contract: what is known of the method.
            arguments: how its arguments are built.
            values: of what. They stand in the actor call itself so that Ray brings what references stand for, and holds
                it until the call has ended.

        Returns:
            A `Status`, then what the contract says: the value, or the blocks of the rows by slot.
        """
        call = partial(self._host.call, role, method)
        # Ray wraps every method of an actor, whose frames would stand in the traceback: no method in between.
        status, result = self._guard(role, partial(served, call, arguments, values, contract, method, answers=answers))
        if status.failure is not None:
            rank, node = self._host.place(role)
            failure = status.failure
            if failure.origin is None:
                failure = replace(failure, origin=(role, rank, node, method), call=number)
            return replace(status, failure=failure), *(
                [Absent(failure) if answers and contract.gives_rows else None] * contract.num_slots
            )
        value, left = result
        if not answers:
            return Status(None, status.revision), *([None] * contract.num_slots)
        if left is None:
            return status, value
        return Status(None, status.revision, left), *packed(value, left, contract.num_slots)

    def close(self) -> tuple[Status, None]:
        """Close all workers."""
        return self._guard("", self._host.close)

    def _guard(self, role: str, run: Callable[[], Any]) -> tuple[Status, Any]:
        from ray import cloudpickle

        try:
            value = run()
        except (Exception, SystemExit) as error:
            dumps = cloudpickle.dumps  # pyright: ignore[reportPrivateImportUsage]
            return Status(capture(error, dumps, cloudpickle.loads), self._host.revision(role)), None
        return Status(None, self._host.revision(role)), value
