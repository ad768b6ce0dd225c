"""Help for tests of what reads prompts and checks runs: tokenizers, parquet files and model folders."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq

from ostinato.ppo.config import PpoConfig
from ostinato.ppo.preflight import examine

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

WORDS = ["<unk>", "<pad>", "<eos>", "<user>", "<assistant>", "<tools>", *(f"w{number}" for number in range(200))]
TEMPLATE = (
    "{% if tools %}<tools> {{ tools | length }} w1 w2 w3 w4 w5 w6 {% endif %}"
    "{% for message in messages %}<{{ message.role }}> {{ message.content }} {% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)

GSM8K_ROW = {
    "data_source": "openai/gsm8k",
    "prompt": [{"role": "user", "content": "what is 1 + 2"}],
    "reward_model": {"ground_truth": "3"},
}
"""A row of a data file that has all that a run reads."""


def make_tokenizer(**kwargs: Any) -> PreTrainedTokenizerFast:
    """Make a tokenizer of whole words with a chat template; keywords replace its special tokens, None drops one."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

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


def write_model(folder: Path, tokenizer: dict[str, Any] | None = None, **config: Any) -> str:
    """Write a model folder as the static checks see it: config and tokenizer files, no weights; returns its path.

    Args:
        folder: is made.
        tokenizer: its `tokenizer_config.json`; None: with a chat template, a pad and an eos token.
        config: replaces entries of `config.json`.
    """
    folder.mkdir()
    values = {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 64,
        "vocab_size": 64,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": True,
    }
    (folder / "config.json").write_text(json.dumps(values | config))
    (folder / "tokenizer.json").write_text("{}")
    known = {"chat_template": "{{ messages }}", "pad_token": "<pad>", "eos_token": {"content": "<eos>"}}
    (folder / "tokenizer_config.json").write_text(json.dumps(known if tokenizer is None else tokenizer))
    return str(folder)


def faults(config: PpoConfig) -> dict[str, str]:
    """What the static checks refuse: key -> text."""
    return {problem.key: problem.text for problem in examine(config).problems}
