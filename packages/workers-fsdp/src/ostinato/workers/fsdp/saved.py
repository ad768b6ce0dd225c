"""The weights of a checkpoint, read in one process without a GPU, whatever number of ranks wrote it."""

from __future__ import annotations

import warnings
from pathlib import Path

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load as load_state_dict

from ostinato.workers.core.checkpoint import named_failure
from ostinato.workers.core.config import ModelConfig
from ostinato.workers.core.engine import Head
from ostinato.workers.fsdp.build import make_meta_module, read_config
from ostinato.workers.fsdp.checkpoint import check_model, read_metadata
from ostinato.workers.fsdp.errors import CheckpointError
from ostinato.workers.fsdp.folder import folder_tensors
from ostinato.workers.fsdp.lora import add_adapter
from ostinato.workers.fsdp.weights import FsdpWeightSource

HOST = torch.device("cpu")


class SavedWeights(FsdpWeightSource):
    """A `WeightSource` over a checkpoint: one weight after another comes from disk, under its Hugging Face name.

    Args:
        path: What the engine's `save` wrote.
        model: The model; its folder needs a config and no weights.
        head: "lm" or "value".

    Raises:
        CheckpointError: The folder holds no whole checkpoint, or one of another model.
    """

    def __init__(self, path: Path, model: ModelConfig, head: Head) -> None:
        metadata = read_metadata(path)
        module = make_meta_module(model, read_config(model, head), head, torch.float32)
        if model.lora_rank > 0:
            add_adapter(module, model, head)
        check_model(path, module, metadata)
        names = {id(tensor): f"model.{name}" for name, tensor in folder_tensors(module).items()}
        self._path = path
        self._saved_names = names
        self._saved_dtypes = {
            name: entry.properties.dtype
            for name, entry in metadata.state_dict_metadata.items()
            if isinstance(entry, TensorStorageMetadata)
        }
        super().__init__(module, (), HOST, self._saved_dtypes[next(iter(names.values()))])

    def _full(self, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        name = self._saved_names[id(tensor)]
        whole = torch.empty(tensor.shape, dtype=self._saved_dtypes[name])
        with named_failure(f"checkpoint {self._path} cannot be read", CheckpointError), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            load_state_dict({name: whole}, storage_reader=FileSystemReader(self._path), no_dist=True)
        return whole.to(dtype)
