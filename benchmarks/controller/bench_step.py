"""One step of seven stages: what it costs the driver, against a copy of the step's bytes and against verl's DataProto.

Run by bench_data_plane.py. The stages have the columns of the real ones and no model. Milliseconds are CPU time of the
driver's whole process, Ray's threads included, so that waits for workers do not count. verl's step is the same one as
its own driver does it: each stage selects its columns, chunks them, sends the pieces, and concatenates and unites what
comes back.

Our driver's bytes are counted where they enter or leave its Python: what is put into the store, what is handed to actor
calls (arguments pickled, 150 bytes for each reference), and what is fetched. Of verl's step the columns alone count.

The bars: at most 5 ms a stage, and at most 64 KiB and 8 bytes a row a step.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from ostinato.controller import Dispatch, Worker, WorkerSpec, register
from ostinato.controller.ray import RayBackend
from ostinato.protocol import DataProto, DataProtoFuture, Metric

REFERENCE_BYTES = 150
WIDTH = 256
"""Prompt and response tokens of the step's rows, each."""
PROMPT = ("input_ids", "attention_mask", "position_ids")
SCORED = ("input_ids", "attention_mask", "response_mask")


class Stages(Worker):
    """The stages of a step with the columns of the real ones and no model."""

    @register(Dispatch.DP_COMPUTE_PROTO, writes=PROMPT)
    def load(self, rows: DataProto) -> DataProto:
        made = {name: torch.zeros(len(rows), WIDTH, dtype=torch.int64) for name in PROMPT}
        return DataProto.from_dict(made, {"uid": [str(i) for i in range(len(rows))]})

    @register(
        Dispatch.DP_COMPUTE_PROTO,
        reads=(*PROMPT, "uid"),
        writes=("prompts", "responses", *PROMPT, "response_mask", "rollout_log_probs"),
    )
    def generate(self, prompts: DataProto) -> DataProto:
        n, long = len(prompts), 2 * WIDTH
        whole = {name: torch.ones(n, long, dtype=torch.int64) for name in PROMPT}
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

    @register(Dispatch.DP_COMPUTE_PROTO, reads=SCORED, writes=("old_log_probs",), keeps_rows=True)
    def old_log_prob(self, batch: DataProto) -> DataProto:
        return self._column(batch, "old_log_probs")

    @register(Dispatch.DP_COMPUTE_PROTO, reads=SCORED, writes=("ref_log_prob",), keeps_rows=True)
    def ref_log_prob(self, batch: DataProto) -> DataProto:
        return self._column(batch, "ref_log_prob")

    @register(Dispatch.DP_COMPUTE_PROTO, reads=SCORED, writes=("values",), keeps_rows=True)
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
        reads=(*SCORED, "old_log_probs", "advantages", "ref_log_prob"),
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
    """Seven stages and a reorder; `clock` gets the driver's CPU seconds of each."""

    def timed(name: str, run: Callable[[], Any]) -> Any:
        begun = time.process_time()
        result = run()
        clock[name] = clock.get(name, 0.0) + time.process_time() - begun
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


class VerlStages:
    """An actor whose one method answers with columns of zeros, as the stages of verl's workers do."""

    def __init__(self, path: list[str]) -> None:
        sys.path.extend(path)

    def make(self, batch: Any, columns: dict[str, tuple[int, torch.dtype]]) -> Any:
        made = {name: torch.zeros(len(batch), width, dtype=dtype) for name, (width, dtype) in columns.items()}
        return type(batch).from_dict(tensors=made, non_tensors={"uid": batch.non_tensor_batch["uid"]})


GENERATED = {
    **dict.fromkeys(PROMPT, (2 * WIDTH, torch.int64)),
    **dict.fromkeys(("prompts", "responses", "response_mask"), (WIDTH, torch.int64)),
    "rollout_log_probs": (WIDTH, torch.float32),
}
VERL_STAGES = (
    ("reward", ("responses", "response_mask"), ("scores",)),
    ("old_log_prob", SCORED, ("old_log_probs",)),
    ("ref_log_prob", SCORED, ("ref_log_prob",)),
    ("values", SCORED, ("values",)),
    (
        "advantage",
        ("response_mask", "scores", "old_log_probs", "ref_log_prob", "values"),
        ("advantages", "returns"),
    ),
    ("update", (*SCORED, "old_log_probs", "advantages", "ref_log_prob"), ()),
)


def verl_step(actors: list[Any], prompts: Any, order: np.ndarray, clock: dict[str, float]) -> int:
    """The same step with verl's DataProto; returns the bytes of columns that went through the driver."""
    import ray

    verl, moved = type(prompts), 0

    def call(batch: Any, columns: dict[str, tuple[int, torch.dtype]]) -> Any:
        nonlocal moved
        parts = ray.get([a.make.remote(p, columns) for a, p in zip(actors, batch.chunk(len(actors)), strict=True)])
        result = verl.concat(parts)
        moved += sum(tensor.nbytes for one in (batch, result) for tensor in one.batch.values())
        return result

    def timed(name: str, run: Callable[[], Any]) -> Any:
        begun = time.process_time()
        result = run()
        clock[name] = time.process_time() - begun
        return result

    batch = timed("generate", lambda: call(prompts, GENERATED))
    timed("reorder", lambda: batch.reorder(torch.from_numpy(order)))
    for name, reads, writes in VERL_STAGES:
        columns = dict.fromkeys(writes, (WIDTH, torch.float32)) or {"rows": (1, torch.float32)}

        def stage(reads=reads, columns=columns) -> None:
            batch.union(call(batch.select(batch_keys=list(reads)), columns))

        timed(name, stage)
    return moved


def medians(clocks: list[dict[str, float]]) -> dict[str, float]:
    """Milliseconds of each stage; the first turn warmed up."""
    return {name: 1000 * statistics.median(clock[name] for clock in clocks[1:]) for name in clocks[0]}


COLUMNS = {**GENERATED, **{name: (WIDTH, torch.float32) for _, _, writes in VERL_STAGES for name in writes}}
"""What a step's rows hold in the end."""
ROW_BYTES = sum(width * dtype.itemsize for width, dtype in COLUMNS.values())


def free_bytes() -> int:
    """Memory that is free on this machine."""
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def copied(rows: int) -> float:
    """CPU milliseconds of one copy of what a step's rows hold in the end."""
    columns = [torch.ones(rows, width, dtype=dtype) for width, dtype in COLUMNS.values()]
    seconds = []
    for _ in range(4):
        begun = time.process_time()
        _ = [column.clone() for column in columns]
        seconds.append(time.process_time() - begun)
    return 1000 * statistics.median(seconds[1:])


def bench_step(backend: RayBackend, verl: Any | None, search: list[str], repeat: int, base: int) -> None:
    """Print the table of the step at 1, 8 and 64 times `base` rows."""
    import ray

    group = backend.launch_one("stages", WorkerSpec(Stages), "pool")
    actors = [ray.remote(VerlStages).options(num_cpus=0.1).remote(search) for _ in range(4)] if verl else []
    print("\nOne step of 7 stages (and a reorder), 4 workers: CPU of the driver, bytes through it\n")
    print(
        "| rows | reference | ours ms | reference ms | ours / reference | our slowest stage ms | our bytes (put, sent, "
        "fetched) | bar: 64 KiB + 8 a row | reference bytes |\n|---|---|---|---|---|---|---|---|---|"
    )
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
        stages = medians(clocks)
        ours, total, allowed = sum(stages.values()), sum(counter.bytes.values()), 64 * 1024 + 8 * rows
        worst = max(stages, key=stages.__getitem__)
        told = f"{worst} {stages[worst]:.2f} | {total} ({', '.join(map(str, counter.bytes.values()))}) | {allowed}"
        references = [("one copy of the bytes", copied(rows), "")]
        if verl is not None and (free := free_bytes()) < 12 * rows * ROW_BYTES:
            print(f"skipped: verl's step of {rows} rows needs more memory than the {free / 1e9:.1f} GB that are free")
        elif verl is not None:
            here = {name: torch.zeros(rows, WIDTH, dtype=torch.int64) for name in PROMPT}
            theirs = verl.from_dict(tensors=here, non_tensors={"uid": np.array(["u"] * rows, dtype=object)})
            clocks = []
            for _ in range(2 if factor == 64 else repeat + 1):
                clocks.append({})
                moved = verl_step(actors, theirs, order, clocks[-1])
            references.append(("verl 0.9.1", sum(medians(clocks).values()), str(moved)))
        for name, milliseconds, moved in references:
            print(
                f"| {rows} | {name} | {ours:.1f} | {milliseconds:.1f} | {ours / milliseconds:.3f} | {told} | {moved} |"
            )
    for actor in actors:
        ray.kill(actor)
