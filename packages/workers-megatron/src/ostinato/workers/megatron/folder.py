"""The tensors of a Hugging Face folder, read one at a time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from ostinato.workers.core.errors import ModelFolderError
from ostinato.workers.core.weight_index import SAFETENSORS_INDEX, find_index, read_index
from ostinato.workers.megatron.errors import ModelLoadError
from ostinato.workers.megatron.mapping import Shape


class Folder:
    """A folder's safetensors files.

    Args:
        path: a Hugging Face folder, or a name whose files are in the local cache or can be fetched.

    Raises:
        ModelLoadError: There are no safetensors files, or they cannot be read.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        root = Path(path)
        if not root.is_dir():
            from huggingface_hub import snapshot_download

            root = Path(snapshot_download(path, allow_patterns=["*.safetensors", "*.json"]))
        index = root / SAFETENSORS_INDEX
        self._files: dict[str, Path] = {}
        if find_index(root) == index:
            try:
                self._files = read_index(index)
            except ModelFolderError as error:
                raise ModelLoadError(f"model.path {path}: {error}") from error
            return
        for file in sorted(root.glob("*.safetensors")):
            with self._readable(file), _opened(file) as opened:
                self._files |= dict.fromkeys(opened.keys(), file)
        if not self._files:
            raise ModelLoadError(f"model.path {path}: expected *.safetensors files, found none in {root}.")

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def read(self, name: str, shape: Shape) -> torch.Tensor:
        """One whole tensor, as it was saved.

        Raises:
            ModelLoadError: It has another shape than the configuration says, or cannot be read.
        """
        with self._readable(self._files[name]), _opened(self._files[name]) as opened:
            tensor = opened.get_tensor(name)
        if tuple(tensor.shape) != shape:
            raise ModelLoadError(
                f"model.path {self.path}: expected {name} of shape {shape} by its configuration, got "
                f"{tuple(tensor.shape)}."
            )
        return tensor

    @contextmanager
    def _readable(self, file: Path) -> Iterator[None]:
        """Name the file that is missing, cut off, or not what its index says."""
        try:
            yield
        except (OSError, SafetensorError) as error:
            raise ModelLoadError(
                f"model.path {self.path}: {file} cannot be read ({type(error).__name__}: {error}). The folder is not "
                "whole; fetch or copy it again."
            ) from error


def _opened(file: Path) -> safe_open:
    return safe_open(file, framework="pt")
