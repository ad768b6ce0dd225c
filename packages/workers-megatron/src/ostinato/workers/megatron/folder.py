"""The tensors of a Hugging Face folder, read one at a time."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors import safe_open

from ostinato.workers.megatron.errors import ModelLoadError
from ostinato.workers.megatron.mapping import Shape


class Folder:
    """A folder's safetensors files.

    Args:
        path: a Hugging Face folder, or a name whose files are in the local cache or can be fetched.

    Raises:
        ModelLoadError: There are no safetensors files.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        root = Path(path)
        if not root.is_dir():
            from huggingface_hub import snapshot_download

            root = Path(snapshot_download(path, allow_patterns=["*.safetensors", "*.json"]))
        index = root / "model.safetensors.index.json"
        self._files: dict[str, Path] = {}
        if index.is_file():
            weight_map = json.loads(index.read_text())["weight_map"]
            self._files = {name: root / file for name, file in weight_map.items()}
        else:
            for file in sorted(root.glob("*.safetensors")):
                with _opened(file) as opened:
                    self._files |= dict.fromkeys(opened.keys(), file)
        if not self._files:
            raise ModelLoadError(f"model.path {path}: expected *.safetensors files, found none in {root}.")

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def read(self, name: str, shape: Shape) -> torch.Tensor:
        """One whole tensor, as it was saved.

        Raises:
            ModelLoadError: It has another shape than the configuration says.
        """
        with _opened(self._files[name]) as opened:
            tensor = opened.get_tensor(name)
        if tuple(tensor.shape) != shape:
            raise ModelLoadError(
                f"model.path {self.path}: expected {name} of shape {shape} by its configuration, got "
                f"{tuple(tensor.shape)}."
            )
        return tensor


def _opened(file: Path) -> safe_open:
    return safe_open(file, framework="pt")
