"""The index of a model folder whose weights lie in several files."""

from __future__ import annotations

import json
from pathlib import Path

from ostinato.workers.core.errors import ModelFolderError

WHOLE = ("model.safetensors", "pytorch_model.bin")
"""Files that hold all weights, in the order in which transformers looks for them."""

SAFETENSORS_INDEX = "model.safetensors.index.json"


def find_index(folder: Path) -> Path | None:
    """The index that transformers goes by in a folder; None where one file holds all weights, or there is no index."""
    for whole in WHOLE:
        if (folder / whole).is_file():
            return None
        if (index := folder / f"{whole}.index.json").is_file():
            return index
    return None


def read_index(index: Path) -> dict[str, Path]:
    """The file of each weight, by the weight's name.

    Args:
        index: what `find_index` gave.

    Raises:
        ModelFolderError: It is no index, names no weights, or names files that are not there.
    """
    again = "Fetch or copy the folder again"
    try:
        content = json.loads(index.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelFolderError(f"{index} cannot be read ({type(error).__name__}: {error}). {again}.") from error
    named = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(named, dict) or not named or not all(isinstance(file, str) for file in named.values()):
        raise ModelFolderError(
            f"{index}: expected a `weight_map` that names the file of each weight, and there is none, or it is empty. "
            f"{again}; where one file holds all weights, remove the index."
        )
    files = {name: index.parent / file for name, file in named.items()}
    if absent := sorted(str(file) for file in set(files.values()) if not file.is_file()):
        raise ModelFolderError(f"{index} names {absent[0]}, which is not there (missing: {len(absent)}). {again}.")
    return files
