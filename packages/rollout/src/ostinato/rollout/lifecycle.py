"""The states of a rollout engine, kept once for every backend."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from ostinato.rollout.errors import EngineStateError, WeightMismatchError

if TYPE_CHECKING:
    from ostinato.rollout.base import TensorSpec


class Lifecycle:
    """What a rollout engine may do next, and which weights have come so far.

    A backend calls one method at the start of each of its own (`generate` calls `require_ready`), so that an engine
    whose weights were dropped or half replaced refuses to generate instead of producing rubbish.

    Args:
        name: the engine's name, for messages.
        specs: the weights the engine wants; tied names of one group count as one.
        loaded: True where the engine has read its weights by itself when it was built.
    """

    def __init__(self, name: str, specs: Mapping[str, TensorSpec], *, loaded: bool = False):
        self._name = name
        self._group = {key: spec.tied_to or key for key, spec in specs.items()}
        self._needed = set(self._group.values())
        self._arrived: set[str] = set(self._needed) if loaded else set()
        self._came: set[str] = set()
        self._whole = loaded
        self._weights_awake = False
        self._cache_awake = False
        self._closed = False

    @property
    def ready(self) -> bool:
        """Whether `generate` is allowed now."""
        return self._whole and self._weights_awake and self._cache_awake and not self._closed

    @property
    def closed(self) -> bool:
        """Whether the engine is gone."""
        return self._closed

    @property
    def asleep(self) -> bool:
        """Whether neither weights nor cache hold device memory."""
        return not (self._weights_awake or self._cache_awake)

    def _refuse(self, call: str, expected: str, got: str) -> None:
        raise EngineStateError(
            f"{self._name} rollout, {call}: expected {expected}, but {got}. "
            "Use `with reshard(source, rollout):`, which makes the calls in the right order."
        )

    def _require_open(self, call: str) -> None:
        if self._closed:
            self._refuse(call, "an open engine", "it was closed")

    def wake(self, tag: str) -> None:
        """Note that weights or cache are on the device again."""
        self._require_open(f"wake({tag!r})")
        if tag == "weights":
            self._weights_awake = True
        elif tag == "kv_cache":
            if not self._weights_awake:
                self._refuse("wake('kv_cache')", "awake weights", "they are asleep")
            self._cache_awake = True
        else:
            self._refuse(f"wake({tag!r})", "'weights' or 'kv_cache'", f"the tag is {tag!r}")

    def load(self, names: Iterable[str]) -> None:
        """Note that some weights come; from here on the engine is not ready until `finish_load`.

        Raises:
            EngineStateError: asleep or closed, or a name comes a second time: what a load that was broken off brought
                must not pass for a part of the next one.
            WeightMismatchError: a name that the engine does not have.
        """
        self._require_open("load_weights")
        if not self._weights_awake:
            self._refuse("load_weights", "awake weights", "they are asleep")
        names = list(names)
        unknown = tuple(name for name in names if name not in self._group)
        if unknown:
            raise WeightMismatchError(
                f"{self._name} rollout, load_weights: no parameter for {', '.join(unknown)}. "
                "Names must be those of `specs()`.",
                unexpected=unknown,
            )
        if self._whole:
            self._arrived.clear()
            self._came.clear()
        again = [name for name in names if name in self._came]
        if again:
            self._refuse(
                "load_weights",
                "each weight once in a load",
                f"{', '.join(again[:8])} came before; `sleep` gives up a load that was broken off",
            )
        self._whole = False
        self._came.update(names)
        self._arrived.update(self._group[name] for name in names)

    def finish_load(self) -> None:
        """Note that the load is whole, or refuse."""
        self._require_open("finish_load")
        if not self._weights_awake:
            self._refuse("finish_load", "awake weights", "they are asleep")
        missing = sorted(self._needed - self._arrived)
        if missing:
            shown = ", ".join(missing[:8]) + (", ..." if len(missing) > 8 else "")
            self._refuse("finish_load", "every weight", f"{len(missing)} of {len(self._needed)} never came: {shown}")
        self._whole = True

    def sleep(self) -> None:
        """Note that device memory was given back: the weights are gone with it."""
        self._weights_awake = self._cache_awake = False
        self._whole = False
        self._arrived.clear()
        self._came.clear()

    def require_whole(self, call: str) -> None:
        """Refuse a call before a whole load, while asleep or after `close`.

        Raises:
            EngineStateError: with what is missing.
        """
        self._require_open(call)
        if not self._weights_awake:
            self._refuse(call, "an awake engine", "it is asleep")
        if not self._whole:
            got = f"{len(self._arrived)} of {len(self._needed)} have come since it woke, and no finish_load"
            self._refuse(call, "a whole load of weights", got)

    def require_ready(self) -> None:
        """Refuse generation before a whole load, without a cache, while asleep or after `close`.

        Raises:
            EngineStateError: with what is missing.
        """
        self.require_whole("generate")
        if not self._cache_awake:
            self._refuse("generate", "an awake key/value cache", "only the weights are awake")

    def close(self) -> None:
        """Note that the engine is gone."""
        self.sleep()
        self._closed = True
