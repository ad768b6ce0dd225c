"""What the benchmarks of protocol and controller share: timing in turns, a table, and verl's DataProto beside ours."""

from __future__ import annotations

import shutil
import statistics
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


def in_turns(runs: Mapping[str, Callable[[], Any]], repeat: int) -> dict[str, list[float]]:
    """Seconds of each, in turns, so that a busy machine slows all alike; the first turn warms up."""
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(repeat + 1):
        for name, run in runs.items():
            begun = time.perf_counter()
            result = run()
            took = time.perf_counter() - begun
            del result
            if turn:
                seconds[name].append(took)
    return seconds


def rows_of(case: str, seconds: Mapping[str, list[float]]) -> list[str]:
    """Lines of the table: ours against each reference of the same turns."""
    ours = seconds["ours"]
    lines = []
    for name, theirs in seconds.items():
        if name != "ours":
            ratio = statistics.median(mine / other for mine, other in zip(ours, theirs, strict=True))
            lines.append(
                f"| {case} | {name} | {1000 * statistics.median(ours):.2f} | {1000 * statistics.median(theirs):.2f} "
                f"| {ratio:.3f} |"
            )
    return lines


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
