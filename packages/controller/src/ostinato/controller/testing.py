"""Workers for tests of controllers and backends: they live here so that other processes can import them."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

from ostinato.controller.dispatch import Dispatch
from ostinato.controller.register import Execute, register
from ostinato.controller.topology import Coordinates, grid
from ostinato.controller.worker import Worker
from ostinato.protocol import DataProto, Metric


class EchoWorker(Worker):
    """Answers with what it got, where it stands and what its process looks like.

    Args:
        tag: any value; `tagged` returns it.
    """

    def __init__(self, tag: Any = None) -> None:
        super().__init__()
        self.tag = tag
        self.calls: list[int] = []

    @register(Dispatch.ONE_TO_ALL)
    def init_model(self, tp: int = 1, pp: int = 1) -> None:
        """Register the mesh "train" as a grid of these sizes."""
        self.register_mesh("train", grid(self.world_size, tp=tp, pp=pp)[self.rank])

    @register(Dispatch.ONE_TO_ALL)
    def take_dp_rank(self, dp_ranks: tuple[int, ...]) -> int:
        """Take the data-parallel rank at this worker's place in the list; return this worker's rank."""
        self.register_mesh("train", Coordinates(dp_ranks[self.rank], self.world_size))
        return self.rank

    @register(Dispatch.ONE_TO_ALL)
    def describe(self) -> dict[str, Any]:
        """Return rank, place, process id and the environment that matters."""
        return {
            "rank": self.rank,
            "world_size": self.world_size,
            "local_rank": self.local_rank,
            "local_world_size": self.local_world_size,
            "role": self.role,
            "tag": self.tag,
            "pid": os.getpid(),
            "threads": torch.get_num_threads(),
            "visible": os.environ.get("CUDA_VISIBLE_DEVICES"),
        }

    @register(Dispatch.ONE_TO_ALL)
    def all_reduce(self) -> float:
        """Make the process group (once a process) and return the sum of rank + 1 over the ranks."""
        self.init_process_group()
        device = f"cuda:{self.local_rank}" if self.context.device_type == "cuda" else "cpu"
        total = torch.tensor([float(self.rank + 1)], device=device)
        torch.distributed.all_reduce(total)
        return float(total)

    @register(Dispatch.RANK_ZERO)
    def rank_of_first(self) -> int:
        """Return the rank that ran."""
        return self.rank

    @register(Dispatch.ONE_TO_ALL, execute_mode=Execute.RANK_ZERO)
    def executed_by(self) -> int:
        """Return the rank that ran."""
        return self.rank

    @register(Dispatch.ALL_TO_ALL)
    def mine(self, value: Any) -> tuple[int, Any]:
        """Return rank and argument."""
        return self.rank, value

    @register(Dispatch.DP_COMPUTE)
    def scaled(self, value: float, by: float = 1.0) -> float:
        """Return value * by."""
        return value * by

    @register(Dispatch.DP_COMPUTE_PROTO)
    def echo(self, batch: DataProto, other: DataProto | None = None, scale: int = 1) -> DataProto:
        """Return the rows with the columns `rank` and `seen`, `x` scaled, and a weighted metric."""
        self.calls.append(len(batch))
        columns: dict[str, torch.Tensor] = {
            "y": batch.batch["x"] * scale
            if batch.batch is not None and "x" in batch.columns
            else torch.zeros(len(batch)),
            "rank": torch.full((len(batch),), self.rank),
            "seen": torch.full((len(batch),), len(other) if other is not None else len(batch)),
        }
        return DataProto.from_dict(columns, meta_info={"metrics": {"rows": Metric.sum(len(batch))}})

    @register(Dispatch.DP_COMPUTE_PROTO, reads=("x", "label"))
    def seen_columns(self, batch: DataProto) -> DataProto:
        """Return one row with the names of the columns that arrived."""
        return DataProto.from_dict(meta_info={"columns": list(batch.columns)})

    @register(Dispatch.DP_COMPUTE_PROTO, reads=("x", "label"), requires=("values", "x"))
    def needs(self, batch: DataProto, other: DataProto | None = None) -> DataProto:
        """Return one row with the names of the columns that arrived, `values` and `x` among them."""
        return DataProto.from_dict(meta_info={"columns": list(batch.columns)})

    @register(Dispatch.DP_COMPUTE_PROTO, blocking=False)
    def echo_later(self, batch: DataProto, seconds: float = 0.0) -> DataProto:
        """Return the batch after a while."""
        time.sleep(seconds)
        return batch

    @register(Dispatch.ONE_TO_ALL, blocking=False)
    def rank_later(self, seconds: float = 0.0) -> int:
        """Return the rank after a while."""
        time.sleep(seconds)
        return self.rank

    @register(Dispatch.DP_COMPUTE_PROTO, reads=("x",), writes=("double",), keeps_rows=True)
    def double(self, batch: DataProto, seconds: float = 0.0) -> DataProto:
        """Return 2 x as `double`, after a while."""
        time.sleep(seconds)
        metrics = {"rows": Metric.sum(len(batch))}
        return DataProto.from_dict({"double": batch.batch["x"] * 2}, meta_info={"metrics": metrics})

    @register(Dispatch.DP_COMPUTE_PROTO, reads=("x", "double"), writes=("total",), keeps_rows=True)
    def total(self, batch: DataProto) -> DataProto:
        """Return x + double as `total`."""
        return DataProto.from_dict({"total": batch.batch["x"] + batch.batch["double"]})

    @register(Dispatch.DP_COMPUTE_PROTO, writes=("scaled",), keeps_rows=True)
    def scaled_rows(self, batch: DataProto, by: DataProto | None = None) -> DataProto:
        """Return `x` of the first batch as `scaled`; the second one is there to have other rows."""
        return DataProto.from_dict({"scaled": batch.batch["x"]})

    @register(Dispatch.DP_COMPUTE_PROTO, reads=("x",), writes=("double",), keeps_rows=True)
    def breaks_promise(self, batch: DataProto) -> DataProto:
        """Return one row less than it got, under a promise to keep them."""
        return DataProto.from_dict({"double": batch.batch["x"][1:]})

    @register(Dispatch.DP_COMPUTE_PROTO, reads=("x",), writes=("double",), keeps_rows=True)
    def fails(self, batch: DataProto, rank: int = 0) -> DataProto:
        """Raise on one rank."""
        if self.rank == rank:
            raise LookupError(f"no double on rank {rank}")
        return self.double(batch)

    @register(Dispatch.DP_COMPUTE_PROTO, reads=("x",), mutates=("m",))
    def add_in_place(self, batch: DataProto) -> DataProto:
        """Add one to `m` in place, which is declared; return it."""
        batch.batch["m"].add_(1)
        return batch.select(["m"])

    @register(Dispatch.DP_COMPUTE_PROTO, reads=("x",))
    def add_in_secret(self, batch: DataProto) -> DataProto:
        """Add one to `x` in place, which is not declared; return it."""
        batch.batch["x"].add_(1)
        return batch.select(["x"])

    @register(Dispatch.DP_COMPUTE_PROTO)
    def grow(self, batch: DataProto, width: int) -> DataProto:
        """Return the rows with a column of `width` numbers a row."""
        return batch.union(DataProto.from_dict({"wide": torch.ones(len(batch), width)}))

    @register(Dispatch.DP_COMPUTE_PROTO_WITH_FUNC)
    def apply(self, function: Callable[[DataProto], DataProto], batch: DataProto) -> DataProto:
        """Return function(batch)."""
        return function(batch)

    @register(Dispatch.DP_COMPUTE_METRIC)
    def count(self, batch: DataProto) -> dict[str, Metric]:
        """Return the number of rows and of ranks."""
        return {"rows": Metric.sum(len(batch)), "largest": Metric.max(len(batch))}

    @register(Dispatch.DP_COMPUTE_PROTO)
    def wrong_result(self, batch: DataProto) -> int:
        """Return something that cannot be concatenated."""
        return len(batch)


class UnpicklableError(Exception):
    """An exception that cannot be rebuilt from its `args`."""

    def __init__(self, left: int, right: int) -> None:
        super().__init__(f"{left} is not {right}")


class FaultyWorker(Worker):
    """Fails in every way that a process can."""

    @register(Dispatch.ONE_TO_ALL)
    def pid(self) -> int:
        """Return the process id."""
        return os.getpid()

    @register(Dispatch.ONE_TO_ALL)
    def fail(self, how: str, rank: int, others_wait_s: float = 0.0) -> int:
        """Fail on one rank while the others sleep.

        Args:
            how: "ValueError", "unpicklable", "sys.exit", "os._exit", "kill", "SIGSTOP" or "sleep".
            rank: the rank that fails; -1 lets all fail.
            others_wait_s: how long the other ranks sleep before they return.
        """
        if rank not in (self.rank, -1):
            time.sleep(others_wait_s)
            return self.rank
        if how == "ValueError":
            raise ValueError(f"bad row on rank {self.rank}")
        if how == "unpicklable":
            raise UnpicklableError(1, 2)
        if how == "sys.exit":
            sys.exit(3)
        if how == "os._exit":
            os._exit(4)
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "SIGSTOP":
            os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(others_wait_s)
        return self.rank


class FailsToBuild(Worker):
    """Fails while it is built."""

    def __init__(self) -> None:
        super().__init__()
        raise FileNotFoundError(f"no model for rank {self.rank}")
