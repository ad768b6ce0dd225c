"""The base class of workers, what a launcher tells them about their place, and the recipe to build one."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Generic, ParamSpec, TypeVar, cast

from ostinato.controller.errors import PlacementError
from ostinato.controller.rendezvous import init_process_group
from ostinato.controller.topology import Coordinates

P = ParamSpec("P")
W = TypeVar("W", bound="Worker")

_current: ContextVar[WorkerContext] = ContextVar("ostinato_worker_context")


@dataclass(frozen=True)
class WorkerContext:
    """A worker's place among the processes of its group.

    Attributes:
        rank: 0 .. world_size - 1.
        world_size: number of processes of the group.
        local_rank: rank among the group's processes on this node; on GPU pools also the index of its device.
        local_world_size: number of the group's processes on this node.
        master_addr: address of rank 0's node.
        master_port: port of the rendezvous on that node; 0 where the world is one process.
        role: role of the worker, e.g. "actor".
        node: name of this node, for error texts.
        device_type: "cuda" on GPU pools, otherwise "cpu".
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    master_addr: str = "127.0.0.1"
    master_port: int = 0
    role: str = "worker"
    node: str = field(default_factory=socket.gethostname)
    device_type: str = "cpu"

    @staticmethod
    def current() -> WorkerContext:
        """Return the context that the launcher set; rank 0 of 1 where there is none."""
        return _current.get(None) or WorkerContext()

    @contextmanager
    def activate(self) -> Iterator[WorkerContext]:
        """Make this the current context for the duration of a `with` block."""
        token = _current.set(self)
        try:
            yield self
        finally:
            _current.reset(token)


class Worker:
    """One process's part of a group. A subclass marks the methods that the driver may call with `register`.

    A subclass with its own `__init__` calls `super().__init__()` first.
    """

    def __init__(self) -> None:
        self._context = WorkerContext.current()
        self._meshes: dict[str, Coordinates] = {}
        self._mesh_revision = 0

    @property
    def context(self) -> WorkerContext:
        """This worker's place."""
        return self._context

    @property
    def rank(self) -> int:
        """Rank in the group."""
        return self._context.rank

    @property
    def world_size(self) -> int:
        """Number of processes of the group."""
        return self._context.world_size

    @property
    def local_rank(self) -> int:
        """Rank among the group's processes on this node."""
        return self._context.local_rank

    @property
    def local_world_size(self) -> int:
        """Number of the group's processes on this node."""
        return self._context.local_world_size

    @property
    def role(self) -> str:
        """Role of this worker."""
        return self._context.role

    @property
    def mesh_revision(self) -> int:
        """How often a mesh was registered; the group forgets cached coordinates when it changes."""
        return self._mesh_revision

    def register_mesh(self, name: str, coordinates: Coordinates) -> None:
        """Say where this rank stands in a mesh; a later call with the same name replaces it."""
        self._meshes[name] = coordinates
        self._mesh_revision += 1

    def coordinates(self, mesh: str = "train") -> Coordinates:
        """Return this rank's coordinates; in a mesh that nobody registered each rank is its own dp rank."""
        return self._meshes.get(mesh) or Coordinates(self.rank, self.world_size)

    def init_process_group(self, device_type: str | None = None, timeout_s: float = 600.0) -> None:
        """Make the default process group of this process, once, whatever number of roles asks.

        Args:
            device_type: "cpu" (gloo) or "cuda" (NCCL, and gloo for CPU tensors); None takes the pool's.
            timeout_s: seconds after which a collective that some rank never joins fails.

        Raises:
            ProcessGroupMismatch: this process has another group already.
        """
        init_process_group(self._context, device_type or self._context.device_type, timeout_s)

    def close(self) -> None:
        """Release what the worker holds outside this process; called once, at shutdown."""


class WorkerSpec(Generic[W]):
    """A recipe for one worker, built in the process where it will live.

    The class and the arguments must pickle where the backend starts other processes.
    """

    def __init__(self, cls: Callable[P, W], *args: P.args, **kwargs: P.kwargs) -> None:
        self.cls: Callable[..., W] = cls
        self.args: tuple[Any, ...] = args
        self.kwargs: dict[str, Any] = kwargs

    @property
    def worker_class(self) -> type[W]:
        """The class whose registered methods the group gets.

        Raises:
            TypeError: the recipe holds something else than a subclass of `Worker`.
        """
        if not (isinstance(self.cls, type) and issubclass(self.cls, Worker)):
            raise TypeError(f"WorkerSpec: expected a subclass of Worker, got {self.cls!r}")
        return cast("type[W]", self.cls)

    def build(self, context: WorkerContext) -> W:
        """Build the worker at this place.

        Raises:
            TypeError: its `__init__` does not call `super().__init__()`.
        """
        with context.activate():
            worker = self.cls(*self.args, **self.kwargs)
        if getattr(worker, "_context", None) is not context:
            raise TypeError(f"{type(worker).__name__}.__init__ must call super().__init__() before anything else")
        return worker

    def __repr__(self) -> str:
        return f"WorkerSpec({getattr(self.cls, '__name__', self.cls)})"


def checked_roles(roles: Any) -> dict[str, WorkerSpec[Any]]:
    """Check what a backend is to launch, before anything starts.

    Raises:
        PlacementError: no dict of role -> `WorkerSpec`.
        TypeError: a recipe holds something else than a subclass of `Worker`.
    """
    if not isinstance(roles, Mapping):
        raise PlacementError(f"launch: expected a dict of role -> WorkerSpec, got {type(roles).__name__}")
    for role, spec in roles.items():
        if not isinstance(role, str) or not role:
            raise PlacementError(f"launch: a role is text and not empty, got {role!r}")
        if not isinstance(spec, WorkerSpec):
            name = spec.__name__ if isinstance(spec, type) else type(spec).__name__
            raise PlacementError(f"launch: role {role!r} needs a recipe, got {name}; write WorkerSpec({name}, ...)")
        _ = spec.worker_class
    return dict(roles)
