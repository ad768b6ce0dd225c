"""What the benchmarks of protocol and controller share: timing in turns, a table, and verl's DataProto beside ours."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

VERL = "verl==0.9.1"


def keep_memory() -> None:
    """Let glibc keep freed memory: fresh pages cost three times what a copy does, and hit now one run, now another."""
    library = ctypes.CDLL(None)
    if hasattr(library, "mallopt"):
        m_trim_threshold, m_mmap_threshold = -1, -3
        library.mallopt(m_trim_threshold, 2**31 - 1)
        library.mallopt(m_mmap_threshold, 32 * 1024**2)


def in_turns(
    runs: Mapping[str, Callable[[], Any]], repeat: int, clock: Callable[[], float] = time.process_time
) -> dict[str, float]:
    """Seconds of each: the least of its turns, since a busy machine only ever adds to them; the first turn warms up.

    Args:
        runs: what to measure, by name; taken in turns, so that a machine that slows down slows all alike.
        repeat: turns.
        clock: CPU time of this process, or `time.perf_counter` where others do the work.
    """
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(repeat + 1):
        for name, run in runs.items():
            begun = clock()
            result = run()
            seconds[name].append(clock() - begun)
            del result
    return {name: min(all_turns[1:]) for name, all_turns in seconds.items()}


def rows_of(case: str, seconds: Mapping[str, float]) -> list[str]:
    """Lines of the table: ours against each reference of the same turns."""
    ours = seconds["ours"]
    return [
        f"| {case} | {name} | {1000 * ours:.3f} | {1000 * theirs:.3f} | {ours / theirs:.3f} |"
        for name, theirs in seconds.items()
        if name != "ours"
    ]


HEAD = "| case | reference | ours ms | reference ms | ours / reference |\n|---|---|---|---|---|"


def verl_protocol() -> Any | None:
    """verl's DataProto from a scratch folder that is made on first use; None, with a line, where it cannot be had."""
    folder = Path(tempfile.gettempdir()) / f"ostinato-bench-{VERL.replace('==', '-')}"
    if not folder.exists():
        beside = folder.with_suffix(f".{time.time_ns()}")
        uv = shutil.which("uv") or str(Path(__file__).resolve().parents[2] / ".uv/bin/uv")
        install = [
            uv,
            "pip",
            "install",
            "--quiet",
            "--no-deps",
            "--target",
            str(beside),
            "--python",
            sys.executable,
            VERL,
        ]
        try:
            subprocess.run(install, check=True, capture_output=True, timeout=300)
            beside.rename(folder)
        except (OSError, subprocess.SubprocessError) as error:
            print(f"skipped: {VERL} cannot be installed here ({error}); the rows against it are left out")
            return None
    sys.path.append(str(folder))  # last: everything but verl itself comes from this environment
    try:
        from verl import DataProto
    except Exception as error:
        print(f"skipped: {VERL} does not import here ({error!r}); the rows against it are left out")
        return None
    return DataProto


def columns_of(rows: int, width: int, count: int) -> tuple[dict[str, torch.Tensor], dict[str, np.ndarray]]:
    """Half int64, half float32 columns of (rows, width), and one text column."""
    tensors = {
        f"c{i}": torch.randint(0, 1000, (rows, width)) if i % 2 else torch.rand(rows, width) for i in range(count)
    }
    text = np.empty(rows, dtype=object)
    text[:] = [f"row {i}" for i in range(rows)]
    return tensors, {"uid": text}
