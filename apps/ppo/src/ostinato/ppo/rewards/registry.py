"""Which scorer a data source has."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any, TypeVar

from ostinato.ppo.rewards.errors import ScorerError, UnknownDataSourceError

Scorer = Callable[..., Any]
F = TypeVar("F", bound=Scorer)

_GSM8K = "ostinato.ppo.rewards.gsm8k:compute_score"
_MATH = "ostinato.ppo.rewards.math:compute_score"

_references: dict[str, str] = {
    "openai/gsm8k": _GSM8K,
    "gsm8k": _GSM8K,
    "ostinato/largest": "ostinato.ppo.rewards.largest:compute_score",
    "math": _MATH,
    "lighteval/MATH": _MATH,
    "DigitalLearningGmbH/MATH-lighteval": _MATH,
    "EleutherAI/hendrycks_math": _MATH,
    "HuggingFaceH4/MATH-500": _MATH,
    "HuggingFaceH4/aime_2024": _MATH,
    "Maxwell-Jia/AIME_2024": _MATH,
    "math-ai/aime25": _MATH,
    "math-ai/amc23": _MATH,
}


def register_scorer(*data_sources: str) -> Callable[[F], F]:
    """Register a function `(data_source, solution_str, ground_truth, extra_info=None)` for data sources.

    The scoring processes import it by module and name, so it has to be defined at the top of a module that can be
    imported; a function of the main script is better given as `custom_reward_function.path`.

    Args:
        *data_sources: the values of the `data_source` column that it scores.

    Returns:
        A decorator that leaves the function as it is.

    Raises:
        ScorerError: the function cannot be imported by another process.
    """

    def register(function: F) -> F:
        module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", "")
        if module in (None, "__main__") or "<" in name:
            raise ScorerError(
                f"register_scorer({', '.join(map(repr, data_sources))}): {module}:{name} cannot be imported by the "
                "scoring processes; define it at the top of a module, or pass its file as custom_reward_function.path"
            )
        for data_source in data_sources:
            _references[data_source] = f"{module}:{name}"
        return function

    return register


def known_data_sources() -> list[str]:
    """The registered data sources, sorted."""
    return sorted(_references)


def references() -> dict[str, str]:
    """`data_source -> "module:name"` of every registered scorer."""
    return dict(_references)


def load(reference: str) -> Scorer:
    """Import the function that `module:name` names."""
    module, _, name = reference.partition(":")
    found: Any = import_module(module)
    for part in name.split("."):
        found = getattr(found, part)
    return found


def scorer_for(data_source: str, known: dict[str, str] | None = None) -> Scorer:
    """Return the scorer of a data source.

    Args:
        data_source: a value of the `data_source` column.
        known: the registry to look in; this process's own by default.

    Raises:
        UnknownDataSourceError: there is none; the text lists the known ones.
    """
    return load(reference_for(data_source, _references if known is None else known))


def reference_for(data_source: str, known: dict[str, str]) -> str:
    """Return the `module:name` of a data source's scorer.

    Raises:
        UnknownDataSourceError: there is none; the text lists the known ones.
    """
    try:
        return known[data_source]
    except KeyError:
        raise UnknownDataSourceError(
            f"no scorer for data_source {data_source!r}; known: {', '.join(sorted(known))}. "
            "Pass your own as custom_reward_function.path, or register one with ostinato.ppo.rewards.register_scorer"
        ) from None
