"""MegatronEngine: ostinato's TrainEngine on Megatron-Core.

Importing this package imports neither Megatron-Core nor transformers and touches no device; the engine does that when
it is built.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ostinato.workers.megatron.config import MegatronConfig
from ostinato.workers.megatron.errors import MegatronError

if TYPE_CHECKING:
    from ostinato.workers.megatron.engine import MegatronEngine

__all__ = ["MegatronConfig", "MegatronEngine", "MegatronError"]


def __getattr__(name: str) -> Any:
    """Import the engine when it is first asked for: its config alone needs no torch."""
    if name == "MegatronEngine":
        from ostinato.workers.megatron.engine import MegatronEngine

        return MegatronEngine
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
