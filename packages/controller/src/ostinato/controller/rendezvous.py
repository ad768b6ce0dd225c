"""How the processes of one group find each other: a held port, a store, a process group.

The launcher asks rank 0's own process for a free port. That process listens on it at once and keeps it until the store
takes the socket over, so nobody else can have the port in between.
"""

from __future__ import annotations

import socket
from datetime import timedelta
from typing import TYPE_CHECKING

from ostinato.controller.errors import ProcessGroupMismatch

if TYPE_CHECKING:
    from torch.distributed import Store  # pyright: ignore[reportPrivateImportUsage]

    from ostinato.controller.worker import WorkerContext

_BACKENDS = {"cpu": "gloo", "cuda": "cuda:nccl,cpu:gloo"}
_SERVES = {"cpu": "cpu:gloo", "cuda": "cuda:nccl"}

_held: dict[int, socket.socket] = {}
_made_here = False


def hold_port() -> int:
    """Listen on a free port of all interfaces and keep it; return its number."""
    listener = socket.socket(socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET)
    if listener.family == socket.AF_INET6:
        listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
    try:
        listener.bind(("", 0))
        listener.listen(1024)
    except OSError:
        listener.close()
        raise
    port = int(listener.getsockname()[1])
    _held[port] = listener
    return port


def release_ports() -> None:
    """Close every port that this process holds and that no store took over."""
    while _held:
        _held.popitem()[1].close()


def make_store(context: WorkerContext, timeout: timedelta) -> Store:
    """Return the store over which the ranks of `context`'s group meet.

    A world of one needs no port. Rank 0 of a larger one serves the store on the port that it holds, or binds
    `context.master_port` where it holds none.

    Raises:
        ProcessGroupMismatch: a larger world without a port.
    """
    from torch.distributed import HashStore, TCPStore  # pyright: ignore[reportPrivateImportUsage]

    if context.world_size == 1:
        return HashStore()
    if not context.master_port:
        raise ProcessGroupMismatch(
            f"role {context.role!r}, rank {context.rank} of {context.world_size}: no master_port is set; a world "
            "of several processes is made by a launcher, or by a WorkerContext with master_addr and master_port"
        )
    listener = _held.pop(context.master_port, None) if context.rank == 0 else None
    return TCPStore(
        context.master_addr,
        context.master_port,
        is_master=context.rank == 0,
        wait_for_workers=False,
        timeout=timeout,
        # The store owns the socket from here on.
        master_listen_fd=None if listener is None else listener.detach(),
    )


def init_process_group(context: WorkerContext, device_type: str, timeout_s: float) -> None:
    """Make the default process group of this process; nothing happens if the same one is there.

    gloo on "cpu"; NCCL for CUDA tensors and gloo for CPU tensors on "cuda", with the current device set to the local
    rank.

    Raises:
        ProcessGroupMismatch: there is another group already, or the device type is neither "cpu" nor "cuda".
    """
    global _made_here
    import torch
    from torch import distributed as dist

    if device_type not in _BACKENDS:
        raise ProcessGroupMismatch(
            f"init_process_group: device type {device_type!r}; expected one of {list(_BACKENDS)}"
        )
    if device_type == "cuda":
        torch.cuda.set_device(context.local_rank)
    if dist.is_initialized():
        _check_same(context, device_type)
        return
    timeout = timedelta(seconds=timeout_s)
    dist.init_process_group(
        _BACKENDS[device_type],
        store=make_store(context, timeout),
        rank=context.rank,
        world_size=context.world_size,
        timeout=timeout,
    )
    _made_here = True


def _check_same(context: WorkerContext, device_type: str) -> None:
    from torch import distributed as dist

    there = (dist.get_rank(), dist.get_world_size())
    if there != (context.rank, context.world_size):
        raise ProcessGroupMismatch(
            f"role {context.role!r}: expected rank {context.rank} of {context.world_size}, but this process is rank "
            f"{there[0]} of {there[1]} in a process group made earlier; roles of one process share one world"
        )
    config = dist.get_backend_config()
    if _SERVES[device_type] not in config:
        raise ProcessGroupMismatch(
            f"role {context.role!r}: asks for {_SERVES[device_type]}, but this process has a process group with "
            f"{config}; the first role to start decides, so start the role on the GPU first"
        )


def leave_process_group() -> None:
    """Destroy the default process group if `init_process_group` of this module made it."""
    global _made_here
    if _made_here:
        from torch import distributed as dist

        if dist.is_initialized():
            dist.destroy_process_group()
        _made_here = False
