"""The errors of this wheel: one root, each leaf also a standard library error, all picklable."""

from __future__ import annotations


class RolloutError(Exception):
    """Root of every error that `ostinato.rollout` raises on purpose."""


class ConfigError(RolloutError, ValueError):
    """A configuration value that cannot work.

    Attributes:
        key: the dotted key as a user writes it on the command line.
    """

    def __init__(self, message: str, *, key: str = ""):
        super().__init__(message)
        self.key = key


class UnknownBackendError(ConfigError):
    """A rollout engine of this name was never registered."""


class BackendUnavailableError(RolloutError, ImportError):
    """The engine behind a known backend is not installed here."""


class BackendNotImplementedError(RolloutError, NotImplementedError):
    """The name is known, the engine may be installed, but this version has no backend for it."""


class WeightMismatchError(RolloutError, ValueError):
    """The weights of the training engine and of the rollout engine do not fit, by name, shape or value.

    Attributes:
        missing: names that the rollout engine needs and the source does not give.
        unexpected: names that the source gives and the rollout engine does not know.
        shapes: lines of the form `name: source shape, rollout shape`, or of their dtypes.
    """

    def __init__(
        self,
        message: str,
        *,
        missing: tuple[str, ...] = (),
        unexpected: tuple[str, ...] = (),
        shapes: tuple[str, ...] = (),
    ):
        super().__init__(message)
        self.missing = missing
        self.unexpected = unexpected
        self.shapes = shapes


class EngineStateError(RolloutError, RuntimeError):
    """A call that the engine's state forbids: asleep, no weights yet, or only a part of them."""


class PromptError(RolloutError, ValueError):
    """Prompts that no engine can take: wrong columns, wrong padding, no token, or longer than the context."""


class GenerationError(RolloutError, RuntimeError):
    """The engine produced something that cannot be right, such as logits that are not numbers."""
