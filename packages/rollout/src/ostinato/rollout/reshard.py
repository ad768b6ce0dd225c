"""The one way from training to generation and back: weights move in place, and both engines share the device."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

import torch

from ostinato.rollout.base import Checksums
from ostinato.rollout.buckets import aligned_bytes, buckets, checksum
from ostinato.rollout.errors import EngineStateError, WeightMismatchError
from ostinato.rollout.names import reconcile, same_kind, tied_groups

if TYPE_CHECKING:
    from ostinato.rollout.base import Rollout, TensorSpec, WeightSource

logger = logging.getLogger(__name__)

PHASES = ("wake_weights", "sync", "park", "wake_kv_cache", "generate", "sleep")
"""What `reshard` goes through, in order; "generate" is the body of the `with` statement."""


class _Watched:
    """The weights of a source on their way: counted, compared with their specs, renamed, and summed where asked."""

    def __init__(
        self,
        source: WeightSource,
        specs: Mapping[str, TensorSpec],
        wanted: Mapping[str, TensorSpec],
        *,
        check: bool,
    ):
        self._source = source
        self._specs = specs
        self._plan = reconcile(specs, wanted)
        self._wanted = wanted
        self._groups = tied_groups(self._plan, wanted)
        self._check = check
        self._group_sums: dict[str, tuple[str, int]] = {}
        self.sums: dict[str, int] = {}

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        seen: set[str] = set()
        for name, tensor in self._source.weights():
            self._compare(name, tensor, seen)
            seen.add(name)
            target = self._plan.get(name)
            if target is not None:
                if self._check or name in self._groups:
                    self._sum(name, target, tensor)
                yield target, tensor
            del tensor  # before the source makes the next one
        missing = tuple(name for name, spec in self._specs.items() if name not in seen and spec.tied_to is None)
        if missing:
            raise WeightMismatchError(
                f"reshard: the source ended without {', '.join(missing[:8])} ({len(missing)} of its own specs). "
                "The rollout engine stays unusable until a whole load; `weights()` must yield all of `specs()`.",
                missing=missing,
            )

    def _compare(self, name: str, tensor: torch.Tensor, seen: set[str]) -> None:
        spec = self._specs.get(name)
        if spec is None or name in seen:
            what = "twice" if name in seen else "without naming it in specs()"
            raise WeightMismatchError(f"reshard: the source sent {name} {what}.", unexpected=(name,))
        if tuple(tensor.shape) != tuple(spec.shape):
            line = f"{name}: specs {tuple(spec.shape)}, sent {tuple(tensor.shape)}"
            raise WeightMismatchError(
                f"reshard: {line}. `weights()` must yield full tensors, gathered from their shards.", shapes=(line,)
            )
        if not same_kind(tensor.dtype, spec.dtype):
            line = f"{name}: specs {spec.dtype}, sent {tensor.dtype}"
            raise WeightMismatchError(f"reshard: {line}. `weights()` must yield what `specs()` says.", shapes=(line,))

    def _sum(self, name: str, target: str, tensor: torch.Tensor) -> None:
        value = checksum(tensor.detach().to(self._wanted[target].dtype))
        self.sums[target] = value
        if name not in self._groups:
            return
        first, expected = self._group_sums.setdefault(self._groups[name], (name, value))
        if value != expected:
            raise WeightMismatchError(
                f"reshard: {first} and {name} differ in training, but are one tensor in the rollout engine. "
                "Build both engines with the same tie_word_embeddings.",
                unexpected=(name,),
            )


def sync_weights(source: WeightSource, rollout: Rollout, *, bucket_megabytes: int = 512, check: bool = False) -> None:
    """Stream the current weights of `source` into the live parameters of an awake `rollout`.

    Names and shapes are reconciled both ways before the first byte moves; tensors are cast to the rollout's dtype as
    they enter a bucket. The copy that the buckets are is gone on return.

    Args:
        source: the training engine's weights; every training rank must make this call.
        rollout: the engine, its weights awake.
        bucket_megabytes: size of a bucket; two exist at a time.
        check: compare a checksum of every weight on both sides afterwards.

    Raises:
        WeightMismatchError: names, shapes, or (with `check`) values do not fit.
        EngineStateError: the rollout refused the load, or cannot give checksums.
    """
    wanted = rollout.specs()
    if check and not isinstance(rollout, Checksums):
        raise EngineStateError(
            f"reshard(check=True): {type(rollout).__name__} has no `checksums()`. Add it, or use check=False."
        )
    stream = _Watched(source, source.specs(), wanted, check=check)
    dtypes = {name: spec.dtype for name, spec in wanted.items()}
    total_bytes = sum(aligned_bytes(math.prod(spec.shape) * spec.dtype.itemsize) for spec in wanted.values())
    for bucket in buckets(stream, bucket_megabytes, dtypes, total_bytes=total_bytes):
        rollout.load_weights(bucket)
    rollout.finish_load()
    if check and isinstance(rollout, Checksums):
        _compare_checksums(stream.sums, rollout.checksums(), wanted)


def _compare_checksums(sent: Mapping[str, int], held: Mapping[str, int], wanted: Mapping[str, TensorSpec]) -> None:
    differing = []
    for name, value in sent.items():
        known_as = name if name in held else (wanted[name].tied_to or name)
        if held.get(known_as) != value:
            differing.append(name)
    if differing:
        raise WeightMismatchError(
            f"reshard(check=True): {len(differing)} of {len(sent)} weights differ between training and rollout after "
            f"the load: {', '.join(differing[:8])}. The rollout engine's loader lost or changed them.",
            unexpected=tuple(differing),
        )


def _free_cached_memory(rollout: Rollout) -> None:
    """Hand back what torch's allocator keeps, so that another allocator on the device can have it.

    An engine in this process that looks at the device itself (`makes_room`) asks for that only where it is short:
    training would have to take the same memory again in each step.
    """
    if torch.cuda.is_initialized() and not getattr(rollout, "makes_room", False):
        torch.cuda.empty_cache()


def _unobserved(phase: str) -> None:
    pass


def _undo(rollout: Rollout, restore: Callable[[], None] | None) -> list[BaseException]:
    """Put the engine to sleep and training state back; both are tried, and what failed is returned."""
    failures: list[BaseException] = []
    for step in (rollout.sleep, partial(_free_cached_memory, rollout), restore):
        try:
            if step is not None:
                step()
        except Exception as error:
            failures.append(error)
    return failures


@contextmanager
def reshard(
    source: WeightSource,
    rollout: Rollout,
    *,
    park: Callable[[], None] | None = None,
    restore: Callable[[], None] | None = None,
    bucket_megabytes: int = 512,
    check: bool = False,
    observe: Callable[[str], None] | None = None,
) -> Iterator[Rollout]:
    """Make `rollout` ready with the current weights of `source`, and give the device back afterwards.

    On enter: wake the weights, stream (`sync_weights`), free the copy, park training state, wake the cache. On exit,
    after an error too: put the engine to sleep, restore training state.

    Args:
        source: the training engine's weights.
        rollout: the engine.
        park: frees training state from the device; called once the weights have moved.
        restore: brings training state back; called on every exit, also where `park` was never reached, so it must
            do nothing for what is there already.
        bucket_megabytes: size of a weight bucket; two exist at a time.
        check: compare checksums of both sides after the load.
        observe: called with the name of each phase when it has ended, in the order of `PHASES`; those that an error
            kept from ending are left out.

    Yields:
        `rollout`, ready to generate.

    Raises:
        RolloutError: what `sync_weights` raises. An error of the body, or of entering, is raised as it is; what then
            fails on the way back is added to it as a note.
    """
    ended = observe or _unobserved
    try:
        rollout.wake("weights")
        ended("wake_weights")
        sync_weights(source, rollout, bucket_megabytes=bucket_megabytes, check=check)
        ended("sync")
        if park is not None:
            park()
        _free_cached_memory(rollout)
        ended("park")
        rollout.wake("kv_cache")
        ended("wake_kv_cache")
        yield rollout
        ended("generate")
    except BaseException as error:
        for failure in _undo(rollout, restore):
            error.add_note(f"reshard: while cleaning up after this error: {failure!r}")
            logger.error("reshard: clean-up failed after %r", error, exc_info=failure)
        raise
    failures = _undo(rollout, restore)
    ended("sleep")
    if len(failures) == 1:
        raise failures[0]
    if failures:
        raise BaseExceptionGroup("reshard: leaving failed in more than one way", failures)
