"""Help for tests of what reads prompts: a tokenizer of whole words, and parquet files of prompts of known lengths."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

WORDS = ["<unk>", "<pad>", "<eos>", "<user>", "<assistant>", "<tools>", *(f"w{number}" for number in range(200))]
TEMPLATE = (
    "{% if tools %}<tools> {{ tools | length }} w1 w2 w3 w4 w5 w6 {% endif %}"
    "{% for message in messages %}<{{ message.role }}> {{ message.content }} {% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def make_tokenizer(**kwargs: Any) -> PreTrainedTokenizerFast:
    """Make a tokenizer of whole words with a chat template; keywords replace its special tokens, None drops one."""
    core = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    given = {"unk_token": "<unk>", "pad_token": "<pad>", "eos_token": "<eos>", "chat_template": TEMPLATE, **kwargs}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, **{name: value for name, value in given.items() if value is not None}
    )
    tokenizer.name_or_path = "tiny-model"
    return tokenizer


def words(count: int, first: int = 0) -> str:
    """A text of so many tokens."""
    return " ".join(f"w{(first + number) % 200}" for number in range(count))


def chat(text: str) -> list[dict[str, str]]:
    """A prompt of one user message."""
    return [{"role": "user", "content": text}]


def write_rows(path: Path, rows: list[dict[str, Any]]) -> str:
    """Write a parquet file and return its path."""
    pq.write_table(pa.Table.from_pylist(rows), path)
    return str(path)


def write_prompts(path: Path, lengths: list[int], **more: Any) -> str:
    """Write prompts of so many words each; the template adds two tokens."""
    return write_rows(path, [{"prompt": chat(words(n, number)), **more} for number, n in enumerate(lengths)])
