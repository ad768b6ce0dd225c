"""A user's own reward function, from a Python file."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from ostinato.ppo.rewards.errors import ScorerError
from ostinato.ppo.rewards.registry import Scorer

EXPECTED = "compute_score(data_source, solution_str, ground_truth, extra_info=None)"
EXPECTED_WHOLE = "compute_score(data_sources, solution_strs, ground_truths, extra_infos)"
"""What `reward_manager.name=batch` calls: lists of one entry a row, in the rows' order; returns a list of results."""

ARGUMENTS = ("data_source", "solution_str", "ground_truth", "extra_info")
WHOLE_ARGUMENTS = ("data_sources", "solution_strs", "ground_truths", "extra_infos")


def check_source(path: str, name: str) -> None:
    """Check, without running it, that a file is Python and defines a name at its top level.

    Args:
        path: the file.
        name: the function's name.

    Raises:
        ScorerError: the file is not there, is not Python, or defines no such name.
    """
    file = Path(path).expanduser()
    if not file.is_file():
        raise ScorerError(f"custom_reward_function.path: there is no file {path!r}")
    try:
        tree = ast.parse(file.read_text(encoding="utf-8"), filename=str(file))
    except (SyntaxError, UnicodeDecodeError) as error:
        raise ScorerError(f"custom_reward_function.path: {path} is not Python: {error}") from error
    names = set(_defined(tree.body))
    if name not in names and "*" not in names:
        functions = sorted(node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef))
        raise ScorerError(
            f"custom_reward_function.name: {path} defines no {name!r}; its functions: {', '.join(functions) or 'none'}"
        )


def _defined(body: list[ast.stmt]) -> list[str]:
    """Names that a module's statements bind, those within its top-level `if` and `try` included."""
    names: list[str] = []
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.append(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names += [(alias.asname or alias.name).split(".")[0] for alias in node.names]
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names += [part.id for target in targets for part in ast.walk(target) if isinstance(part, ast.Name)]
        elif isinstance(node, ast.If | ast.Try | ast.With):
            blocks = [node.body, getattr(node, "orelse", []), getattr(node, "finalbody", [])]
            blocks += [handler.body for handler in getattr(node, "handlers", [])]
            names += [name for block in blocks for name in _defined(block)]
    return names


def load_module(path: str) -> ModuleType:
    """Run a Python file as a module of its own; modules beside it can be imported from it."""
    file = Path(path).expanduser().resolve()
    spec = importlib.util.spec_from_file_location(f"ostinato_custom_reward_{file.stem}", file)
    if spec is None or spec.loader is None:
        raise ScorerError(f"custom_reward_function.path: {path} is no Python file (its name must end in .py)")
    if str(file.parent) not in sys.path:
        sys.path.insert(0, str(file.parent))
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def load_function(path: str, name: str, kwargs: Mapping[str, Any], *, whole: bool = False) -> Scorer:
    """Load a user's function or class and check that it can be called as the rewards call it.

    Args:
        path: the file.
        name: the function's name, or that of a class whose instances are called like the function.
        kwargs: further keyword arguments that every call gets; a class gets them once, when it is made.
        whole: it scores whole batches (`EXPECTED_WHOLE`), not single rows (`EXPECTED`).

    Returns:
        The function, or the class; `made` turns it into what is called.

    Raises:
        ScorerError: no such function, one that is async, or one with another signature.
    """
    where, expected = f"custom_reward_function: {path}:{name}", EXPECTED_WHOLE if whole else EXPECTED
    found = getattr(load_module(path), name, None)
    if not callable(found):
        raise ScorerError(f"{where} is not a function; expected {expected}")
    called, first = found, ()
    if inspect.isclass(found):
        if not any("__call__" in vars(base) for base in found.__mro__):
            raise ScorerError(f"{where} is a class without __call__; expected {expected} as its __call__")
        _bind(where, found, (), kwargs, "its __init__ to take the reward_kwargs")
        called, first, kwargs = vars_of(found, "__call__"), (None,), {}
    if inspect.iscoroutinefunction(called):
        raise ScorerError(f"{where} is async; expected a plain function {expected}")
    arguments: dict[str, Any] = dict.fromkeys(WHOLE_ARGUMENTS if whole else ARGUMENTS, "")
    _bind(where, called, first, arguments | dict(kwargs), expected, kwargs)
    return found


def vars_of(cls: type, name: str) -> Any:
    """What a class or one of its bases defines under a name."""
    return next(vars(base)[name] for base in cls.__mro__ if name in vars(base))


def _bind(
    where: str, called: Any, first: tuple[Any, ...], arguments: Mapping[str, Any], expected: str, given: Any = None
) -> None:
    signature = inspect.signature(called)
    try:
        signature.bind(*first, **arguments)
    except TypeError as error:
        kwargs = arguments if given is None else given
        told = f" with reward_kwargs {sorted(kwargs)}" if kwargs else ""
        raise ScorerError(f"{where}{signature} cannot be called{told}: {error}; expected {expected}") from error


def made(found: Scorer, kwargs: Mapping[str, Any]) -> tuple[Scorer, dict[str, Any]]:
    """What is called, and the keyword arguments of each call: a class is made here, and its instance needs none."""
    if not inspect.isclass(found):
        return found, dict(kwargs)
    instance: Any = found(**kwargs)
    return instance, {}
