"""From a training engine's weights to a folder that `from_pretrained` and every inference engine reads."""

from __future__ import annotations

import logging
import os
import shutil
from pathlib import Path
from typing import Any

import torch

from ostinato.rollout.base import WeightSource
from ostinato.rollout.model_config import read_model_config
from ostinato.workers.core.config import ModelConfig

logger = logging.getLogger(__name__)


def export_hf(source: WeightSource, model: ModelConfig, path: Path, *, head: str, writes: bool) -> None:
    """Write weights, config, tokenizer and generation config as a Hugging Face folder.

    The folder appears whole or not at all: it is written beside its place and renamed. An older folder of that name is
    replaced.

    Args:
        source: the weights; streaming them is collective, so every rank calls this.
        model: gives config, tokenizer and generation config.
        path: the folder to make.
        head: `lm` (causal language model) or `value` (sequence classification with one output).
        writes: whether this rank keeps the weights and writes; exactly one does, and needs host memory for all of them.

    Raises:
        ValueError: the source lacks weights that the model has, or has others.
    """
    kept: dict[str, torch.Tensor] = {}
    for name, weight in source.weights():
        if writes:
            kept[name] = weight.detach().to("cpu", copy=True)
    if not writes:
        return
    partial = path.with_name(f".{path.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    _write(kept, model, partial, head)
    share(partial)
    replaced = path.with_name(f".{path.name}.replaced")
    shutil.rmtree(replaced, ignore_errors=True)  # a run that died right here left it behind
    if path.exists():
        os.replace(path, replaced)
    os.replace(partial, path)
    shutil.rmtree(replaced, ignore_errors=True)
    logger.info("%d weights exported to %s", len(kept), path)


def share(folder: Path) -> None:
    """Give a folder's files the rights of any new file; safetensors writes them for the owner alone."""
    umask = os.umask(0)
    os.umask(umask)
    for file in folder.iterdir():
        file.chmod(0o666 & ~umask)


def _write(weights: dict[str, torch.Tensor], model: ModelConfig, folder: Path, head: str) -> None:
    from transformers import (
        AutoModelForCausalLM,
        AutoModelForSequenceClassification,
        AutoModelForTokenClassification,
        AutoTokenizer,
        GenerationConfig,
    )

    options: dict[str, Any] = {"trust_remote_code": model.trust_remote_code}
    config: Any = read_model_config(model.path, model.override_config, **options)
    factory: Any = AutoModelForCausalLM
    if head == "value":
        config.num_labels = 1
        # Only a token classifier's score has a bias.
        factory = AutoModelForTokenClassification if "score.bias" in weights else AutoModelForSequenceClassification
    dtype = config.dtype or next(iter(weights.values())).dtype
    with torch.device("meta"):
        shell = factory.from_config(config, dtype=dtype, **options)
    _check_names(weights, shell)
    shell.save_pretrained(folder, state_dict={name: weight.to(dtype) for name, weight in weights.items()})
    if head == "lm" and (Path(model.path) / "generation_config.json").exists():
        GenerationConfig.from_pretrained(model.path).save_pretrained(folder)
    try:
        tokenizer = AutoTokenizer.from_pretrained(model.resolved_tokenizer_path, **options)
    except (OSError, ValueError) as error:
        logger.warning("%s holds no tokenizer (%s); the export has none either", model.resolved_tokenizer_path, error)
    else:
        tokenizer.save_pretrained(folder)


def _check_names(weights: dict[str, torch.Tensor], shell: Any) -> None:
    """Compare with the model's own names; a tied weight may be there once or twice."""
    names = {name for name, _ in shell.named_parameters()}
    missing = sorted(names - weights.keys())
    foreign = sorted(weights.keys() - shell.state_dict().keys())
    if missing or foreign:
        raise ValueError(
            f"export: the weights do not fit {type(shell).__name__}: missing {missing[:5]}, unknown {foreign[:5]}"
        )
