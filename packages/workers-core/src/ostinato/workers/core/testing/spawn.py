"""Run a function in several processes that form one process group, and bring back what it returned.

On a CPU they are copies of one fresh process that has imported what the function needs; on GPUs each is fresh itself.
Rendezvous goes through a file in a fresh folder, so no port is chosen and none can be taken by another run.
"""

from __future__ import annotations

import math
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
from typing import Any, Literal, NoReturn, TypeVar

from ostinato.workers.core.errors import WorkersError

T = TypeVar("T")

POLL_SECONDS = 0.05
GRACE_SECONDS = 3.0
START_SECONDS = 120.0
"""How long the process that starts the ranks may take beside the deadline, above all to import what they need."""

_TAIL = 4000
_LATE = 75


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
        late = _run(folder, world_size, device_type, deadline)
        outcomes = [_outcome(folder, rank) for rank in range(world_size)]
        problems = [text for text, _ in outcomes if text is not None]
        if problems:
            reason = f"did not end within {deadline:.0f} s" if late else "failed"
            raise SpawnError(f"spawn: {len(problems)} of {world_size} ranks {reason}.\n" + "\n".join(problems))
        return [value for _, value in outcomes]


def _run(folder: Path, world_size: int, device_type: str, deadline: float) -> bool:
    """Run the process that starts the ranks and sees to their end; True where the deadline passed."""
    environment = dict(os.environ)
    environment["PYTHONPATH"] = os.pathsep.join(entry for entry in sys.path if entry)
    environment.setdefault("OMP_NUM_THREADS", "1")
    if device_type == "cpu" and sys.platform == "linux":
        # gloo otherwise resolves the host's name, which not every test machine can do.
        environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
    command = _command("_all_ranks", folder, world_size, device_type, deadline)
    with (folder / "output.txt").open("wb") as output:
        try:
            done = subprocess.run(
                command, env=environment, stdout=output, stderr=output, timeout=START_SECONDS + deadline, check=False
            )
        except subprocess.TimeoutExpired:  # it is dead now, and its ranks with it
            return True
    return done.returncode == _LATE


def _command(body: str, *arguments: object) -> list[str]:
    code = f"from ostinato.workers.core.testing import spawn; spawn.{body}()"
    return [sys.executable, "-c", code, *map(str, arguments)]


def _outcome(folder: Path, rank: int) -> tuple[str | None, Any]:
    """What is wrong with a rank, and what it returned."""
    files = {name: folder / f"{name}{rank}" for name in ("status", "result", "failure", "output")}
    status = files["status"].read_text() if files["status"].is_file() else None
    if status == "0" and files["result"].is_file():
        return None, pickle.loads(files["result"].read_bytes())
    if files["failure"].is_file():
        text = files["failure"].read_text()
    else:
        output = files["output"] if status is not None else folder / "output.txt"
        text = output.read_text(errors="replace")[-_TAIL:]
    return f"--- rank {rank} ({'not started' if status is None else f'exit status {status}'}):\n{text}", None


def _all_ranks() -> None:
    """Body of the process that starts the ranks; its arguments come on the command line."""
    name, world_size, device_type, deadline = sys.argv[1:]
    _end_with_parent()
    folder = Path(name)
    if device_type == "cpu":
        # Every rank needs what this imports, and importing takes longer than many a test.
        pickle.loads((folder / "call.pkl").read_bytes())
    started = {}
    for rank in range(int(world_size)):
        pid = os.fork()
        if not pid:
            _become(folder, rank, device_type)
        started[pid] = rank
    sys.exit(_LATE if _watch(started, folder, float(deadline)) else 0)


def _become(folder: Path, rank: int, device_type: str) -> NoReturn:
    """Be a rank from here on."""
    with (folder / f"output{rank}").open("wb") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    if device_type == "cuda":
        # A process that begins anew: CUDA cannot be used in a copy of one that may have touched it.
        os.execv(sys.executable, _command("_one_rank", rank, *sys.argv[1:]))
    status = 1
    try:
        sys.argv.insert(1, str(rank))
        _one_rank()
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _watch(started: dict[int, int], folder: Path, deadline: float) -> bool:
    """Note how each rank ends; kill what is left after the deadline, or after the grace that follows a failure.

    Returns:
        Whether the deadline passed.
    """
    end, failed, late = time.monotonic() + deadline, False, False
    while started:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid in started:  # not a process that an import has left behind
            (folder / f"status{started.pop(pid)}").write_text(str(os.waitstatus_to_exitcode(status)))
            if status and not failed:
                failed, end = True, min(end, time.monotonic() + GRACE_SECONDS)
        elif time.monotonic() > end:
            late, end = not failed, math.inf
            for other in started:
                os.kill(other, signal.SIGKILL)
        else:
            time.sleep(POLL_SECONDS)
    return late


def _end_with_parent() -> None:
    """A test run that is killed takes its ranks along; they would wait for one another until the deadline."""
    from torch.multiprocessing import _prctl_pr_set_pdeathsig  # pyright: ignore[reportAttributeAccessIssue]

    _prctl_pr_set_pdeathsig(signal.SIGKILL)


def _one_rank() -> None:
    """Body of a rank; its arguments come on the command line."""
    import torch
    import torch.distributed as dist
    from torch.distributed import FileStore  # pyright: ignore[reportPrivateImportUsage]

    rank, name, world_size, device_type, deadline = sys.argv[1:]
    _end_with_parent()
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
        (folder / f"failure{rank}").write_text(traceback.format_exc())
        # A clean shutdown would wait for ranks that wait for this one.
        os._exit(1)
    partial = folder / f"result{rank}.part"
    partial.write_bytes(payload)
    partial.rename(folder / f"result{rank}")
    dist.barrier()
    dist.destroy_process_group()
