"""Tokens per second of the hf rollout against transformers' own `generate`, on one tiny model, in one process.

    python benchmarks/rollout/bench_hf.py [--prompts 32] [--prompt-length 16] [--new-tokens 64] [--repeat 7]

Cases: rows that all run to the limit; the same with samples that share prompts; rows of very different lengths.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from ostinato.protocol import DataProto
from ostinato.rollout import RolloutConfig, build_rollout
from ostinato.rollout.reshard import reshard
from ostinato.rollout.testing.models import ModuleWeights, make_prompts, save_tiny_model


def rates(runs: tuple[Callable[[], int], Callable[[], int]], repeat: int) -> list[tuple[float, float]]:
    """Tokens per second of both, in turns, so that a busy machine slows both alike."""
    pairs = []
    for turn in range(repeat + 1):
        pair = []
        for run in runs:
            start = time.perf_counter()
            tokens = run()
            pair.append(tokens / (time.perf_counter() - start))
        if turn > 0:
            pairs.append((pair[0], pair[1]))
    return pairs


def prompt_lists(rows: int, length: int, *, ragged: bool, shared: int = 1) -> list[list[int]]:
    draw = np.random.default_rng(0)
    distinct = [
        draw.integers(2, 512, size=draw.integers(max(1, length // 4), length + 1) if ragged else length).tolist()
        for _ in range(rows // shared)
    ]
    return [tokens for tokens in distinct for _ in range(shared)]


def compare(model: torch.nn.Module, path: Path, prompts: DataProto, limit: int, eos: list[int], repeat: int) -> dict:
    batch = prompts.batch
    config = RolloutConfig(
        dtype="float32", prompt_length=batch["input_ids"].shape[1], response_length=limit, ignore_eos=not eos
    )
    rollout = build_rollout(config, model_path=path)

    def reference() -> int:
        out = model.generate(
            input_ids=batch["input_ids"],
            attention_mask=batch["attention_mask"],
            do_sample=True,
            top_k=0,
            top_p=1.0,
            max_new_tokens=limit,
            min_new_tokens=None if eos else limit,
            eos_token_id=eos or None,
            pad_token_id=0,
        )
        new = out[:, batch["input_ids"].shape[1] :]
        return int((new != 0).sum()) if eos else new.numel()

    with reshard(ModuleWeights(model), rollout, bucket_megabytes=1):
        sampling = config.sampling(eos_token_ids=tuple(eos))

        def ours() -> int:
            return int(rollout.generate(prompts, sampling).batch["response_mask"].sum())

        pairs = rates((ours, reference), repeat)
    return {
        "ostinato_tok_s": round(statistics.median(mine for mine, _ in pairs)),
        "generate_tok_s": round(statistics.median(theirs for _, theirs in pairs)),
        "ratio": round(statistics.median(mine / theirs for mine, theirs in pairs), 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--prompt-length", type=int, default=16)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--repeat", type=int, default=7)
    arguments = parser.parse_args()
    rows, length, limit = arguments.prompts, arguments.prompt_length, arguments.new_tokens
    with tempfile.TemporaryDirectory() as folder:
        model = save_tiny_model(folder, scale=0.02)
        cases = {
            "equal_lengths": (prompt_lists(rows, length, ragged=False), []),
            "ragged_prompts": (prompt_lists(rows, length, ragged=True), []),
            "shared_prompts": (prompt_lists(rows, length * 8, ragged=True, shared=8), []),
            "early_ends": (prompt_lists(rows, length, ragged=True), list(range(100, 120))),
        }
        for name, (lists, eos) in cases.items():
            result = compare(model, Path(folder), make_prompts(lists), limit, eos, arguments.repeat)
            print(json.dumps({"case": name, "threads": torch.get_num_threads(), **result}))


if __name__ == "__main__":
    main()
