"""The prompts of a run: parquet rows become token ids, and token ids become left-padded batches.

A prompt is tokenised once, when the data is read, with everything that the rollout will send (chat template, tools,
generation prompt). Filter, truncation and padding all work on those ids, so they cannot disagree.
"""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
import pyarrow.parquet as pq
import torch
from torch.utils.data import Dataset

from ostinato.ppo.errors import DataError
from ostinato.protocol import DataProto

logger = logging.getLogger(__name__)

Truncation = Literal["error", "left", "right", "middle"]

CARRIED = ("data_source", "reward_model", "extra_info")
"""Columns of the files that go along with a prompt; one that a file lacks is None in its rows."""

TOOLS_COLUMN = "tools"
"""Optional column: tool schemas for the chat template, as a list or as JSON text."""

_NOTE_SECONDS = 5.0
_SLICE = 512
_warned_pad: set[str] = set()


def load_tokenizer(model: Any) -> Any:
    """Load a model's tokenizer.

    Args:
        model: a section with `resolved_tokenizer_path` and `trust_remote_code`.

    Raises:
        DataError: there is none; the text holds what the library said.
    """
    from transformers import AutoTokenizer

    path = model.resolved_tokenizer_path
    try:
        return AutoTokenizer.from_pretrained(path, trust_remote_code=model.trust_remote_code)
    except (OSError, ValueError) as error:
        raise DataError(f"actor_rollout_ref.model: no tokenizer could be loaded from {path!r}: {error}") from error


def pad_token_id(tokenizer: Any) -> int:
    """Return the id that fills padded places: the tokenizer's pad token, else its end token, with one warning.

    What the id is never matters: masks come from lengths.

    Raises:
        DataError: the tokenizer has neither.
    """
    if tokenizer.pad_token_id is not None:
        return int(tokenizer.pad_token_id)
    name = str(getattr(tokenizer, "name_or_path", ""))
    if tokenizer.eos_token_id is None:
        raise DataError(f"the tokenizer of {name!r} has neither a pad nor an eos token; set one in its folder")
    if name not in _warned_pad:
        _warned_pad.add(name)
        logger.warning("the tokenizer of %r has no pad token; its eos token pads", name)
    return int(tokenizer.eos_token_id)


def truncate(ids: Sequence[int], limit: int, how: Truncation) -> Sequence[int]:
    """Cut a prompt to a length.

    Args:
        ids: token ids.
        limit: tokens that may stay.
        how: `left` cuts at the left and keeps the end, `right` keeps the start, `middle` keeps both ends (of an odd
            limit, the end gets one more), `error` refuses.

    Raises:
        DataError: `how="error"` and the prompt is longer; names both lengths.
    """
    if len(ids) <= limit:
        return ids
    if how == "left":
        return ids[len(ids) - limit :]
    if how == "right":
        return ids[:limit]
    if how == "middle":
        head = limit // 2
        return [*ids[:head], *ids[len(ids) - (limit - head) :]]
    raise DataError(
        f"a prompt has {len(ids)} tokens, data.max_prompt_length is {limit}: raise it, drop such prompts with "
        "data.filter_overlong_prompts=True, or cut them with data.truncation=left|right|middle"
    )


def render(tokenizer: Any, prompt: Any, *, column: str, tools: Any = None, options: Mapping[str, Any]) -> str:
    """Return a prompt as the text that is tokenised: the chat template applied, generation prompt included.

    Args:
        tokenizer: gives the template.
        prompt: plain text, which stays as it is, or a list of `{role, content}` messages.
        column: where the prompt comes from, for errors.
        tools: tool schemas, a list or JSON text.
        options: further arguments of the template.

    Raises:
        DataError: messages without a template, or messages that the template refuses.
    """
    if isinstance(prompt, str):
        return prompt
    name = getattr(tokenizer, "name_or_path", "")
    if getattr(tokenizer, "chat_template", None) is None:
        raise DataError(
            f"column {column!r} holds chat messages, but the tokenizer of {name!r} has no chat template: use an "
            "instruct model, add a chat_template to the tokenizer's folder, or give plain text in the column"
        )
    if isinstance(tools, str):
        tools = json.loads(tools)
    # parquet fills the keys that a message lacks with None
    messages = [{key: value for key, value in message.items() if value is not None} for message in prompt]
    try:
        return tokenizer.apply_chat_template(
            messages, tools=tools or None, add_generation_prompt=True, tokenize=False, **options
        )
    except Exception as error:
        raise DataError(f"column {column!r}: the chat template of {name!r} refuses {messages!r}: {error}") from error


class PromptDataset(Dataset[DataProto]):
    """Tokenised prompts with what belongs to them.

    Args:
        files: parquet files, read in order.
        tokenizer: a Hugging Face tokenizer.
        prompt_key: the column with the prompt.
        max_prompt_length: tokens of a prompt at most, and the width of a batch.
        filter_overlong_prompts: leave out longer prompts.
        truncation: what becomes of longer prompts that were not left out, see `truncate`.
        max_samples: rows to use, from the first on; -1 for all.
        chat_template_kwargs: further arguments of the chat template.

    Attributes:
        token_ids: the ids of each prompt, cut to length, without padding.
        lengths: tokens of each prompt before filter and truncation, those left out included.

    Raises:
        DataError: a file or column is missing, a prompt is empty or too long, or nothing is left.
    """

    def __init__(
        self,
        files: str | Sequence[str],
        tokenizer: Any,
        *,
        prompt_key: str = "prompt",
        max_prompt_length: int = 512,
        filter_overlong_prompts: bool = False,
        truncation: Truncation = "error",
        max_samples: int = -1,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        self.files = [files] if isinstance(files, str) else list(files)
        self.max_prompt_length, self.pad = max_prompt_length, pad_token_id(tokenizer)
        rows = [row for file in self.files for row in _read(file, prompt_key)]
        rows = rows if max_samples < 0 else rows[:max_samples]
        encoded = _encode(rows, tokenizer, prompt_key, chat_template_kwargs or {})
        self.lengths = [len(ids) for ids in encoded]
        keep = list(range(len(rows)))
        if filter_overlong_prompts:
            keep = [number for number in keep if len(encoded[number]) <= max_prompt_length]
            if len(keep) < len(rows):
                logger.info("%d of %d prompts have more than %d tokens and are left out", len(rows) - len(keep),
                            len(rows), max_prompt_length)  # fmt: skip
        if not keep:
            raise DataError(f"no prompt is left of {len(rows)} rows in {', '.join(self.files)}")
        self.token_ids: list[np.ndarray] = []
        for number in keep:
            try:
                cut = truncate(encoded[number], max_prompt_length, truncation)
            except DataError as error:
                raise DataError(f"row {number} of {', '.join(self.files)}: {error}") from error
            self.token_ids.append(np.asarray(cut, dtype=np.int64))
        self._numbers = keep
        self._carried = {name: objects([rows[number].get(name) for number in keep]) for name in CARRIED}
        self._carried["raw_prompt"] = objects([rows[number][prompt_key] for number in keep])

    @classmethod
    def from_config(cls, data: Any, tokenizer: Any, *, validation: bool = False) -> Self:
        """The data set of a `data` section.

        Args:
            data: the section.
            tokenizer: a Hugging Face tokenizer.
            validation: take `val_files`, not `train_files`.
        """
        return cls(
            data.val_files if validation else data.train_files,
            tokenizer,
            prompt_key=data.prompt_key,
            max_prompt_length=data.max_prompt_length,
            filter_overlong_prompts=data.filter_overlong_prompts,
            truncation=data.truncation,
            max_samples=data.val_max_samples if validation else data.train_max_samples,
            chat_template_kwargs=data.apply_chat_template_kwargs,
        )

    def __len__(self) -> int:
        return len(self.token_ids)

    def __getitem__(self, index: int) -> DataProto:
        """One prompt as a batch of one."""
        return self.rows([index])

    def __getitems__(self, places: Sequence[tuple[int, int]]) -> DataProto:
        """The batch of (epoch, index) pairs, as `data.EpochBatches` yields them."""
        return self.rows([index for _, index in places], epoch=places[0][0])

    def rows(self, indices: Sequence[int], epoch: int | None = None) -> DataProto:
        """Return prompts as a batch.

        Args:
            indices: which prompts.
            epoch: goes into `uid`, so that a prompt's groups of two epochs differ.

        Returns:
            `input_ids`, `attention_mask`, `position_ids` (B, max_prompt_length) int64, left-padded; position ids count
            from 0 at the first token and are 0 at padding. Non-tensor: `uid` (`epoch:row of the files`), `data_source`,
            `reward_model`, `extra_info`, `raw_prompt`.
        """
        width = self.max_prompt_length
        lengths = torch.tensor([len(self.token_ids[index]) for index in indices])
        mask = (torch.arange(width) >= width - lengths[:, None]).long()
        input_ids = torch.full((len(indices), width), self.pad, dtype=torch.int64)
        input_ids[mask.bool()] = torch.from_numpy(np.concatenate([self.token_ids[index] for index in indices]))
        prefix = "" if epoch is None else f"{epoch}:"
        taken = np.asarray(indices, dtype=np.int64)
        return DataProto.from_dict(
            tensors={
                "input_ids": input_ids,
                "attention_mask": mask,
                "position_ids": (mask.cumsum(-1) - 1).clamp_min(0),
            },
            non_tensors={
                "uid": objects([f"{prefix}{self._numbers[index]}" for index in indices]),
                **{name: column[taken] for name, column in self._carried.items()},
            },
        )

    def fingerprint(self) -> str:
        """A digest of all token ids in order: two data sets with the same one give the same batches."""
        digest = hashlib.sha256()
        for ids in self.token_ids:
            digest.update(len(ids).to_bytes(8, "little") + ids.tobytes())
        return digest.hexdigest()


def _read(file: str, prompt_key: str) -> list[dict[str, Any]]:
    """The rows of one parquet file, reduced to the columns that are used."""
    if not Path(file).is_file():
        raise DataError(f"data: there is no file {file!r} (data.train_files, data.val_files)")
    try:
        names = pq.read_schema(file).names
        if prompt_key not in names:
            raise DataError(f"{file} has no column {prompt_key!r} (data.prompt_key); it has {', '.join(names)}")
        wanted = [name for name in (prompt_key, *CARRIED, TOOLS_COLUMN) if name in names]
        rows = pq.read_table(file, columns=list(dict.fromkeys(wanted))).to_pylist()
    except (OSError, ValueError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"{file} cannot be read as parquet: {error}") from error
    for row in rows:
        if row.get("data_source") is None:
            row["data_source"] = Path(file).stem
    return rows


def _encode(
    rows: Sequence[Mapping[str, Any]], tokenizer: Any, prompt_key: str, options: Mapping[str, Any]
) -> list[list[int]]:
    """Token ids of every row's prompt, at full length."""
    started = noted = time.monotonic()
    encoded: list[list[int]] = []
    for start in range(0, len(rows), _SLICE):
        part = rows[start : start + _SLICE]
        texts = [
            render(tokenizer, row[prompt_key], column=prompt_key, tools=row.get(TOOLS_COLUMN), options=options)
            for row in part
        ]
        # A template writes its special tokens itself; plain text gets the tokenizer's.
        plain = isinstance(part[0][prompt_key], str)
        encoded += tokenizer(texts, add_special_tokens=plain, return_attention_mask=False)["input_ids"]
        if time.monotonic() - noted > _NOTE_SECONDS:
            noted = time.monotonic()
            logger.info("tokenised %d of %d prompts", len(encoded), len(rows))
    for number, ids in enumerate(encoded):
        if not ids:
            raise DataError(f"row {number}: the prompt in column {prompt_key!r} has no tokens")
    logger.info("tokenised %d prompts in %.1f s", len(rows), time.monotonic() - started)
    return encoded


def objects(values: Sequence[Any]) -> np.ndarray:
    """A 1-D object array, whatever the values' own lengths."""
    column = np.empty(len(values), dtype=object)
    for number, value in enumerate(values):
        column[number] = value
    return column
