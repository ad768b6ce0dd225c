"""FsdpEngine: ostinato's TrainEngine on PyTorch FSDP2."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ostinato.workers.fsdp.config import FsdpConfig
from ostinato.workers.fsdp.errors import FsdpError

if TYPE_CHECKING:
    from ostinato.workers.fsdp.engine import FsdpEngine

__all__ = ["FsdpConfig", "FsdpEngine", "FsdpError"]


def __getattr__(name: str) -> Any:
    """Import the engine when it is first asked for: its config alone needs no transformers."""
    if name == "FsdpEngine":
        from ostinato.workers.fsdp.engine import FsdpEngine

        return FsdpEngine
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
