"""A training engine in plain torch: one model on one process, one row at a time. Slow, and easy to believe."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

import torch

from ostinato.algos import token_entropy, token_log_probs, token_sum_pi_squared
from ostinato.controller.topology import Coordinates
from ostinato.rollout.base import TensorSpec
from ostinato.workers.core.config import ModelConfig
from ostinato.workers.core.engine import LossFn, OutputFn, StepStats, TokenOutputs
from ostinato.workers.core.microbatch import PackedRows
from ostinato.workers.core.optim import OptimConfig, lr_factor
from ostinato.workers.core.testing.ranks import ThreadRanks

T = TypeVar("T")

_LOADING = threading.Lock()
"""`from_pretrained` switches global state while it loads, so thread ranks load one after another."""


@dataclass(frozen=True)
class PlainConfig:
    """The engine's own config.

    Attributes:
        param_offload: as every engine's; here "offloaded" parameters are refused, not moved.
        optimizer_offload: likewise.
        ranks: the other ranks, where there are any.
        rank: this one's number.
    """

    param_offload: bool = False
    optimizer_offload: bool = False
    ranks: ThreadRanks | None = None
    rank: int = 0


class PlainEngine:
    """`TrainEngine` without sharding or packing: each row runs alone, so nothing can leak between rows.

    Attributes:
        model: the Hugging Face model, float32.
        optimizer: AdamW, or None where the engine is frozen.
        num_steps: optimizer steps made.
        resident: which of `params` and `optimizer` are on the device.
        calls: names of the phases that ran, in order; for tests.
    """

    model: Any
    optimizer: torch.optim.AdamW | None

    def __init__(
        self,
        head: str,
        model: ModelConfig,
        optim: OptimConfig | None = None,
        engine: PlainConfig | None = None,
        trainable: bool = True,
    ) -> None:
        self.head = head
        self.model_config = model
        self.optim_config = optim
        self.config = engine or PlainConfig()
        self.trainable = trainable
        self.num_steps = 0
        self.resident = {"params": False, "optimizer": False}
        self.calls: list[str] = []

    def build(self) -> None:
        """Load the folder in float32; a value head that the folder lacks starts near 0."""
        if self.model_config.lora_rank:
            raise NotImplementedError("PlainEngine trains no adapters; leave model.lora_rank at 0")
        with _LOADING:
            self._load()
        self.model.eval()
        self.model.requires_grad_(self.trainable)
        self.optimizer = None
        if self.trainable:
            assert self.optim_config is not None, "a trainable engine needs an optimizer config"
            self.optim_config.check_resolved()
            optim = self.optim_config
            self.optimizer = torch.optim.AdamW(
                self.model.parameters(), lr=optim.lr, betas=optim.betas, eps=optim.eps, weight_decay=optim.weight_decay
            )
        self.resident = {"params": True, "optimizer": True}

    def _load(self) -> None:
        from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

        path = self.model_config.path
        options: dict[str, Any] = {"dtype": torch.float32, "attn_implementation": "eager"}
        options |= dict(self.model_config.override_config)
        if self.head == "lm":
            self.model = AutoModelForCausalLM.from_pretrained(path, **options)
        else:
            self.model, report = AutoModelForSequenceClassification.from_pretrained(
                path, num_labels=1, output_loading_info=True, **options
            )
            if "score.weight" in report["missing_keys"]:
                generator = torch.Generator().manual_seed(0)
                with torch.no_grad():
                    self.model.score.weight.normal_(0.0, 1e-3, generator=generator)

    @property
    def coordinates(self) -> Coordinates:
        """This rank among the thread ranks."""
        return Coordinates(self.config.rank, self.config.ranks.size if self.config.ranks else 1)

    @property
    def device(self) -> torch.device:
        """The CPU."""
        return torch.device("cpu")

    def forward(
        self,
        micro_batches: Sequence[PackedRows],
        fn: OutputFn[T],
        *,
        entropy: bool = False,
        sum_pi_squared: bool = False,
    ) -> list[T] | None:
        """Run micro-batches without gradients."""
        self._need(params=True)
        self.calls.append("forward")
        with torch.no_grad():
            return [fn(self._outputs(packed, entropy, sum_pi_squared), packed) for packed in micro_batches]

    def forward_backward(
        self, micro_batches: Sequence[PackedRows], fn: LossFn[T], *, entropy: bool = False
    ) -> list[T] | None:
        """Run micro-batches with gradients and add them up; the ranks are added up in `optimizer_step`."""
        self._need(params=True, optimizer=True)
        self.calls.append("forward_backward")
        collected = []
        for packed in micro_batches:
            loss, extra = fn(self._outputs(packed, entropy), packed)
            if loss.requires_grad:
                loss.backward()
            collected.append(extra)
        return collected

    def optimizer_step(self) -> StepStats:
        """Add up the ranks' gradients, clip, step, advance the schedule, zero the gradients."""
        assert self.optimizer is not None, "the engine is frozen"
        assert self.optim_config is not None, "the engine is frozen"
        self._need(params=True, optimizer=True)
        self.calls.append("optimizer_step")
        for parameter in self.model.parameters():
            grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            parameter.grad = self.reduce(grad)
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.optim_config.grad_clip)
        lr = self.optim_config.lr * lr_factor(self.num_steps, self.optim_config)
        finite = bool(torch.isfinite(norm))
        if finite:
            for group in self.optimizer.param_groups:
                group["lr"] = lr
            self.optimizer.step()
        self.num_steps += 1
        self.optimizer.zero_grad(set_to_none=True)
        return StepStats(grad_norm=float(norm), lr=lr, skipped=not finite)

    def reduce(self, values: torch.Tensor) -> torch.Tensor:
        """Sum over the thread ranks."""
        ranks = self.config.ranks
        return values.clone() if ranks is None else ranks.all_reduce(self.config.rank, values)

    def onload(self, *, params: bool = True, optimizer: bool = True) -> None:
        """Allow the use of parameters and optimizer."""
        self.resident = {
            "params": self.resident["params"] or params,
            "optimizer": self.resident["optimizer"] or optimizer,
        }

    def offload(self, *, params: bool = True, optimizer: bool = True) -> None:
        """Forbid the use of parameters and optimizer until `onload`."""
        self.resident = {
            "params": self.resident["params"] and not params,
            "optimizer": self.resident["optimizer"] and not optimizer,
        }

    def weight_source(self) -> PlainWeights:
        """The model's own parameters."""
        return PlainWeights(self)

    def save(self, path: Path, *, background: bool = False) -> None:
        """Write everything into one file, at once; rank 0 writes, the others hold the same."""
        if self.config.rank:
            return
        path.mkdir(parents=True, exist_ok=True)
        state = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict() if self.optimizer else None,
            "num_steps": self.num_steps,
            "random": torch.get_rng_state(),
        }
        torch.save(state, path / "engine.pt")

    def load(self, path: Path) -> None:
        """Read what `save` wrote."""
        state = torch.load(path / "engine.pt", weights_only=True)
        self.model.load_state_dict(state["model"])
        if self.optimizer is not None:
            self.optimizer.load_state_dict(state["optimizer"])
        self.num_steps = state["num_steps"]
        torch.set_rng_state(state["random"])

    def _need(self, **parts: bool) -> None:
        missing = [name for name in parts if not self.resident[name]]
        if missing:
            raise RuntimeError(f"PlainEngine: {missing} is offloaded; the phase must bring it back first")

    def _outputs(self, packed: PackedRows, entropy: bool, sum_pi_squared: bool = False) -> TokenOutputs:
        read = [self._row(packed.input_ids[start:end]) for start, end in pairwise(packed.cu_seqlens.tolist())]
        width = 1 if self.head == "value" else self.model.config.vocab_size
        chosen = torch.cat([torch.zeros(0, width), *read])[packed.predict]
        if self.head == "value":
            return TokenOutputs(values=chosen[:, 0])
        return TokenOutputs(
            log_probs=token_log_probs(chosen, packed.labels, packed.temperature),
            entropy=token_entropy(chosen, packed.temperature) if entropy else None,
            sum_pi_squared=token_sum_pi_squared(chosen, packed.temperature) if sum_pi_squared else None,
        )

    def _row(self, input_ids: torch.Tensor) -> torch.Tensor:
        if not len(input_ids):
            return torch.zeros(0, 1 if self.head == "value" else self.model.config.vocab_size)
        if self.head == "lm":
            return self.model(input_ids=input_ids[None], use_cache=False).logits[0]
        return self.model.score(self.model.base_model(input_ids=input_ids[None], use_cache=False).last_hidden_state[0])


class PlainWeights:
    """The engine's weights under their names; a tied weight comes once."""

    def __init__(self, engine: PlainEngine) -> None:
        self._engine = engine

    def specs(self) -> dict[str, TensorSpec]:
        """Names, shapes and dtypes."""
        return {
            name: TensorSpec(tuple(weight.shape), weight.dtype)
            for name, weight in self._engine.model.named_parameters()
        }

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The weights themselves."""
        for name, weight in self._engine.model.named_parameters():
            yield name, weight.detach()
