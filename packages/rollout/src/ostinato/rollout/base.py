"""The two contracts of this wheel: who gives weights, and who takes them and generates.

N training engines and M rollout engines need N + M adapters: a training engine implements `WeightSource`, a rollout
engine `Rollout`, and `reshard` joins any of the one with any of the other.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol, runtime_checkable

import torch

if TYPE_CHECKING:
    from ostinato.protocol import DataProto
    from ostinato.rollout.config import SamplingParams

WakeTag = Literal["weights", "kv_cache"]
"""What to bring back to the device: the parameters, or the memory of the key/value cache."""

Bucket = Sequence[tuple[str, torch.Tensor]]
"""Some named full tensors, in the rollout engine's names and dtypes."""


@dataclass(frozen=True)
class TensorSpec:
    """What is known about a weight before its first byte moves.

    Attributes:
        shape: the full (unsharded) shape.
        dtype: the dtype that the holder keeps it in; the rollout's dtype is the one that travels.
        tied_to: the name of the weight that this one shares its memory with (a tied `lm_head.weight`), or None. A tied
            name needs no bytes of its own: it is enough that one name of the group arrives.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    tied_to: str | None = None


@runtime_checkable
class WeightSource(Protocol):
    """The current weights of a training engine, under their Hugging Face names."""

    def specs(self) -> dict[str, TensorSpec]:
        """Name, full shape and dtype of every weight that `weights` yields, in that order. Moves no data."""
        ...

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield every weight of `specs` once, as a full tensor; one that is `tied_to` another may be left out.

        Collective over the training ranks: every rank must exhaust the iterator. A tensor's memory may be reused once
        the next one is asked for.
        """
        ...


@runtime_checkable
class Rollout(Protocol):
    """A generation engine that shares its device with a training engine.

    States, in the order of a step: asleep -> `wake("weights")` -> `load_weights`... -> `finish_load` ->
    `wake("kv_cache")` -> `generate`... -> `sleep`. A call outside this order raises `EngineStateError`. `sleep` forgets
    the weights: generation after it needs a new whole load.
    """

    @property
    def dp_rank(self) -> int:
        """This engine's place among the engines that generate independently."""
        ...

    @property
    def dp_size(self) -> int:
        """How many engines generate independently."""
        ...

    def specs(self) -> dict[str, TensorSpec]:
        """The weights the engine wants: Hugging Face names, full shapes, the dtype it computes in."""
        ...

    def wake(self, tag: WakeTag) -> None:
        """Take device memory for the weights or for the cache."""
        ...

    def load_weights(self, bucket: Bucket) -> None:
        """Copy some weights into the live parameters.

        The tensors of a bucket stay intact until the second next call, no longer.
        """
        ...

    def finish_load(self) -> None:
        """Declare the load whole; drops caches of older weights. A weight that never came raises `EngineStateError`."""
        ...

    def sleep(self) -> None:
        """Give device memory back. Harmless in any state, also when asleep already."""
        ...

    def generate(self, prompts: DataProto, sampling: SamplingParams) -> DataProto:
        """Answer each prompt row.

        Args:
            prompts: columns `input_ids` (B,P) int64 left-padded, `attention_mask` (B,P), `position_ids` (B,P), and the
                non-tensor columns `uid`, `rollout_id`. Zero rows are legal.
            sampling: how to draw tokens.

        Returns:
            At least one row for each prompt row, in prompt order: the columns of the design, `uid`, `rollout_id` and
            `finish_reason` ("stop", "length" or "abort"; the response mask of an aborted row is all 0).
        """
        ...

    def close(self) -> None:
        """Free everything for good; the engine cannot be used afterwards."""
        ...


@runtime_checkable
class Checksums(Protocol):
    """What a rollout engine offers beyond `Rollout` where `reshard(..., check=True)` is to be used."""

    def checksums(self) -> Mapping[str, int]:
        """`buckets.checksum` of every weight that is held, under the names of `specs` (tied names may be left out)."""
        ...
