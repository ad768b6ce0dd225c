"""Starting Ray and ending it."""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from ostinato.controller.errors import RayNotRunning

logger = logging.getLogger(__name__)

_SETTINGS = {
    # Under `uv run` Ray would otherwise rebuild the project's environment on every worker.
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
}
_GIBIBYTE = 1024**3


def init_ray(
    *,
    num_cpus: float | None = None,
    num_gpus: float | None = None,
    address: str | None = None,
    object_store_memory: int | None = None,
    log_to_driver: bool = True,
    namespace: str | None = None,
    env_vars: Mapping[str, str] | None = None,
) -> None:
    """Start Ray on this machine, or join a cluster; nothing happens if this process has joined one already.

    Call it before anything else imports ray, so that the settings made here count. Settings that the environment has
    already are left alone, and so is this process's handler of SIGTERM. A Ctrl-C that comes while Ray starts on this
    machine takes effect once it has started.

    Args:
        num_cpus: CPUs that this machine offers; None counts them. Not for a running cluster.
        num_gpus: GPUs that this machine offers; None counts them. Not for a running cluster.
        address: a running cluster ("auto", "host:port"); None takes RAY_ADDRESS where it is set, else starts Ray here.
        object_store_memory: bytes of shared memory for objects; None takes a sixth of what is free, at most 2 GiB, on
            a machine without GPUs, and Ray's own choice on others. Not for a running cluster.
        log_to_driver: whether the workers' output appears here.
        namespace: Ray namespace of this driver.
        env_vars: environment of all processes of this driver.

    Raises:
        RayNotRunning: nothing answers at the address.
    """
    for name, value in _SETTINGS.items():
        os.environ.setdefault(name, value)
    import ray

    if ray.is_initialized():
        logger.debug("Ray is running in this process already; nothing to start")
        return
    options: dict[str, Any] = {
        "log_to_driver": log_to_driver,
        "namespace": namespace,
        "logging_level": logging.ERROR,  # a warning at every start, that this local cluster has a token, says little
        "runtime_env": {"env_vars": dict(env_vars)} if env_vars else None,
    }
    address = address or os.environ.get("RAY_ADDRESS")
    if address:
        _require_answer(address)
        with _sigterm_left_alone():
            ray.init(address=address, **options)
        return
    if object_store_memory is None and not num_gpus and not _has_gpu():
        object_store_memory = min(2 * _GIBIBYTE, max(_free_memory() // 6, 80 * 1024**2))
    with _ctrl_c_held_back(), _sigterm_left_alone():
        ray.init(
            address="local",
            num_cpus=num_cpus,  # pyright: ignore[reportArgumentType]
            num_gpus=num_gpus,  # pyright: ignore[reportArgumentType]
            object_store_memory=object_store_memory,
            include_dashboard=False,
            **options,
        )


def shutdown_ray() -> None:
    """Leave the cluster; a Ray that `init_ray` started on this machine ends."""
    import ray

    if ray.is_initialized():
        ray.shutdown()


@contextmanager
def ray_session(**options: Any) -> Iterator[None]:
    """Run a `with` block on Ray: `init_ray(**options)` before it; after it `shutdown_ray`, unless Ray ran before."""
    import sys

    running = sys.modules.get("ray")
    ran_before = running is not None and running.is_initialized()
    try:
        init_ray(**options)
        yield
    finally:
        if not ran_before:
            shutdown_ray()


def require_ray() -> None:
    """Refuse to go on without a running Ray.

    Raises:
        RayNotRunning: this process has not joined a cluster.
    """
    import ray

    if not ray.is_initialized():
        raise RayNotRunning(
            "RayBackend: Ray is not running in this process; call ostinato.controller.ray.init_ray() first"
        )


@contextmanager
def _sigterm_left_alone() -> Iterator[None]:
    """Put the handler of SIGTERM back after the block: with Ray's own the process aborts and prints its stack."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread() and before is not None:
            signal.signal(signal.SIGTERM, before)


@contextmanager
def _ctrl_c_held_back() -> Iterator[None]:
    """Let a SIGINT take effect after the block: where the start of Ray is broken off, its agents stay for a minute."""
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or before is None:
        yield
        return
    came = threading.Event()
    signal.signal(signal.SIGINT, lambda number, frame: came.set())
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if came.is_set():
        signal.raise_signal(signal.SIGINT)


def _require_answer(address: str, timeout_s: float = 10.0) -> None:
    """Refuse a "host:port" that takes no connection; Ray itself would try for minutes."""
    host, colon, port = address.rpartition(":")
    if "/" in address or not colon or not port.isdigit():
        return
    try:
        socket.create_connection((host, int(port)), timeout=timeout_s).close()
    except OSError as error:
        raise RayNotRunning(
            f"no Ray answers at {address} ({error}); start one there (ray start --head), or unset RAY_ADDRESS to start "
            "one on this machine"
        ) from error


def _has_gpu() -> bool:
    return any(os.path.exists(f"/dev/{name}") for name in ("nvidia0", "nvidiactl", "kfd"))


def _free_memory() -> int:
    pages = os.sysconf("SC_AVPHYS_PAGES")
    return pages * os.sysconf("SC_PAGE_SIZE")
