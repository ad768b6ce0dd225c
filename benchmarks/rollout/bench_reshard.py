"""Seconds from the trained weights of FSDP to a rollout engine that holds them, against the device's own copy rate.

    python benchmarks/rollout/bench_reshard.py [--engine vllm] [--sizes 0.5b 1.5b] [--repeat 5] [--bucket 512]

Random weights; one GPU, or the CPU with `--sizes tiny`. Printed for each size, medians over the repeats after the first
two (the first load is watched, the second repeats it): the whole sync, its parts (the source alone, source and
buckets), GB/s, the most memory it took besides both engines' weights, and the share of a device-to-device copy of the
same bytes in the same process.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ostinato.rollout import RolloutConfig, build_rollout
from ostinato.rollout.buckets import aligned_bytes, buckets
from ostinato.rollout.reshard import reshard, sync_weights
from ostinato.rollout.testing.models import make_prompts
from ostinato.workers.core.config import ModelConfig
from ostinato.workers.core.optim import OptimConfig
from ostinato.workers.fsdp import FsdpEngine

# Shapes of the Qwen2.5 family: hidden, intermediate, layers, heads, kv heads, tied head.
SHAPES = {
    "tiny": (128, 256, 2, 4, 2, True),
    "0.5b": (896, 4864, 24, 14, 2, True),
    "1.5b": (1536, 8960, 28, 12, 2, True),
    "7b": (3584, 18944, 28, 28, 4, False),
}


def write_model(path: Path, size: str, device: str) -> None:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    hidden, inner, layers, heads, kv_heads, tied = SHAPES[size]
    config = Qwen2Config(
        vocab_size=512 if size == "tiny" else 151936,
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=4096,
        tie_word_embeddings=tied,
        eos_token_id=1,
        pad_token_id=0,
    )
    with torch.device(device):
        Qwen2ForCausalLM._from_config(config, dtype=torch.bfloat16).save_pretrained(path)


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def seconds(run: Callable[[], object]) -> float:
    synchronize()
    start = time.perf_counter()
    run()
    synchronize()
    return time.perf_counter() - start


def copy_seconds(num_bytes: int, device: str) -> float:
    source = torch.empty(num_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return statistics.median(seconds(lambda: target.copy_(source)) for _ in range(7))


def measure(engine: FsdpEngine, rollout: Any, megabytes: int, repeat: int) -> dict[str, Any]:
    cuda = torch.cuda.is_available()
    source = engine.weight_source()
    wanted = rollout.specs()
    dtypes = {name: spec.dtype for name, spec in wanted.items()}
    num_bytes = sum(
        torch.Size(spec.shape).numel() * spec.dtype.itemsize for spec in wanted.values() if spec.tied_to is None
    )
    total = sum(aligned_bytes(torch.Size(s.shape).numel() * s.dtype.itemsize) for s in wanted.values())
    runs: dict[str, list[float]] = {"sync": [], "source": [], "source_and_buckets": [], "wake": [], "sleep": []}
    extra = 0
    for turn in range(repeat + 2):
        wake = seconds(lambda: rollout.wake("weights"))
        if cuda:
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
        sync = seconds(lambda: sync_weights(source, rollout, bucket_megabytes=megabytes))
        if cuda:
            extra = max(extra, torch.cuda.max_memory_allocated() - before)
        alone = seconds(lambda: [None for _ in source.weights()])
        filled = seconds(lambda: [None for _ in buckets(source.weights(), megabytes, dtypes, total_bytes=total)])
        sleep = seconds(rollout.sleep)
        if turn >= 2:
            for name, value in zip(runs, (sync, alone, filled, wake, sleep), strict=True):
                runs[name].append(value)
    medians = {name: statistics.median(values) for name, values in runs.items()}
    copied = copy_seconds(num_bytes, "cuda" if cuda else "cpu")
    return {
        "MiB": round(num_bytes / 2**20),
        **{f"{name}_s": round(value, 4) for name, value in medians.items()},
        "fastest_sync_s": round(min(runs["sync"]), 4),
        "GB_per_s": round(num_bytes / medians["sync"] / 1e9, 1),
        "copy_s": round(copied, 5),
        "share_of_copy_rate": round(copied / medians["sync"], 3),
        "extra_MiB": round(extra / 2**20),
        "two_buckets_MiB": round(2 * min(megabytes << 20, total) / 2**20),
    }


def check_answers(engine: FsdpEngine, rollout: Any, config: RolloutConfig) -> None:
    """The engine holds exactly what was sent, and answers."""
    with reshard(engine.weight_source(), rollout, check=True):
        assert len(rollout.generate(make_prompts([[5, 6, 7]]), config.sampling())) == 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", default="vllm")
    parser.add_argument("--sizes", nargs="+", default=["0.5b", "1.5b"], choices=SHAPES)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--bucket", type=int, default=512, help="MiB of a bucket")
    parser.add_argument("--utilization", type=float, default=0.3)
    options = parser.parse_args()
    if len(options.sizes) > 1:
        # A process holds one engine that sleeps.
        for size in options.sizes:
            subprocess.run([sys.executable, *sys.argv, "--sizes", size], check=True)
        return
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_device(0)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo", store=dist.HashStore(), rank=0, world_size=1
    )
    for size in options.sizes:
        with tempfile.TemporaryDirectory() as folder:
            write_model(Path(folder), size, device)
            engine = FsdpEngine(head="lm", model=ModelConfig(path=folder), optim=OptimConfig(total_training_steps=1))
            engine.build()
            config = RolloutConfig(
                name=options.engine,
                prompt_length=64,
                response_length=64 if device == "cuda" else 512,
                max_num_seqs=64,
                gpu_memory_utilization=options.utilization,
                enforce_eager=True,
                update_weights_bucket_megabytes=options.bucket,
            )
            rollout = build_rollout(config, model_path=folder, device=device)
            row = {"engine": options.engine, "size": size, **measure(engine, rollout, options.bucket, options.repeat)}
            check_answers(engine, rollout, config)
            print(json.dumps(row), flush=True)
            rollout.close()
            del engine, rollout
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
