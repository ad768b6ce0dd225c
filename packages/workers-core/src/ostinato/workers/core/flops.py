"""How many floating-point operations a model's forward pass takes, and which share of the device's peak that is.

Counted are the multiplications and additions of the matrix products that the result needs: each weight once a token,
the attention's products once a pair of tokens that see each other, the head where it is asked. A backward pass is two
forward passes. What an implementation does beyond that (padding, recomputed activations, masked pairs) is not counted,
so MFU is the share of the peak that is spent on the result.
"""

from __future__ import annotations

import logging
import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from ostinato.protocol import DataProto, Metric
from ostinato.rollout.model_config import read_model_config
from ostinato.workers.core.config import ModelConfig
from ostinato.workers.core.engine import TrainEngine

logger = logging.getLogger(__name__)

PEAK_VARIABLE = "OSTINATO_DEVICE_TFLOPS"
"""Environment variable of the workers: the device's dense peak, in 10¹² operations a second."""

PEAK_TFLOPS: tuple[tuple[str, float], ...] = (
    ("GB300", 2500.0),
    ("GB200", 2500.0),
    ("B300", 2250.0),
    ("B200", 2250.0),
    ("H200", 989.5),
    ("GH200", 989.5),
    ("H100 PCIE", 756.0),
    ("H100 NVL", 835.5),
    ("H100", 989.5),
    ("H800 PCIE", 756.0),
    ("H800", 989.5),
    ("H20", 148.0),
    ("A100", 312.0),
    ("A800", 312.0),
    ("L40S", 362.0),
    ("L40", 181.0),
    ("L20", 119.5),
    ("L4", 121.0),
    ("A40", 149.7),
    ("A10", 125.0),
    ("RTX 6000 ADA", 364.25),
    ("RTX 5090", 209.5),
    ("RTX 4090", 165.2),
    ("RTX 3090", 71.0),
    ("V100", 125.0),
)
"""Dense bf16 peak (V100: fp16) by words of the device's name, in 10¹² operations a second; the first match counts.
Source: the vendor's data sheets, without sparsity."""

GATED = frozenset(
    {
        *("cohere2", "gemma2", "gemma3_text", "glm4", "granite", "llama", "mistral", "mixtral", "olmo2", "olmoe"),
        *("phi3", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "smollm3"),
    }
)
"""Model types whose layers are grouped-query attention and a gated MLP (or experts of that form)."""


@dataclass(frozen=True)
class Layer:
    """One decoder layer.

    Attributes:
        weights: entries of the matrices that a token meets: projections, MLP or chosen experts, router.
        window: tokens that a token sees, itself included; None: all before it.
    """

    weights: int
    window: int | None


@dataclass(frozen=True)
class ModelFlops:
    """The counts of one model.

    Attributes:
        layers: the decoder's layers.
        head_width: query heads × size of a head.
        head_weights: entries of the matrix that gives one position its logits or value.
    """

    layers: tuple[Layer, ...]
    head_width: int
    head_weights: int

    def forward(self, lengths: torch.Tensor, num_outputs: int) -> float:
        """Operations of a forward pass.

        Σ over layers of 2 · weights · T + 4 · head_width · pairs, and 2 · head_weights · N. A row of L tokens has
        L (L + 1) / 2 pairs; with a window w < L it has L w − w (w − 1) / 2.

        Args:
            lengths: (b,) int64 tokens of each row; T is their sum.
            num_outputs: N, positions at which the head runs.
        """
        lengths = lengths.to(torch.float64)
        tokens = float(lengths.sum())
        pairs: dict[int | None, float] = {}
        total = 2.0 * self.head_weights * num_outputs
        for layer in self.layers:
            if layer.window not in pairs:
                width = lengths if layer.window is None else lengths.clamp(max=layer.window)
                pairs[layer.window] = float((lengths * width - width * (width - 1) / 2).sum())
            total += 2.0 * layer.weights * tokens + 4.0 * self.head_width * pairs[layer.window]
        return total


def model_flops(config: Any, *, head: str) -> ModelFlops | None:
    """The counts of a model from its config alone.

    Args:
        config: the model's Hugging Face config, of a text model.
        head: `lm` or `value`.

    Returns:
        None for an architecture that this module does not know: no number rather than a wrong one.
    """
    if config.model_type not in GATED:
        logger.info("operations of a %s model are not counted; there will be no MFU", config.model_type)
        return None
    hidden, heads = config.hidden_size, config.num_attention_heads
    size = getattr(config, "head_dim", None) or hidden // heads
    groups = getattr(config, "num_key_value_heads", None) or heads
    attention = 2 * hidden * heads * size + 2 * hidden * groups * size
    return ModelFlops(
        layers=tuple(
            Layer(attention + _mlp_weights(config, index), _window(config, index))
            for index in range(config.num_hidden_layers)
        ),
        head_width=heads * size,
        head_weights=hidden * (config.vocab_size if head == "lm" else 1),
    )


def _mlp_weights(config: Any, index: int) -> int:
    """Entries of the MLP's matrices that a token meets in a layer."""
    hidden = config.hidden_size
    experts = getattr(config, "num_experts", None) or getattr(config, "num_local_experts", None)
    step = getattr(config, "decoder_sparse_step", None) or 1
    dense = index in (getattr(config, "mlp_only_layers", None) or ()) or (index + 1) % step
    if not experts or dense:
        return 3 * hidden * config.intermediate_size
    width = getattr(config, "moe_intermediate_size", None) or config.intermediate_size
    shared = getattr(config, "shared_expert_intermediate_size", None) or getattr(config, "shared_intermediate_size", 0)
    gate = hidden if getattr(config, "shared_expert_intermediate_size", None) else 0
    return 3 * hidden * (width * config.num_experts_per_tok + (shared or 0)) + hidden * experts + gate


def _window(config: Any, index: int) -> int | None:
    window = getattr(config, "sliding_window", None) or None
    kinds = getattr(config, "layer_types", None)
    if kinds is not None:
        return window if kinds[index] == "sliding_attention" else None
    return window if getattr(config, "use_sliding_window", True) else None


def peak_flops(device: torch.device) -> float | None:
    """The device's dense bf16 peak in operations a second.

    Args:
        device: where the model runs.

    Returns:
        What `OSTINATO_DEVICE_TFLOPS` says, else the table's entry for the device's name; None where neither knows it,
        as on a CPU.

    Raises:
        ValueError: the variable is no number above 0.
    """
    given = os.environ.get(PEAK_VARIABLE)
    if given:
        try:
            value = float(given)
        except ValueError:
            value = 0.0
        if not value > 0:
            raise ValueError(f"{PEAK_VARIABLE}: expected 10¹² operations a second as a number above 0, got {given!r}")
        return value * 1e12
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device).upper()
    return next((peak * 1e12 for part, peak in PEAK_TFLOPS if re.search(rf"\b{part}\b", name)), None)


class Mfu:
    """`perf/mfu/…` of one rank's calls: the share of the device's peak that they reached.

    Args:
        model: the model; its config is read where the peak is known.
        head: `lm` or `value`.
        engine: runs it; ranks that share a data-parallel rank's work share its operations.
        world_size: ranks of the role.
    """

    def __init__(self, model: ModelConfig, head: str, engine: TrainEngine, world_size: int) -> None:
        peak = peak_flops(engine.device)
        self._peak = peak and peak * world_size / engine.coordinates.dp_size
        self._flops: ModelFlops | None = None
        if peak is not None:
            config = read_model_config(
                model.path, model.override_config, trust_remote_code=model.trust_remote_code
            ).get_text_config()
            self._flops = model_flops(config, head=head)
        self._seconds = 0.0
        # An adapter's backward pass needs the gradients of the activations, and of hardly any weight.
        self._training = 2.0 if model.lora_rank > 0 else 3.0

    @contextmanager
    def measured(self) -> Iterator[None]:
        """Take the time of a call; what it computes has ended when it returns."""
        began = time.perf_counter()
        yield
        self._seconds = time.perf_counter() - began

    def metrics(self, name: str, batch: DataProto, epochs: int | None = None) -> dict[str, Metric]:
        """The share that the last measured call reached; the mean over ranks counts.

        Args:
            name: `actor`, `critic` or `actor_infer`.
            batch: this rank's rows: `attention_mask` (B, P+R), `response_mask` (B, R).
            epochs: passes of training over the rows; None: one forward pass.

        Returns:
            Nothing where the peak or the model's operations are not known.
        """
        if self._flops is None or self._peak is None or not len(batch) or self._seconds <= 0:
            return {}
        assert batch.batch is not None, "rows that were computed on have tensor columns"
        lengths, asked = batch.batch["attention_mask"].sum(dim=1), int(batch.batch["response_mask"].sum())
        passes = 1.0 if epochs is None else self._training * epochs
        done = self._flops.forward(lengths, asked) * passes
        return {f"perf/mfu/{name}": Metric.mean(done / self._seconds / self._peak)}
