"""Micro-batches through Megatron's schedules: one stage, a pipeline, or an interleaved one.

The schedules divide a loss by the number of micro-batches and scale gradients by token counts. Here a loss is a share
of a sum that has been divided already: with per-token losses and token counts of 0 they divide by nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, TypeVar

import torch

from ostinato.workers.core.engine import LossFn, OutputFn
from ostinato.workers.core.microbatch import PackedRows
from ostinato.workers.megatron.build import Built, bare
from ostinato.workers.megatron.packing import Layout, OutputReader, model_inputs, token_outputs
from ostinato.workers.megatron.parallel import import_megatron

T = TypeVar("T")


def run(
    built: Built,
    micro_batches: Sequence[PackedRows],
    layout: Layout,
    fn: OutputFn[T] | LossFn[T],
    *,
    backward: bool,
    entropy: bool,
    sum_pi_squared: bool = False,
) -> list[T] | None:
    """Run micro-batches forward, or forward and backward; collective over all ranks.

    Gradients are added to this rank's buffers and reduced nowhere; the optimizer step does that once.

    Args:
        built: the model.
        micro_batches: equally many on every rank; some may hold no row.
        layout: how they are laid out.
        fn: called with each micro-batch's outputs; gives the loss first where `backward`.
        backward: whether to run backward too.
        entropy: whether `fn` gets entropies.
        sum_pi_squared: whether `fn` gets Σπ².

    Returns:
        What `fn` returned, a micro-batch an entry; None on a stage that is not the last.
    """
    state = import_megatron("parallel_state")
    last = state.is_pipeline_last_stage(ignore_virtual=True)
    if not micro_batches:
        return [] if last else None
    rows = _padded_count(built, micro_batches)
    collected: list[T] = []

    def read(packed: PackedRows, out: torch.Tensor, non_loss_data: bool = False) -> Any:
        outputs = token_outputs(out, packed, layout, entropy=entropy, sum_pi_squared=sum_pi_squared)
        result = fn(outputs, packed)
        if not backward:
            collected.append(result)  # pyright: ignore[reportArgumentType]
            return result
        loss, extra = result  # pyright: ignore[reportGeneralTypeIssues]
        collected.append(extra)
        # Reaches every parameter before it, also where the loss reads nothing of this micro-batch.
        total = loss.float() + out[:0].float().sum()
        return total, torch.zeros((), dtype=torch.int, device=out.device), extra

    def step(batches: Iterator[PackedRows], chunk: Any) -> tuple[torch.Tensor, Any]:
        packed = next(batches)
        inputs = model_inputs(packed, layout)
        module = bare(chunk)
        module.rotary_pos_emb.position_ids = inputs.rotary
        options: dict[str, Any] = {"fp32_output": False} if built.transformer.bf16 else {}
        reader = OutputReader(layout, inputs, packed, entropy=entropy, sum_pi_squared=sum_pi_squared)
        output = chunk(**inputs.arguments, output_processor=reader, **options)
        return output, partial(read, packed)

    batches = [iter(rows) for _ in built.chunks]
    schedule = import_megatron("pipeline_parallel").get_forward_backward_func()
    schedule(
        forward_step_func=step,
        data_iterator=batches if len(batches) > 1 else batches[0],
        model=built.chunks if len(batches) > 1 else built.chunks[0],
        num_microbatches=len(rows),
        seq_length=1,  # not read: shapes travel with the tensors
        micro_batch_size=1,
        forward_only=not backward,
        collect_non_loss_data=not backward,
    )
    return collected[: len(micro_batches)] if last else None


def _padded_count(built: Built, micro_batches: Sequence[PackedRows]) -> list[PackedRows]:
    """The micro-batches, with empty ones added for an interleaved schedule, which takes multiples of its stages."""
    rows = list(micro_batches)
    if len(built.chunks) > 1:
        stages = import_megatron("parallel_state").get_pipeline_model_parallel_world_size()
        rows += [_empty_like(rows[0])] * (-len(rows) % stages)
    return rows


def _empty_like(packed: PackedRows) -> PackedRows:
    """A micro-batch of the same columns without any row."""
    none = packed.input_ids[:0]
    return PackedRows(
        input_ids=none,
        position_ids=none,
        cu_seqlens=packed.cu_seqlens[:1],
        max_seqlen=0,
        predict=none,
        labels=none,
        mask=packed.mask[:0],
        rows=packed.rows[:0],
        temperature=packed.temperature,
    )
