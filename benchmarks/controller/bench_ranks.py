"""The driver's cost of one call to N ranks, with actors that answer at once and do nothing: dispatch and collect.

python benchmarks/controller/bench_ranks.py [--rows-per-rank 8] [--repeat 5]

Everything of the controller runs as it does on Ray (plan, layouts, packing, tickets, replies, futures); Ray itself is
replaced by a table. Milliseconds are CPU time. `bare` is the least that any controller has to do: one object a rank
made, sent and read back. Growth is from one line to the next: 1.0 is in proportion to the ranks; `no gc` is without
Python's cycle collector, whose passes over all objects are what grows faster than the ranks.
"""

from __future__ import annotations

import argparse
import gc
import math
import pickle
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from ostinato.controller.arrival import Contract, Left
from ostinato.controller.calls import Ended, RowsCall, sizes_of
from ostinato.controller.dispatch import Call, Dispatch, plan_call
from ostinato.controller.ray.transport import Packer
from ostinato.controller.topology import Mesh, RankPlace, grid
from ostinato.protocol import DataProtoFuture, Metric
from ostinato.protocol.future import State
from ostinato.protocol.lanes import Lane, Piece, Rows, Source

RANKS = (8, 64, 512, 4096)
COLUMNS = ("input_ids", "attention_mask", "response_mask")


class Table:
    """Stands for Ray's store: references are numbers."""

    def __init__(self) -> None:
        self.next = 0

    def put(self, tensors: Any, arrays: Any) -> dict[str, Any]:
        return {name: self.reference() for name in (*tensors, *arrays)}

    def put_order(self, order: np.ndarray) -> Any:
        return self.reference()

    def fetch(self, references: Sequence[Any]) -> list[Any]:
        raise AssertionError("nothing is fetched")

    def reference(self) -> bytes:
        self.next += 1
        return self.next.to_bytes(28, "little")


class Wire:
    """A transport whose workers answer at once; it lays out, packs and pickles what a real one sends."""

    def __init__(self, ranks: int, store: Table) -> None:
        self.places = [RankPlace(rank, rank % 8, 8, f"node{rank // 8}") for rank in range(ranks)]
        self.store = store

    def start(self, method: str, calls: Sequence[Call | None], answering: Sequence[int], contract: Contract) -> Any:
        packer, slots = Packer(self.store), {}
        for rank, call in enumerate(calls):
            assert call is not None
            arguments, values = packer.pack(call)
            pickle.dumps((0, "role", method, True, contract, arguments, values), protocol=5)
            slots[rank] = [self.store.reference() for _ in range(contract.num_slots)]
        sizes = [len(call.args[0]) for call in calls if call is not None]
        return slots, [pickle.dumps(_left(size, contract)) for size in sizes]

    def finish(self, ticket: Any) -> dict[int, Ended]:
        return {rank: Ended(0, pickle.loads(reply)) for rank, reply in enumerate(ticket[1])}

    def fetch(self, ticket: Any, ranks: Sequence[int]) -> list[Any]:
        raise AssertionError("rows stay where they are")

    def slots(self, ticket: Any, rank: int) -> Sequence[Any]:
        return ticket[0][rank]


def _left(size: int, contract: Contract) -> Left:
    columns = {name: (place, "(0, 4) float32 tensor") for place, name in enumerate(contract.writes)}
    return Left("rows", size, columns, {"metrics": {"loss": Metric.mean(0.5, weight=size)}})


class Owner:
    role = "role"

    def note(self, ended: Any) -> None:
        pass


def left_by_a_call(ranks: int, rows: int, store: Table) -> DataProtoFuture:
    """What a rollout on all ranks would have left."""
    pieces = [Piece(store, rows, {name: (store.reference(), name) for name in COLUMNS}) for _ in range(ranks)]
    lane = Lane(Source(pieces), Rows(0, ranks * rows))
    return DataProtoFuture(State(ranks * rows, {name: (lane, name) for name in COLUMNS}, {}))


def call(wire: Wire, mesh: Mesh, batch: DataProtoFuture) -> DataProtoFuture:
    """One group call as `WorkerGroup` makes it: dispatched, answered, collected."""
    contract = Contract(True, COLUMNS, (), ("values",), True)
    plan = plan_call(Dispatch.DP_COMPUTE_PROTO, mesh, Call((batch,)), reads=COLUMNS)
    pending = RowsCall(Owner(), wire, "values", plan, wire.start("values", plan.calls, plan.answering, contract))
    sizes = sizes_of(plan)
    assert sizes is not None
    return batch.union(pending.promise(("values",), sizes)).wait()


def bare(ranks: int) -> int:
    sent = [pickle.dumps((rank, "role", "values", b"x" * 84), protocol=5) for rank in range(ranks)]
    return sum(pickle.loads(one)[0] for one in sent)


def median(run: Callable[[], Any], repeat: int) -> float:
    seconds = []
    for _ in range(repeat + 1):
        begun = time.process_time()
        run()
        seconds.append(time.process_time() - begun)
    return 1000 * statistics.median(seconds[1:])


def costs(ranks: int, rows: int, repeat: int) -> dict[str, float]:
    """Milliseconds of a call on rows as they lie, of one on reordered rows, each without gc too, and the bare least."""
    store = Table()
    wire, mesh = Wire(ranks, store), Mesh(grid(ranks))
    batch = left_by_a_call(ranks, rows, store)
    mixed = batch.reorder(np.random.default_rng(0).permutation(len(batch)))
    found = {}
    for name, rows_to_send in (("aligned", batch), ("reordered", mixed)):
        found[name] = median(lambda rows=rows_to_send: call(wire, mesh, rows), repeat)
        gc.disable()
        found[f"{name}, no gc"] = median(lambda rows=rows_to_send: call(wire, mesh, rows), repeat)
        gc.enable()
    return found | {"bare": median(lambda: bare(ranks), repeat)}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows-per-rank", type=int, default=8)
    parser.add_argument("--repeat", type=int, default=5)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    names = ("aligned", "aligned, no gc", "reordered", "reordered, no gc")
    print(f"| ranks | rows | {' | '.join(f'{name}: ms (us a rank; growth)' for name in names)} | bare ms |")
    print("|---" * (len(names) + 3) + "|")
    before: dict[str, float] = {}
    for ranks in RANKS:
        found = costs(ranks, arguments.rows_per_rank, arguments.repeat)
        cells = []
        for name in names:
            growth = f"; {math.log(found[name] / before[name], 8):.2f}" if before else ""
            cells.append(f"{found[name]:.1f} ({1000 * found[name] / ranks:.0f}{growth})")
        print(f"| {ranks} | {ranks * arguments.rows_per_rank} | {' | '.join(cells)} | {found['bare']:.2f} |")
        before = found


if __name__ == "__main__":
    main()
