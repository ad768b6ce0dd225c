"""What a role writes beside its engine's files."""

from __future__ import annotations

import pickle
import resource
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ostinato.workers.core.checkpoint import MODEL_FOLDER, CheckpointConfig, RoleCheckpoint
from ostinato.workers.core.config import ModelConfig
from ostinato.workers.core.errors import CheckpointError
from ostinato.workers.core.testing import tiny_causal_lm


def role(model):
    """A role of an engine that writes and reads nothing."""
    done = SimpleNamespace(done=lambda: True, wait=lambda: None)
    engine = SimpleNamespace(save=lambda path, background: done, load=lambda path: None)
    residency: Any = SimpleNamespace(engine=engine, training=nullcontext, choice=SimpleNamespace(strategy="plain"))
    return RoleCheckpoint(residency, model, "lm", CheckpointConfig(async_save=True))


@pytest.mark.parametrize("file", ["config.json", "tokenizer.json", "role.json"])
def test_saving_in_the_background_on_a_full_disk_names_rank_and_checkpoint(file, tmp_path, monkeypatch):
    """The engine's files are under way then, and these meet the full disk first; a limit of size stands for it.

    What transformers and tokenizers raise differs: the latter's is no OSError.
    """
    base = tiny_causal_lm(tmp_path / "base")
    saved = role(ModelConfig(path=str(base)))
    saved.save(tmp_path / "whole", writes=True)
    whole = tmp_path / "whole" / ("" if file == "role.json" else MODEL_FOLDER) / file
    if file == "role.json":  # the smallest of them
        monkeypatch.setattr("ostinato.workers.core.export.write_model_files", lambda *_: None)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (whole.stat().st_size - 1, hard))
    try:
        with pytest.raises(
            CheckpointError, match=r"actor cannot be written: rank 0: OSError: .*File too large"
        ) as caught:
            saved.save(tmp_path / "actor", writes=True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_an_adapter_that_would_count_otherwise_is_refused(tmp_path):
    """The weights fit, and would say something else: no engine can tell."""
    base = str(tiny_causal_lm(tmp_path / "base"))
    adapted = ModelConfig(path=base, lora_rank=4, lora_alpha=8)
    role(adapted).save(tmp_path / "actor", writes=True)
    role(adapted).load(tmp_path / "actor")
    with pytest.raises(CheckpointError, match=r"actor: its adapter counts with model\.lora_alpha=8, this run's"):
        role(ModelConfig(path=base, lora_rank=4, lora_alpha=16)).load(tmp_path / "actor")
    role(ModelConfig(path=base, lora_alpha=1)).save(tmp_path / "whole", writes=True)
    role(ModelConfig(path=base, lora_alpha=2)).load(tmp_path / "whole")
