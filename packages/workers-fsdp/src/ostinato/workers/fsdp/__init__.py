"""FsdpEngine: ostinato's TrainEngine on PyTorch FSDP2."""

from __future__ import annotations

from ostinato.workers.fsdp.config import FsdpConfig
from ostinato.workers.fsdp.engine import FsdpEngine
from ostinato.workers.fsdp.errors import FsdpError

__all__ = ["FsdpConfig", "FsdpEngine", "FsdpError"]
