"""Every column of the system: what it holds, who writes it and who reads it.

Prompts are left-padded to P tokens, responses right-padded to R; B is the number of rows. A batch may carry columns
that are not declared here: a user's own, and `reward/KEY` for each further key of a reward function's result. Only what
a user names in the configuration is read of those.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from ostinato.protocol.errors import ColumnMismatchError, MissingColumnError

if TYPE_CHECKING:
    from ostinato.protocol.dataproto import DataProto

INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


@dataclass(frozen=True)
class Column:
    """Declaration of one column.

    Attributes:
        name: as it stands in a batch; unique.
        dtype: of the tensor, or None for a numpy column.
        shape: what follows B, in the letters P and R; () is one value a row.
        producer: who writes it.
        readers: who reads it.
        holds: meaning and unit, and what masked places hold.
        accepts: other dtypes that readers take.
    """

    name: str
    dtype: torch.dtype | None
    shape: tuple[str, ...]
    producer: str
    readers: tuple[str, ...]
    holds: str
    accepts: tuple[torch.dtype, ...] = ()


_MASK = (*INTEGERS, torch.bool)
_F32 = torch.float32
_I64 = torch.int64
_R = ("R",)

_DECLARED = (
    Column(
        "input_ids", _I64, ("P+R",), "data: (B, P) prompts; rollout: prompts and responses",
        ("rollout", "actor", "ref", "critic", "reward_model"), "token ids; padding holds the pad id", INTEGERS,
    ),
    Column(
        "attention_mask", _I64, ("P+R",), "data: (B, P); rollout",
        ("rollout", "actor", "ref", "critic", "reward_model"), "1 = token, 0 = padding", _MASK,
    ),
    Column(
        "position_ids", _I64, ("P+R",), "data: (B, P); rollout", ("rollout", "actor", "ref", "critic", "reward_model"),
        "place of the token in its row, from 0; 0 in left padding, goes on counting in right padding", INTEGERS,
    ),
    Column("prompts", _I64, ("P",), "rollout", ("reward", "metrics"), "prompt token ids, left-padded", INTEGERS),
    Column(
        "responses", _I64, _R, "rollout", ("reward", "actor", "ref", "critic", "metrics"),
        "sampled token ids and tool output, right-padded", INTEGERS,
    ),
    Column(
        "response_mask", _I64, _R, "rollout", ("reward", "actor", "ref", "critic", "estimate", "metrics"),
        "1 = token that the policy sampled, eos included; 0 = padding or tool output", _MASK,
    ),
    Column(
        "rollout_log_probs", _F32, _R, "rollout", ("estimate", "actor", "metrics"),
        "log-probability of the sampled token under the engine's temperature-scaled distribution; 0 where masked",
    ),
    Column(
        "old_log_probs", _F32, _R, "actor.compute_log_prob", ("estimate", "actor"),
        "log-probability under the policy before the update; 0 where masked",
    ),
    Column(
        "sum_pi_squared", _F32, _R, "actor.compute_log_prob (optimal_token_baseline)", ("estimate",),
        "sum of the squared probabilities of the vocabulary, same distribution as old_log_probs; 0 where masked",
    ),
    Column(
        "ref_log_prob", _F32, _R, "reference.compute_ref_log_prob", ("estimate", "actor"),
        "log-probability under the reference policy; 0 where masked",
    ),
    Column(
        "values", _F32, _R, "critic.compute_values", ("estimate", "critic"), "value before each token; 0 where masked"
    ),
    Column(
        "token_level_scores", _F32, _R, "reward", ("estimate", "metrics"),
        "score at the token that it was given for, as a rule the last policy token; 0 elsewhere",
    ),
    Column(
        "token_level_rewards", _F32, _R, "estimate", ("metrics",), "scores less the KL penalty, if any; 0 where masked"
    ),
    Column("advantages", _F32, _R, "estimate", ("actor", "metrics"), "advantage; 0 where masked"),
    Column("returns", _F32, _R, "estimate", ("critic", "metrics"), "the critic's target; 0 where masked"),
    Column("reward_baselines", _F32, (), "trainer (remax)", ("estimate",), "score of the row's greedy response"),
    Column("rollout_is_weights", _F32, _R, "estimate", ("actor",), "train/rollout correction weight; 0 where masked"),
    Column(
        "selected", torch.bool, _R, "actor, for one mini-batch", ("actor",),
        "token that the policy loss treats apart; 0 where masked",
    ),
    Column("mini_batch", _I64, (), "trainer.balance", ("actor", "critic"), "number of the mini-batch of the row"),
    Column(
        "uid", None, (), "data", ("rollout", "estimate", "metrics"), "label of the prompt, whose responses are a group"
    ),
    Column(
        "rollout_id", None, (), "trainer", ("rollout", "estimate"),
        "number of the rollout within the step; a rollout may come back as several rows",
    ),
    Column(
        "finish_reason", None, (), "rollout", ("reward", "metrics"),
        "why the response ended: `stop` (an end token), `length` (a limit) or `abort` (the engine gave up)",
    ),
    Column("data_source", None, (), "data", ("reward", "metrics"), "name of the data set; chooses the reward"),
    Column("reward_model", None, (), "data", ("reward",), "dict that holds `ground_truth`"),
    Column("extra_info", None, (), "data", ("reward",), "dict of anything else the reward may want, or None"),
    Column("reward/score", None, (), "reward (a function's)", ("estimate",), "score as the function gave it"),
    Column("raw_prompt", None, (), "data", ("reward", "metrics"), "the prompt's messages, before tokenisation"),
)  # fmt: skip

COLUMNS: dict[str, Column] = {column.name: column for column in _DECLARED}
"""Every declared column by name."""

PROMPT = ("input_ids", "attention_mask", "position_ids", "uid", "rollout_id")
"""What a rollout reads."""

ROLLOUT = (
    "prompts",
    "responses",
    "input_ids",
    "attention_mask",
    "position_ids",
    "response_mask",
    "rollout_log_probs",
    "finish_reason",
)
"""What a rollout writes; `uid` and `rollout_id` come back with it."""


def validate(batch: DataProto | Any, reads: Iterable[str], where: str = "validate") -> None:
    """Check that a batch holds what a stage reads.

    Args:
        batch: the batch, or a handle to rows elsewhere, of which the names alone are checked.
        reads: names; of a declared one kind, dtype and shape are checked too. P and R are the widths of `prompts` and
            `responses` where these are in the batch, else whatever the first column read says. Widths of `P+R` columns
            are checked where P and R are both known, so a batch of prompts passes with (B, P).
        where: whose batch it is; errors begin with it.

    Raises:
        MissingColumnError: columns are missing; the text says who produces each.
        ColumnMismatchError: a column is not what its declaration says.
    """
    reads = [reads] if isinstance(reads, str) else list(reads)
    held = batch.columns
    if missing := [name for name in reads if name not in held]:
        who = [f"{name!r}" + (f" (from {COLUMNS[name].producer})" if name in COLUMNS else "") for name in missing]
        raise MissingColumnError(f"{where}: the batch lacks {', '.join(who)}; it has {list(held) or 'no columns'}")
    tensors = None if hasattr(batch, "layout") else getattr(batch, "batch", None)  # a look at a future brings its rows
    if tensors is None:
        return
    widths: dict[str, tuple[int, str]] = {}
    for name, letter in (("prompts", "P"), ("responses", "R")):
        column = tensors.get(name, None)
        if column is not None and not column.is_nested and column.ndim == 2:
            widths[letter] = (column.shape[1], name)
    for name in reads:
        if name in COLUMNS:
            _check(where, COLUMNS[name], tensors.get(name, None), widths)


def _check(where: str, declared: Column, column: torch.Tensor | None, widths: dict[str, tuple[int, str]]) -> None:
    where = f"{where}: column {declared.name!r}"
    if (declared.dtype is None) != (column is None):
        kinds = ("a numpy column", "a tensor") if declared.dtype is None else ("a tensor", "a numpy column")
        raise ColumnMismatchError(f"{where} must be {kinds[0]}, got {kinds[1]}; give it under the other argument")
    if column is None:
        return
    if column.dtype != declared.dtype and column.dtype not in declared.accepts:
        raise ColumnMismatchError(
            f"{where} must be {declared.dtype}, got {column.dtype}; convert it where it is made ({declared.producer})"
        )
    if column.is_nested:
        return
    if column.ndim != 1 + len(declared.shape):
        told = ", ".join(("B", *declared.shape))
        raise ColumnMismatchError(f"{where} must have shape ({told}), got {tuple(column.shape)}")
    for letters, size in zip(declared.shape, column.shape[1:], strict=True):
        if letters in ("P", "R"):
            widths.setdefault(letters, (size, declared.name))
        known = [widths[letter] for letter in letters.split("+") if letter in widths]
        expected = sum(width for width, _ in known)
        if len(known) == len(letters.split("+")) and size != expected:
            told = " + ".join(f"{width} (from {name!r})" for width, name in known)
            raise ColumnMismatchError(f"{where} must be {letters} = {told} wide, got {size}; pad or cut to that width")
