"""From a training engine's weights to a folder that `from_pretrained` and every inference engine reads."""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from ostinato.rollout.base import TensorSpec, WeightSource
from ostinato.rollout.model_config import read_model_config
from ostinato.workers.core.config import ModelConfig

logger = logging.getLogger(__name__)

SHARD_BYTES = 5 * 10**9
"""Largest size of one weight file, unless a single weight is larger."""

Progress = Callable[[int, int], None]
"""Called with bytes written and bytes in all."""


def export_hf(
    source: WeightSource,
    model: ModelConfig,
    path: Path,
    *,
    head: str,
    writes: bool,
    dtype: torch.dtype | None = None,
    shard_bytes: int = SHARD_BYTES,
    progress: Progress | None = None,
) -> None:
    """Write weights, config, tokenizer and generation config as a Hugging Face folder.

    The folder appears whole or not at all: it is written beside its place and renamed. An older folder of that name is
    replaced, and so is a file.

    Args:
        source: the weights; streaming them is collective, so every rank calls this.
        model: gives config, tokenizer and generation config.
        path: the folder to make.
        head: `lm` (causal language model) or `value` (sequence classification with one output).
        writes: whether this rank writes; exactly one does, and holds one weight file at a time in host memory.
        dtype: type of the weights; None: that of the model's folder.
        shard_bytes: largest size of one weight file.
        progress: told after each file.

    Raises:
        ValueError: the source lacks weights that the model has, or has others.
        OSError: the folder cannot be written.
    """
    weights = source.weights()
    if not writes:
        _drain(weights)
        return
    partial = path.with_name(f".{path.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir(parents=True)
        write_model_files(model, partial, head)
        _write(source.specs(), weights, model, partial, head, dtype, shard_bytes, progress)
        share(partial)
        replaced = path.with_name(f".{path.name}.replaced")
        _remove(replaced)  # a run that died right here left it behind
        if path.exists():
            os.replace(path, replaced)
        os.replace(partial, path)
    except BaseException as error:
        shutil.rmtree(partial, ignore_errors=True)
        if isinstance(error, Exception):
            _drain(weights)  # the other ranks are in the same collective calls, and would wait for this one
        raise
    _remove(replaced)
    # A part of a checkpoint may get another name yet: the caller reports that one.
    logger.debug("weights exported to %s", path)


def _remove(path: Path) -> None:
    """Remove a folder, or a file or link that stood in its place."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _drain(weights: Iterator[tuple[str, torch.Tensor]]) -> None:
    for _ in weights:
        pass


def write_model_files(model: ModelConfig, folder: Path, head: str) -> None:
    """Write what a model's folder holds beside its weights: config, tokenizer, generation config, code of its own.

    Args:
        model: whose files; `override_config` is applied.
        folder: made where it is absent.
        head: `value` leaves the generation config out.

    Raises:
        OSError: they cannot be written.
    """
    from transformers import AutoTokenizer
    from transformers.utils.hub import cached_file

    folder.mkdir(parents=True, exist_ok=True)
    options: dict[str, Any] = {"trust_remote_code": model.trust_remote_code}
    config: Any = read_model_config(model.path, model.override_config, **options)
    config.save_pretrained(folder)
    if head == "lm":
        generation = cached_file(
            model.path,
            "generation_config.json",
            _raise_exceptions_for_gated_repo=False,
            _raise_exceptions_for_missing_entries=False,
            _raise_exceptions_for_connection_errors=False,
        )
        if generation is not None:
            shutil.copyfile(generation, folder / "generation_config.json")
    if model.trust_remote_code and Path(model.path).is_dir():
        for code in Path(model.path).glob("*.py"):
            shutil.copyfile(code, folder / code.name)
    try:
        tokenizer = AutoTokenizer.from_pretrained(model.resolved_tokenizer_path, **options)
    except (OSError, ValueError) as error:
        logger.warning("%s holds no tokenizer (%s); the export has none either", model.resolved_tokenizer_path, error)
    else:
        _write_tokenizer(tokenizer, folder)


def _write_tokenizer(tokenizer: Any, folder: Path) -> None:
    try:
        tokenizer.save_pretrained(folder)
    except Exception as error:
        if type(error) is not Exception:
            raise
        raise OSError(f"{folder}: the tokenizer cannot be written: {error}") from error  # that library's own, of files


def share(folder: Path) -> None:
    """Give a folder's files the rights of any new file; safetensors writes them for the owner alone."""
    umask = os.umask(0)
    os.umask(umask)
    for file in folder.rglob("*"):
        if file.is_file():
            file.chmod(0o666 & ~umask)


def _write(
    specs: Mapping[str, TensorSpec],
    weights: Iterator[tuple[str, torch.Tensor]],
    model: ModelConfig,
    folder: Path,
    head: str,
    dtype: torch.dtype | None,
    shard_bytes: int,
    progress: Progress | None,
) -> None:
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    config, shell = _shell(model, head, "score.bias" in specs)
    dtype = dtype or config.dtype or next(iter(specs.values())).dtype
    assert dtype is not None, "an empty source"
    types = _checked_types(specs, shell, dtype)
    config.dtype, config.architectures = dtype, [type(shell).__name__]
    config.save_pretrained(folder)
    sizes = {name: torch.Size(specs[name].shape).numel() * kind.itemsize for name, kind in types.items()}
    shards, total = _shards(sizes, shard_bytes), sum(sizes.values())
    file_of = {name: number for number, shard in enumerate(shards) for name in shard}
    held: list[dict[str, torch.Tensor]] = [{} for _ in shards]
    written = 0
    for name, weight in weights:
        if name not in file_of:
            continue
        number = file_of[name]
        held[number][name] = weight.detach().to("cpu", types[name], copy=True).contiguous()
        if len(held[number]) < len(shards[number]):
            continue
        file = folder / _file_name(number, len(shards))
        try:
            save_file(held[number], file, metadata={"format": "pt"})
        except SafetensorError as error:  # its text for a full disk, which is no OSError
            raise OSError(f"{file} cannot be written: {error}") from error
        written += sum(tensor.nbytes for tensor in held[number].values())
        held[number] = {}
        if progress is not None:
            progress(written, total)
    if len(shards) > 1:
        index = {
            "metadata": {"total_size": total},
            "weight_map": {name: _file_name(number, len(shards)) for name, number in file_of.items()},
        }
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")


def _shell(model: ModelConfig, head: str, has_bias: bool) -> tuple[Any, Any]:
    """The exported model's config, and the model without storage."""
    from transformers import (
        AutoModelForCausalLM,
        AutoModelForSequenceClassification,
        AutoModelForTokenClassification,
    )

    options: dict[str, Any] = {"trust_remote_code": model.trust_remote_code}
    config: Any = read_model_config(model.path, model.override_config, **options)
    factory: Any = AutoModelForCausalLM
    if head == "value":
        config.num_labels = 1
        # Only a token classifier's score has a bias.
        factory = AutoModelForTokenClassification if has_bias else AutoModelForSequenceClassification
    with torch.device("meta"):
        shell = factory.from_config(config, **options)
    return config, shell


def _checked_types(specs: Mapping[str, TensorSpec], shell: Any, dtype: torch.dtype) -> dict[str, torch.dtype]:
    """The type of each tensor to write: weights that given, the folder's buffers their own.

    A tied weight may be there once or twice and is written once.

    Raises:
        ValueError: the weights are not those of the model.
    """
    from transformers.core_model_loading import revert_weight_conversion

    state = shell.state_dict(keep_vars=True)
    every = revert_weight_conversion(shell, state)
    buffers = {name: tensor for name, tensor in state.items() if not isinstance(tensor, torch.nn.Parameter)}
    own = revert_weight_conversion(shell, {**dict(shell.named_parameters()), **buffers})
    missing = sorted(own.keys() - specs.keys())
    foreign = sorted(specs.keys() - own.keys() - every.keys())
    if missing or foreign:
        raise ValueError(
            f"export: the weights do not fit {type(shell).__name__}: missing {missing[:5]}, unknown {foreign[:5]}"
        )
    kept = set(map(id, buffers.values()))  # by identity: the folder may have them under other names
    return {name: spec.dtype if id(own[name]) in kept else dtype for name, spec in specs.items() if name in own}


def _shards(sizes: Mapping[str, int], limit: int) -> list[list[str]]:
    """Names of each weight file, in order, from their bytes."""
    shards: list[list[str]] = []
    room = 0
    for name, size in sizes.items():
        if not shards or size > room:
            shards.append([])
            room = limit
        shards[-1].append(name)
        room -= size
    return shards


def _file_name(number: int, count: int) -> str:
    return "model.safetensors" if count == 1 else f"model-{number + 1:05d}-of-{count:05d}.safetensors"
