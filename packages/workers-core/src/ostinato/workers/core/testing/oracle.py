"""The conformance suite's inputs, its oracle, and how it feeds an engine.

The oracle is a Hugging Face model in this process, fed one row at a time without padding or packing, with AdamW. It
shares no code with any engine.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ostinato.protocol import DataProto
from ostinato.workers.core.config import ModelConfig
from ostinato.workers.core.engine import StepStats, TokenOutputs, TrainEngine
from ostinato.workers.core.microbatch import PackedRows, pack
from ostinato.workers.core.optim import OptimConfig, lr_factor

MakeEngine = Callable[..., TrainEngine]

VOCAB = 96
PROMPT = 5
RESPONSE = 7
TEMPERATURE = 0.7
RTOL = 1e-6
RTOL_GPU = 5e-6
# AdamW's epsilon sets what counts as a gradient: some gradients (a key bias's) are 0 but for rounding, and the usual
# 1e-8 would blow that rounding up to whole steps of the learning rate.
OPTIM = OptimConfig(lr=1e-3, eps=1e-4, weight_decay=0.1, grad_clip=0.05)
STILL = OptimConfig(lr=0.0, grad_clip=1e9)


def prepare(workspace: Path) -> None:
    """Write the tiny model folders that the checks read: `lm`, `tied` and `value`. Call it in one process."""
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM
    from transformers import LlamaForSequenceClassification as ValueModel

    sizes: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "pad_token_id": 0,
    }
    one_label: dict[str, Any] = {**sizes, "num_labels": 1}
    models = {
        "lm": lambda: LlamaForCausalLM(LlamaConfig(**sizes, tie_word_embeddings=False)),
        "tied": lambda: Qwen2ForCausalLM(Qwen2Config(**sizes, tie_word_embeddings=True)),
        "value": lambda: ValueModel(LlamaConfig(**one_label)),
    }
    for seed, (name, make) in enumerate(models.items()):
        generator = torch.Generator().manual_seed(seed)
        model = make()
        with torch.no_grad():
            for parameter in model.parameters():
                # Larger than a usual start, so that logits, attention and biases matter.
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.copy_(0.2 * noise if parameter.dim() > 1 else 1 + 0.2 * noise)
        model.save_pretrained(workspace / name)


def make_rows(num_rows: int, seed: int = 0) -> DataProto:
    """Rows of ragged lengths with a two-part response mask and random `advantages`, `returns` (b, R).

    Advantages are positive: a loss whose terms cancel could not be compared relatively.
    """
    generator = torch.Generator().manual_seed(seed)
    input_ids = torch.randint(1, VOCAB, (num_rows, PROMPT + RESPONSE), generator=generator)
    prompt_lengths = torch.randint(1, PROMPT + 1, (num_rows, 1), generator=generator)
    response_lengths = torch.randint(2, RESPONSE + 1, (num_rows, 1), generator=generator)
    place = torch.arange(PROMPT + RESPONSE)
    attention_mask = (place >= PROMPT - prompt_lengths) & (place < PROMPT + response_lengths)
    response_mask = attention_mask[:, PROMPT:].clone()
    # The second token of some rows came from a tool: seen by the model, not sampled by the policy.
    response_mask[::3, 1] = False
    input_ids[~attention_mask] = 0
    return DataProto.from_dict(
        tensors={
            "prompts": input_ids[:, :PROMPT],
            "responses": input_ids[:, PROMPT:],
            "input_ids": input_ids,
            "attention_mask": attention_mask.long(),
            "position_ids": (attention_mask.long().cumsum(1) - 1).clamp(min=0),
            "response_mask": response_mask.long(),
            "advantages": 0.5 + torch.rand(num_rows, RESPONSE, generator=generator),
            "returns": torch.randn(num_rows, RESPONSE, generator=generator),
        }
    )


def without_response(rows: DataProto) -> DataProto:
    """The same rows with a response mask of zeros."""
    mask = torch.zeros_like(batch_of(rows)["response_mask"])
    return rows.drop(["response_mask"]).union(DataProto.from_dict(tensors={"response_mask": mask}))


def two_rows(*sequences: Sequence[int]) -> DataProto:
    """Rows with a prompt of one token; the rest is the response."""
    width = max(len(sequence) for sequence in sequences)
    ids = torch.tensor([[*sequence, *[0] * (width - len(sequence))] for sequence in sequences])
    mask = torch.tensor([[1] * len(sequence) + [0] * (width - len(sequence)) for sequence in sequences])
    return DataProto.from_dict(
        tensors={
            "input_ids": ids,
            "attention_mask": mask,
            "position_ids": (mask.cumsum(1) - 1).clamp(min=0),
            "response_mask": mask[:, 1:],
        }
    )


def batch_of(rows: DataProto) -> Any:
    """The tensors of rows that have some."""
    assert rows.batch is not None
    return rows.batch


class Oracle:
    """One plain model and AdamW: a row at a time, no padding, no packing, no ranks.

    Args:
        folder: One of the folders of `prepare`.
        head: "lm" or "value".
        optim: As the engine gets it.
        device: Where to compute.
    """

    def __init__(self, folder: Path, head: str, optim: OptimConfig, device: torch.device) -> None:
        from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

        auto: Any = AutoModelForCausalLM if head == "lm" else AutoModelForSequenceClassification
        self.module: nn.Module = auto.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
        self.module.to(device).eval()
        self.head = head
        self.optim = optim
        self.device = device
        self.steps = 0
        self.optimizer = torch.optim.AdamW(
            self.module.parameters(),
            lr=optim.lr,
            betas=optim.betas,
            eps=optim.eps,
            weight_decay=optim.weight_decay,
            foreach=False,
        )

    def outputs(self, rows: DataProto, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """One row's log-probabilities and entropies ("lm"), or its values twice, (R,) each, 0 where the mask is 0."""
        batch = batch_of(rows)
        valid = batch["attention_mask"][index].bool()
        ids = batch["input_ids"][index][valid].to(self.device)
        before = torch.nonzero(batch["response_mask"][index])[:, 0]
        places = [int(valid[: PROMPT + int(j)].sum()) for j in before]
        first, second = torch.zeros(RESPONSE, device=self.device), torch.zeros(RESPONSE, device=self.device)
        if self.head == "lm":
            logits: Any = self.module(input_ids=ids[None], use_cache=False).logits[0]
            for j, place in zip(before.tolist(), places, strict=True):
                log_probs = torch.log_softmax(logits[place - 1] / TEMPERATURE, dim=-1)
                first[j] = log_probs[ids[place]]
                second[j] = -(log_probs.exp() * log_probs).sum()
            return first, second
        hidden: Any = self.module.model(input_ids=ids[None], use_cache=False).last_hidden_state[0]  # pyright: ignore[reportCallIssue]
        values = (hidden @ self.module.score.weight.T)[:, 0]  # pyright: ignore[reportAttributeAccessIssue, reportArgumentType]
        for j, place in zip(before.tolist(), places, strict=True):
            first[j] = values[place - 1]
        return first, first

    def sum_pi_squared(self, rows: DataProto) -> torch.Tensor:
        """Σπ² at every policy token, (b, R), 0 where the mask is 0."""
        batch = batch_of(rows)
        squares = torch.zeros(len(rows), RESPONSE, device=self.device)
        for index in range(len(rows)):
            valid = batch["attention_mask"][index].bool()
            ids = batch["input_ids"][index][valid].to(self.device)
            with torch.no_grad():
                logits: Any = self.module(input_ids=ids[None], use_cache=False).logits[0]
            for j in torch.nonzero(batch["response_mask"][index])[:, 0].tolist():
                place = int(valid[: PROMPT + j].sum())
                squares[index, j] = (logits[place - 1] / TEMPERATURE).softmax(-1).square().sum()
        return squares

    def all_outputs(self, rows: DataProto) -> tuple[torch.Tensor, torch.Tensor]:
        """`outputs` of each row without gradients, (b, R) each."""
        with torch.no_grad():
            pairs = [self.outputs(rows, index) for index in range(len(rows))]
        empty = torch.zeros(0, RESPONSE, device=self.device)
        if not pairs:
            return empty, empty
        return torch.stack([pair[0] for pair in pairs]), torch.stack([pair[1] for pair in pairs])

    def loss(self, rows: DataProto) -> float:
        """Add up the gradient of the suite's loss over rows and return the loss."""
        batch = batch_of(rows)
        count = float(batch["response_mask"].sum())
        total = 0.0
        for index in range(len(rows)):
            first, second = self.outputs(rows, index)
            column = {name: batch[name][index].to(self.device) for name in ("advantages", "returns", "response_mask")}
            loss = _per_token_loss(self.head, first, second, column).sum() / count
            if loss.requires_grad:
                loss.backward()
            total += loss.item()
        return total

    def step(self) -> StepStats:
        """Clip, step and advance the schedule."""
        norm = float(nn.utils.clip_grad_norm_(self.module.parameters(), self.optim.grad_clip, foreach=False))
        lr = self.optim.lr * lr_factor(self.steps, self.optim)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.steps += 1
        return StepStats(grad_norm=norm, lr=lr)

    def state(self) -> dict[str, torch.Tensor]:
        """Weights by name; a tied weight once."""
        return {name: parameter.detach() for name, parameter in self.module.named_parameters()}


def _per_token_loss(head: str, first: torch.Tensor, second: torch.Tensor, rows: Any) -> torch.Tensor:
    """The suite's loss: a policy gradient with an entropy bonus, or a squared value error; 0 where the mask is 0."""
    mask = rows["response_mask"]
    if head == "lm":
        return -(first * rows["advantages"] + 0.01 * second) * mask
    return (first - rows["returns"]).square() * mask


@dataclass(frozen=True)
class Driver:
    """An engine that has been built, and how the suite feeds it."""

    engine: TrainEngine
    head: str

    def mine(self, rows: DataProto) -> DataProto:
        """This rank's rows of a batch that all ranks know."""
        place = self.engine.coordinates
        return rows.chunk(place.dp_size)[place.dp_rank]

    def packed(self, rows: DataProto, size: int, count: int | None = None) -> list[PackedRows]:
        """Micro-batches of `size` rows; empty ones at the end until there are `count`."""
        parts = [rows[start : start + size] for start in range(0, len(rows), size)]
        parts += [rows[:0]] * ((count or 0) - len(parts))
        return [pack(part, temperature=TEMPERATURE, device=self.engine.device) for part in parts]

    def num_micro_batches(self, rows: DataProto, size: int) -> int:
        """How many micro-batches the rank with the most rows needs."""
        pieces = rows.chunk(self.engine.coordinates.dp_size)
        return max(math.ceil(len(piece) / size) for piece in pieces)

    def outputs(self, rows: DataProto, size: int, entropy: bool = True) -> list[dict[str, torch.Tensor]] | None:
        """Outputs (b, R) of this rank's micro-batches, without gradients."""

        def collect(outputs: TokenOutputs, packed: PackedRows) -> dict[str, torch.Tensor]:
            entries = {
                "log_probs": outputs.log_probs,
                "entropy": outputs.entropy,
                "sum_pi_squared": outputs.sum_pi_squared,
                "values": outputs.values,
            }
            for name, value in entries.items():
                assert value is None or value.dtype == torch.float32, f"{name} must be float32, got {value}"
                assert value is None or not value.requires_grad, f"{name} of forward must carry no gradient"
            return {name: packed.to_response(value) for name, value in entries.items() if value is not None}

        mine = self.mine(rows)
        packed = self.packed(mine, size, self.num_micro_batches(rows, size))
        also = entropy and self.head == "lm"
        return self.engine.forward(packed, collect, entropy=also, sum_pi_squared=also)

    def accumulate(self, rows: DataProto, size: int, extra: int = 0) -> float:
        """Forward and backward over a batch that all ranks know; the loss over all ranks."""
        mine = self.mine(rows)
        count = batch_of(rows)["response_mask"].sum().item() or 1

        def loss(outputs: TokenOutputs, packed: PackedRows) -> tuple[torch.Tensor, float]:
            first = outputs.log_probs if self.head == "lm" else outputs.values
            second = outputs.entropy if self.head == "lm" else outputs.values
            assert first is not None
            assert second is not None
            token_loss = _per_token_loss(
                self.head, packed.to_response(first), packed.to_response(second), batch_of(packed.rows)
            )
            share = token_loss.sum() / count
            return share, share.item()

        packed = self.packed(mine, size, self.num_micro_batches(rows, size) + extra)
        losses = self.engine.forward_backward(packed, loss, entropy=self.head == "lm")
        seen = losses is not None
        own = torch.tensor([sum(losses or [])], dtype=torch.float64)
        return self._known_to_all(float(self.engine.reduce(own)[0]), seen)

    def _known_to_all(self, total: float, seen: bool) -> float:
        """A number that the ranks which see the outputs agree on; the others (earlier pipeline stages) are told."""
        if not dist.is_initialized() or dist.get_world_size() == self.engine.coordinates.dp_size:
            return total
        told = torch.tensor([total if seen else 0.0, float(seen)], dtype=torch.float64)
        dist.all_reduce(told)
        return float(told[0] / told[1])

    def train(self, rows: DataProto, size: int = 2) -> tuple[float, StepStats]:
        """One whole optimizer step."""
        loss = self.accumulate(rows, size)
        return loss, self.engine.optimizer_step()

    def state(self) -> dict[str, torch.Tensor]:
        """All weights, in full, as copies."""
        return {name: tensor.detach().clone() for name, tensor in self.engine.weight_source().weights()}


def start(
    make_engine: MakeEngine,
    folder: Path,
    head: str = "lm",
    optim: OptimConfig = OPTIM,
    **model: Any,
) -> Driver:
    """Build a trainable engine on one of the folders."""
    engine = make_engine(head=head, model=ModelConfig(path=str(folder), **model), optim=optim, trainable=True)
    engine.build()
    return Driver(engine, head)


def tolerance() -> float:
    """How far float32 results may lie apart, relatively.

    On a CPU 1e-6. On a GPU 5e-6: cuBLAS picks its kernel, and with it the order in which a product is added up, by the
    shapes; a pack of rows has other shapes than the oracle's single rows. 1.1e-6 was seen on an H200.
    """
    on_gpu = dist.is_initialized() and "nccl" in str(dist.get_backend_config())
    return RTOL_GPU if on_gpu else RTOL


def assert_near(name: str, got: float, expected: float, rtol: float | None = None) -> None:
    """Compare two numbers relatively; None is `tolerance`."""
    rtol = tolerance() if rtol is None else rtol
    assert abs(got - expected) <= rtol * max(abs(expected), 1e-3), f"{name}: expected {expected!r}, got {got!r}"


def assert_same_weights(
    got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], rtol: float | None = None
) -> None:
    """Compare weights by name: ‖got − expected‖ ≤ rtol · ‖expected‖ for each; bit by bit where rtol is 0."""
    rtol = tolerance() if rtol is None else rtol
    assert got.keys() == expected.keys(), f"names differ: {sorted(got.keys() ^ expected.keys())}"
    for name, tensor in got.items():
        reference = expected[name].to(tensor.device)
        assert tensor.shape == reference.shape, f"{name}: expected shape {reference.shape}, got {tensor.shape}"
        difference = (tensor.double() - reference.double()).norm().item()
        bound = rtol * reference.double().norm().item()
        assert difference <= bound, f"{name}: differs by {difference:.3e}, allowed {bound:.3e}"
