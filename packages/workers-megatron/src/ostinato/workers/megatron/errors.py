"""Errors of the Megatron engine; every one is a `MegatronError` and a standard library error, and survives pickling."""

from __future__ import annotations


class MegatronError(Exception):
    """Root of all errors that this wheel raises on purpose."""


class MegatronConfigError(MegatronError, ValueError):
    """A configuration value that cannot be used."""


class MegatronMissingError(MegatronError, ImportError):
    """Megatron-Core is not installed."""


class ProcessGroupMissingError(MegatronError, RuntimeError):
    """The default process group was not initialised before the engine was built."""


class DeviceError(MegatronError, RuntimeError):
    """Megatron-Core cannot run on this rank's device."""


class LayoutConflictError(MegatronError, RuntimeError):
    """Two engines of one process ask for different parallel sizes."""


class TransformerEngineMissingError(MegatronError, RuntimeError):
    """A setting needs TransformerEngine, which is not installed or not chosen."""


class ModelLoadError(MegatronError, ValueError):
    """A model folder does not hold what was asked for, or a model that this engine does not know."""


class EngineStateError(MegatronError, RuntimeError):
    """A method was called at a moment at which the engine cannot serve it."""


class CheckpointError(MegatronError, OSError):
    """A checkpoint is missing, cut off, or belongs to another model."""
