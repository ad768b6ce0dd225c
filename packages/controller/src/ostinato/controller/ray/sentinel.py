"""Looking at a worker's process from outside: whether it stands still, where it stands, and ending it.

A process that is stopped, or deep in a library call, answers nobody. Its node can still be asked: what state the kernel
has it in, and, by a signal that `faulthandler` answers without Python's help, what its threads are doing.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_SIGNAL = signal.SIGUSR2
_DUMP_S = 2.0
_ANSWER_S = 15.0


@dataclass(frozen=True)
class Mark:
    """What tells a process from another one that gets its number later, and where it writes its stacks.

    Attributes:
        pid: process id.
        started: when it was started, in the kernel's ticks.
        stacks: file descriptor that it writes its stacks to when it gets the signal; -1 for none.
    """

    pid: int
    started: int
    stacks: int = -1


def mark_here() -> Mark:
    """Let this process answer the signal with its stacks; return how to find it."""
    stacks = tempfile.TemporaryFile(prefix="ostinato-stacks-")  # noqa: SIM115  (open as long as the process lives)
    try:
        faulthandler.register(_SIGNAL, file=stacks, all_threads=True)
    except (OSError, RuntimeError, ValueError):
        return Mark(os.getpid(), _started(os.getpid()))
    return Mark(os.getpid(), _started(os.getpid()), os.dup(stacks.fileno()))


def _stat(pid: int) -> list[str]:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()
    except OSError:
        return []


def _started(pid: int) -> int:
    fields = _stat(pid)
    return int(fields[19]) if fields else -1


class Sentinel:
    """Looks at processes of the node where it is."""

    def standing(self, marks: Mapping[int, Mark]) -> list[int]:
        """Which of these processes (by rank) are stopped by a signal; one under a debugger is not."""
        found = []
        for rank, mark in marks.items():
            fields = _stat(mark.pid)
            if fields and fields[0] == "T" and int(fields[19]) == mark.started:
                found.append(rank)
        return found

    def stacks(self, marks: Mapping[int, Mark]) -> dict[int, str]:
        """Where the threads of these processes are; a process that cannot say is left out."""
        asked = {}
        for rank, mark in marks.items():
            if mark.stacks >= 0 and _started(mark.pid) == mark.started:
                path = f"/proc/{mark.pid}/fd/{mark.stacks}"
                try:
                    asked[rank] = path, os.stat(path).st_size
                    os.kill(mark.pid, _SIGNAL)
                except OSError:
                    asked.pop(rank, None)
        told = {}
        deadline = time.monotonic() + _DUMP_S
        while asked and time.monotonic() < deadline:
            time.sleep(0.1)
            for rank, (path, before) in list(asked.items()):
                text = _read_after(path, before)
                if text and text == told.get(rank):
                    del asked[rank]
                elif text:
                    told[rank] = text
        return told

    def kill(self, marks: Mapping[int, Mark]) -> None:
        """End these processes; a stopped one hears nothing else."""
        for mark in marks.values():
            if _started(mark.pid) == mark.started:
                try:
                    os.kill(mark.pid, signal.SIGKILL)
                except OSError:
                    continue


def _read_after(path: str, start: int) -> str:
    try:
        with open(path, "rb") as file:
            file.seek(start)
            return file.read().decode(errors="replace")
    except OSError:
        return ""


class Sentinels:
    """Asks the nodes of a group's processes; the driver's own node needs no helper, others get one when first asked.

    Args:
        nodes: Ray's id of each rank's node.
        marks: each rank's process.
    """

    def __init__(self, nodes: Sequence[str], marks: Sequence[Mark]) -> None:
        self._nodes, self._marks = list(nodes), list(marks)
        self._helpers: dict[str, Any] = {}

    def standing(self, ranks: Sequence[int]) -> list[int]:
        """Ranks whose processes are stopped."""
        return sorted(rank for found in self._ask("standing", ranks) for rank in found)

    def stacks(self, ranks: Sequence[int]) -> dict[int, str]:
        """Rank -> where its threads are, of those that can say."""
        told: dict[int, str] = {}
        for part in self._ask("stacks", ranks):
            told |= part
        return told

    def kill(self, ranks: Sequence[int]) -> None:
        """End processes."""
        self._ask("kill", ranks)

    def close(self) -> None:
        """End the helpers."""
        import ray

        for helper in self._helpers.values():
            if helper is not None:
                ray.kill(helper)
        self._helpers.clear()

    def _ask(self, what: str, ranks: Sequence[int]) -> list[Any]:
        import ray
        from ray.exceptions import RayError

        here = ray.get_runtime_context().get_node_id()
        by_node: dict[str, dict[int, Mark]] = {}
        for rank in ranks:
            by_node.setdefault(self._nodes[rank], {})[rank] = self._marks[rank]
        answers, waiting = [], []
        for node, marks in by_node.items():
            if node == here:
                answers.append(getattr(Sentinel(), what)(marks))
            elif (helper := self._helper(node)) is not None:
                waiting.append(getattr(helper, what).remote(marks))
        for reference in waiting:
            try:
                answers.append(ray.get(reference, timeout=_ANSWER_S))
            except RayError:  # the node is gone or overloaded: nothing is known of its processes
                continue
        return [answer for answer in answers if answer is not None]

    def _helper(self, node: str) -> Any:
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        if node not in self._helpers:
            strategy = NodeAffinitySchedulingStrategy(node, soft=False)
            self._helpers[node] = ray.remote(Sentinel).options(num_cpus=0, scheduling_strategy=strategy).remote()
        return self._helpers[node]
