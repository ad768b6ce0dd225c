"""Groups in this process, world size 1: breakpoints work, and Ray is not needed."""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast

from ostinato.controller.colocate import RoleHost
from ostinato.controller.dispatch import Call
from ostinato.controller.errors import GroupStopped, WorkerDied
from ostinato.controller.group import WorkerGroup
from ostinato.controller.topology import RankPlace
from ostinato.controller.worker import Worker, WorkerContext, WorkerSpec

W = TypeVar("W", bound=Worker)


@dataclass(frozen=True)
class _Outcome:
    value: Any
    error: BaseException | None


class LocalTransport:
    """Carries calls to one worker of this process: a call has ended when `start` returns."""

    def __init__(self, host: RoleHost, context: WorkerContext) -> None:
        self._host = host
        self._context = context
        self.closed = False
        self.places: Sequence[RankPlace] = (RankPlace(0, 0, 1, context.node),)

    def start(self, method: str, calls: Sequence[Call | None], answering: Sequence[int]) -> _Outcome:
        """Run the call; an exception is kept for `finish`."""
        where = f"role {self._context.role!r}, rank 0 on node {self._context.node}, method {method!r}"
        if self.closed:
            raise GroupStopped(f"{where}: this backend was shut down")
        call = calls[0]
        if call is None:
            return _Outcome(None, None)
        try:
            return _Outcome(self._host.call(self._context.role, method, call.args, call.kwargs), None)
        except SystemExit as error:
            died = WorkerDied(self._context.role, 0, self._context.node, method, "", f"called sys.exit({error.code!r})")
            died.__cause__ = error
            return _Outcome(None, died)
        except Exception as error:
            error.add_note(f"raised by {where}")
            return _Outcome(None, error)

    def finish(self, ticket: _Outcome) -> Mapping[int, int]:
        """Raise what the call raised."""
        if ticket.error is not None:
            raise ticket.error
        return {0: self._host.revision(self._context.role)}

    def fetch(self, ticket: _Outcome, ranks: Sequence[int]) -> list[Any]:
        """Return the call's value."""
        return [ticket.value for _ in ranks]


class LocalBackend:
    """Starts groups in this process.

    Args:
        device_type: what workers are told to run on, "cpu" or "cuda" (the current process's device 0).
    """

    def __init__(self, device_type: str = "cpu") -> None:
        self._host = RoleHost()
        self._context = WorkerContext(node=socket.gethostname(), device_type=device_type)
        self._transports: list[LocalTransport] = []

    def launch(
        self, roles: Mapping[str, WorkerSpec[Any]], placement: Mapping[str, str] | None = None
    ) -> dict[str, WorkerGroup]:
        """Build every role's worker here; `placement` is accepted and has no effect."""
        groups = {}
        for role, spec in roles.items():
            context = WorkerContext(role=role, node=self._context.node, device_type=self._context.device_type)
            self._host.build(role, spec, context)
            self._transports.append(LocalTransport(self._host, context))
            groups[role] = WorkerGroup(role, spec.worker_class, self._transports[-1])
        return groups

    def launch_one(self, role: str, spec: WorkerSpec[W], pool: str | None = None) -> W:
        """Build one role's worker here; the group is typed as its class."""
        return cast("W", self.launch({role: spec})[role])

    def shutdown(self) -> None:
        """Close the workers; a process group made by one of them is destroyed."""
        for transport in self._transports:
            transport.closed = True
        self._host.close()
