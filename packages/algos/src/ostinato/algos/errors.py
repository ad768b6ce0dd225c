"""What this wheel raises. Every leaf is also the built-in error that fits, and survives pickling."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class AlgosError(Exception):
    """Root of the errors of `ostinato.algos`."""


class UnknownNameError(AlgosError, ValueError):
    """A name that no registry and no list of modes holds."""


class ShapeError(AlgosError, ValueError):
    """Tensors or label lists whose shapes do not fit together."""


class ArgumentError(AlgosError, ValueError):
    """A number or an option outside of what the formula allows."""


class SecondOrderError(AlgosError, NotImplementedError):
    """A gradient of a gradient, where only the first one is known."""


class SingletonGroupWarning(UserWarning):
    """A group holds one rollout: its baseline is itself and its advantages are 0."""


def unknown_name(kind: str, name: object, known: Iterable[str]) -> UnknownNameError:
    """The error for a name that is not known, with the nearest known one and all of them."""
    names = sorted(known)
    near = difflib.get_close_matches(str(name), names, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else "."
    return UnknownNameError(f"{kind}: unknown name {name!r}{hint} Known names: {', '.join(names)}")
