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
        functions = sorted(node.name for node in tree.body if isinstance(node, ast.FunctionDef))
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


def load_function(path: str, name: str, kwargs: Mapping[str, Any]) -> Scorer:
    """Load a user's function and check that it can be called as the rewards call it.

    Args:
        path: the file.
        name: the function's name.
        kwargs: further keyword arguments that every call gets.

    Returns:
        The function.

    Raises:
        ScorerError: no such function, one that is async, or one with another signature.
    """
    where = f"custom_reward_function: {path}:{name}"
    function = getattr(load_module(path), name, None)
    if not callable(function):
        raise ScorerError(f"{where} is not a function; expected {EXPECTED}")
    if inspect.iscoroutinefunction(function):
        raise ScorerError(f"{where} is async; expected a plain function {EXPECTED}")
    try:
        inspect.signature(function).bind(
            data_source="", solution_str="", ground_truth="", extra_info=None, **dict(kwargs)
        )
    except TypeError as error:
        given = f" with reward_kwargs {sorted(kwargs)}" if kwargs else ""
        raise ScorerError(
            f"{where}{inspect.signature(function)} cannot be called{given}: {error}; expected {EXPECTED}"
        ) from error
    return function
