"""Which weight of the training engine goes into which weight of the rollout engine, decided before any byte moves."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from ostinato.rollout.errors import WeightMismatchError

if TYPE_CHECKING:
    import torch

    from ostinato.rollout.base import TensorSpec

_ADAPTER_PREFIX = "base_model.model."
_WRAPPED = ".base_layer."


def _spellings(name: str) -> Iterator[str]:
    """The names one weight may have where adapters wrap some modules: as it is, wrapped, unwrapped."""
    for stem in (name, name.removeprefix(_ADAPTER_PREFIX), _ADAPTER_PREFIX + name):
        yield stem
        module, _, leaf = stem.rpartition(".")
        yield f"{module}{_WRAPPED}{leaf}"
        yield stem.replace(_WRAPPED, ".")


def _group(specs: Mapping[str, TensorSpec], name: str) -> str:
    return specs[name].tied_to or name


def _sizes(spec: TensorSpec) -> str:
    return "x".join(map(str, spec.shape)) or "scalar"


def same_kind(one: torch.dtype, other: torch.dtype) -> bool:
    """Whether casting keeps what a number means: between floats; not from codes of a quantised weight to floats."""
    return one == other or (one.is_floating_point and other.is_floating_point)


def reconcile(source: Mapping[str, TensorSpec], rollout: Mapping[str, TensorSpec]) -> dict[str, str]:
    """Match the weights of both sides by name and shape, both ways.

    Each name is resolved by itself against the live rollout engine: an adapter may wrap some modules of a model and
    not others. A tied group of the rollout (an embedding and the `lm_head` that shares its memory) is satisfied by one
    of its names; where the source sends several, all are delivered.

    Args:
        source: what the training engine will send.
        rollout: what the rollout engine holds.

    Returns:
        For each source name, in order, the rollout's name for it.

    Raises:
        WeightMismatchError: a name is left over on either side, two source names meet in one rollout name, or shapes
            differ, or one side holds floats and the other does not; the error lists all of them.
    """
    plan: dict[str, str] = {}
    taken: dict[str, str] = {}
    unexpected: list[str] = []
    shapes: list[str] = []
    for name, spec in source.items():
        target = next((spelling for spelling in _spellings(name) if spelling in rollout), None)
        if target is None and spec.tied_to is not None and spec.tied_to in source:
            # The rollout has only one name for the pair, and the source sends that one as well.
            continue
        if target is None or target in taken:
            unexpected.append(name if target is None else f"{name} (same place as {taken[target]})")
            continue
        plan[name] = target
        taken[target] = name
        if tuple(spec.shape) != tuple(rollout[target].shape):
            shapes.append(f"{name}: source {_sizes(spec)}, rollout {_sizes(rollout[target])}")
        elif not same_kind(spec.dtype, rollout[target].dtype):
            shapes.append(f"{name}: source {spec.dtype}, rollout {rollout[target].dtype}")
    arrived = {_group(rollout, target) for target in taken}
    missing = [name for name in rollout if _group(rollout, name) not in arrived and rollout[name].tied_to is None]
    if missing or unexpected or shapes:
        _raise_mismatch(missing, unexpected, shapes)
    return plan


def _raise_mismatch(missing: list[str], unexpected: list[str], shapes: list[str]) -> None:
    def listed(names: list[str]) -> str:
        return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")

    parts = [
        f"{len(names)} {what}: {listed(names)}"
        for names, what in (
            (missing, "wanted by the rollout engine and not sent"),
            (unexpected, "sent and not known to the rollout engine"),
            (shapes, "of another shape or kind of number"),
        )
        if names
    ]
    raise WeightMismatchError(
        "reshard: the weights of training and rollout do not fit, nothing was moved. "
        + "; ".join(parts)
        + ". Both engines must be built from one config.json (see tie_word_embeddings for an lm_head alone).",
        missing=tuple(missing),
        unexpected=tuple(unexpected),
        shapes=tuple(shapes),
    )


def tied_groups(plan: Mapping[str, str], rollout: Mapping[str, TensorSpec]) -> dict[str, str]:
    """Source names that share one rollout memory with another source name.

    Returns:
        For each such source name, the rollout's own name of the group. Their bytes must agree: a model that ties
        them in the rollout and not in training would silently lose one of the two.
    """
    members: dict[str, list[str]] = {}
    for name, target in plan.items():
        members.setdefault(_group(rollout, target), []).append(name)
    return {name: group for group, names in members.items() if len(names) > 1 for name in names}


def check_shape(engine: str, name: str, sent: Sequence[int], wanted: Sequence[int]) -> None:
    """Refuse a tensor of another shape than the engine's weight of this name.

    Args:
        engine: the engine's name, for the message.
        name: of the weight.
        sent: shape of the tensor.
        wanted: shape of the weight.

    Raises:
        WeightMismatchError: they differ.
    """
    if tuple(sent) != tuple(wanted):
        line = f"{name}: sent {tuple(sent)}, wanted {tuple(wanted)}"
        raise WeightMismatchError(f"{engine} rollout, load_weights: {line}. Send full tensors.", shapes=(line,))
