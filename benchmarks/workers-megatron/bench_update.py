"""One update of the policy on ragged rows: the Megatron engine beside the FSDP engine, in one run.

    python benchmarks/workers-megatron/bench_update.py                                               # CPU, a tiny model
    python benchmarks/workers-megatron/bench_update.py --device cuda --model 0.5b --response-length 512        # one GPU
    torchrun --nproc-per-node 2 benchmarks/workers-megatron/bench_update.py \\
        --device cuda --model 0.5b --response-length 512 --set tensor_model_parallel_size=2                   # two GPUs

Random weights and tokens; all engines train on the same rows with the same loss, micro-batches of the same rows and
gradient checkpointing. They take turns and each one's fastest turn counts. On a CPU the time is that of the process and
the weights are float32, on a GPU it is that of the clock and products are bf16. The ratio is what counts. README.md
beside this file says what each entry of the output is.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import FileStore  # pyright: ignore[reportPrivateImportUsage]

from ostinato.protocol import DataProto
from ostinato.rollout.model_config import read_model_config
from ostinato.workers.core.config import ModelConfig
from ostinato.workers.core.flops import model_flops, peak_flops
from ostinato.workers.core.microbatch import pack
from ostinato.workers.core.optim import OptimConfig
from ostinato.workers.fsdp import FsdpConfig, FsdpEngine
from ostinato.workers.megatron import MegatronConfig, MegatronEngine

SHAPES: dict[str, tuple[int, int, int, int, int, int]] = {
    "tiny": (128, 352, 4, 4, 2, 1024),
    "0.5b": (896, 4864, 24, 14, 2, 151936),
    "1.5b": (1536, 8960, 28, 12, 2, 151936),
    "7b": (3584, 18944, 28, 28, 4, 152064),
}
"""Width, MLP width, layers, query heads, key/value heads, vocabulary of the Qwen2.5 models, and of one for a CPU."""


LAYERS: dict[str, dict[str, str]] = {
    "kernel": {"transformer_impl": "local"},
    "mask": {"transformer_impl": "local", "attention_backend": "local"},
}
"""Megatron's own layers, with PyTorch's attention kernel and with Megatron's own attention under a mask."""


def write_model(name: str, folder: Path, device: torch.device) -> None:
    """A random Qwen2 of one of the shapes, made on the device."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    width, inner, layers, heads, kv_heads, vocabulary = SHAPES[name]
    config = Qwen2Config(
        hidden_size=width,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        vocab_size=vocabulary,
        max_position_embeddings=16384,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16 if device.type == "cuda" else torch.float32)
    try:
        with device:  # random weights of a large model take a CPU minutes
            module: Any = Qwen2ForCausalLM(config)
    finally:
        torch.set_default_dtype(before)
    module.save_pretrained(folder)


def make_rows(num_rows: int, prompt: int, response: int, vocabulary: int) -> DataProto:
    """Rows with prompts of one length and responses between a quarter of the longest and all of it."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(response // 4, response + 1, (num_rows, 1), generator=generator)
    mask = torch.arange(response) < lengths
    attention = torch.cat([torch.ones(num_rows, prompt, dtype=torch.bool), mask], dim=1)
    ids = torch.randint(0, vocabulary, attention.shape, generator=generator)
    return DataProto.from_dict(
        {
            "input_ids": ids,
            "attention_mask": attention.long(),
            "response_mask": mask.long(),
            "advantages": torch.randn(num_rows, response, generator=generator) * mask,
        }
    )


@dataclass(frozen=True)
class Turn:
    """One update.

    Attributes:
        seconds: its time.
        grad_norm: of its gradient.
        gigabytes: device memory that it needed beyond what lay there; 0 on a CPU.
    """

    seconds: float
    grad_norm: float
    gigabytes: float


def take_turn(engine: Any, rows: DataProto, size: int) -> Turn:
    """Forward, backward, step."""
    place = engine.coordinates
    mine = rows.chunk(place.dp_size)[place.dp_rank]
    packed = [pack(mine[i : i + size], device=engine.device) for i in range(0, len(mine), size)]
    tokens = float(rows.batch["response_mask"].sum()) if rows.batch is not None else 1.0

    def loss(outputs: Any, part: Any) -> tuple[torch.Tensor, None]:
        advantages = part.rows.batch["advantages"]
        return -(part.to_response(outputs.log_probs) * advantages).sum() / tokens, None

    on_gpu = engine.device.type == "cuda"
    before = 0
    if on_gpu:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    dist.barrier()
    began = time.perf_counter() if on_gpu else time.process_time()
    engine.forward_backward(packed, loss)
    stats = engine.optimizer_step()
    if on_gpu:
        torch.cuda.synchronize()
    seconds = (time.perf_counter() if on_gpu else time.process_time()) - began
    peak = torch.cuda.max_memory_allocated() - before if on_gpu else 0
    return Turn(seconds, stats.grad_norm, peak / 1e9)


def value(text: str) -> Any:
    """A setting as a number, a truth value or text."""
    return {"true": True, "false": False}.get(text.lower(), int(text) if text.isdigit() else text)


def main() -> None:
    """Print one line of JSON on rank 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=SHAPES, default="tiny")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--micro-batch-rows", type=int, default=4)
    parser.add_argument("--prompt-length", type=int, default=32)
    parser.add_argument("--response-length", type=int, default=96)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--also", nargs="*", choices=list(LAYERS), default=[], help="Megatron's own layers too")
    parser.add_argument("--set", nargs="*", default=[], help="entries of MegatronConfig, name=value")
    arguments = parser.parse_args()
    if arguments.device == "cpu":
        from ostinato.workers.megatron.testing import cpu

        cpu.install()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(os.environ.get("BENCH_FOLDER", name))
        device = torch.device("cpu")
        if arguments.device == "cuda":
            device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
            torch.cuda.set_device(device)
        backend = "cuda:nccl,cpu:gloo" if arguments.device == "cuda" else "gloo"
        if "RANK" in os.environ:
            dist.init_process_group(backend)
        else:
            dist.init_process_group(backend, store=FileStore(f"{name}/store", 1), rank=0, world_size=1)
        shared = [str(folder)]
        dist.broadcast_object_list(shared, src=0)
        folder = Path(shared[0])
        if dist.get_rank() == 0:
            write_model(arguments.model, folder, device)
        dist.barrier()
        compare(arguments, folder)
        dist.destroy_process_group()


def compare(arguments: argparse.Namespace, folder: Path) -> None:
    """Build both engines, let them take turns, print the fastest turn of each."""
    rows = make_rows(arguments.rows, arguments.prompt_length, arguments.response_length, SHAPES[arguments.model][5])
    assert rows.batch is not None
    settings = dict(entry.split("=", 1) for entry in arguments.set)
    megatron = MegatronConfig(**{name: value(text) for name, text in settings.items()})
    common: dict[str, Any] = {"head": "lm", "model": ModelConfig(path=str(folder)), "optim": OptimConfig(lr=1e-6)}
    engines: dict[str, Any] = {
        "fsdp": FsdpEngine(engine=FsdpConfig(), **common),
        "megatron": MegatronEngine(engine=megatron, **common),
    }
    for name in arguments.also:
        layers = replace(megatron, override_transformer_config=LAYERS[name])
        engines[f"megatron_{name}"] = MegatronEngine(engine=layers, **common)
    turns: dict[str, list[Turn]] = {name: [] for name in engines}
    for engine in engines.values():
        engine.build()
    for _ in range(arguments.turns + 1):
        for name, engine in engines.items():
            turns[name].append(take_turn(engine, rows, arguments.micro_batch_rows))
    tokens = float(rows.batch["attention_mask"].sum())
    # The first turn compiles and allocates.
    best = {name: min(turn.seconds for turn in taken[1:]) for name, taken in turns.items()}
    if dist.get_rank() != 0:
        return
    first = {name: taken[0].grad_norm for name, taken in turns.items()}
    report: dict[str, Any] = {"model": arguments.model, "ranks": dist.get_world_size(), **settings}
    report |= {f"{name}_tokens_per_second": round(tokens / seconds) for name, seconds in best.items()}
    if engines["fsdp"].device.type == "cuda":
        report |= {f"{name}_gigabytes": round(taken[-1].gigabytes, 2) for name, taken in turns.items()}
    peak = peak_flops(engines["megatron"].device)
    if peak:
        flops = model_flops(read_model_config(str(folder)), head="lm")
        assert flops is not None, "Qwen2 is counted"
        done = 3 * flops.forward(rows.batch["attention_mask"].sum(1), int(rows.batch["response_mask"].sum()))
        rate = peak * dist.get_world_size()
        report |= {f"{name}_mfu": round(done / seconds / rate, 3) for name, seconds in best.items()}
    for name in engines:
        if name != "fsdp":
            report[f"{name}_over_fsdp"] = round(best["fsdp"] / best[name], 3)
            report[f"{name}_grad_norm_off_by"] = f"{abs(first[name] / first['fsdp'] - 1):.1e}"
    print(json.dumps(report))


if __name__ == "__main__":
    main()
