"""Checks of config values, an engine's own among them, and the three keys that set the size of a micro-batch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, TypeVar, cast

from ostinato.workers.core.errors import ConfigError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

T = TypeVar("T")


def require(ok: bool, key: str, expected: str, got: object) -> None:
    """Refuse a value unless `ok`, naming the dotted key, what was expected and what came."""
    if not ok:
        raise ConfigError(f"{key}: expected {expected}, got {got!r}")


def require_choice(value: str, choices: tuple[str, ...], key: str) -> None:
    """Refuse a value that is none of `choices`."""
    require(value in choices, key, "one of " + ", ".join(choices), value)


def engine_config(kind: type[T], value: T | Mapping[str, Any] | None, key: str, error: type[ValueError]) -> T:
    """An engine's config from what a role worker passes on.

    Args:
        kind: the engine's config class, a dataclass.
        value: one of it, a mapping of its keys, or None for the defaults.
        key: dotted prefix for error texts.
        error: the engine's error.

    Raises:
        ValueError: an `error`: a key is unknown; the text names the nearest one.
    """
    if isinstance(value, kind):
        return value
    entries = dict(cast("Mapping[str, Any]", value or {}))
    known = [entry.name for entry in fields(cast("type[DataclassInstance]", kind))]
    for name in entries:
        if name not in known:
            near = get_close_matches(name, known, n=1)
            hint = f"; did you mean {near[0]}?" if near else f"; known: {', '.join(known)}."
            raise error(f"{key}.{name}: unknown key{hint}")
    return kind(**entries)


@dataclass(frozen=True)
class BatchLimit:
    """How large a micro-batch may be: a token budget or a number of rows, the other one is None."""

    max_tokens: int | None = None
    micro_batch_size: int | None = None


def batch_limit(
    key: str, dynamic: bool | None, micro_batch_size: int | None, max_tokens: int, names: str, *, ranks: int = 1
) -> BatchLimit:
    """Resolve the three keys of one phase.

    Args:
        key: dotted prefix for error texts.
        dynamic: `use_dynamic_bsz`; None means: on unless an explicit size is given.
        micro_batch_size: rows a GPU, or None.
        max_tokens: token budget a GPU.
        names: prefix of the three keys (`ppo_`, `log_prob_`, ...).
        ranks: how many share the tokens of a micro-batch.

    Returns:
        The one limit that holds.

    Raises:
        ConfigError: a limit is not positive, or dynamic is off and no size is given.
    """
    require(ranks >= 1, f"{key}.ulysses_sequence_parallel_size", "at least 1", ranks)
    use_dynamic = micro_batch_size is None if dynamic is None else dynamic
    if use_dynamic:
        require(max_tokens >= 1, f"{key}.{names}max_token_len_per_gpu", "at least 1", max_tokens)
        return BatchLimit(max_tokens=max_tokens * ranks)
    if micro_batch_size is None:
        raise ConfigError(
            f"{key}.{names}micro_batch_size_per_gpu: expected a number of rows, because dynamic micro-batches are "
            "switched off; give a size or switch them on"
        )
    require(micro_batch_size >= 1, f"{key}.{names}micro_batch_size_per_gpu", "at least 1", micro_batch_size)
    return BatchLimit(micro_batch_size=micro_batch_size)
