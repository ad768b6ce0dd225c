"""The weights of a checkpoint, read in one process without a GPU, whatever number of ranks wrote it.

Megatron's format is torch's own: every tensor lies there whole, dealt into pieces whose places the metadata tells.
Neither Megatron-Core nor its process groups are needed to read one.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from ostinato.rollout.base import TensorSpec
from ostinato.workers.core.config import ModelConfig
from ostinato.workers.core.engine import Head
from ostinato.workers.megatron.architecture import Architecture, read_architecture
from ostinato.workers.megatron.errors import CheckpointError
from ostinato.workers.megatron.mapping import TE_NAMES, Part, merge, table

METADATA = "metadata.json"
"""What a checkpoint's folder gets last."""

EARLIER = "Resume from an earlier one."
"""What to do about a checkpoint that cannot be read."""

_LAYER = re.compile(r"decoder\.layers\.(\d+)\.")
_EXPERT = re.compile(r"local_experts\.\d+\.")


def require_whole(path: Path) -> None:
    """Refuse a folder without the file that is written last.

    Raises:
        CheckpointError: It is not there.
    """
    if not (path / METADATA).is_file():
        raise CheckpointError(
            f"checkpoint {path}: expected a folder with a `{METADATA}` file, which is written last; found none. The "
            f"checkpoint is missing or was cut off while it was written. {EARLIER}"
        )


class SavedWeights:
    """A `WeightSource` over a checkpoint: one weight after another comes from disk, under its Hugging Face name.

    Args:
        path: What the engine's `save` wrote.
        model: The model; its folder needs a config and no weights.
        head: "lm" or "value".

    Raises:
        CheckpointError: The folder holds no whole checkpoint, or one of another model.
    """

    def __init__(self, path: Path, model: ModelConfig, head: Head) -> None:
        require_whole(path)
        self._path = path
        self._reader = FileSystemReader(path)
        try:
            metadata = self._reader.read_metadata()
            self._reader.set_up_storage_reader(metadata, is_coordinator=True)
        except Exception as error:  # a pickle that is broken may raise anything
            raise self._unreadable(error) from error
        self._saved = {
            key: entry
            for key, entry in metadata.state_dict_metadata.items()
            if isinstance(entry, TensorStorageMetadata) and not key.startswith("optimizer.")
        }
        self._architecture = read_architecture(model, head)
        self._parts = [part for part in table(self._architecture, head) if part.exported]
        self._places = {part.name: self._place(part) for part in self._parts}
        if unknown := sorted(self._saved.keys() - {key for key, _ in self._places.values()}):
            raise self._foreign(f"it holds {unknown[0]}, and the model has no such weight")

    def specs(self) -> dict[str, TensorSpec]:
        """Full shape and type of every weight, in the order of `weights`."""
        return {
            name: TensorSpec(shape=shape, dtype=self._saved[self._places[part.name][0]].properties.dtype)
            for part in self._parts
            for name, shape in part.hf
        }

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Give one weight after another, in host memory; the tensors of one Megatron parameter are held at a time."""
        for part in self._parts:
            tensors = merge(part, [self._read(*self._places[part.name])], self._architecture)
            yield from zip((name for name, _ in part.hf), tensors, strict=True)

    def _place(self, part: Part) -> tuple[str, tuple[int, ...]]:
        """The tensor that holds a part, and the part's number along its leading dimensions.

        Layers that are alike are saved as one tensor, experts always; a norm may go by TransformerEngine's name.
        """
        for key, leading in _candidates(part, self._architecture):
            entry = self._saved.get(key)
            if entry is None:
                continue
            counts, whole = tuple(entry.size)[: len(leading)], tuple(entry.size)[len(leading) :]
            wanted = (sum(shape[0] for _, shape in part.hf), *part.hf[0][1][1:])
            padded = part.kind == "vocab" and whole[1:] == wanted[1:] and whole[0] >= wanted[0]
            if (whole != wanted and not padded) or counts != tuple(count for _, count in leading):
                raise self._foreign(f"{key} has shape {tuple(entry.size)}, and the model's {part.name} has {wanted}")
            return key, tuple(number for number, _ in leading)
        raise self._foreign(f"it lacks the model's {part.name}")

    def _read(self, key: str, number: tuple[int, ...]) -> torch.Tensor:
        entry = self._saved[key]
        shape = entry.size[len(number) :]
        window = ChunkStorageMetadata(
            offsets=torch.Size([*number, *[0] * len(shape)]), sizes=torch.Size([*[1] * len(number), *shape])
        )
        whole = torch.empty(window.sizes, dtype=entry.properties.dtype)
        items = create_read_items_for_chunk_list(key, entry, [window])
        if sum(math.prod(item.lengths) for item in items) != whole.numel():
            raise self._foreign(f"{key} is not there in full")
        try:
            self._reader.read_data(LoadPlan(items), _Into(whole)).wait()
        except Exception as error:  # what lies in the pieces is pickled too
            raise self._unreadable(error) from error
        return whole.view(shape)

    def _foreign(self, what: str) -> CheckpointError:
        return CheckpointError(f"checkpoint {self._path}: {what}. It belongs to another model.")

    def _unreadable(self, error: BaseException) -> CheckpointError:
        return CheckpointError(f"checkpoint {self._path} cannot be read: {type(error).__name__}: {error}. {EARLIER}")


def _candidates(part: Part, a: Architecture) -> Iterator[tuple[str, list[tuple[int, int]]]]:
    """Names under which a parameter may be saved, and of each leading dimension there its number and their count."""
    experts = [] if part.expert is None else [(part.expert, a.num_experts)]
    saved = _EXPERT.sub("experts.", part.name)
    for each in (saved, *(saved.replace(ours, theirs) for theirs, ours in TE_NAMES.items() if ours in saved)):
        yield each, experts
        if layer := _LAYER.match(each):
            yield f"decoder.layers.{each[layer.end() :]}", [(int(layer[1]), a.num_layers), *experts]


class _Into(LoadPlanner):
    """Reads into one tensor."""

    def __init__(self, whole: torch.Tensor) -> None:
        self._whole = whole

    def set_up_planner(self, state_dict: Any, metadata: Any = None, is_coordinator: bool = False) -> None:
        """Nothing to do: the plan is made already."""

    def create_local_plan(self) -> LoadPlan:
        """Not asked for."""
        raise NotImplementedError

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        """Not asked for."""
        raise NotImplementedError

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        """Not asked for."""
        raise NotImplementedError

    def load_bytes(self, read_item: ReadItem, value: Any) -> None:
        """Not asked for."""
        raise NotImplementedError

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        """The place of a piece."""
        place = self._whole
        for dim, (start, length) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=True)):
            place = place.narrow(dim, start, length)
        return place

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        """Nothing to do: the piece is in its place."""
