"""Where training state lies: on the device during the phases that use it, elsewhere between them if so asked.

The offload flags are the user's; the phases are context managers, so that a phase that fails leaves the device as one
that ends.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ostinato.workers.core.config import EngineChoice
from ostinato.workers.core.engine import TrainEngine
from ostinato.workers.core.memory import PeakMemory


class Residency:
    """Moves one engine's parameters and optimizer state between device and host, as its flags say.

    Attributes:
        engine: the engine whose state is moved.
        choice: the role's section; names the engine and holds the flags.
        param_offload: parameters lie on the host between phases.
        optimizer_offload: optimizer state lies on the host between phases.
        peaks: the most memory that the engine's phases need.
    """

    def __init__(self, engine: TrainEngine, choice: EngineChoice) -> None:
        self.engine = engine
        self.choice = choice
        self.param_offload = choice.param_offload
        self.optimizer_offload = choice.optimizer_offload
        self.peaks = PeakMemory(engine.device)

    @contextmanager
    def training(self) -> Iterator[None]:
        """Parameters and optimizer state are on the device inside."""
        self.engine.onload(params=True, optimizer=True)
        try:
            yield
        finally:
            self.park()

    @contextmanager
    def inference(self) -> Iterator[None]:
        """Parameters are on the device inside; optimizer state is not asked for."""
        self.engine.onload(params=True, optimizer=False)
        try:
            yield
        finally:
            self.park()

    def park(self) -> None:
        """Move to the host what the flags say lies there between phases; nothing else moves."""
        if self.param_offload or self.optimizer_offload:
            self.engine.offload(params=self.param_offload, optimizer=self.optimizer_offload)
