"""A group of workers: one bound method for each registered method, on whatever carries the calls."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeVar, cast

from ostinato.controller.arrival import Contract
from ostinato.controller.calls import Ended, PendingCall, RowsCall, Transport, batches_of, sizes_of
from ostinato.controller.dispatch import Call, plan_call
from ostinato.controller.errors import RegistrationError
from ostinato.controller.register import Execute, Registration, registered_methods
from ostinato.controller.topology import Mesh, RankPlace
from ostinato.controller.worker import Worker, WorkerSpec
from ostinato.protocol import DataProto, DataProtoFuture, columns

W = TypeVar("W", bound=Worker)

__all__ = ["Backend", "PendingCall", "Transport", "WorkerGroup"]


class WorkerGroup:
    """The driver's side of a role: call a registered method here and it runs on the workers.

    Args:
        role: role of the workers.
        worker_class: their class; each of its registered methods becomes a method of the group.
        transport: what carries the calls.
        futures: whether rows stay where they are and a call returns a `DataProtoFuture`; False brings them here.
        check_writes: debug mode: a method that writes into a column that it shares with others is named.

    Raises:
        RegistrationError: a registered method has the name of something that every group has.
    """

    def __init__(
        self,
        role: str,
        worker_class: type[Worker],
        transport: Transport,
        *,
        futures: bool = True,
        check_writes: bool = False,
    ) -> None:
        self._futures = futures
        self._check_writes = check_writes
        self._role = role
        self._worker_class = worker_class
        self._transport = transport
        self._meshes: dict[str, Mesh] = {}
        self._revisions: dict[int, int] = {}
        for name, function, record in registered_methods(worker_class):
            if hasattr(WorkerGroup, name):
                raise RegistrationError(
                    f"{worker_class.__name__}.{name} is registered, but every group has its own {name!r}; rename it"
                )
            setattr(self, name, self._bind(name, function, record))

    @property
    def role(self) -> str:
        """Role of the workers."""
        return self._role

    @property
    def world_size(self) -> int:
        """Number of workers."""
        return len(self._transport.places)

    @property
    def places(self) -> tuple[RankPlace, ...]:
        """Rank, local rank, local world size and node of each worker, in rank order."""
        return tuple(self._transport.places)

    def coordinates(self, mesh: str = "train") -> Mesh:
        """Return the coordinates of all ranks in a mesh, in rank order.

        The workers are asked the first time and again after one of them registered a mesh.

        Raises:
            MeshError: the ranks' coordinates do not form a mesh.
        """
        if mesh not in self._meshes:
            ranks = range(self.world_size)
            ticket = self._transport.start("coordinates", [Call((mesh,))] * len(ranks), ranks, Contract())
            self.note(self._transport.finish(ticket))
            self._meshes[mesh] = Mesh(tuple(self._transport.fetch(ticket, ranks)))
        return self._meshes[mesh]

    def dp_size(self, mesh: str = "train") -> int:
        """Return the number of data-parallel ranks of a mesh."""
        return self.coordinates(mesh).dp_size

    def typed(self, cls: type[W]) -> W:
        """Return this group as its worker class, for editors and type checkers; nothing changes at run time.

        Raises:
            TypeError: the workers are of another class.
        """
        if not issubclass(self._worker_class, cls):
            raise TypeError(f"role {self._role!r} has workers of {self._worker_class.__name__}, not of {cls.__name__}")
        return cast("W", self)

    def __repr__(self) -> str:
        return f"WorkerGroup({self._role!r}, {self._worker_class.__name__}, world_size={self.world_size})"

    def note(self, ended: Mapping[int, Ended]) -> None:
        """Forget coordinates where a call has registered a mesh; for the calls of this group alone."""
        revisions = {rank: one.revision for rank, one in ended.items()}
        if any(self._revisions.get(rank, 0) != revision for rank, revision in revisions.items()):
            self._meshes.clear()
        self._revisions.update(revisions)

    def _bind(self, name: str, function: Callable[..., Any], record: Registration) -> Callable[..., Any]:
        signature = inspect.signature(function)
        contract = Contract.of(record, self._check_writes)
        ahead = contract.gives_rows and self._futures and not record.blocking and _returns_batch(function)

        @functools.wraps(function)
        def group_call(*args: Any, **kwargs: Any) -> Any:
            # A wrong argument is the caller's error: it is raised here and not once a rank.
            bound = signature.bind(None, *args, **kwargs)
            # In the order of the parameters: which batch is the first must not hang on how a call is written.
            named = {key: kwargs[key] for key in (*bound.arguments, *kwargs) if key in kwargs}
            return self._call(name, record, contract, Call(args, named), ahead)

        return group_call

    def _call(self, name: str, record: Registration, contract: Contract, call: Call, ahead: bool) -> Any:
        mode = record.dispatch_mode
        if record.requires and (batches := batches_of(call)):
            columns.validate(batches[0], record.requires, f"role {self._role!r}, method {name!r}")
        mesh = self.coordinates(record.mesh) if mode.uses_mesh else Mesh.of_every_rank(self.world_size)
        plan = plan_call(mode, mesh, call, reads=record.travels, rank_zero=record.execute_mode is Execute.RANK_ZERO)
        ticket = self._transport.start(name, plan.calls, plan.answering, contract)
        if not contract.gives_rows:
            pending = PendingCall(self, self._transport, name, plan, ticket)
            return pending.get() if record.blocking else pending
        rows = RowsCall(self, self._transport, name, plan, ticket)
        if not ahead:
            value = rows.value()
            return value.get() if isinstance(value, DataProtoFuture) and not self._futures else value
        sizes = sizes_of(plan) if record.keeps_rows else None
        return DataProtoFuture(rows) if sizes is None else rows.promise(record.writes, sizes)


def _returns_batch(function: Callable[..., Any]) -> bool:
    """Whether a method's annotation says that it returns a DataProto: then nobody has to wait to see."""
    annotation = getattr(function, "__annotations__", {}).get("return")
    name = annotation if isinstance(annotation, str) else getattr(annotation, "__name__", "")
    return name.strip("'\"").rpartition(".")[2] == DataProto.__name__


class Backend(Protocol):
    """What starts groups. `LocalBackend` and `RayBackend` are the two."""

    def launch(
        self, roles: Mapping[str, WorkerSpec[Any]], placement: Mapping[str, str] | None = None
    ) -> dict[str, WorkerGroup]:
        """Start workers and return role -> group.

        Args:
            roles: role -> recipe of its worker.
            placement: role -> pool name; None where there is one pool. Roles of one pool share its processes.
        """
        ...

    def launch_one(self, role: str, spec: WorkerSpec[W], pool: str | None = None) -> W:
        """Start one role; the group is typed as its worker class."""
        ...

    def wait(self) -> None:
        """Wait for every call that was sent to any group; raise the first failure, which names the call."""
        ...

    def shutdown(self) -> None:
        """Close the workers and give back what they hold; a second call does nothing."""
        ...
