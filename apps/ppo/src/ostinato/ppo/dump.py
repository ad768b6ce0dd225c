"""Rollout dumps: the rows of a step as JSON lines, to be read by people and by `examples/offline_analysis.py`."""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ostinato.ppo.config import TrainerConfig
from ostinato.ppo.prepare.files import write_whole
from ostinato.ppo.rewards.manager import EXTRA
from ostinato.protocol import DataProto

logger = logging.getLogger(__name__)

TOKENS = ("old_log_probs", "rollout_log_probs", "values", "sum_pi_squared")
"""Columns (B, R) that become lists, one number a response token."""

READS = (
    *("prompts", "responses", "attention_mask", "response_mask", "token_level_scores", "reward_baselines", *TOKENS),
    *("uid", "rollout_id", "data_source", "reward_model", "finish_reason"),
)
"""Columns that a dump reads; those that are not there leave their keys out."""

DIGITS = 6
"""Digits behind the point of scores and of the numbers in the lists."""


def observers(trainer: TrainerConfig, tokenizer: Any) -> dict[str, Callable[[DataProto], None]]:
    """What looks at the scored rows of each training step, by its name among the timings."""
    folder = trainer.rollout_data_dir
    return {} if folder is None else {"dump_rollout_generations": RolloutDump(folder, tokenizer)}


class RolloutDump:
    """Writes rows to `FOLDER/STEP.jsonl`, one object a row.

    Keys: `input`, `output` (texts, special tokens left out), `gts`, `score` (what training takes), `step`, and what the
    reward function returned beside the score under its own names; further `uid`, `rollout_id`, `data_source`,
    `finish_reason`, `response_mask`, `reward_baseline` and the lists of `TOKENS`, as far as the rows have them. Lists
    end with the response.

    A file appears whole or not at all, and replaces one of the same step. Where it cannot be written, the run goes on,
    with one warning.

    Args:
        folder: where to write; is made.
        tokenizer: turns tokens into text.
    """

    def __init__(self, folder: str | os.PathLike[str], tokenizer: Any) -> None:
        self.folder, self.tokenizer = Path(folder), tokenizer
        self._failed = False

    def reads(self, batch: DataProto) -> list[str]:
        """The columns of a batch that a dump reads."""
        return [name for name in batch.columns if name in READS or name.startswith(EXTRA)]

    def __call__(self, batch: DataProto) -> None:
        """Write the rows of a batch under its `meta_info["global_step"]`."""
        self.write(batch.meta_info["global_step"], [batch.get(self.reads(batch))])

    def write(self, step: int, parts: list[DataProto]) -> None:
        """Write rows that lie here under a step."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with (
                write_whole(self.folder / f"{step}.jsonl") as path,
                # A reward function may return text that UTF-8 does not have; as an escape it is JSON again.
                path.open("w", encoding="utf-8", errors="backslashreplace") as file,
            ):
                for part in parts:
                    for row in _rows(part, self.tokenizer, step):
                        file.write(_line(row))
        except OSError as error:
            if not self._failed:
                self._failed = True
                logger.warning("%s cannot be written; the run goes on without such dumps: %r", self.folder, error)


def _rows(data: DataProto, tokenizer: Any, step: int) -> list[dict[str, Any]]:
    """The objects of rows that lie here."""
    if not len(data):
        return []
    assert data.batch is not None
    tensors, others = data.batch, data.non_tensor_batch
    asked, responses, mask = (tensors[name].cpu() for name in ("prompts", "responses", "response_mask"))
    attended = tensors["attention_mask"].cpu().bool()
    lengths = attended[:, asked.shape[1] :].sum(-1).tolist()
    prompts = [row[on[: len(row)]].tolist() for row, on in zip(asked, attended, strict=True)]
    answers = [row[:length].tolist() for row, length in zip(responses, lengths, strict=True)]
    keys: dict[str, list[Any]] = {
        "input": tokenizer.batch_decode(prompts, skip_special_tokens=True),
        "output": tokenizer.batch_decode(answers, skip_special_tokens=True),
        "gts": [_truth(cell) for cell in others["reward_model"]] if "reward_model" in others else [None] * len(data),
        "score": np.round(tensors["token_level_scores"].sum(-1).cpu().double().numpy(), DIGITS).tolist(),
        "step": [step] * len(data),
    }
    extras = {name.removeprefix(EXTRA): column for name, column in others.items() if name.startswith(EXTRA)}
    keys |= {name: [_number(value) for value in column] for name, column in extras.items() if name not in keys}
    for name in ("uid", "rollout_id", "data_source", "finish_reason"):
        if name in others:
            keys[name] = others[name].tolist()
    if "reward_baselines" in tensors:
        keys["reward_baseline"] = tensors["reward_baselines"].tolist()
    keys["response_mask"] = [row[:length].tolist() for row, length in zip(mask.int(), lengths, strict=True)]
    for name in TOKENS:
        if name in tensors:
            column = np.round(tensors[name].cpu().double().numpy(), DIGITS)
            keys[name] = [row[:length].tolist() for row, length in zip(column, lengths, strict=True)]
    return [dict(zip(keys, values, strict=True)) for values in zip(*keys.values(), strict=True)]


def _line(row: dict[str, Any]) -> str:
    """A row as JSON, with the characters escaped that some readers take for the end of a line."""
    text = json.dumps(row, ensure_ascii=False, default=_plain)
    return text.replace("\x85", r"\u0085").replace("\u2028", r"\u2028").replace("\u2029", r"\u2029") + "\n"


def _truth(cell: Any) -> Any:
    return cell.get("ground_truth") if isinstance(cell, Mapping) else cell


def _number(value: Any) -> Any:
    """A cell of a result column; what JSON has no number for becomes null."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _plain(value: Any) -> Any:
    """What JSON does not know: arrays and their numbers as lists and numbers, anything else as text."""
    return value.tolist() if hasattr(value, "tolist") else str(value)
