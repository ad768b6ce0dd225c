"""Which model a role loads, and which engine runs it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ostinato.workers.core.limits import require


@dataclass(frozen=True)
class ModelConfig:
    """Which model a role loads.

    Attributes:
        path: Hugging Face folder or name. Required before a worker starts.
        tokenizer_path: where the tokenizer is, if not in `path`.
        trust_remote_code: run code that comes with the model.
        override_config: entries of the model's config that replace those of its folder.
        enable_gradient_checkpointing: recompute activations in the backward pass.
        enable_activation_offload: keep activations in host memory between the forward and the backward pass, with
            gradient checkpointing or without; nothing changes on a CPU.
        use_remove_padding: run packed rows; off for a model whose attention cannot keep packed rows apart.
        use_fused_kernels: log-probabilities and entropies straight from the hidden states, so that the logits never
            exist; a model whose logits change after its head keeps them. Off computes the logits.
        use_liger: Liger's kernels for norms, rotary positions and gated activations; GPUs and the FSDP engine only.
        lora_rank: train low-rank adapters of this rank in place of the weights; 0 trains the weights.
        lora_alpha: an adapter's output counts `lora_alpha / lora_rank` times.
        target_modules: which modules get an adapter: `all-linear` (all but the head), a list of name endings, or a
            regular expression over full names.
        exclude_modules: which of them do not; a list or an expression likewise.
        external_lib: a module that every worker imports first; it may register models, policy losses and rollouts.
    """

    path: str = ""
    tokenizer_path: str | None = None
    trust_remote_code: bool = False
    override_config: Mapping[str, Any] = field(default_factory=dict)
    enable_gradient_checkpointing: bool = True
    enable_activation_offload: bool = False
    use_remove_padding: bool = True
    use_fused_kernels: bool = True
    use_liger: bool = False
    lora_rank: int = 0
    lora_alpha: int = 16
    target_modules: str | list[str] = "all-linear"
    exclude_modules: str | list[str] | None = None
    external_lib: str | None = None

    def __post_init__(self) -> None:
        """Check ranges."""
        require(self.lora_rank >= 0, "model.lora_rank", "0 (no adapter) or a rank above it", self.lora_rank)
        require(self.lora_alpha > 0, "model.lora_alpha", "greater than 0", self.lora_alpha)
        require(bool(self.target_modules), "model.target_modules", "all-linear, names or an expression", "nothing")

    @property
    def resolved_tokenizer_path(self) -> str:
        """Where the tokenizer is loaded from."""
        return self.tokenizer_path or self.path


@dataclass(frozen=True)
class EngineChoice:
    """Which training engine runs a model, and that engine's own config.

    Attributes:
        strategy: `fsdp` or `megatron`.
        fsdp_config: the FSDP engine's own config.
        megatron: the Megatron engine's own config.
        ulysses_sequence_parallel_size: ranks that share the tokens of a micro-batch; every token budget a GPU counts
            that many times. FSDP only.
    """

    strategy: str = "fsdp"
    fsdp_config: Any = None
    megatron: Any = None
    ulysses_sequence_parallel_size: int = 1

    @property
    def engine_config(self) -> Any:
        """The config of the engine that `strategy` names, with what the role says about it."""
        if self.strategy == "megatron":
            return self.megatron
        config, size = self.fsdp_config, self.ulysses_sequence_parallel_size
        if size == 1:
            return config
        shared = {"ulysses_sequence_parallel_size": size}
        return {**config, **shared} if isinstance(config, Mapping) else replace(config, **shared) if config else shared

    @property
    def param_offload(self) -> bool:
        """Whether parameters lie in host memory between the phases that use them."""
        return self._flag("param_offload")

    @property
    def optimizer_offload(self) -> bool:
        """Whether optimizer state lies in host memory between updates."""
        return self._flag("optimizer_offload")

    def _flag(self, name: str) -> bool:
        config = self.engine_config
        return bool(config.get(name, False) if isinstance(config, Mapping) else getattr(config, name, False))
