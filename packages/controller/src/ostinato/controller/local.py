"""Groups in this process, world size 1: breakpoints work, and Ray is not needed."""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar, cast

from ostinato.controller.arrival import Arguments, Contract, served
from ostinato.controller.calls import Ended
from ostinato.controller.colocate import RoleHost
from ostinato.controller.dispatch import Call
from ostinato.controller.errors import GroupStopped, WorkerDied
from ostinato.controller.group import WorkerGroup
from ostinato.controller.topology import RankPlace
from ostinato.controller.worker import Worker, WorkerContext, WorkerSpec, checked_roles
from ostinato.protocol import DataProto, DataProtoFuture
from ostinato.protocol.blocks import HeldBlock
from ostinato.protocol.lanes import LOCAL

W = TypeVar("W", bound=Worker)


@dataclass(frozen=True)
class _Outcome:
    value: Any
    ended: Ended
    slots: list[Any]


class LocalTransport:
    """Carries calls to one worker of this process: a call has ended when `start` returns, or has raised."""

    store = LOCAL

    def __init__(self, host: RoleHost, context: WorkerContext) -> None:
        self._host = host
        self._context = context
        self.closed = False
        self.places: Sequence[RankPlace] = (RankPlace(0, 0, 1, context.node),)

    def start(
        self, method: str, calls: Sequence[Call | None], answering: Sequence[int], contract: Contract
    ) -> _Outcome:
        """Run the call; what it raises is raised here, in the frames where it happened."""
        role, node = self._context.role, self._context.node
        where = f"role {role!r}, rank 0 on node {node}, method {method!r}"
        if self.closed:
            raise GroupStopped(f"{where}: this backend was shut down")
        call = calls[0]
        if call is None:
            return _Outcome(None, Ended(self._host.revision(role)), [])
        try:
            arguments, values = _laid_out(call)
            result, left = served(partial(self._host.call, role, method), arguments, values, contract, method)
        except SystemExit as error:
            raise WorkerDied(role, 0, node, method, "", f"called sys.exit({error.code!r})") from error
        except Exception as error:
            error.add_note(f"raised by {where}")
            raise
        slots = [None] * contract.num_slots
        if left is not None and isinstance(result, DataProto):
            block = HeldBlock(result._tensors(), result._arrays())
            slots = [block] * contract.num_slots
            result = None
        return _Outcome(result, Ended(self._host.revision(role), left), slots)

    def finish(self, ticket: _Outcome) -> Mapping[int, Ended]:
        """Return how the call ended."""
        return {0: ticket.ended}

    def fetch(self, ticket: _Outcome, ranks: Sequence[int]) -> list[Any]:
        """Return the call's value."""
        return [ticket.value for _ in ranks]

    def slots(self, ticket: _Outcome, rank: int) -> Sequence[Any]:
        """Return the blocks of rows that it left."""
        return ticket.slots


def _laid_out(call: Call) -> tuple[Arguments, list[Any]]:
    entries: list[Any] = []
    values: list[Any] = []
    for value in (*call.args, *call.kwargs.values()):
        if not isinstance(value, DataProto | DataProtoFuture):
            entries.append(len(values))
            values.append(value)
            continue
        layout, references = DataProtoFuture.of(value).layout(LOCAL)
        entries.append((layout, tuple(range(len(values), len(values) + len(references)))))
        values += [reference for _, reference in references]
    return Arguments(tuple(entries), tuple(call.kwargs)), values


class LocalBackend:
    """Starts groups in this process.

    Args:
        device_type: what workers are told to run on, "cpu" or "cuda" (the current process's device 0).
        futures: whether calls that give rows return a `DataProtoFuture`; False returns the rows.
        check_writes: debug mode: a method that writes into a column that it shares with others is named.
    """

    def __init__(self, device_type: str = "cpu", *, futures: bool = True, check_writes: bool = False) -> None:
        self._options = {"futures": futures, "check_writes": check_writes}
        self._host = RoleHost()
        self._context = WorkerContext(node=socket.gethostname(), device_type=device_type)
        self._transports: list[LocalTransport] = []

    def launch(
        self, roles: Mapping[str, WorkerSpec[Any]], placement: Mapping[str, str] | None = None
    ) -> dict[str, WorkerGroup]:
        """Build every role's worker here; `placement` is accepted and has no effect."""
        groups = {}
        for role, spec in checked_roles(roles).items():
            context = WorkerContext(role=role, node=self._context.node, device_type=self._context.device_type)
            self._host.build(role, spec, context)
            self._transports.append(LocalTransport(self._host, context))
            groups[role] = WorkerGroup(role, spec.worker_class, self._transports[-1], **self._options)
        return groups

    def launch_one(self, role: str, spec: WorkerSpec[W], pool: str | None = None) -> W:
        """Build one role's worker here; the group is typed as its class."""
        return cast("W", self.launch({role: spec})[role])

    def wait(self) -> None:
        """Do nothing: a call of this process has ended, and raised what it had to raise, when it returns."""

    def shutdown(self) -> None:
        """Close the workers; a process group made by one of them is destroyed."""
        for transport in self._transports:
            transport.closed = True
        self._host.close()
