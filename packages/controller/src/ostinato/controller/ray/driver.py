"""The loop in an actor of its own: the process that started it may be a laptop's terminal, far from the cluster.

`run_on_cluster` runs a function in a driver actor and brings back what it emits as it goes, so that progress is drawn
where the person sits. The function's groups are owned by the actor and go when it goes.
"""

from __future__ import annotations

import queue
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from ostinato.controller.colocate import Failure, capture
from ostinato.controller.errors import WorkerDied, WorkerFailed

_END = object()
_ROLE = "driver"


@dataclass(frozen=True)
class _Raised:
    """What the function raised, in a form that always travels.

    Attributes:
        failure: the exception.
        cause: the worker's failure behind it, if it came from a worker; pickling an exception loses its cause.
        node: where it was raised.
    """

    failure: Failure
    cause: WorkerFailed | None
    node: str

    @staticmethod
    def of(error: BaseException) -> _Raised:
        """Record an exception in the actor."""
        from ray import cloudpickle

        cause = error.__cause__ if isinstance(error.__cause__, WorkerFailed) else None
        dumps = cloudpickle.dumps  # pyright: ignore[reportPrivateImportUsage]
        return _Raised(capture(error, dumps, cloudpickle.loads), cause, socket.gethostname())

    def restored(self, method: str) -> BaseException:
        """The exception with its cause, or a stand-in where it does not unpickle here."""
        from ray import cloudpickle

        stand_in = WorkerFailed(_ROLE, 0, self.node, method, self.failure.traceback, self.failure.reason)
        if self.failure.pickled is None:
            return stand_in
        try:
            error = cloudpickle.loads(self.failure.pickled)
        except Exception:
            return stand_in
        error.__cause__ = self.cause or stand_in
        return error


class _Driver:
    """Runs one function in a thread and yields what it emits; a `_Raised` comes last."""

    def stream(self, function: Callable[..., Any], args: tuple[Any, ...]) -> Iterator[Any]:
        events: queue.SimpleQueue[Any] = queue.SimpleQueue()
        failure: list[BaseException] = []

        def body() -> None:
            try:
                function(*args, emit=events.put)
            except BaseException as error:  # handed to the caller below, `SystemExit` of a library included
                failure.append(error)
            finally:
                events.put(_END)

        thread = threading.Thread(target=body, name="driver", daemon=True)
        thread.start()
        while (event := events.get()) is not _END:
            yield event
        thread.join()
        if failure:
            yield _Raised.of(failure[0])


def run_on_cluster(
    function: Callable[..., Any], *args: Any, on_event: Callable[[Any], None], num_cpus: float = 0, **options: Any
) -> None:
    """Run `function(*args, emit=…)` in an actor and pass on what it emits, in order, until it returns.

    Args:
        function: a picklable function; its keyword `emit` takes any picklable event.
        args: its arguments.
        on_event: called here, in this process, with each event.
        num_cpus: CPUs that the actor reserves; 0 lets it sit on a node whose CPUs the workers hold.
        options: further options of the actor (`resources`, `scheduling_strategy`, `runtime_env`, …).

    Raises:
        Exception: what the function raised, as its own type where it pickles. Its cause is a `WorkerFailed` with the
            traceback of the worker that it came from, or of the actor.
        WorkerFailed: the function raised what does not pickle, or could not be called.
        WorkerDied: the actor's process ended.
    """
    import ray

    method = getattr(function, "__name__", "function")
    actor: Any = ray.remote(_Driver).options(num_cpus=num_cpus, **options).remote()
    try:
        for reference in actor.stream.options(num_returns="streaming").remote(function, args):
            event = _received(reference, method)
            if isinstance(event, _Raised):
                raise event.restored(method)
            on_event(event)
    finally:
        ray.kill(actor)


def _received(reference: Any, method: str) -> Any:
    import ray
    from ray.exceptions import RayError, RayTaskError

    where = _ROLE, 0, "not known", method
    try:
        return ray.get(reference)
    except RayTaskError as error:  # outside the function, e.g. an argument that does not unpickle
        raise WorkerFailed(*where, str(error), "the call could not be run") from error
    except RayError as error:
        raise WorkerDied(*where, str(error), f"its process ended ({type(error).__name__})") from error
