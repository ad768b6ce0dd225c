"""Run a function in several fresh processes that form one process group, and bring back what it returned.

Rendezvous goes through a file in a fresh folder, so no port is chosen and none can be taken by another run.
"""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, TypeVar

from ostinato.workers.core.errors import WorkersError

T = TypeVar("T")

POLL_SECONDS = 0.05
GRACE_SECONDS = 3.0
_TAIL = 4000


class SpawnError(WorkersError, RuntimeError):
    """A spawned rank failed, died or did not end in time; the text holds each rank's traceback."""


def spawn(
    fn: Callable[..., T],
    world_size: int,
    *args: Any,
    deadline: float = 400.0,
    device_type: Literal["cpu", "cuda"] = "cpu",
) -> list[T]:
    """Call `fn(*args)` in `world_size` processes with an initialised default process group.

    Once a rank has failed, the others get a few seconds to end (they may be waiting for it) and are then killed.

    Args:
        fn: Picklable by import path: a function of an importable module, or a `functools.partial` of one.
        world_size: Number of processes.
        args: Picklable arguments, the same for each rank.
        deadline: Seconds until all ranks must have ended.
        device_type: "cpu" for gloo; "cuda" for NCCL with gloo beside it, rank r on device r.

    Returns:
        What each rank returned, by rank; results must be picklable.

    Raises:
        SpawnError: A rank raised, died, or the deadline passed.
    """
    with tempfile.TemporaryDirectory(prefix="ostinato-spawn-") as name:
        folder = Path(name)
        (folder / "call.pkl").write_bytes(pickle.dumps((fn, args)))
        processes = [_start(folder, rank, world_size, device_type, deadline) for rank in range(world_size)]
        try:
            late = _wait(processes, deadline)
        finally:
            for process in processes:
                if process.poll() is None:
                    process.kill()
                process.wait()
        outcomes = [_outcome(folder, rank, process.returncode) for rank, process in enumerate(processes)]
        problems = [text for text, _ in outcomes if text is not None]
        if problems:
            reason = f"did not end within {deadline:.0f} s" if late else "failed"
            raise SpawnError(f"spawn: {len(problems)} of {world_size} ranks {reason}.\n" + "\n".join(problems))
        return [value for _, value in outcomes]


def _start(folder: Path, rank: int, world_size: int, device_type: str, deadline: float) -> subprocess.Popen[bytes]:
    environment = dict(os.environ)
    environment["PYTHONPATH"] = os.pathsep.join(entry for entry in sys.path if entry)
    environment.setdefault("OMP_NUM_THREADS", "1")
    if device_type == "cpu" and sys.platform == "linux":
        # gloo otherwise resolves the host's name, which not every test machine can do.
        environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
    command = [sys.executable, "-c", "from ostinato.workers.core.testing.spawn import _child; _child()"]
    arguments = [str(folder), str(rank), str(world_size), device_type, str(deadline)]
    with (folder / f"output{rank}.txt").open("wb") as output:
        return subprocess.Popen([*command, *arguments], env=environment, stdout=output, stderr=output)


def _wait(processes: list[subprocess.Popen[bytes]], deadline: float) -> bool:
    """Wait for all ranks, or for the grace after the first failure; True where the deadline passed."""
    end = time.monotonic() + deadline
    failed_at: float | None = None
    while any(process.poll() is None for process in processes):
        now = time.monotonic()
        if failed_at is None and any(process.poll() for process in processes):
            failed_at = now
        if failed_at is not None and now > failed_at + GRACE_SECONDS:
            return False
        if now > end:
            return True
        time.sleep(POLL_SECONDS)
    return False


def _outcome(folder: Path, rank: int, returncode: int) -> tuple[str | None, Any]:
    result = folder / f"result{rank}.pkl"
    if returncode == 0 and result.is_file():
        return None, pickle.loads(result.read_bytes())
    failure = folder / f"failure{rank}.txt"
    if failure.is_file():
        text = failure.read_text()
    else:
        text = (folder / f"output{rank}.txt").read_text(errors="replace")[-_TAIL:]
    return f"--- rank {rank} (exit status {returncode}):\n{text}", None


def _child() -> None:
    """Body of a spawned process; its arguments come on the command line."""
    import torch
    import torch.distributed as dist
    from torch.distributed import FileStore  # pyright: ignore[reportPrivateImportUsage]
    from torch.multiprocessing import _prctl_pr_set_pdeathsig  # pyright: ignore[reportAttributeAccessIssue]

    name, rank, world_size, device_type, deadline = sys.argv[1:]
    # A test run that is killed takes its ranks along; they would wait for one another until the deadline.
    _prctl_pr_set_pdeathsig(signal.SIGKILL)
    folder = Path(name)
    if device_type == "cuda":
        torch.cuda.set_device(int(rank))
    dist.init_process_group(
        "cuda:nccl,cpu:gloo" if device_type == "cuda" else "gloo",
        store=FileStore(str(folder / "store"), int(world_size)),
        rank=int(rank),
        world_size=int(world_size),
        timeout=timedelta(seconds=float(deadline)),
    )
    try:
        fn, args = pickle.loads((folder / "call.pkl").read_bytes())
        payload = pickle.dumps(fn(*args))
    except BaseException:
        (folder / f"failure{rank}.txt").write_text(traceback.format_exc())
        # A clean shutdown would wait for ranks that wait for this one.
        os._exit(1)
    partial = folder / f"result{rank}.part"
    partial.write_bytes(payload)
    partial.rename(folder / f"result{rank}.pkl")
    dist.barrier()
    dist.destroy_process_group()
