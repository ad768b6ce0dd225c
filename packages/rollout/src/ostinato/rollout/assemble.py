"""Prompts in, padded rows out: what every engine does around its own generation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from ostinato.protocol import DataProto
from ostinato.rollout.errors import PromptError

FinishReason = Literal["stop", "length", "abort"]
FINISH_REASONS: tuple[FinishReason, ...] = ("stop", "length", "abort")


@dataclass(frozen=True)
class Completion:
    """One answer to one prompt, as token ids.

    Attributes:
        row: which prompt row it answers; several completions may answer one row.
        token_ids: the response, end token included; may be empty.
        log_probs: log-probability of each response token under the temperature-scaled distribution, in nats; what
            stands at tokens that were not sampled is ignored.
        finish_reason: "stop" (an end token), "length" (cut by a limit), "abort" (the engine gave up).
        sampled: which response tokens the policy sampled (False: tool output); None means all.
        prompt_token_ids: the prompt where it is not the row's own (a later turn of one rollout); None is the row's.
    """

    row: int
    token_ids: Sequence[int]
    log_probs: Sequence[float]
    finish_reason: FinishReason
    sampled: Sequence[bool] | None = None
    prompt_token_ids: Sequence[int] | None = None


@dataclass(frozen=True)
class PaddedResponses:
    """Answers as padded arrays; the form that engines with tensors at hand give.

    Attributes:
        rows: (C,) int64, which prompt row each answers, ascending.
        token_ids: (C,R) int64; anything at and behind `lengths`.
        lengths: (C,) int64, tokens of each response.
        log_probs: (C,R) float32; anything where no token was sampled.
        finish_reasons: (C,) object array of "stop", "length" or "abort".
        sampled: (C,R) bool, or None where every response token was sampled by the policy.
    """

    rows: np.ndarray
    token_ids: torch.Tensor
    lengths: torch.Tensor
    log_probs: torch.Tensor
    finish_reasons: np.ndarray
    sampled: torch.Tensor | None = None


def check_prompts(prompts: DataProto, context_length: int | None = None, vocab_size: int | None = None) -> torch.Tensor:
    """Refuse prompts that no engine can take.

    Args:
        prompts: rows with `input_ids`, `attention_mask`, `position_ids` (B,P) and `rollout_id`, `uid`.
        context_length: most tokens of prompt and response together; a prompt must leave room for one.
        vocab_size: tokens of the model; what stands in the padding may be anything.

    Returns:
        (B,) int64, tokens of each prompt.

    Raises:
        PromptError: a column is absent, or a row is empty, not left-padded, too long, or holds a token that the model
            does not have; names the first such row.
    """
    absent = [name for name in ("input_ids", "attention_mask", "position_ids") if name not in _tensor_names(prompts)]
    absent += [name for name in ("uid", "rollout_id") if name not in prompts.columns]
    if absent:
        raise PromptError(
            f"generate: the prompts lack the columns {', '.join(absent)} (they have {', '.join(prompts.columns)}). "
            "Pass `columns.PROMPT` of the batch."
        )
    mask = _tensor(prompts, "attention_mask").bool()
    lengths = mask.sum(-1)
    _refuse_rows(lengths == 0, lengths, "at least one token", "Drop empty prompts.")
    if mask.shape[-1] > 1:
        _refuse_rows((mask[:, :-1] & ~mask[:, 1:]).any(-1), lengths, "padding on the left alone", "Left-pad prompts.")
    if context_length is not None:
        expected = f"fewer than {context_length} tokens (max_model_len)"
        _refuse_rows(lengths >= context_length, lengths, expected, "Filter or cut prompts, or raise max_model_len.")
    if vocab_size is not None:
        tokens = _tensor(prompts, "input_ids").long()
        unknown = mask & ((tokens < 0) | (tokens >= vocab_size))
        if bool(unknown.any()):
            row, place = unknown.nonzero()[0].tolist()
            raise PromptError(
                f"generate: prompt row {row} holds the token {int(tokens[row, place])}, expected 0 to "
                f"{vocab_size - 1}, the model's own; {int(unknown.any(-1).sum())} of {len(lengths)} rows are like "
                "this. Take the tokenizer that belongs to the model."
            )
    return lengths


def _refuse_rows(bad: torch.Tensor, lengths: torch.Tensor, expected: str, fix: str) -> None:
    rows = bad.nonzero().flatten().tolist()
    if rows:
        raise PromptError(
            f"generate: prompt row {rows[0]} has {int(lengths[rows[0]])} tokens in its attention_mask, expected "
            f"{expected}; {len(rows)} of {len(bad)} rows are like this. {fix}"
        )


def _tensor_names(rows: DataProto) -> set[str]:
    return set() if rows.batch is None else {str(name) for name in rows.batch.keys()}  # noqa: SIM118


def _tensor(rows: DataProto, name: str) -> torch.Tensor:
    if rows.batch is None:
        raise PromptError(f"generate: the prompts have no tensor columns, so no {name}. Pass `columns.PROMPT`.")
    tensor = rows.batch.get(name)
    assert isinstance(tensor, torch.Tensor), name
    return tensor


def prompt_token_ids(prompts: DataProto) -> list[list[int]]:
    """The prompts without their padding, for engines that take token lists.

    Returns:
        One list a row; padding never reaches the engine, whatever its token id.
    """
    lengths = check_prompts(prompts).tolist()
    return [row[len(row) - n :] for row, n in zip(_tensor(prompts, "input_ids").tolist(), lengths, strict=True)]


def rollout_ids(prompts: DataProto) -> np.ndarray:
    """The number of each row within the step, as (B,) int64.

    Raises:
        PromptError: the column is absent or holds something else than whole numbers.
    """
    column = prompts.get(("rollout_id",))
    if "rollout_id" in _tensor_names(column):
        return _tensor(column, "rollout_id").cpu().numpy().astype(np.int64)
    values = column.non_tensor_batch["rollout_id"]
    if len(values) == 0:
        return np.zeros(0, dtype=np.int64)
    try:
        numbers = np.asarray(values.tolist())
    except ValueError:
        numbers = np.asarray([], dtype=object)
    if numbers.dtype.kind not in "iu" or numbers.ndim != 1:
        raise PromptError(
            f"generate: the column rollout_id must hold one whole number a row, got {values[:3].tolist()!r}. "
            "The trainer numbers the rows of a step: 0, 1, 2, ..."
        )
    return numbers.astype(np.int64)


def assemble_padded(prompts: DataProto, responses: PaddedResponses, *, pad_token_id: int) -> DataProto:
    """Put padded answers behind their prompts.

    Prompts stay left-padded, responses are right-padded; position ids continue from the prompt. An aborted row keeps
    its tokens but gets a response mask of zeros, so that nothing rewards it or trains on it as if it were complete.

    Args:
        prompts: the rows that were asked.
        responses: their answers, on the prompts' device.
        pad_token_id: what stands behind a response.

    Returns:
        `prompts` (C,P), `responses` (C,R), `input_ids` (C,P+R), `attention_mask` (C,P+R), `position_ids` (C,P+R),
        `response_mask` (C,R), all int64; `rollout_log_probs` (C,R) float32, 0 where the mask is 0; and the non-tensor
        columns `uid`, `rollout_id`, `finish_reason`.
    """
    rows = torch.from_numpy(responses.rows)
    columns = {name: _tensor(prompts, name)[rows] for name in ("input_ids", "attention_mask", "position_ids")}
    return _join(prompts, responses, columns, pad_token_id)


def _join(prompts: DataProto, responses: PaddedResponses, own: dict[str, torch.Tensor], pad: int) -> DataProto:
    width = responses.token_ids.shape[1]
    place = torch.arange(width)
    valid = place < responses.lengths[:, None]
    tokens = torch.where(valid, responses.token_ids, pad)
    aborted = torch.from_numpy(np.asarray(responses.finish_reasons == "abort", dtype=bool))
    mask = valid & ~aborted[:, None]
    if responses.sampled is not None:
        mask = mask & responses.sampled
    prompt_ids = own["input_ids"].long()
    positions = own["position_ids"].long()
    names = prompts.get(("uid", "rollout_id"))
    non_tensors = {name: column[responses.rows] for name, column in names.non_tensor_batch.items()}
    tensors = {
        "prompts": prompt_ids,
        "responses": tokens,
        "input_ids": torch.cat([prompt_ids, tokens], -1),
        "attention_mask": torch.cat([own["attention_mask"].long(), valid.long()], -1),
        "position_ids": torch.cat([positions, positions[:, -1:] + 1 + place], -1),
        "response_mask": mask.long(),
        "rollout_log_probs": torch.where(mask, responses.log_probs.float(), 0.0),
    }
    if "rollout_id" in _tensor_names(names):
        tensors["rollout_id"] = _tensor(names, "rollout_id")[torch.from_numpy(responses.rows)]
    return DataProto.from_dict(tensors, {**non_tensors, "finish_reason": responses.finish_reasons})


def assemble(
    prompts: DataProto, completions: Sequence[Completion], *, response_length: int, pad_token_id: int
) -> DataProto:
    """Put answers that came as token lists behind their prompts.

    Args:
        prompts: the rows that were asked.
        completions: at least one for each row, in any order; those of one row keep their order.
        response_length: width R of the padded responses.
        pad_token_id: what stands behind a response.

    Returns:
        What `assemble_padded` returns, in the order of the prompts.

    Raises:
        PromptError: a prompt row has no completion, a completion has no row, or is longer than the width.
    """
    ordered = sorted(completions, key=lambda completion: completion.row)
    _check_completions(ordered, len(prompts), response_length)
    lengths = np.asarray([len(c.token_ids) for c in ordered], dtype=np.int64)
    valid = np.arange(response_length) < lengths[:, None]

    def padded(parts: list[Sequence[int]] | list[Sequence[float]] | list[Sequence[bool]], kind: type) -> torch.Tensor:
        out = np.zeros(valid.shape, dtype=kind)
        out[valid] = np.concatenate([np.asarray(part, dtype=kind) for part in parts]) if parts else 0
        return torch.from_numpy(out)

    sampled: list[Sequence[bool]] = [
        np.ones(len(c.token_ids), dtype=bool).tolist() if c.sampled is None else c.sampled for c in ordered
    ]
    responses = PaddedResponses(
        rows=np.asarray([c.row for c in ordered], dtype=np.int64),
        token_ids=padded([c.token_ids for c in ordered], np.int64),
        lengths=torch.from_numpy(lengths),
        log_probs=padded([c.log_probs for c in ordered], np.float32),
        finish_reasons=np.asarray([c.finish_reason for c in ordered], dtype=object),
        sampled=padded(sampled, np.bool_),
    )
    rows = torch.from_numpy(responses.rows)
    own = {name: _tensor(prompts, name)[rows] for name in ("input_ids", "attention_mask", "position_ids")}
    for place, completion in enumerate(ordered):
        if completion.prompt_token_ids is not None:
            _write_prompt(own, place, completion.prompt_token_ids)
    return _join(prompts, responses, own, pad_token_id)


def _write_prompt(own: dict[str, torch.Tensor], place: int, token_ids: Sequence[int]) -> None:
    width, n = own["input_ids"].shape[1], len(token_ids)
    if not 0 < n <= width:
        raise PromptError(f"assemble: a prompt of {n} tokens does not fit 1..{width}. Raise data.max_prompt_length.")
    for column in own.values():
        column[place] = 0
    own["input_ids"][place, width - n :] = torch.as_tensor(token_ids)
    own["attention_mask"][place, width - n :] = 1
    own["position_ids"][place, width - n :] = torch.arange(n, dtype=own["position_ids"].dtype)


def _check_completions(ordered: Sequence[Completion], num_rows: int, width: int) -> None:
    answered = {c.row for c in ordered}
    expected = set(range(num_rows))
    if answered != expected:
        lost, extra = sorted(expected - answered), sorted(answered - expected)
        raise PromptError(
            f"assemble: {num_rows} prompt rows; rows {lost[:8]} have no completion, rows {extra[:8]} are not there. "
            "An engine must answer each row, with finish_reason 'abort' where it failed."
        )
    for c in ordered:
        n = len(c.token_ids)
        counts = {n, len(c.log_probs), n if c.sampled is None else len(c.sampled)}
        if n > width or len(counts) > 1 or c.finish_reason not in FINISH_REASONS:
            raise PromptError(
                f"assemble: completion of row {c.row} has {n} tokens, {len(c.log_probs)} log-probs and finish_reason "
                f"{c.finish_reason!r}; expected at most {width} tokens, as many log-probs (and `sampled` flags), and "
                f"one of {', '.join(FINISH_REASONS)}."
            )
