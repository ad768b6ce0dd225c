"""How much memory the ranks and their nodes use, as metrics."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from ostinato.protocol import Metric

_GIBIBYTE = 1024**3
_MEMINFO = Path("/proc/meminfo")
_STATM = Path("/proc/self/statm")
_HIGHEST: dict[torch.device, tuple[int, int]] = {}
"""Of each GPU, the most bytes allocated and reserved before PyTorch's counters last began anew."""


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
        sizes["max_memory_allocated_gb"], sizes["max_memory_reserved_gb"] = _highest(device)
    if _MEMINFO.exists():
        entries = dict(line.split(":") for line in _MEMINFO.read_text().splitlines())
        total, available = (int(entries[name].split()[0]) for name in ("MemTotal", "MemAvailable"))
        sizes["cpu_memory_used_gb"] = (total - available) * 1024
    return {f"perf/{name}": Metric.max(size / _GIBIBYTE) for name, size in sizes.items()}


def _highest(device: torch.device) -> tuple[int, int]:
    """The most bytes that this process has had allocated and reserved on a GPU, whenever the counters began."""
    now = torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device)
    before = _HIGHEST.get(device, now)
    return max(before[0], now[0]), max(before[1], now[1])


class PeakMemory:
    """The most that PyTorch has allocated on a GPU in each phase of one model; nothing on a CPU.

    Args:
        device: where the model lies.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._peaks: dict[str, int] = {}

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """Measure what is inside; of several phases of one name the highest counts."""
        if self._device.type != "cuda":
            yield
            return
        _HIGHEST[self._device] = _highest(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        yield
        self._peaks[phase] = max(torch.cuda.max_memory_allocated(self._device), self._peaks.get(phase, 0))

    def metrics(self) -> dict[str, Metric]:
        """The peaks since the last call in GiB, as `perf/max_memory_allocated_gb/{phase}`; over ranks the largest."""
        peaks, self._peaks = self._peaks, {}
        return {f"perf/max_memory_allocated_gb/{phase}": Metric.max(peak / _GIBIBYTE) for phase, peak in peaks.items()}


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
