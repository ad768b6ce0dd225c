"""What the static checks and the plan know of model folders and data files; read without torch, without network."""

from __future__ import annotations

import json
import math
import os
import re
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

_VOCABULARY = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "tekken.json")
_CONTEXT = ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "max_sequence_length")


class Unreadable(ValueError):  # noqa: N818  (becomes a Problem of the key that named it)
    """A folder or file cannot be used; the text says why and what to do."""


@dataclass(frozen=True)
class ModelFacts:
    """A model folder.

    Attributes:
        folder: where it lies.
        config: its `config.json`, with the run's overrides; the text part of a multi-modal one.
        weight_format: `safetensors` or `bin` (`pytorch_model*.bin`); None where there are no weight files.
        num_parameters: from the weight files, else an estimate from the config; None where neither tells.
    """

    folder: Path
    config: Mapping[str, Any]
    weight_format: Literal["safetensors", "bin"] | None
    num_parameters: int | None

    @property
    def has_weights(self) -> bool:
        """Whether there are weight files."""
        return self.weight_format is not None

    @property
    def architecture(self) -> str:
        """Class name of the model, or its type."""
        return next(iter(self.config.get("architectures") or ()), None) or self.config.get("model_type", "unknown")

    @property
    def num_heads(self) -> int | None:
        """Attention heads."""
        return self.config.get("num_attention_heads") or self.config.get("n_head")

    @property
    def num_kv_heads(self) -> int | None:
        """Key/value heads; as many as heads where the config does not say."""
        return self.config.get("num_key_value_heads") or self.num_heads

    @property
    def max_positions(self) -> int | None:
        """Tokens that fit the model's positions, or None where it sets no limit."""
        return next((int(self.config[name]) for name in _CONTEXT if self.config.get(name)), None)


@dataclass(frozen=True)
class TokenizerFacts:
    """A tokenizer's files.

    Attributes:
        has_chat_template: whether it can turn messages into a prompt.
        pad_token: its padding token, or None.
        eos_token: its end token, or None.
    """

    has_chat_template: bool
    pad_token: str | None
    eos_token: str | None


@dataclass(frozen=True)
class DataFacts:
    """A parquet file.

    Attributes:
        num_rows: its rows.
        columns: its column names.
        prompt_kind: `chat`, `text` or `other` (`missing` where there is no such column).
        has_ground_truth: whether `reward_model` holds mappings with `ground_truth`.
        data_sources: values of `data_source` that its statistics name (the smallest and the largest of each row group).
    """

    num_rows: int
    columns: tuple[str, ...]
    prompt_kind: str
    has_ground_truth: bool
    data_sources: tuple[str, ...]


def model_folder(path: str) -> Path:
    """The local folder of a model: a folder, or a name that lies in the Hugging Face cache.

    Raises:
        Unreadable: neither.
    """
    folder = Path(path).expanduser()
    if folder.is_dir():
        return folder.absolute()
    if not re.fullmatch(r"[\w][\w.-]*(/[\w][\w.-]*)?", path):
        raise Unreadable(f"there is no folder {path}")
    from huggingface_hub import constants, try_to_load_from_cache

    cached = try_to_load_from_cache(path, "config.json")
    if isinstance(cached, str):
        return Path(cached).parent
    raise Unreadable(
        f"there is no folder {path!r}, and no model of this name in the local cache ({constants.HF_HUB_CACHE}). Give a "
        f"local folder, or fetch the model once with: hf download {path}"
    )


def read_model(path: str, overrides: Mapping[str, Any] | None = None) -> ModelFacts:
    """Read a model folder's `config.json` and the headers of its weight files.

    Raises:
        Unreadable: no such model, no usable `config.json`, or weight files that are not whole.
    """
    folder = model_folder(path)
    config = _read_json(folder / "config.json")
    if config is None:
        raise Unreadable(f"{folder} has no config.json, so it is no Hugging Face model folder")
    inner = config.get("text_config")
    if isinstance(inner, dict):
        config = {**config, **inner}
    config = {**config, **(overrides or {})}
    weights = sorted(folder.glob("*.safetensors"))
    others = list(folder.glob("pytorch_model*.bin"))  # the other form that transformers loads; .gguf and .pt are not
    if weights or others:
        _check_index(folder)
    counted = sum(_parameters_in(file) for file in weights) or _parameters_by_shape(config)
    return ModelFacts(folder, config, "safetensors" if weights else "bin" if others else None, counted)


def read_tokenizer(path: str) -> TokenizerFacts:
    """Read what a tokenizer's files say, without building it.

    Raises:
        Unreadable: no such folder, or no tokenizer in it.
    """
    folder = model_folder(path)
    if not any((folder / name).exists() for name in _VOCABULARY):
        raise Unreadable(f"{folder} has no tokenizer: expected one of {', '.join(_VOCABULARY)}")
    config = _read_json(folder / "tokenizer_config.json") or {}
    special = _read_json(folder / "special_tokens_map.json") or {}
    has_template = bool(config.get("chat_template")) or any(
        (folder / name).exists() for name in ("chat_template.jinja", "chat_template.json", "additional_chat_templates")
    )

    def token(name: str) -> str | None:
        value = config.get(name) or special.get(name)
        return value.get("content") if isinstance(value, dict) else value

    return TokenizerFacts(has_template, token("pad_token"), token("eos_token"))


def read_data(path: str, prompt_key: str) -> DataFacts:
    """Read a parquet file's schema and statistics; no row is read.

    Raises:
        Unreadable: no such file, or not parquet.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    if not os.path.exists(path):
        raise Unreadable(f"there is no file {path}")
    try:
        file = pq.ParquetFile(path)
    except (pa.ArrowException, OSError) as error:
        raise Unreadable(f"{path} is not a parquet file ({str(error).splitlines()[0]})") from error
    with file:
        schema, metadata = file.schema_arrow, file.metadata
        kind = _prompt_kind(schema.field(prompt_key).type) if prompt_key in schema.names else "missing"
        truth = "reward_model" in schema.names and _has_field(schema.field("reward_model").type, "ground_truth")
        return DataFacts(metadata.num_rows, tuple(schema.names), kind, truth, _extremes(metadata, "data_source"))


def _prompt_kind(arrow_type: Any) -> str:
    import pyarrow.types as kinds

    if kinds.is_string(arrow_type) or kinds.is_large_string(arrow_type):
        return "text"
    if kinds.is_list(arrow_type) or kinds.is_large_list(arrow_type):
        item = arrow_type.value_type
        if kinds.is_struct(item) and {"role", "content"} <= {item.field(i).name for i in range(item.num_fields)}:
            return "chat"
    return "other"


def _has_field(arrow_type: Any, name: str) -> bool:
    import pyarrow.types as kinds

    return kinds.is_struct(arrow_type) and arrow_type.get_field_index(name) >= 0


def _extremes(metadata: Any, column: str) -> tuple[str, ...]:
    """The smallest and largest values of a text column, from the statistics of the row groups."""
    found: set[str] = set()
    for group in range(metadata.num_row_groups):
        row_group = metadata.row_group(group)
        for index in range(row_group.num_columns):
            chunk = row_group.column(index)
            if chunk.path_in_schema == column and chunk.statistics is not None and chunk.statistics.has_min_max:
                found |= {value for value in (chunk.statistics.min, chunk.statistics.max) if isinstance(value, str)}
    return tuple(sorted(found))


def _read_json(path: Path) -> dict[str, Any] | None:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise Unreadable(f"{path} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise Unreadable(f"{path} cannot be read: expected a JSON object, got {type(value).__name__}")
    return value


def _check_index(folder: Path) -> None:
    """Refuse weights in several files that their index does not lead to."""
    from ostinato.workers.core.errors import ModelFolderError  # its package brings torch
    from ostinato.workers.core.weight_index import find_index, read_index

    if index := find_index(folder):
        try:
            read_index(index)
        except ModelFolderError as error:
            raise Unreadable(str(error)) from error


_NO_SAFETENSORS = (
    *(OSError, struct.error, MemoryError, OverflowError, RecursionError),
    *(ValueError, KeyError, TypeError, AttributeError),
)
"""What reading numbers and a header out of anything else ends in."""


def _parameters_in(file: Path) -> int:
    """Numbers in a safetensors file, from its header (8 bytes of length, then JSON)."""
    try:
        with file.open("rb") as handle:
            start = handle.read(8)
            if start == b"version ":
                raise Unreadable(
                    f"{file} holds no weights: it is what Git LFS leaves in their place; run `git lfs pull`"
                )
            (length,) = struct.unpack("<Q", start)
            header = json.loads(handle.read(length))
        return sum(math.prod(entry["shape"]) for name, entry in header.items() if name != "__metadata__")
    except Unreadable:
        raise
    except _NO_SAFETENSORS as error:
        raise Unreadable(f"{file} is not a whole safetensors file: {type(error).__name__}: {error}") from error


def _parameters_by_shape(config: Mapping[str, Any]) -> int | None:
    """Parameters of a dense Llama-like decoder with this config; an estimate for others."""
    names: Sequence[str] = (
        "hidden_size",
        "num_hidden_layers",
        "num_attention_heads",
        "intermediate_size",
        "vocab_size",
    )
    if not all(isinstance(config.get(name), int) for name in names):
        return None
    hidden, layers, heads, inner, vocabulary = (config[name] for name in names)
    head = config.get("head_dim") or hidden // heads
    kv_heads = config.get("num_key_value_heads") or heads
    attention = 2 * hidden * head * heads + 2 * hidden * head * kv_heads
    embeddings = vocabulary * hidden * (1 if config.get("tie_word_embeddings") else 2)
    return layers * (attention + 3 * hidden * inner + 2 * hidden) + embeddings + hidden
