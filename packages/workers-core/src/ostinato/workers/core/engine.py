"""The contract between the role workers and a training engine.

The roles (`actor.py`, `critic.py`, `reward.py`) and the one update loop (`update.py`) are written against
`TrainEngine`; FSDP and Megatron implement it. An engine knows one model, its optimizer and how both lie on the ranks;
it knows no algorithm: what to do with the outputs of a forward pass comes as a closure.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Literal, Protocol, TypeVar, runtime_checkable

import torch

from ostinato.controller.topology import Coordinates
from ostinato.rollout.base import WeightSource
from ostinato.workers.core.microbatch import PackedRows
from ostinato.workers.core.model import ModelConfig
from ostinato.workers.core.optim import OptimConfig

T = TypeVar("T")
C = TypeVar("C")

HOST = torch.device("cpu")

Head = Literal["lm", "value"]
"""What a model ends in: the vocabulary, or one number at every position (critic, reward model)."""


@dataclass(frozen=True)
class TokenOutputs:
    """What a model says at the predicting positions of one micro-batch.

    All tensors are 1-D over the N positions of `PackedRows.predict`, float32, on the engine's device.

    Attributes:
        log_probs: (N,) log-probability of each position's label under the temperature-scaled distribution; language
            model head only.
        entropy: (N,) entropy in nats of the same distribution; present where it was asked for.
        sum_pi_squared: (N,) Σπ² over the vocabulary of the same distribution; present where it was asked for.
        values: (N,) output of a scalar head (critic or reward model).
    """

    log_probs: torch.Tensor | None = None
    entropy: torch.Tensor | None = None
    sum_pi_squared: torch.Tensor | None = None
    values: torch.Tensor | None = None


@dataclass(frozen=True)
class StepStats:
    """One optimizer step.

    Attributes:
        grad_norm: l2 norm of the whole model's gradient, over all ranks, before clipping.
        lr: the learning rate that this step used.
        skipped: True where the gradient was not finite and no weight was changed.
    """

    grad_norm: float
    lr: float
    skipped: bool = False


OutputFn = Callable[[TokenOutputs, PackedRows], T]
"""Called once a micro-batch without gradients; what it returns is collected."""

LossFn = Callable[[TokenOutputs, PackedRows], tuple[torch.Tensor, T]]
"""Called once a micro-batch; returns this micro-batch's share of the loss (a scalar that has already been divided by
the global count) and anything to collect. For a micro-batch without a token the share is 0 and may carry no graph."""


class PendingSave(Protocol):
    """A checkpoint that is being written while training goes on."""

    def done(self) -> bool:
        """Whether this rank has nothing more to write, be it that it has failed."""
        ...

    def wait(self) -> None:
        """Return once the checkpoint is whole.

        Raises:
            OSError: it could not be written, on whichever rank; the same on all of them.
        """
        ...


@runtime_checkable
class TrainEngine(Protocol):
    """A model, its optimizer and their layout over the ranks. At most twelve members."""

    def build(self) -> None:
        """Load the model, lay it out over the ranks and make the optimizer. Called once, on every rank.

        Everything is on the device afterwards, whatever the offload flags say: the worker offloads by them.
        """
        ...

    @property
    def coordinates(self) -> Coordinates:
        """This rank's place: data-parallel rank and size, and whether it answers for its data-parallel rank."""
        ...

    @property
    def device(self) -> torch.device:
        """Where micro-batches must lie."""
        ...

    def forward(
        self,
        micro_batches: Sequence[PackedRows],
        fn: OutputFn[T],
        *,
        entropy: bool = False,
        sum_pi_squared: bool = False,
        adapter: bool = True,
    ) -> list[T] | None:
        """Run micro-batches without gradients.

        Every rank passes the same number of micro-batches (some may hold no row). Ranks that do not see the outputs
        (all but the last pipeline stage) return None. `adapter=False` runs the folder's own model where low-rank
        adapters are trained; nobody passes it elsewhere, so an engine without adapters need not take it.
        """
        ...

    def forward_backward(
        self, micro_batches: Sequence[PackedRows], fn: LossFn[T], *, entropy: bool = False
    ) -> list[T] | None:
        """Run micro-batches with gradients and add them up.

        After the call the gradient is the SUM over all micro-batches and all data-parallel ranks of the gradients of
        the scalars that `fn` returned: no division by ranks or micro-batches anywhere.
        """
        ...

    def optimizer_step(self) -> StepStats:
        """Clip by the global norm, step, advance the learning-rate schedule, zero the gradients."""
        ...

    def reduce(self, values: torch.Tensor) -> torch.Tensor:
        """Sum a small tensor over the data-parallel ranks.

        Every rank gets the same result, a new tensor on the device of `values` (which may be the CPU's).
        """
        ...

    def onload(self, *, params: bool = True, optimizer: bool = True) -> None:
        """Bring parameters and optimizer state to the device; nothing happens to what is there already."""
        ...

    def offload(self, *, params: bool = True, optimizer: bool = True) -> None:
        """Move parameters and optimizer state to host memory and free the device's."""
        ...

    def weight_source(self) -> WeightSource:
        """The model's weights under their Hugging Face names, gathered one after another.

        They stream from wherever the parameters lie, offloaded ones too.
        """
        ...

    def save(self, path: Path, *, background: bool = False) -> PendingSave | None:
        """Write model, optimizer, schedule and random state under `path`; collective over all ranks.

        Args:
            path: the folder.
            background: return once everything is copied to host memory, and write from there while training goes on. A
                save that follows waits for one under way. An engine that cannot do so writes at once.

        Returns:
            What is still being written; None: the checkpoint is whole.

        Raises:
            OSError: it cannot be written, on whichever rank; raised on all of them.
        """
        ...

    def load(self, path: Path) -> None:
        """Read what `save` wrote, at any world size; collective over all ranks."""
        ...


class ConfiguredEngine(Generic[C]):
    """What an engine is before it is built: its model, its optimizer and its own config.

    Args:
        head: "lm" for a language model, "value" for one scalar a token.
        model: which Hugging Face folder.
        optim: optimizer and schedule; None where nothing is trained.
        engine: the engine's config, a mapping of its keys, or None for the defaults.
        trainable: False freezes the weights: no gradients, no optimizer.
    """

    def __init__(
        self,
        *,
        head: Head,
        model: ModelConfig,
        optim: OptimConfig | None = None,
        engine: C | Mapping[str, Any] | None = None,
        trainable: bool = True,
    ) -> None:
        self._head: Head = head
        self._model_config = model
        self._config = self._read_config(engine)
        self._trainable = trainable
        self._optim_config = (optim or OptimConfig()) if trainable else None
        self._device = HOST
        self._counters = {"steps": 0, "skipped": 0}

    @staticmethod
    def _read_config(value: Any) -> C:
        """The engine's own config from what came for it."""
        raise NotImplementedError

    @property
    def device(self) -> torch.device:
        """Where micro-batches must lie; known after `build`."""
        return self._device

    @property
    def skipped_steps(self) -> int:
        """How many optimizer steps were skipped because the gradient was not finite."""
        return self._counters["skipped"]


EngineFactory = Callable[..., Any]
"""How a role worker gets its engine: `factory(head=..., model=..., optim=..., engine=..., trainable=...)`.

`head` is `"lm"` or `"value"`; the other arguments are the config objects of `config.py`. Factories are passed by import
path (`"ostinato.workers.fsdp:FsdpEngine"`), so that `workers.core` imports no engine.
"""
