"""The data plane on Ray: transfers against a copy and verl's DataProto, and what a training step costs the driver.

python benchmarks/controller/bench_data_plane.py [--repeat 5] [--only transfer|step]

Transfers take wall time, the least of the turns: on a machine with other work they say little. The bar: our echo is at
least five times as fast as verl's.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "protocol"))
from bench_step import bench_step
from measure import HEAD, columns_of, in_turns, keep_memory, rows_of, verl_protocol

from ostinato.controller import Dispatch, Worker, WorkerSpec, register
from ostinato.controller.ray import RayBackend, ResourcePool, ResourcePoolManager, ray_session
from ostinato.protocol import DataProto


class Echo(Worker):
    """Gives back what it gets."""

    @register(Dispatch.DP_COMPUTE_PROTO, reads=(*(f"c{i}" for i in range(8)), "uid"))
    def echo(self, batch: DataProto) -> DataProto:
        return batch


def bench_transfer(backend: RayBackend, verl: Any | None, search: list[str], repeat: int) -> None:
    """Print the table of transfers."""
    import ray

    tensors, arrays = columns_of(512, 4096, 8)
    ours = DataProto.from_dict(tensors, arrays)
    theirs = verl.from_dict(tensors=dict(tensors), non_tensors=dict(arrays)) if verl else None

    class Remote:
        def __init__(self) -> None:
            sys.path.extend(search)

        def length(self, batch: object) -> int:
            return len(batch)

        def echo(self, batch: object) -> object:
            return batch

    actors = [ray.remote(Remote).options(num_cpus=0.1).remote() for _ in range(4)]
    group = backend.launch_one("echo", WorkerSpec(Echo), "pool")
    alone = backend.launch_one("alone", WorkerSpec(Echo), "one")
    one, four = actors[0], actors
    put_ours, put_theirs = ray.put(ours), ray.put(theirs)

    def copied() -> object:
        return [tensor.clone() for tensor in tensors.values()]

    def scattered(chunks, concat):
        return concat(ray.get([actor.echo.remote(part) for actor, part in zip(four, chunks, strict=True)]))

    cases = {
        "send": [lambda x=x: ray.get(one.length.remote(x)) for x in (ours, theirs)],
        "echo, plain actor": [lambda x=x: ray.get(one.echo.remote(x)) for x in (ours, theirs)],
        "echo, group of one": [lambda: alone.echo(ours).get(), lambda: ray.get(one.echo.remote(theirs))],
        "already put": [lambda x=x: ray.get(one.length.remote(x)) for x in (put_ours, put_theirs)],
        "dispatch and collect, 4 workers": [
            lambda: group.echo(ours).get(),
            lambda: scattered(theirs.chunk(4), verl.concat),
        ],
        "dispatch to 4 workers, rows stay there": [
            lambda: group.echo(ours).wait(),
            lambda: scattered(theirs.chunk(4), verl.concat),
        ],
    }
    print(f"512 rows, 8 columns of width 4096\n\n{HEAD}")
    for case, (mine, verls) in cases.items():
        runs = {"ours": mine, "copy of the bytes": copied} | ({"verl 0.9.1": verls} if verl else {})
        print("\n".join(rows_of(case, in_turns(runs, repeat, time.perf_counter))))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--rows", type=int, default=512, help="rows of the step at 1x")
    parser.add_argument("--only", choices=("transfer", "step"))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    keep_memory()
    with ray_session(num_cpus=2, object_store_memory=3 * 1024**3, log_to_driver=False):
        from ray import cloudpickle

        for module in (sys.modules[__name__], sys.modules[bench_step.__module__]):
            cloudpickle.register_pickle_by_value(module)
        verl = verl_protocol()
        search = [path for path in sys.path if "ostinato-bench" in path]
        backend = RayBackend(ResourcePoolManager([ResourcePool("pool", [4]), ResourcePool("one", [1])]))
        try:
            if arguments.only != "step":
                bench_transfer(backend, verl, search, arguments.repeat)
            if arguments.only != "transfer":
                bench_step(backend, verl, search, arguments.repeat, arguments.rows)
        finally:
            backend.shutdown()


if __name__ == "__main__":
    main()
