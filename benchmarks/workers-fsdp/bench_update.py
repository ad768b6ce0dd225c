"""One update of the policy on ragged rows: this engine against a plain PyTorch loop, padded and packed.

    python benchmarks/workers-fsdp/bench_update.py                                             # CPU, a tiny model
    python benchmarks/workers-fsdp/bench_update.py --model 1.5b --response-length 512 2048 8192   # one GPU

Random weights and tokens. Response lengths are lognormal with mean .4 of the maximum, seed 0. All variants train on the
same rows with the same loss, micro-batches under the same token budget, gradient checkpointing (unless
`--no-checkpointing`) and float32 master weights; they take turns, and each variant's fastest turn counts. On a CPU the
time is that of the process, so that a busy machine changes little; on a GPU it is that of the clock.
"""

from __future__ import annotations

import argparse
import functools
import gc
import json
import math
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import FileStore  # pyright: ignore[reportPrivateImportUsage]

from ostinato.protocol import DataProto
from ostinato.protocol.partition import token_budget_micro_batches
from ostinato.workers.core.config import ModelConfig
from ostinato.workers.core.flops import ModelFlops, model_flops, peak_flops
from ostinato.workers.core.microbatch import PackedRows, pack
from ostinato.workers.core.optim import OptimConfig
from ostinato.workers.core.row_attention import row_kernel
from ostinato.workers.fsdp import FsdpConfig, FsdpEngine

SHAPES: dict[str, tuple[int, int, int, int, int, bool]] = {
    "tiny": (128, 352, 4, 4, 1024, False),
    "0.5b": (896, 4864, 24, 14, 151936, True),
    "1.5b": (1536, 8960, 28, 12, 151936, True),
    "7b": (3584, 18944, 28, 28, 152064, False),
}
"""Width, MLP width, layers, query heads, vocabulary, tied embeddings of the Qwen2.5 models, and of one for a CPU."""

KEY_VALUE_HEADS = {"tiny": 2, "0.5b": 2, "1.5b": 2, "7b": 4}
LR = 1e-6


@dataclass
class Setting:
    """What all variants share."""

    folder: Path
    device: torch.device
    rows: DataProto
    budget: int
    flops: ModelFlops
    lengths: torch.Tensor
    checkpointing: bool = True
    liger: bool = False

    @property
    def width(self) -> int:
        return self.rows.batch["attention_mask"].shape[1]

    @property
    def num_responses(self) -> int:
        return int(self.rows.batch["response_mask"].sum())

    @property
    def num_real(self) -> int:
        return int(self.lengths.sum())

    @property
    def num_padded(self) -> int:
        return len(self.rows) * self.width

    @property
    def forward_flops(self) -> float:
        return self.flops.forward(self.lengths, self.num_responses)


def make_folder(folder: Path, name: str, positions: int) -> Any:
    """A Hugging Face folder with random weights in bf16; returns its config."""
    from transformers import AutoModelForCausalLM, Qwen2Config

    width, inner, layers, heads, vocabulary, tied = SHAPES[name]
    config = Qwen2Config(
        hidden_size=width,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=KEY_VALUE_HEADS[name],
        vocab_size=vocabulary,
        tie_word_embeddings=tied,
        max_position_embeddings=positions,
    )
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    return config


def make_rows(count: int, prompt: int, response: int, vocabulary: int) -> DataProto:
    """Ragged rows: responses lognormal around .4 of the maximum (spread 0.5), at least 1, at most the maximum."""
    draw = torch.Generator().manual_seed(0)
    spread = 0.5
    middle = math.log(0.4 * response) - spread**2 / 2
    lengths = torch.exp(middle + spread * torch.randn(count, generator=draw)).round().clamp(1, response).long()
    mask = (torch.arange(response)[None] < lengths[:, None]).long()
    return DataProto.from_dict(
        {
            "input_ids": torch.randint(3, vocabulary, (count, prompt + response), generator=draw),
            "attention_mask": torch.cat([torch.ones(count, prompt, dtype=torch.long), mask], dim=1),
            "response_mask": mask,
            "advantages": torch.randn(count, response, generator=draw) * mask,
        }
    )


class Ours:
    """The engine, as the update loop uses it."""

    name = "ostinato"

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.engine = FsdpEngine(
            head="lm",
            model=ModelConfig(
                path=str(setting.folder),
                enable_gradient_checkpointing=setting.checkpointing,
                use_liger=setting.liger,
            ),
            optim=OptimConfig(lr=LR),
            engine=FsdpConfig(),
        )
        self.engine.build()

    def packed(self) -> list[PackedRows]:
        rows, budget = self.setting.rows, self.setting.budget
        groups = token_budget_micro_batches(self.setting.lengths.tolist(), budget)
        return [pack(rows[group], device=self.setting.device) for group in groups]

    def update(self) -> None:
        total = self.setting.num_responses

        def loss(outputs: Any, packed: PackedRows) -> tuple[torch.Tensor, None]:
            advantages = packed.rows.batch["advantages"][packed.mask]
            return -(outputs.log_probs * advantages).sum() / total, None

        self.engine.forward_backward(self.packed(), loss)
        self.engine.optimizer_step()

    def log_probs(self) -> None:
        self.engine.forward(self.packed(), lambda outputs, packed: outputs.log_probs)


class Plain:
    """A loop as one writes it with transformers and PyTorch: autocast, checkpointing, AdamW.

    Args:
        setting: shared.
        packing: rows lie behind each other in one long row and are told apart by position ids; else each micro-batch is
            padded to the width of the batch's columns.
    """

    def __init__(self, setting: Setting, *, packing: bool) -> None:
        from transformers import AutoModelForCausalLM

        self.name = "plain, packed" if packing else "plain, padded"
        self.setting, self.packing = setting, packing
        model: Any = AutoModelForCausalLM.from_pretrained(setting.folder, dtype=torch.float32)
        self.model: nn.Module = model.to(setting.device)
        if setting.checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=LR, fused=setting.device.type == "cuda")

    def micro_batches(self) -> list[dict[str, torch.Tensor]]:
        setting = self.setting
        if self.packing:
            groups = token_budget_micro_batches(setting.lengths.tolist(), setting.budget)
            return [self._packed(setting.rows[group]) for group in groups]
        size = max(setting.budget // setting.width, 1)
        return [self._padded(rows) for rows in setting.rows.split(size)]

    def _packed(self, rows: DataProto) -> dict[str, torch.Tensor]:
        packed = pack(rows, device=self.setting.device)
        return {
            "input_ids": packed.input_ids[None],
            "position_ids": packed.position_ids[None],
            "predict": packed.predict,
            "labels": packed.labels,
            "advantages": packed.rows.batch["advantages"][packed.mask],
        }

    def _padded(self, rows: DataProto) -> dict[str, torch.Tensor]:
        batch = rows.to(self.setting.device).batch
        response = batch["response_mask"].shape[1]
        return {
            "input_ids": batch["input_ids"],
            "attention_mask": batch["attention_mask"],
            "labels": batch["input_ids"][:, -response:],
            "mask": batch["response_mask"],
            "advantages": batch["advantages"],
        }

    def _log_probs(self, micro: dict[str, torch.Tensor]) -> torch.Tensor:
        device = self.setting.device.type
        names = ("input_ids", "attention_mask", "position_ids")
        with torch.autocast(device, dtype=torch.bfloat16, enabled=device == "cuda"):
            logits = self.model(**{name: micro[name] for name in names if name in micro}, use_cache=False).logits
        if self.packing:
            logits, labels = logits[0, micro["predict"]], micro["labels"]
        else:
            response = micro["labels"].shape[1]
            logits, labels = logits[:, -response - 1 : -1], micro["labels"]
        return logits.float().log_softmax(-1).gather(-1, labels[..., None])[..., 0]

    def update(self) -> None:
        self.model.train()
        for micro in self.micro_batches():
            loss = -(self._log_probs(micro) * micro["advantages"]).sum() / self.setting.num_responses
            loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def log_probs(self) -> None:
        self.model.eval()
        with torch.no_grad():
            for micro in self.micro_batches():
                self._log_probs(micro)


def seconds(run: Callable[[], None], device: torch.device) -> float:
    """Time of one call: the process's on a CPU, the clock's on a GPU."""
    if device.type == "cpu":
        began = time.process_time()
        run()
        return time.process_time() - began
    torch.cuda.synchronize()
    began = time.perf_counter()
    run()
    torch.cuda.synchronize()
    return time.perf_counter() - began


def peak_gigabytes(run: Callable[[], None], device: torch.device) -> float | None:
    """The most that was allocated during a call beyond what lay there before it; None on a CPU."""
    if device.type == "cpu":
        return None
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    return (torch.cuda.max_memory_allocated() - before) / 1e9


def matmul_rate(device: torch.device) -> float:
    """Operations a second of one large matrix product in the type of the forward pass."""
    size, dtype = (8192, torch.bfloat16) if device.type == "cuda" else (1024, torch.float32)
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    runs = 20 if device.type == "cuda" else 3

    def multiply() -> None:
        for _ in range(runs):
            torch.mm(a, b)

    best = min(seconds(multiply, device) for _ in range(3))
    return 2 * size**3 * runs / best


def measure(setting: Setting, variants: list[str], turns: int, rate: float) -> list[dict[str, Any]]:
    """One line a variant; on a GPU only one of them is in memory at a time."""
    if setting.device.type == "cpu":
        made = [VARIANTS[name](setting) for name in variants]
        times: list[dict[str, list[float]]] = [{"update": [], "log_probs": []} for _ in made]
        for turn in range(turns + 1):
            for each, found in zip(made, times, strict=True):
                for call in found:
                    taken = seconds(getattr(each, call), setting.device)
                    if turn:
                        found[call].append(taken)
        return [line(each.name, setting, found, {}, rate) for each, found in zip(made, times, strict=True)]
    lines = []
    for name in variants:
        try:
            each = VARIANTS[name](setting)
            found = {"update": [], "log_probs": []}
            memory = {}
            for call in found:
                getattr(each, call)()
                memory[call] = peak_gigabytes(getattr(each, call), setting.device)
                found[call] = [seconds(getattr(each, call), setting.device) for _ in range(turns)]
            lines.append(line(each.name, setting, found, memory, rate))
        except torch.OutOfMemoryError:
            lines.append({"variant": name, "out_of_memory": True})
        each = None
        gc.collect()
        torch.cuda.empty_cache()
    return lines


def line(
    name: str, setting: Setting, times: dict[str, list[float]], memory: dict[str, float | None], rate: float
) -> dict[str, Any]:
    peak = peak_flops(setting.device)
    result: dict[str, Any] = {"variant": name}
    for call, passes in (("update", 3), ("log_probs", 1)):
        best = min(times[call])
        done = setting.forward_flops * passes / best
        gigabytes = memory.get(call)
        result[call] = {
            "seconds": round(best, 4),
            "tokens_per_second": round(setting.num_real / best, 1),
            "share_of_matmul_rate": round(done / rate, 3),
            **({"mfu": round(done / peak, 3)} if peak else {}),
            **({} if gigabytes is None else {"peak_gb": round(gigabytes, 2)}),
        }
    return result


VARIANTS: dict[str, Callable[[Setting], Any]] = {
    "ostinato": Ours,
    "padded": functools.partial(Plain, packing=False),
    "packed": functools.partial(Plain, packing=True),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=list(SHAPES), default="tiny")
    parser.add_argument("--prompt-length", type=int, default=None, help="default: an eighth of the response length")
    parser.add_argument("--response-length", type=int, nargs="+", default=[224])
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--token-budget", type=int, default=None, help="default: 2048 on a CPU, 32768 on a GPU")
    parser.add_argument("--no-checkpointing", action="store_true", help="keep activations, in all variants")
    parser.add_argument("--liger", action="store_true", help="`model.use_liger` of this engine")
    parser.add_argument("--variants", choices=VARIANTS, nargs="+", default=list(VARIANTS))
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--json", type=Path, default=None, help="write the results there too")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    budget = options.token_budget or (32768 if device.type == "cuda" else 2048)
    rate = matmul_rate(device)
    print(f"{device}, {options.model}, matrix products at {rate / 1e12:.3f} TFLOPS")
    if device.type == "cuda":
        width, _, _, heads, _, _ = SHAPES[options.model]
        print(f"attention of this engine: {row_kernel(device, width // heads)}")
    results = []
    with tempfile.TemporaryDirectory() as folder:
        store = FileStore(f"{folder}/store", 1)
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=store, rank=0, world_size=1)
        config = make_folder(Path(folder) / "model", options.model, 2 * max(options.response_length))
        flops = model_flops(config, head="lm")
        assert flops is not None, "Qwen2 is counted"
        for response in options.response_length:
            rows = make_rows(options.rows, options.prompt_length or response // 8, response, config.vocab_size)
            lengths = rows.batch["attention_mask"].sum(dim=1)
            kinds = {"checkpointing": not options.no_checkpointing, "liger": options.liger}
            setting = Setting(Path(folder) / "model", device, rows, budget, flops, lengths, **kinds)
            ratio = setting.num_padded / setting.num_real
            print(
                f"\nresponses up to {response}: {setting.num_real} tokens, padded {setting.num_padded} ({ratio:.2f} x)"
            )
            lines = measure(setting, options.variants, options.turns, rate)
            for each in lines:
                print(json.dumps(each))
            by_name = {each["variant"]: each for each in lines if "update" in each}
            if {"ostinato", "plain, padded"} <= by_name.keys():
                gain = by_name["plain, padded"]["update"]["seconds"] / by_name["ostinato"]["update"]["seconds"]
                print(f"update against padded: {gain:.2f} x, {gain / ratio:.2f} of padded/real")
            results.append({"response_length": response, "padded_to_real": ratio, "lines": lines})
        dist.destroy_process_group()
    if options.json:
        options.json.write_text(json.dumps({"model": options.model, "matmul": rate, "results": results}, indent=1))


if __name__ == "__main__":
    main()
