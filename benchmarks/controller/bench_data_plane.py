"""The data plane on Ray: transfers against verl's DataProto, and what a training step costs the driver.

python benchmarks/controller/bench_data_plane.py [--repeat 5] [--only transfer|step]

Driver bytes of a step are counted where they enter or leave the driver's Python: what is put into the store, what is
handed to actor calls (arguments pickled, 150 bytes for each reference), and what is fetched.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "protocol"))
from measure import HEAD, columns_of, in_turns, rows_of, verl_protocol

from ostinato.controller import Dispatch, Worker, WorkerSpec, register
from ostinato.controller.ray import RayBackend, ResourcePool, ResourcePoolManager, ray_session
from ostinato.protocol import DataProto, DataProtoFuture, Metric

REFERENCE_BYTES = 150
WIDTH = 256
"""Prompt and response tokens of the step's rows, each."""


class Stages(Worker):
    """The stages of a step with the columns of the real ones and no model."""

    @register(Dispatch.DP_COMPUTE_PROTO, reads=(*(f"c{i}" for i in range(8)), "uid"))
    def echo(self, batch: DataProto) -> DataProto:
        return batch

    @register(Dispatch.DP_COMPUTE_PROTO, writes=("input_ids", "attention_mask", "position_ids"))
    def load(self, rows: DataProto) -> DataProto:
        made = {
            name: torch.zeros(len(rows), WIDTH, dtype=torch.int64)
            for name in ("input_ids", "attention_mask", "position_ids")
        }
        return DataProto.from_dict(made, {"uid": [str(i) for i in range(len(rows))]})

    @register(
        Dispatch.DP_COMPUTE_PROTO,
        reads=("input_ids", "attention_mask", "position_ids", "uid"),
        writes=(
            "prompts",
            "responses",
            "input_ids",
            "attention_mask",
            "position_ids",
            "response_mask",
            "rollout_log_probs",
        ),
    )
    def generate(self, prompts: DataProto) -> DataProto:
        n, long = len(prompts), 2 * WIDTH
        whole = {
            name: torch.ones(n, long, dtype=torch.int64) for name in ("input_ids", "attention_mask", "position_ids")
        }
        parts = {name: torch.ones(n, WIDTH, dtype=torch.int64) for name in ("prompts", "responses", "response_mask")}
        return DataProto.from_dict(
            {**whole, **parts, "rollout_log_probs": torch.zeros(n, WIDTH)}, {"uid": prompts.non_tensor_batch["uid"]}
        )

    def _column(self, batch: DataProto, name: str, *like: str) -> DataProto:
        metrics = {f"stage/{name}": Metric.mean(0.0, weight=len(batch))}
        columns = {name: torch.zeros(len(batch), WIDTH) for name in (name, *like)}
        return DataProto.from_dict(columns, meta_info={"metrics": metrics})

    @register(Dispatch.DP_COMPUTE_PROTO, reads=("responses", "response_mask"), writes=("scores",), keeps_rows=True)
    def reward(self, batch: DataProto) -> DataProto:
        return self._column(batch, "scores")

    @register(
        Dispatch.DP_COMPUTE_PROTO,
        reads=("input_ids", "attention_mask", "response_mask"),
        writes=("old_log_probs",),
        keeps_rows=True,
    )
    def old_log_prob(self, batch: DataProto) -> DataProto:
        return self._column(batch, "old_log_probs")

    @register(
        Dispatch.DP_COMPUTE_PROTO,
        reads=("input_ids", "attention_mask", "response_mask"),
        writes=("ref_log_prob",),
        keeps_rows=True,
    )
    def ref_log_prob(self, batch: DataProto) -> DataProto:
        return self._column(batch, "ref_log_prob")

    @register(
        Dispatch.DP_COMPUTE_PROTO,
        reads=("input_ids", "attention_mask", "response_mask"),
        writes=("values",),
        keeps_rows=True,
    )
    def values(self, batch: DataProto) -> DataProto:
        return self._column(batch, "values")

    @register(
        Dispatch.DP_COMPUTE_PROTO,
        reads=("response_mask", "scores", "old_log_probs", "ref_log_prob", "values"),
        writes=("advantages", "returns"),
        keeps_rows=True,
    )
    def advantage(self, batch: DataProto) -> DataProto:
        return self._column(batch, "advantages", "returns")

    @register(
        Dispatch.DP_COMPUTE_PROTO,
        reads=("input_ids", "attention_mask", "response_mask", "old_log_probs", "advantages", "ref_log_prob"),
    )
    def update(self, batch: DataProto) -> DataProto:
        return DataProto.from_dict(meta_info={"metrics": {"rows": Metric.sum(len(batch))}})


class Counter:
    """Counts what goes through the driver, by wrapping the four functions of Ray that the controller calls."""

    def __init__(self) -> None:
        import ray
        from ray import cloudpickle

        self.ray, self.dumps = ray, cloudpickle.dumps
        self.bytes: dict[str, int] = {"put": 0, "sent": 0, "fetched": 0}

    def size(self, value: object) -> int:
        if isinstance(value, self.ray.ObjectRef):
            return REFERENCE_BYTES
        buffers: list = []
        data = self.dumps(value, protocol=5, buffer_callback=buffers.append)
        return len(data) + sum(len(memoryview(buffer.raw())) for buffer in buffers)

    def __enter__(self) -> Counter:
        from ray.actor import ActorMethod

        put, get, remote = self.ray.put, self.ray.get, ActorMethod._remote

        def counted_put(value, *args, **kwargs):
            self.bytes["put"] += self.size(value)
            return put(value, *args, **kwargs)

        def counted_get(references, *args, **kwargs):
            found = get(references, *args, **kwargs)
            self.bytes["fetched"] += sum(map(self.size, found if isinstance(found, list) else [found]))
            return found

        def counted_remote(method, args=None, kwargs=None, **options):
            self.bytes["sent"] += sum(map(self.size, args or ()))
            return remote(method, args, kwargs, **options)

        self.undo = [(self.ray, "put", put), (self.ray, "get", get), (ActorMethod, "_remote", remote)]
        self.ray.put, self.ray.get, ActorMethod._remote = counted_put, counted_get, counted_remote
        return self

    def __exit__(self, *_: object) -> None:
        for owner, name, function in self.undo:
            setattr(owner, name, function)


def step(group: Stages, prompts: DataProtoFuture, order: np.ndarray, clock: dict[str, float]) -> None:
    """Seven stages and a reorder; `clock` gets the driver's seconds of each, waits for workers left out."""

    def timed(name: str, run):
        begun, busy = time.perf_counter(), time.thread_time()
        result = run()
        clock[name] = clock.get(name, 0.0) + time.perf_counter() - begun
        clock[f"{name}, CPU"] = clock.get(f"{name}, CPU", 0.0) + time.thread_time() - busy
        return result

    generated = timed("generate", lambda: group.generate(prompts))
    generated.wait()
    batch = timed("generate", lambda: generated.with_meta(step=1))
    batch = timed("reward", lambda: batch.union(group.reward(batch)))
    batch = timed("reorder", lambda: batch.reorder(order))
    for name in ("old_log_prob", "ref_log_prob", "values", "advantage"):
        batch = timed(name, lambda name=name, batch=batch: batch.union(getattr(group, name)(batch)))
    updated = timed("update", lambda: group.update(batch))
    assert updated.metrics["rows"].value == len(batch)
    assert len(batch.metrics) == 5


def bench_step(backend: RayBackend, repeat: int, base: int) -> None:
    group = backend.launch_one("stages", WorkerSpec(Stages), "pool")
    print(
        "\n| rows | slowest stage ms (CPU) | step ms (CPU) | put | sent | fetched | driver bytes | 64 KiB + 8 a row |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for factor in (1, 8, 64):
        rows = base * factor
        prompts = group.load(DataProto.from_dict({"row": torch.arange(rows)})).wait()
        order = np.random.default_rng(0).permutation(rows)
        clocks: list[dict[str, float]] = []
        for _ in range(repeat + 1):
            clocks.append({})
            step(group, prompts, order, clocks[-1])
        with Counter() as counter:
            step(group, prompts, order, {})
        medians = {name: 1000 * statistics.median(clock[name] for clock in clocks[1:]) for name in clocks[0]}
        busy = {name.removesuffix(", CPU"): ms for name, ms in medians.items() if name.endswith(", CPU")}
        stages = {name: medians[name] for name in busy}
        total, allowed = sum(counter.bytes.values()), 64 * 1024 + 8 * rows
        worst = max(stages, key=stages.__getitem__)
        print(
            f"| {rows} | {worst} {stages[worst]:.2f} ({max(busy.values()):.2f}) "
            f"| {sum(stages.values()):.2f} ({sum(busy.values()):.2f}) | "
            + " | ".join(str(counter.bytes[name]) for name in ("put", "sent", "fetched"))
            + f" | {total} | {allowed} ({total / allowed:.2f}) |"
        )


def bench_transfer(backend: RayBackend, repeat: int) -> None:
    import ray

    tensors, arrays = columns_of(512, 4096, 8)
    ours = DataProto.from_dict(tensors, arrays)
    verl = verl_protocol()
    theirs = verl.from_dict(tensors=dict(tensors), non_tensors=dict(arrays)) if verl else None
    search = [path for path in sys.path if "ostinato-bench" in path]

    class Remote:
        def __init__(self) -> None:
            sys.path.extend(search)

        def length(self, batch: object) -> int:
            return len(batch)

        def echo(self, batch: object) -> object:
            return batch

    actors = [ray.remote(Remote).options(num_cpus=0.1).remote() for _ in range(4)]
    group = backend.launch_one("echo", WorkerSpec(Stages), "pool")
    alone = backend.launch_one("alone", WorkerSpec(Stages), "one")
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
        print("\n".join(rows_of(case, in_turns(runs, repeat))))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--rows", type=int, default=512, help="rows of the step at 1x")
    parser.add_argument("--only", choices=("transfer", "step"))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with ray_session(num_cpus=2, object_store_memory=3 * 1024**3, log_to_driver=False):
        from ray import cloudpickle

        cloudpickle.register_pickle_by_value(sys.modules[__name__])
        backend = RayBackend(ResourcePoolManager([ResourcePool("pool", [4]), ResourcePool("one", [1])]))
        try:
            if arguments.only != "transfer":
                bench_step(backend, arguments.repeat, arguments.rows)
            if arguments.only != "step":
                bench_transfer(backend, arguments.repeat)
        finally:
            backend.shutdown()


if __name__ == "__main__":
    main()
