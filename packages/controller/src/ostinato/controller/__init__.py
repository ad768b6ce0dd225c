"""Single controller over SPMD worker groups: register, dispatch, resource pools; Ray and in-process.

Importing this package does not import Ray; `ostinato.controller.ray` is where it is used.
"""

from ostinato.controller.dispatch import (
    Broadcast,
    Call,
    Dispatch,
    DispatchMode,
    Scatter,
    by_argument,
    register_dispatch_mode,
)
from ostinato.controller.errors import (
    CallTimedOut,
    CollectError,
    ColumnWritten,
    ControllerError,
    DispatchError,
    GroupsExist,
    GroupsNotFound,
    GroupStopped,
    MeshError,
    PlacementError,
    ProcessGroupMismatch,
    RayNotRunning,
    RegistrationError,
    ResourcesUnavailable,
    ResultMismatch,
    UnknownDispatchMode,
    WorkerDied,
    WorkerFailed,
    WorkerHung,
)
from ostinato.controller.group import Backend, PendingCall, WorkerGroup
from ostinato.controller.local import LocalBackend
from ostinato.controller.pool import ResourcePool, ResourcePoolManager, Role, SubPool
from ostinato.controller.register import Execute, Registration, register, registration_of
from ostinato.controller.topology import Coordinates, Mesh
from ostinato.controller.watch import watch
from ostinato.controller.worker import Worker, WorkerContext, WorkerSpec

__all__ = [
    "Backend",
    "Broadcast",
    "Call",
    "CallTimedOut",
    "CollectError",
    "ColumnWritten",
    "ControllerError",
    "Coordinates",
    "Dispatch",
    "DispatchError",
    "DispatchMode",
    "Execute",
    "GroupStopped",
    "GroupsExist",
    "GroupsNotFound",
    "LocalBackend",
    "Mesh",
    "MeshError",
    "PendingCall",
    "PlacementError",
    "ProcessGroupMismatch",
    "RayNotRunning",
    "Registration",
    "RegistrationError",
    "ResourcePool",
    "ResourcePoolManager",
    "ResourcesUnavailable",
    "ResultMismatch",
    "Role",
    "Scatter",
    "SubPool",
    "UnknownDispatchMode",
    "Worker",
    "WorkerContext",
    "WorkerDied",
    "WorkerFailed",
    "WorkerGroup",
    "WorkerHung",
    "WorkerSpec",
    "by_argument",
    "register",
    "register_dispatch_mode",
    "registration_of",
    "watch",
]
