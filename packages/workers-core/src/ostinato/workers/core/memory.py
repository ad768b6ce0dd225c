"""How much memory the ranks and their nodes use, as metrics."""

from __future__ import annotations

from pathlib import Path

import torch

from ostinato.protocol import Metric

_GIBIBYTE = 1024**3
_MEMINFO = Path("/proc/meminfo")


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
