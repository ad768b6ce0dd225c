"""Errors of this wheel: one root, every leaf also an error of the standard library, all picklable."""

from __future__ import annotations


class WorkersError(Exception):
    """Root of everything that `ostinato.workers.core` raises on purpose."""


class ConfigError(WorkersError, ValueError):
    """A config value that cannot work; the text begins with its dotted key."""


class BatchError(WorkersError, ValueError):
    """Rows that a worker cannot train on or score: a column is missing, or two columns contradict each other."""


class EngineImportError(WorkersError, ImportError):
    """The engine's import path does not lead to a factory."""


class CheckpointError(WorkersError, OSError):
    """A folder is not what a role worker saved, or a role cannot be saved in it."""


class RoleError(WorkersError, RuntimeError):
    """A method was called on a worker whose role does not have it, or before `init_model`."""


class ModelMismatchError(WorkersError, ValueError):
    """Two models that must share something (a vocabulary, a head) do not."""


class ModelFolderError(WorkersError, ValueError):
    """A model folder's files contradict each other, or one of them cannot be read."""
