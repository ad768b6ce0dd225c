"""DataProto against a plain copy of the same bytes and against verl's: pickling and the operations on rows and columns.

python benchmarks/protocol/bench_dataproto.py [--rows 512] [--width 4096] [--columns 8] [--repeat 9]

A ratio below 1 says that ours is faster. Milliseconds are CPU time, the least of the turns. Reordering, concatenation
and a round trip copy every byte once; the others copy none. The bar: a round trip costs at most 1.5 copies.
"""

from __future__ import annotations

import argparse
import pickle

import numpy as np
import torch
from measure import HEAD, columns_of, in_turns, keep_memory, rows_of, verl_protocol

from ostinato.protocol import DataProto, DataProtoFuture


def round_trip(batch: object) -> object:
    """Pickle 5 with buffers out of band, as an object store does it."""
    buffers: list[pickle.PickleBuffer] = []
    data = pickle.dumps(batch, protocol=5, buffer_callback=buffers.append)
    return pickle.loads(data, buffers=buffers)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, default=512)
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--columns", type=int, default=8)
    parser.add_argument("--repeat", type=int, default=9)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    keep_memory()
    tensors, arrays = columns_of(arguments.rows, arguments.width, arguments.columns)
    ours = DataProto.from_dict(tensors, arrays)
    future = DataProtoFuture.of(ours)
    verl = verl_protocol()
    theirs = verl.from_dict(tensors=dict(tensors), non_tensors=dict(arrays)) if verl else None
    order = torch.randperm(arguments.rows)
    more = {"more": torch.rand(arguments.rows, arguments.width)}
    our_more, their_more = DataProto.from_dict(more), verl.from_dict(tensors=more) if verl else None
    names = [f"c{i}" for i in range(arguments.columns // 2)]

    def copied() -> object:
        return [tensor.clone() for tensor in tensors.values()]

    def moved() -> object:
        fresh = verl.from_dict(tensors=dict(tensors), non_tensors=dict(arrays))  # verl's reorder changes its operand
        fresh.reorder(order)
        return fresh

    size = sum(tensor.nbytes for tensor in tensors.values()) / 1e6
    print(f"{arguments.rows} rows, {arguments.columns} columns of width {arguments.width}, {size:.0f} MB\n\n{HEAD}")
    our_parts, their_parts = ours.chunk(4), theirs.chunk(4) if verl else None

    def united() -> object:
        return verl.from_dict(tensors=dict(tensors), non_tensors=dict(arrays)).union(their_more)  # changes its operand

    cases = {
        "pickle round trip": (lambda: round_trip(ours), lambda: round_trip(theirs)),
        "reorder": (lambda: ours.reorder(order), moved),
        "concat of 4": (lambda: DataProto.concat(our_parts), lambda: verl.concat(their_parts)),
        "chunk(4)": (lambda: ours.chunk(4), lambda: theirs.chunk(4)),
        "select half": (lambda: ours.select(names), lambda: theirs.select(batch_keys=names)),
        "union": (lambda: ours.union(our_more), united),
        "future: chunk(4), concat, reorder, union": (
            lambda: DataProtoFuture.concat(future.chunk(4)).reorder(order).union(our_more),
            None,
        ),
    }
    for case, (run, verls) in cases.items():
        runs = {"ours": run, "copy of the bytes": copied}
        if verl is not None and verls is not None:
            runs["verl 0.9.1"] = verls
        print("\n".join(rows_of(case, in_turns(runs, arguments.repeat))))
    assert np.array_equal(ours.reorder(order).batch["c0"], tensors["c0"][order])


if __name__ == "__main__":
    main()
