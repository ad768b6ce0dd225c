"""GSM8K as the two parquet files that the app reads.

    python -m ostinato.ppo.prepare.gsm8k --local_dir OUT --local_dataset_path DIR

`DIR` holds `train.jsonl` and `test.jsonl`, one object a line with `question` and `answer`. Without
`--local_dataset_path` the set is loaded with the `datasets` package, where that is installed.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from ostinato.ppo.prepare.files import write_whole

logger = logging.getLogger(__name__)

DATA_SOURCE = "openai/gsm8k"
SPLITS = ("train", "test")
INSTRUCTION = 'Think step by step, and put the final answer on its own after "####".'

_ANSWER = re.compile(r"####\s*(\S[^\n]*)")

SCHEMA = pa.schema(
    [
        ("data_source", pa.string()),
        ("prompt", pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))),
        ("ability", pa.string()),
        ("reward_model", pa.struct([("style", pa.string()), ("ground_truth", pa.string())])),
        (
            "extra_info",
            pa.struct(
                [("split", pa.string()), ("index", pa.int64()), ("answer", pa.string()), ("question", pa.string())]
            ),
        ),
    ]
)


def final_answer(answer: str) -> str:
    """Return the number after the last `####` of a GSM8K solution, without thousands separators.

    Raises:
        ValueError: the text has no `####` with something behind it.
    """
    found = _ANSWER.findall(answer)
    if not found:
        raise ValueError(f"gsm8k: a solution must end in '#### <number>'; got {answer[-80:]!r}")
    return found[-1].replace(",", "").strip()


def rows(examples: Iterable[dict[str, Any]], split: str) -> Iterator[dict[str, Any]]:
    """Yield one row of the parquet file for each example.

    Args:
        examples: objects with `question` and `answer`.
        split: goes to `extra_info`.
    """
    for index, example in enumerate(examples):
        question, answer = example["question"], example["answer"]
        yield {
            "data_source": DATA_SOURCE,
            "prompt": [{"role": "user", "content": f"{question} {INSTRUCTION}"}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": final_answer(answer)},
            "extra_info": {"split": split, "index": index, "answer": answer, "question": question},
        }


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """Read one JSON object a line; empty lines are skipped.

    Raises:
        FileNotFoundError: there is no such file; the text names the folder and the files that it must hold.
        ValueError: a line is no JSON object with `question` and `answer`; the text names the line.
    """
    if not path.is_file():
        expected = ", ".join(f"{split}.jsonl" for split in SPLITS)
        raise FileNotFoundError(f"--local_dataset_path must hold {expected}; there is no {path}")
    examples = []
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                example = json.loads(line)
            except json.JSONDecodeError as error:
                raise ValueError(f"{path}:{number}: not JSON: {error}") from error
            if not isinstance(example, dict) or not {"question", "answer"} <= example.keys():
                raise ValueError(f"{path}:{number}: expected an object with 'question' and 'answer'; got {line[:80]!r}")
            examples.append(example)
    return examples


def load(split: str, local_dataset_path: str | os.PathLike[str] | None) -> Iterable[dict[str, Any]]:
    """Load one split from a local folder, or through the `datasets` package.

    Raises:
        ModuleNotFoundError: no folder was given and `datasets` is not installed; nothing has been tried online.
    """
    if local_dataset_path is not None:
        return read_jsonl(Path(local_dataset_path).expanduser() / f"{split}.jsonl")
    if find_spec("datasets") is None:
        raise ModuleNotFoundError(
            "GSM8K is neither given as a folder nor can it be loaded: pass --local_dataset_path DIR with train.jsonl "
            "and test.jsonl, or install the loader: pip install datasets"
        )
    import datasets  # pyright: ignore[reportMissingImports]  # an optional package, only for this path

    return datasets.load_dataset(DATA_SOURCE, "main", split=split)


def prepare(
    local_dir: str | os.PathLike[str], local_dataset_path: str | os.PathLike[str] | None = None
) -> dict[str, int]:
    """Write `train.parquet` and `test.parquet`; each appears whole or not at all.

    Args:
        local_dir: the folder to write to; made where it is missing.
        local_dataset_path: the folder with `train.jsonl` and `test.jsonl`.

    Returns:
        Rows written, by split.
    """
    out = Path(local_dir).expanduser()
    loaded = {split: list(rows(load(split, local_dataset_path), split)) for split in SPLITS}
    out.mkdir(parents=True, exist_ok=True)
    for split, records in loaded.items():
        table = pa.Table.from_pylist(records, schema=SCHEMA)
        with write_whole(out / f"{split}.parquet") as part:
            pq.write_table(table, part)
        logger.info("%s: %d rows", out / f"{split}.parquet", len(records))
    return {split: len(records) for split, records in loaded.items()}


def main(argv: Sequence[str] | None = None) -> None:
    """Run the program."""
    parser = argparse.ArgumentParser(prog="ostinato.ppo.prepare.gsm8k", description="GSM8K as parquet files")
    parser.add_argument("--local_dir", required=True, help="folder for train.parquet and test.parquet")
    parser.add_argument("--local_dataset_path", help="folder with train.jsonl and test.jsonl")
    options = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    try:
        prepare(options.local_dir, options.local_dataset_path)
    except (OSError, ValueError, ModuleNotFoundError) as error:
        parser.exit(1, f"{parser.prog}: {error}\n")


if __name__ == "__main__":
    main()
