"""The loop in an actor of its own: the process that started it may be a laptop's terminal, far from the cluster.

`run_on_cluster` runs a function in a driver actor and brings back what it emits as it goes, so that progress is drawn
where the person sits. The function's groups are owned by the actor and go when it goes.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from typing import Any

_END = object()


class _Driver:
    """Runs one function in a thread and yields what it emits."""

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
            raise failure[0]


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
        Exception: what the function raised, as its own type where Ray can carry it.
    """
    import ray
    from ray.exceptions import RayTaskError

    actor: Any = ray.remote(_Driver).options(num_cpus=num_cpus, **options).remote()
    try:
        stream = actor.stream.options(num_returns="streaming").remote(function, args)
        for reference in stream:
            try:
                on_event(ray.get(reference))
            except RayTaskError as error:
                raise getattr(error, "cause", None) or error from error
    finally:
        ray.kill(actor)
