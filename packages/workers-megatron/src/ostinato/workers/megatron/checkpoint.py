"""Checkpoints through Megatron's distributed checkpointing: written by every rank, read at other parallel sizes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ostinato.workers.core.checkpoint import WriteUnderWay
from ostinato.workers.core.optim import OptimConfig
from ostinato.workers.megatron.build import Built
from ostinato.workers.megatron.errors import CheckpointError
from ostinato.workers.megatron.optim import inner, parts
from ostinato.workers.megatron.parallel import import_megatron
from ostinato.workers.megatron.saved import require_whole
from ostinato.workers.megatron.writing import Writer, failure_named

FORMAT = {"distrib_optim_sharding_type": "fully_reshardable", "chained_optim_avoid_prefix": True}
"""Optimizer state by parameter, so that it can be read with other parallel sizes."""

OPTIMIZER, MODEL = "optimizer", "model"


def save(
    path: Path,
    built: Built,
    optimizer: Any | None,
    counters: Mapping[str, int],
    device: torch.device,
    writer: Writer,
    *,
    background: bool = False,
) -> WriteUnderWay | None:
    """Write model, optimizer, counters and each rank's random state, or begin to; collective.

    An optimizer that has made no step has no state, and none is written.

    Args:
        path: A folder, made where it is absent. Its `metadata.json` is written last.
        built: The model, on the device.
        optimizer: None for a frozen model.
        counters: Small whole numbers that all ranks agree on; `updates` of them are steps that changed weights.
        device: Where the model trains.
        writer: Writes it, once an earlier checkpoint is there.
        background: It is written while training goes on.

    Returns:
        What the writer began.

    Raises:
        CheckpointError: It cannot be written, on whichever rank.
    """
    writer.end()
    with failure_named(path, "written"):
        metadata = _metadata()
        state = _model_state(built, metadata)
        if optimizer is not None and counters["updates"]:
            state[OPTIMIZER] = optimizer.sharded_state_dict(state, is_loading=False, metadata=metadata)
        state["counters"] = dict(counters)
        state["distributed"] = _distributed(optimizer)
        state["random"] = _random_state(device)
    return (writer.start if background else writer.write)(path, state, dict(FORMAT))


def load(
    path: Path, built: Built, optimizer: Any | None, optim: OptimConfig | None, device: torch.device
) -> dict[str, int]:
    """Read what `save` wrote into a model and its optimizer, at any parallel sizes; collective.

    A rank that did not exist when the checkpoint was written keeps its random state. The optimizer's own settings
    (decay, betas, epsilon) stay those of the configuration.

    Args:
        path: The folder.
        built: The model, on the device; gets the saved weights.
        optimizer: Gets the saved state, or none where none was saved; None for a frozen model.
        optim: The configuration's settings; None for a frozen model.
        device: Where the model trains.

    Returns:
        The counters.

    Raises:
        CheckpointError: The folder holds no whole checkpoint, or one of another model, or cannot be read.
    """
    require_whole(path)
    checkpointing, metadata = import_megatron("dist_checkpointing"), _metadata()
    with failure_named(path, "read"):
        saved = checkpointing.load_tensors_metadata(str(path))
        common = checkpointing.load_common_state_dict(str(path))
        objects = {entry.key for entry in checkpointing.serialization.load_sharded_metadata(str(path)).values()}
        counters, distributed = common["counters"], common["distributed"]
    state = _model_state(built, metadata)
    _check_model(path, state, saved)
    random = {name: entry for name, entry in _random_state(device).items() if entry.key in objects}
    resumes = optimizer is not None and bool(counters["updates"])
    if resumes and distributed != _distributed(optimizer):
        raise CheckpointError(
            f"checkpoint {path}: its optimizer state was written with "
            f"megatron.use_distributed_optimizer={distributed}; set it so to go on from there."
        )
    if optimizer is not None:
        _reset_state(optimizer, filled=resumes)
    if resumes and optimizer is not None:
        state[OPTIMIZER] = optimizer.sharded_state_dict(state, is_loading=True, metadata=metadata)
    with failure_named(path, "read"):
        loaded = checkpointing.load({**state, "random": random}, str(path))
    for name, module in _named_modules(built):
        module.load_state_dict(loaded[name])
    if resumes and optimizer is not None:
        _load_optimizer(optimizer, loaded[OPTIMIZER])
    elif optimizer is not None:
        optimizer.reload_model_params()
    if optimizer is not None and optim is not None:
        _own_settings(optimizer, optim)
    for kind, value in loaded.get("random", {}).items():
        torch.set_rng_state(value) if kind == "cpu" else torch.cuda.set_rng_state(value, device)
    return {name: int(value) for name, value in counters.items()}


def _distributed(optimizer: Any | None) -> bool:
    """Whether the optimizer's state is dealt over the data-parallel ranks; the two kinds write it differently."""
    return optimizer is not None and hasattr(parts(optimizer)[0], "gbuf_ranges")


def _metadata() -> dict[str, Any]:
    group = import_megatron("parallel_state").get_data_parallel_group(with_context_parallel=True)
    return {**FORMAT, "dp_cp_group": group}


def _named_modules(built: Built) -> Iterator[tuple[str, nn.Module]]:
    """The pieces under the names that Megatron's optimizers expect."""
    modules = built.modules
    for index, module in enumerate(modules):
        yield (MODEL if len(modules) == 1 else f"{MODEL}{index}"), module


def _model_state(built: Built, metadata: dict[str, Any]) -> dict[str, Any]:
    return {name: module.sharded_state_dict(metadata=metadata) for name, module in _named_modules(built)}  # pyright: ignore


def _random_state(device: torch.device) -> dict[str, Any]:
    """This rank's random state, as objects of the checkpoint."""
    mapping, rank = import_megatron("dist_checkpointing.mapping"), dist.get_rank()
    state = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return {
        kind: mapping.ShardedObject(f"random.rank{rank}.{kind}", value, (1,), (0,), replica_id=0)
        for kind, value in state.items()
    }


def _check_model(path: Path, state: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
    """Compare names and whole shapes; a vocabulary's padding may differ."""
    mine: dict[str, Sequence[int] | None] = {}
    for entries in state.values():
        for entry in entries.values():
            if hasattr(entry, "allow_shape_mismatch"):
                mine[entry.key] = None if entry.allow_shape_mismatch else tuple(entry.global_shape)
            elif hasattr(entry, "build"):
                mine[entry.key] = None
    theirs = {name: tuple(entry.global_shape) for name, entry in saved.items() if not name.startswith("optimizer.")}
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    whole = {name: shape for rank in everyone for name, shape in rank.items()}
    differing = sorted(
        name
        for name in whole.keys() | theirs.keys()
        if name not in whole or name not in theirs or (whole[name] is not None and whole[name] != theirs[name])
    )
    if differing:
        first = differing[0]
        raise CheckpointError(
            f"checkpoint {path}: {len(differing)} weights differ from the model; the first is {first}: the model has "
            f"{whole.get(first, 'no such weight')}, the checkpoint {theirs.get(first, 'no such weight')}. "
            "It belongs to another model."
        )


def _reset_state(optimizer: Any, *, filled: bool) -> None:
    """Forget an optimizer's state, and make one of zeros to be read into where `filled`.

    Megatron's own way to make it leaves out torch's step counter.
    """
    for part in parts(optimizer):
        adam = inner(part)
        if adam is None:
            continue
        adam.state.clear()
        for group in adam.param_groups:
            group.pop("step", None)  # TransformerEngine's counts here
        if not filled:
            continue
        if not isinstance(adam, torch.optim.AdamW):
            part.init_state_fn(adam, part.config)
            continue
        for group in adam.param_groups:
            for parameter in group["params"]:
                adam.state[parameter] = {
                    "step": torch.tensor(0.0),
                    "exp_avg": torch.zeros_like(parameter.detach()),
                    "exp_avg_sq": torch.zeros_like(parameter.detach()),
                }


def _load_optimizer(optimizer: Any, loaded: Any) -> None:
    """Give each part of a chain its state.

    Of torch's step counters the distributed optimizer makes one tensor for all parameters, which then counts each of
    them, and it looks for one among the moments; both hold only where neither Apex nor TransformerEngine is installed.
    """
    chain = parts(optimizer)
    entries = [loaded] if len(chain) == 1 else [entry for _, entry in sorted(loaded.items())]
    for part, entry in zip(chain, entries, strict=True):
        moments = entry.pop("param_state", None)
        part.load_state_dict(entry)
        if moments is None:
            continue
        adam = inner(part)
        state = adam.state if adam is not None else {}
        steps = {parameter: held.pop("step") for parameter, held in state.items() if "step" in held}
        part.load_parameter_state_from_fully_reshardable(moments)
        for parameter, step in steps.items():
            state[parameter]["step"] = step.clone()


def _own_settings(optimizer: Any, optim: OptimConfig) -> None:
    for part in parts(optimizer):
        adam = inner(part)
        for group in adam.param_groups if adam is not None else ():
            group |= {"weight_decay": optim.weight_decay, "betas": optim.betas, "eps": optim.eps}
