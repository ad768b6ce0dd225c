"""Forward passes over a batch: micro-batches out, one (B, R) column back in the rows' own order."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from ostinato.protocol import DataProto
from ostinato.workers.core.engine import TokenOutputs, TrainEngine
from ostinato.workers.core.limits import BatchLimit
from ostinato.workers.core.microbatch import PackedRows, micro_batches
from ostinato.workers.core.residency import Residency

Packer = Callable[[DataProto], PackedRows]
Outputs = dict[str, torch.Tensor]
Reader = Callable[[TokenOutputs], Outputs]

SCORING = ("input_ids", "attention_mask", "response_mask")
"""Columns that a forward pass reads."""


def planned(engine: TrainEngine, batch: DataProto, limit: BatchLimit) -> list[list[int]]:
    """Group this rank's rows into micro-batches under a limit, equally many on every rank."""
    return micro_batches(
        batch, reduce=engine.reduce, max_tokens=limit.max_tokens, micro_batch_size=limit.micro_batch_size
    )


def scored(
    part: Residency,
    batch: DataProto,
    packer: Packer,
    read: Reader,
    limit: BatchLimit,
    *,
    phase: str,
    **asked: bool,
) -> Outputs | None:
    """Bring the parameters to the device and run `token_columns` in micro-batches under a limit.

    `asked` is what `TrainEngine.forward` is asked for; `phase` is what its peak of memory is called.
    """
    with part.inference(), part.peaks.during(phase):
        return token_columns(part.engine, batch, packer, read, plan=planned(part.engine, batch, limit), **asked)


def token_columns(
    engine: TrainEngine,
    batch: DataProto,
    packer: Packer,
    read: Reader,
    *,
    plan: Sequence[Sequence[int]],
    **asked: bool,
) -> Outputs | None:
    """Run the model over this rank's rows and lay its outputs out as columns.

    Args:
        engine: holds the model; its parameters are on the device.
        batch: this rank's rows; may be empty.
        packer: makes a packed micro-batch of some rows.
        read: picks the (N,) outputs that are wanted, by name.
        plan: rows of each micro-batch, of `planned`.
        asked: what the engine's `forward` is asked for beyond log-probabilities or values (`entropy`, ...).

    Returns:
        Name -> (B, R) float32 on the host, exactly 0 where no output belongs; None on a rank that sees no outputs.
    """

    def collect(outputs: TokenOutputs, packed: PackedRows) -> Outputs:
        return {name: packed.to_response(values.float()) for name, values in read(outputs).items()}

    packed = [packer(batch[list(group)]) for group in plan]
    collected = engine.forward(packed, collect, **asked)
    if collected is None:
        return None
    assert batch.batch is not None, "packing has checked that there are tensor columns"
    shape = batch.batch["response_mask"].shape
    names = list(collected[0]) if collected else list(read(_no_outputs(**asked)))
    columns = {name: torch.zeros(shape, dtype=torch.float32) for name in names}
    for group, part in zip(plan, collected, strict=True):
        if group:
            for name in names:
                columns[name][list(group)] = part[name].cpu()
    return columns


def log_probs_of(outputs: TokenOutputs) -> Outputs:
    """Pick log-probabilities, and entropies and Σπ² where the engine gave any."""
    wanted = {
        "log_probs": outputs.log_probs,
        "entropy": outputs.entropy,
        "sum_pi_squared": outputs.sum_pi_squared,
    }
    return {name: values for name, values in wanted.items() if values is not None}


def values_as(name: str) -> Reader:
    """Make the function that picks the outputs of a scalar head, as a column of this name."""

    def read(outputs: TokenOutputs) -> Outputs:
        assert outputs.values is not None, "the engine's head is not 'value'"
        return {name: outputs.values}

    return read


def _no_outputs(*, entropy: bool = False, sum_pi_squared: bool = False, **_: bool) -> TokenOutputs:
    none = torch.zeros(0)
    return TokenOutputs(
        log_probs=none,
        entropy=none if entropy else None,
        sum_pi_squared=none if sum_pi_squared else None,
        values=none,
    )
