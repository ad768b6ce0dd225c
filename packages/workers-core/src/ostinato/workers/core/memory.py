"""How much memory the ranks and their nodes use, as metrics."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from ostinato.protocol import Metric

_GIBIBYTE = 1024**3
_MEMINFO = Path("/proc/meminfo")
_STATM = Path("/proc/self/statm")


def memory_metrics(device: torch.device) -> dict[str, Metric]:
    """Return what this rank has needed so far, in GiB; over ranks the largest counts.

    Args:
        device: where this rank trains.

    Returns:
        On a GPU `perf/max_memory_allocated_gb` and `perf/max_memory_reserved_gb`, the most since the process began. On
        Linux `perf/cpu_memory_used_gb`, what all processes of the node hold now, file caches left out.
    """
    sizes: dict[str, int] = {}
    if device.type == "cuda":
        sizes["max_memory_allocated_gb"] = torch.cuda.max_memory_allocated(device)
        sizes["max_memory_reserved_gb"] = torch.cuda.max_memory_reserved(device)
    if _MEMINFO.exists():
        entries = dict(line.split(":") for line in _MEMINFO.read_text().splitlines())
        total, available = (int(entries[name].split()[0]) for name in ("MemTotal", "MemAvailable"))
        sizes["cpu_memory_used_gb"] = (total - available) * 1024
    return {f"perf/{name}": Metric.max(size / _GIBIBYTE) for name, size in sizes.items()}


def memory_used(device: torch.device) -> int | None:
    """Bytes in use now: of a GPU by all that share it, training and rollout engines alike; on a CPU by this process.

    None where the system does not say.
    """
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return total - free
    if _STATM.exists():
        return int(_STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return None


class MemoryTimeline:
    """How much memory is in use at the end of each phase of a step, as `perf/memory_used_gb/{phase}`.

    Args:
        device: where this rank trains; see `memory_used` for what is counted.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._used: dict[str, int] = {}

    def mark(self, phase: str) -> None:
        """Take a reading under the name of the phase that has just ended; a later one replaces it."""
        used = memory_used(self._device)
        if used is not None:
            self._used[phase] = used

    def metrics(self) -> dict[str, Metric]:
        """The readings in GiB, in the order they were taken; over ranks the largest counts."""
        return {f"perf/memory_used_gb/{phase}": Metric.max(used / _GIBIBYTE) for phase, used in self._used.items()}
