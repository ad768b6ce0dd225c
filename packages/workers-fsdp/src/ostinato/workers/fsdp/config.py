"""Configuration of the FSDP engine: the keys of `fsdp_config`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from ostinato.workers.fsdp.errors import FsdpConfigError

_DTYPES = {
    "fp32": torch.float32,
    "float32": torch.float32,
    "bf16": torch.bfloat16,
    "bfloat16": torch.bfloat16,
    "fp16": torch.float16,
    "float16": torch.float16,
}


def torch_dtype(name: str, key: str) -> torch.dtype:
    """The torch dtype of a name such as ``bf16``.

    Args:
        name: One of fp32, bf16, fp16 or the long forms.
        key: The dotted config key, for the error.

    Raises:
        FsdpConfigError: The name is unknown.
    """
    try:
        return _DTYPES[name]
    except KeyError:
        raise FsdpConfigError(f"fsdp_config.{key}: expected one of {', '.join(_DTYPES)}, got {name!r}.") from None


@dataclass(frozen=True)
class FsdpConfig:
    """How one model lies on its ranks.

    Attributes:
        param_offload: Keep parameters in host memory between the calls that need them. The role worker acts on this
            through `onload` and `offload`; the engine never moves anything on its own.
        optimizer_offload: The same for the optimizer's state.
        offload_policy: Let FSDP itself keep parameters, gradients and optimizer state in host memory and fetch one
            layer at a time. Slow, and the smallest on the device. `onload` and `offload` then do nothing.
        reshard_after_forward: Free a layer's gathered weights after its forward and gather them again for backward
            (less memory); False keeps them (less communication).
        fsdp_size: Ranks that share one copy of the model. -1 means all; a smaller number gives hybrid sharding with
            `world_size / fsdp_size` replicas.
        model_dtype: Type of the master weights, the optimizer state and the checkpoint; fp16 where nothing of it is
            trained.
        dtype: Type of the matrix products and of the gathered weights. "auto" is bf16 on a GPU and fp32 on a CPU.
        reduce_dtype: Type in which gradients are added up over ranks and micro-batches.
        defer_gradient_sync: Reduce gradients once, after the last micro-batch. One communication a mini-batch, at the
            price of one whole gradient a rank in memory. False reduces after every micro-batch.
        forward_prefetch: Start gathering the next layer before the current one has finished.
        wrap_policy: `transformer_layer_cls_to_wrap`: class names of the blocks that are sharded on their own, in place
            of the model's own list.
        ulysses_sequence_parallel_size: ranks that share the tokens of a micro-batch; filled in from the role's key.
    """

    param_offload: bool = False
    optimizer_offload: bool = False
    offload_policy: bool = False
    reshard_after_forward: bool = True
    fsdp_size: int = -1
    model_dtype: str = "fp32"
    dtype: str = "auto"
    reduce_dtype: str = "fp32"
    defer_gradient_sync: bool = True
    forward_prefetch: bool = False
    wrap_policy: dict[str, Any] = field(default_factory=dict)
    ulysses_sequence_parallel_size: int = field(default=1, metadata={"derived": True})

    def __post_init__(self) -> None:
        """Check every value.

        Raises:
            FsdpConfigError: A value cannot be used; the text names the key.
        """
        torch_dtype(self.model_dtype, "model_dtype")
        torch_dtype(self.reduce_dtype, "reduce_dtype")
        if self.dtype != "auto":
            torch_dtype(self.dtype, "dtype")
        if self.fsdp_size != -1 and self.fsdp_size < 1:
            raise FsdpConfigError(
                f"fsdp_config.fsdp_size: expected -1 (all ranks) or at least 1, got {self.fsdp_size}."
            )
        unknown = set(self.wrap_policy) - {"transformer_layer_cls_to_wrap"}
        if unknown:
            raise FsdpConfigError(
                f"fsdp_config.wrap_policy: unknown key {sorted(unknown)}; known: transformer_layer_cls_to_wrap."
            )

    @property
    def master_dtype(self) -> torch.dtype:
        """The torch dtype of `model_dtype`."""
        return torch_dtype(self.model_dtype, "model_dtype")

    def compute_dtype(self, device: torch.device) -> torch.dtype:
        """The dtype of the forward pass on a device."""
        if self.dtype == "auto":
            return torch.bfloat16 if device.type == "cuda" else self.master_dtype
        return torch_dtype(self.dtype, "dtype")

    def layer_names(self) -> tuple[str, ...]:
        """Class names of `wrap_policy`, or nothing where the model's own list holds."""
        names = self.wrap_policy.get("transformer_layer_cls_to_wrap") or ()
        return (names,) if isinstance(names, str) else tuple(names)
