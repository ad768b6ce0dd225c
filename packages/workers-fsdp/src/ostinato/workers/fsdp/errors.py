"""Errors of the FSDP engine; every one is a `FsdpError` and a standard library error, and survives pickling."""

from __future__ import annotations


class FsdpError(Exception):
    """Root of all errors that this wheel raises on purpose."""


class FsdpConfigError(FsdpError, ValueError):
    """A configuration value that cannot be used."""


class ProcessGroupMissingError(FsdpError, RuntimeError):
    """The default process group was not initialised before the engine was built."""


class ModelLoadError(FsdpError, ValueError):
    """A model folder does not hold what was asked for."""


class EngineStateError(FsdpError, RuntimeError):
    """A method was called at a moment at which the engine cannot serve it."""


class CheckpointError(FsdpError, OSError):
    """A checkpoint is missing, cut off, or belongs to another model."""
