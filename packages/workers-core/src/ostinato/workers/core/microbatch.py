"""Micro-batches: which rows go together, and the packed form in which an engine gets them.

A packed micro-batch has no padding: the valid tokens of its rows lie one after another, and `cu_seqlens` marks where a
row begins. Everything about shifting by one token happens here and only here: `predict` holds the positions whose
*next* token is asked about, `labels` that next token, and both are taken inside a row, so no label crosses a boundary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from ostinato.protocol import DataProto, padding
from ostinato.protocol.partition import token_budget_micro_batches
from ostinato.workers.core.errors import BatchError

SEQUENCE_COLUMNS = ("input_ids", "attention_mask", "position_ids", "prompts", "responses")
"""Columns that a packed micro-batch holds in packed form, or that nothing after packing reads."""


@dataclass(frozen=True)
class PackedRows:
    """The rows of one micro-batch without their padding; T tokens of b rows, N of them asked about.

    b, T and N may be 0: a rank that has run out of rows still takes part in every collective.

    Attributes:
        input_ids: (T,) int64, the valid tokens of all rows, row after row.
        position_ids: (T,) int64, counts from 0 in each row.
        cu_seqlens: (b + 1,) int32, where each row begins in T; the last entry is T.
        max_seqlen: number of tokens of the longest row.
        predict: (N,) int64 in [0, T), the packed positions at which the model's output is read, in row-major order.
        labels: (N,) int64, the token after each of those positions in the same row; of `pack_last`, where no token is
            predicted, the token at the position itself.
        mask: (b, R) bool, true at the N places to which the outputs belong, in row-major order.
        rows: the micro-batch's other columns, (b, R) each, on the same device.
        temperature: what logits are divided by before a log-probability is taken.
    """

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    cu_seqlens: torch.Tensor
    max_seqlen: int
    predict: torch.Tensor
    labels: torch.Tensor
    mask: torch.Tensor
    rows: DataProto
    temperature: float = 1.0

    def __len__(self) -> int:
        """Number of rows."""
        return self.mask.shape[0]

    def to_response(self, values: torch.Tensor) -> torch.Tensor:
        """Put per-position values at their places among the response tokens.

        Args:
            values: (N,), one value per entry of `predict`.

        Returns:
            (b, R) of the same dtype, exactly 0 where `mask` is 0; gradients flow back into `values`.
        """
        return values.new_zeros(self.mask.shape).masked_scatter(self.mask, values)


def pack(rows: DataProto, *, temperature: float = 1.0, device: torch.device | str | None = None) -> PackedRows:
    """Pack rows so that the model is asked about every token that the policy sampled.

    The prediction position of response token j is the packed position of the token before it (the last prompt token for
    the first response token), for log-probabilities and for values alike: a critic's value is that of the state before
    the token.

    Args:
        rows: `input_ids` and `attention_mask` (b, P+R), `response_mask` (b, R); other columns are kept in `rows`.
        temperature: of the distribution that the tokens were sampled from; greater than 0.
        device: where the result must lie; that of the rows where None.

    Returns:
        The packed micro-batch; N is the number of ones in `response_mask`.

    Raises:
        BatchError: a column is missing, a policy token lies on padding or has no token before it, or the temperature is
            not positive.
    """
    if not temperature > 0:
        raise BatchError(f"pack: temperature must be greater than 0, got {temperature}; training has no greedy mode")
    attention, mask = _masks(rows, "pack")
    num_rows, width = attention.shape
    asked = torch.zeros(num_rows, width, dtype=torch.bool, device=attention.device)
    asked[:, width - mask.shape[1] :] = mask
    if bool((asked & ~attention).any()):
        row = int((asked & ~attention).any(dim=1).nonzero()[0])
        raise BatchError(f"pack: response_mask is 1 on a token whose attention_mask is 0 (row {row}); one is wrong")
    packed_index = attention.flatten().cumsum(0).reshape(num_rows, width) - 1
    index = packed_index[asked]
    input_ids, position_ids, cu_seqlens, max_seqlen = _packed(rows, attention)
    if bool((position_ids[index] == 0).any()):
        raise BatchError("pack: a response token has no token before it in its row; give every row a prompt")
    return _on_device(
        PackedRows(
            input_ids=input_ids,
            position_ids=position_ids,
            cu_seqlens=cu_seqlens,
            max_seqlen=max_seqlen,
            predict=index - 1,
            labels=input_ids[index],
            mask=mask,
            rows=rows,
            temperature=float(temperature),
        ),
        device,
    )


def pack_last(rows: DataProto, *, device: torch.device | str | None = None) -> PackedRows:
    """Pack rows so that the model is read once a row, at its last valid token (a reward model's score).

    Args:
        rows: as for `pack`.
        device: as for `pack`.

    Returns:
        The packed micro-batch. `mask` has one place a row, the last token that the policy sampled; a row without such a
        token is not asked about and has no place.

    Raises:
        BatchError: a column is missing.
    """
    attention, mask = _masks(rows, "pack_last")
    scored = mask.any(dim=1)
    input_ids, position_ids, cu_seqlens, max_seqlen = _packed(rows, attention)
    last = cu_seqlens[1:].to(torch.int64) - 1
    remaining = mask.flip(1).cumsum(1).flip(1)
    predict = last[scored]
    return _on_device(
        PackedRows(
            input_ids=input_ids,
            position_ids=position_ids,
            cu_seqlens=cu_seqlens,
            max_seqlen=max_seqlen,
            predict=predict,
            labels=input_ids[predict],
            mask=mask & (remaining == 1),
            rows=rows,
        ),
        device,
    )


def micro_batches(
    batch: DataProto,
    *,
    reduce: Callable[[torch.Tensor], torch.Tensor],
    max_tokens: int | None = None,
    micro_batch_size: int | None = None,
) -> list[list[int]]:
    """Group the rows of one rank into micro-batches, equally many on every rank.

    Args:
        batch: this rank's rows, with `attention_mask` (B, L); may be empty.
        reduce: sums a small tensor over the data-parallel ranks (`TrainEngine.reduce`); called equally often on each.
        max_tokens: token budget: the valid tokens of a micro-batch add up to at most this many. A row longer than the
            budget is a micro-batch of its own.
        micro_batch_size: or a number of rows. Exactly one of the two is given.

    Returns:
        Row indices of each micro-batch; every row once. As many lists as the rank with the most needs; a rank with too
        few rows gets empty lists at the end.

    Raises:
        BatchError: neither or both limits are given, or one is not positive.
    """
    if (max_tokens is None) == (micro_batch_size is None):
        raise BatchError("micro_batches: give exactly one of max_tokens and micro_batch_size")
    limit = max_tokens if max_tokens is not None else micro_batch_size
    if limit is None or limit < 1:
        raise BatchError(f"micro_batches: the limit must be at least 1, got {limit}")
    if max_tokens is None:
        groups = [list(range(i, min(i + limit, len(batch)))) for i in range(0, len(batch), limit)]
        count = largest_over_ranks(len(groups), reduce)
    else:
        lengths = valid_lengths(batch).tolist()
        groups = token_budget_micro_batches(lengths, max_tokens) if lengths else []
        count = largest_over_ranks(len(groups), reduce)
        if len(groups) < count:
            groups = token_budget_micro_batches(lengths, max_tokens, min_count=count)
    return groups + [[] for _ in range(count - len(groups))]


def largest_over_ranks(count: int, reduce: Callable[[torch.Tensor], torch.Tensor]) -> int:
    """Return the largest `count` over the ranks, by sums alone.

    Each rank adds a vector that begins with `count` ones; the number of entries that are not 0 in the sum is the
    maximum. The vector is as long as the sum of all counts, which every rank knows after a first sum.

    Args:
        count: this rank's number, at least 0.
        reduce: sums a small tensor over the ranks.

    Returns:
        The same number on every rank.
    """
    total = int(reduce(torch.tensor([count], dtype=torch.float64))[0])
    present = torch.zeros(total, dtype=torch.float64)
    present[:count] = 1
    return int((reduce(present) > 0).sum()) if total else 0


def valid_lengths(batch: DataProto) -> torch.Tensor:
    """Count the valid tokens (prompt and response) of each row: (B,) int64."""
    return _column(batch, "attention_mask", "valid_lengths").to(torch.bool).sum(dim=1)


def _masks(rows: DataProto, where: str) -> tuple[torch.Tensor, torch.Tensor]:
    attention = _column(rows, "attention_mask", where).to(torch.bool)
    mask = _column(rows, "response_mask", where).to(torch.bool)
    if mask.shape[1] > attention.shape[1]:
        raise BatchError(
            f"{where}: response_mask {tuple(mask.shape)} is wider than attention_mask {tuple(attention.shape)}; "
            "attention_mask spans prompt and response"
        )
    return attention, mask


def _column(rows: DataProto, name: str, where: str) -> torch.Tensor:
    if rows.batch is None or name not in rows.batch.keys():  # noqa: SIM118  (a TensorDict iterates over its rows)
        raise BatchError(f"{where}: column '{name}' is missing; the rows hold {sorted(rows.columns)}")
    return rows.batch[name]


def _packed(rows: DataProto, attention: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int]:
    input_ids, cu_seqlens = padding.pack(_column(rows, "input_ids", "pack").to(torch.int64), attention)
    lengths = cu_seqlens.diff()
    return input_ids, padding.position_ids(attention)[attention], cu_seqlens, int(lengths.max()) if len(lengths) else 0


def _on_device(packed: PackedRows, device: torch.device | str | None) -> PackedRows:
    rows = packed.rows
    rows = rows.drop([name for name in SEQUENCE_COLUMNS if name in rows.columns])
    target = packed.input_ids.device if device is None else torch.device(device)
    return PackedRows(
        input_ids=packed.input_ids.to(target),
        position_ids=packed.position_ids.to(target),
        cu_seqlens=packed.cu_seqlens.to(target),
        max_seqlen=packed.max_seqlen,
        predict=packed.predict.to(target),
        labels=packed.labels.to(target),
        mask=packed.mask.to(target),
        rows=rows.to(target),
        temperature=packed.temperature,
    )
