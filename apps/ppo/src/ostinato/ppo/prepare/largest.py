"""A task and a model small enough for a laptop: name the largest of three digits.

Writes a model that has learnt nothing (random weights, a real transformers architecture, its own small tokenizer with a
chat template, saved as a Hugging Face folder) and all 1,000 prompts in two disjoint parts, 800 to train and 200 to
validate:

    python -m ostinato.ppo.prepare.largest --local_dir DIR

The best constant answer, 9, is right for 27.1 % of all prompts.
"""

from __future__ import annotations

import argparse
import itertools
import logging
import os
import random
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from ostinato.ppo.prepare.files import write_whole

logger = logging.getLogger(__name__)

DATA_SOURCE = "ostinato/largest"
NUM_DIGITS, NUM_TRAIN = 3, 800
WORDS = ("<pad>", "<s>", "</s>", "<unk>", "largest", "of", "is", *"0123456789", ".", "the", "and")
CHAT_TEMPLATE = (
    "{{ '<s>' }}{% for message in messages %}{{ message['content'] + ' ' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'is' }}{% endif %}"
)


def rows(digits: Sequence[tuple[int, ...]], split: str) -> Iterator[dict[str, Any]]:
    """Yield one row of the parquet file for each tuple of digits."""
    for index, numbers in enumerate(digits):
        yield {
            "data_source": DATA_SOURCE,
            "prompt": [{"role": "user", "content": "largest of " + " ".join(map(str, numbers))}],
            "ability": "comparison",
            "reward_model": {"style": "rule", "ground_truth": str(max(numbers))},
            "extra_info": {"split": split, "index": index},
        }


def write_data(folder: Path) -> dict[str, int]:
    """Write `train.parquet` and `val.parquet`, the same ones at every call.

    Args:
        folder: an existing folder.

    Returns:
        Rows written, by split.
    """
    everything = list(itertools.product(range(10), repeat=NUM_DIGITS))
    random.Random(0).shuffle(everything)
    splits = {"train": everything[:NUM_TRAIN], "val": everything[NUM_TRAIN:]}
    for split, digits in splits.items():
        with write_whole(folder / f"{split}.parquet") as part:
            pq.write_table(pa.Table.from_pylist(list(rows(digits, split))), part)
    return {split: len(digits) for split, digits in splits.items()}


def write_model(folder: Path, seed: int) -> int:
    """Write the model and its tokenizer as a Hugging Face folder.

    Args:
        folder: where to; made or replaced whole.
        seed: of the random weights.

    Returns:
        Number of parameters.
    """
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        chat_template=CHAT_TEMPLATE,
    )
    config = LlamaConfig(
        vocab_size=len(WORDS),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=False,
        pad_token_id=WORDS.index("<pad>"),
        bos_token_id=WORDS.index("<s>"),
        eos_token_id=WORDS.index("</s>"),
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
    with write_whole(folder) as part:
        model.save_pretrained(part)
        tokenizer.save_pretrained(part)
    return sum(parameter.numel() for parameter in model.parameters())


def prepare(local_dir: str | os.PathLike[str], seed: int = 0) -> dict[str, int]:
    """Write `model/`, `train.parquet` and `val.parquet`.

    Args:
        local_dir: the folder to write to; made where it is missing.
        seed: of the model's random weights.

    Returns:
        Rows by split, and the model's `parameters`.

    Raises:
        FileExistsError: `model/` is there and holds something else than a model.
    """
    out = Path(local_dir).expanduser()
    out.mkdir(parents=True, exist_ok=True)
    counts = write_data(out)
    model = out / "model"
    if model.is_dir():
        if any(model.iterdir()) and not (model / "config.json").is_file():
            raise FileExistsError(f"--local_dir {out}: {model} is there and is no model; name another folder")
        shutil.rmtree(model)
    counts["parameters"] = write_model(model, seed)
    logger.info("%s: %s", out, ", ".join(f"{value:,} {name}" for name, value in counts.items()))
    return counts


def main(argv: Sequence[str] | None = None) -> None:
    """Run the program."""
    parser = argparse.ArgumentParser(
        prog="ostinato.ppo.prepare.largest", description="the toy task: the largest of three digits"
    )
    parser.add_argument("--local_dir", required=True, help="folder for model/, train.parquet and val.parquet")
    parser.add_argument("--seed", type=int, default=0, help="seed of the model's random weights (default 0)")
    options = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    try:
        prepare(options.local_dir, options.seed)
    except OSError as error:
        parser.exit(1, f"{parser.prog}: {error}\n")


if __name__ == "__main__":
    main()
