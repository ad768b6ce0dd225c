"""The errors of this wheel: one root, each leaf also a standard error, all of them picklable."""

from __future__ import annotations

from collections.abc import Mapping


class ControllerError(Exception):
    """Root of everything that `ostinato.controller` raises."""


class RegistrationError(ControllerError, TypeError):
    """A method or a dispatch mode is declared in a way that cannot work."""


class UnknownDispatchMode(ControllerError, LookupError):  # noqa: N818  (names what happened)
    """No dispatch mode has this name."""


class DispatchError(ControllerError, ValueError):
    """The arguments of a group call do not fit its dispatch mode or the group's size."""


class CollectError(ControllerError, TypeError):
    """The ranks returned something that the dispatch mode cannot put together."""


class MeshError(ControllerError, ValueError):
    """The coordinates that the ranks report do not form one mesh."""


class PlacementError(ControllerError, ValueError):
    """A role or a pool is placed where it cannot go."""


class ProcessGroupMismatch(ControllerError, RuntimeError):  # noqa: N818  (names what happened)
    """A process group exists already in this process and is another one than asked for."""


class RayNotRunning(ControllerError, RuntimeError):  # noqa: N818  (names what happened)
    """The Ray backend is used before Ray was started."""


class ResultMismatch(ControllerError, TypeError):  # noqa: N818  (names what happened)
    """A method's result is not what its registration says."""


class ColumnWritten(ControllerError, RuntimeError):  # noqa: N818  (names what happened)
    """A method changed a column that it shares with others (debug mode)."""


class GroupsNotFound(ControllerError, LookupError):  # noqa: N818  (names what happened)
    """No detached groups have this name."""


class GroupsExist(ControllerError, ValueError):  # noqa: N818  (names what happened)
    """Detached groups of this name run already."""


class GroupStopped(ControllerError, RuntimeError):  # noqa: N818  (names what happened)
    """The processes of this group were stopped; the text says why."""


class CallTimedOut(ControllerError, TimeoutError):  # noqa: N818  (names what happened)
    """A group call did not end within its deadline."""


class ResourcesUnavailable(ControllerError, RuntimeError):  # noqa: N818  (names what happened)
    """A pool asks for more than the cluster has, or has free.

    Attributes:
        pool: name of the pool.
        asked: resource name -> amount asked for.
        free: resource name -> amount free when the request was given up.
        reason: what did not fit and what to do.
    """

    def __init__(self, pool: str, asked: Mapping[str, float], free: Mapping[str, float], reason: str) -> None:
        super().__init__(pool, dict(asked), dict(free), reason)
        self.pool = pool
        self.asked = dict(asked)
        self.free = dict(free)
        self.reason = reason

    def __str__(self) -> str:
        return (
            f"resource pool {self.pool!r} asks for {_amounts(self.asked)}; free: {_amounts(self.free)}. {self.reason}"
        )


class WorkerFailed(ControllerError, RuntimeError):  # noqa: N818  (names what happened)
    """A worker failed; the readable stand-in for what it raised, and the cause of it where it came back whole.

    Attributes:
        role: role of the worker, e.g. "actor".
        rank: its rank in the group.
        node: host name or address of its node.
        method: the method that was called.
        traceback: the worker's traceback as text; for a process that died, what is known about its end.
        reason: one line, e.g. "ValueError: no such column".
    """

    def __init__(
        self, role: str, rank: int, node: str, method: str, traceback: str = "", reason: str = "failed"
    ) -> None:
        super().__init__(role, rank, node, method, traceback, reason)
        self.role = role
        self.rank = rank
        self.node = node
        self.method = method
        self.traceback = traceback
        self.reason = reason

    @property
    def where(self) -> str:
        """Role, rank, node and method in one phrase."""
        return f"role {self.role!r}, rank {self.rank} on node {self.node}, method {self.method!r}"

    def __str__(self) -> str:
        text = f"{self.where}: {self.reason}"
        return f"{text}\n\nOn the worker:\n{self.traceback.rstrip()}" if self.traceback else text


class WorkerDied(WorkerFailed):
    """A worker's process ended during a call (exit, kill, out of memory)."""


class WorkerHung(WorkerDied, TimeoutError):  # noqa: N818  (names what happened)
    """A worker's process is alive and stands still (SIGSTOP, a frozen container)."""


def _amounts(amounts: Mapping[str, float]) -> str:
    return ", ".join(f"{value:g} {name}" for name, value in sorted(amounts.items())) or "nothing"
