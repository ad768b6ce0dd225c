"""Checks of config values and the three keys that set the size of a micro-batch."""

from __future__ import annotations

from dataclasses import dataclass

from ostinato.workers.core.errors import ConfigError


def require(ok: bool, key: str, expected: str, got: object) -> None:
    """Refuse a value unless `ok`, naming the dotted key, what was expected and what came."""
    if not ok:
        raise ConfigError(f"{key}: expected {expected}, got {got!r}")


def require_choice(value: str, choices: tuple[str, ...], key: str) -> None:
    """Refuse a value that is none of `choices`."""
    require(value in choices, key, "one of " + ", ".join(choices), value)


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
