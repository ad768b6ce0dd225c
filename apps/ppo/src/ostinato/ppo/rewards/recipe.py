"""What a scoring process needs to know to score rows, and one row scored."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ostinato.ppo.rewards.custom import WHOLE_ARGUMENTS, check_source, load_function, made
from ostinato.ppo.rewards.errors import ScorerError
from ostinato.ppo.rewards.registry import Scorer, load, reference_for, references, scorer_for


class Row(NamedTuple):
    """What a scorer sees of one response."""

    data_source: str
    solution_str: str
    ground_truth: Any
    extra_info: Any = None


class RowBatch(NamedTuple):
    """All rows of one call of a function that scores a whole batch."""

    rows: tuple[Row, ...]
    data_source: str = "the whole batch"


Result = tuple[float, dict[str, float | str]]
"""A row's score, and what else the scorer returned of it."""


@dataclass(frozen=True)
class Recipe:
    """Which function scores a row; small and picklable.

    Attributes:
        path: a user's file; None for the registered scorers.
        name: the function's name in that file.
        kwargs: further keyword arguments of every call. A registered scorer gets those that it names.
        registered: `data_source -> "module:name"`.
        whole: the user's function scores whole batches.
    """

    path: str | None = None
    name: str = "compute_score"
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    registered: Mapping[str, str] = field(default_factory=references)
    whole: bool = False

    def check(self) -> None:
        """Check what can be checked without running a user's code.

        Raises:
            ScorerError: the file or the name is not there, or no registered scorer takes a keyword argument.
        """
        if self.path is not None:
            check_source(self.path, self.name)
            return
        taken = {name for reference in set(self.registered.values()) for name in _own_keywords(load(reference))}
        unknown = sorted(set(self.kwargs) - taken)
        if unknown:
            raise ScorerError(
                f"custom_reward_function.reward_kwargs: no registered scorer takes {', '.join(unknown)}; "
                f"known: {', '.join(sorted(taken)) or 'none'}"
            )

    def check_data_source(self, data_source: str) -> None:
        """Check that there is a scorer for a data source.

        Raises:
            UnknownDataSourceError: there is none.
        """
        if self.path is None:
            reference_for(data_source, dict(self.registered))


_STANDARD = ("data_source", "solution_str", "ground_truth", "extra_info")


def _own_keywords(function: Scorer) -> list[str]:
    return [name for name in inspect.signature(function).parameters if name not in _STANDARD]


class Resolver:
    """The functions of a recipe, loaded when they are first asked for.

    Args:
        recipe: what to load.
    """

    def __init__(self, recipe: Recipe) -> None:
        self._recipe = recipe
        self._loaded: dict[str, tuple[Scorer, dict[str, Any]]] = {}
        self._custom: tuple[Scorer, dict[str, Any]] | None = None
        if recipe.path is not None:
            self._custom = made(
                load_function(recipe.path, recipe.name, recipe.kwargs, whole=recipe.whole), recipe.kwargs
            )

    def function(self, data_source: str) -> tuple[Scorer, dict[str, Any]]:
        """Return the scorer of a data source and the keyword arguments it gets on top.

        A scorer's module may have a function `prepare()`: it is called once here, so that slow imports do not count
        against a row's time limit. It may also have `answer(solution_str, **kwargs)`: what that returns is reported as
        `pred`, so that validation can count votes.
        """
        if self._custom is not None:
            return self._custom
        if data_source not in self._loaded:
            scorer = scorer_for(data_source, dict(self._recipe.registered))
            if prepare := getattr(inspect.getmodule(scorer), "prepare", None):
                prepare()
            taken = _own_keywords(scorer)
            kwargs = {name: value for name, value in self._recipe.kwargs.items() if name in taken}
            self._loaded[data_source] = _with_answer(scorer), kwargs
        return self._loaded[data_source]

    def score_whole(self, batch: RowBatch) -> list[Result | Exception]:
        """Score a whole batch in one call; whatever the scorer raises goes on to the caller.

        Returns:
            One result a row; an error in place of a result that is none.
        """
        scorer, kwargs = self.function(batch.data_source)
        columns = zip(*batch.rows, strict=True)
        results = scorer(**dict(zip(WHOLE_ARGUMENTS, map(list, columns), strict=True)), **kwargs)
        if isinstance(results, Mapping | str) or not hasattr(results, "__len__") or not hasattr(results, "__iter__"):
            raise TypeError(f"the reward function must return a list of results; got {type(results).__name__}")
        if len(results) != len(batch.rows):
            raise ValueError(f"the reward function returned {len(results)} results for {len(batch.rows)} rows")
        return [_read_or_error(result) for result in results]

    def score(self, row: Row) -> Result:
        """Score one row; whatever the scorer raises goes on to the caller."""
        scorer, kwargs = self.function(row.data_source)
        return read_result(
            scorer(
                data_source=row.data_source,
                solution_str=row.solution_str,
                ground_truth=row.ground_truth,
                extra_info=row.extra_info,
                **kwargs,
            )
        )


def _with_answer(scorer: Scorer) -> Scorer:
    """The scorer, with what its module's `answer` says put beside a plain score as `pred`."""
    answer = getattr(inspect.getmodule(scorer), "answer", None)
    if answer is None:
        return scorer

    def score_and_answer(*, solution_str: str, **others: Any) -> dict[str, Any]:
        own = {name: value for name, value in others.items() if name not in _STANDARD}
        return {"score": scorer(solution_str=solution_str, **others), "pred": answer(solution_str, **own)}

    return score_and_answer


def _read_or_error(result: Any) -> Result | Exception:
    try:
        return read_result(result)
    except (TypeError, ValueError) as error:
        return error


def read_result(result: Any) -> Result:
    """Read what a scorer returned.

    Args:
        result: a number (int, float, bool, numpy or tensor scalar), or a mapping with `score`.

    Returns:
        The score, and the mapping's other entries: numbers as floats, texts as they are. Other types are left out.

    Raises:
        TypeError: no number, None included.
        ValueError: a score that is not finite, or a mapping without `score`.
    """
    extra: dict[str, float | str] = {}
    if isinstance(result, Mapping):
        if "score" not in result:
            raise ValueError(f"the reward function returned a dict without 'score': keys {sorted(map(str, result))}")
        for key, value in result.items():
            if key == "score":
                continue
            if isinstance(value, str):
                extra[str(key)] = value
            elif (number := _number(value)) is not None:
                extra[str(key)] = number
        result = result["score"]
    score = _number(result)
    if score is None:
        raise TypeError(f"the reward function must return a number or a dict with 'score'; got {type(result).__name__}")
    if not math.isfinite(score):
        raise ValueError(f"the reward function returned {score}; a score must be finite")
    return score, extra


def _number(value: Any) -> float | None:
    """The float that a number of any library stands for; None where it is none."""
    if isinstance(value, bool | int | float):
        return float(value)
    item = getattr(value, "item", None)
    if not callable(item):
        return None
    try:
        value = item()
    except (ValueError, RuntimeError):  # more than one element
        return None
    return float(value) if isinstance(value, bool | int | float) else None
