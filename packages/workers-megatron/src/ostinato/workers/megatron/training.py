"""What a piece of a model is trained with: its number type, gradient buffers and the optimizer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from ostinato.workers.core.optim import OptimConfig
from ostinato.workers.megatron.config import MegatronConfig, check_entries
from ostinato.workers.megatron.errors import MegatronConfigError
from ostinato.workers.megatron.parallel import import_megatron

FIXED = {
    "use_distributed_optimizer": "use megatron.use_distributed_optimizer",
    "overlap_grad_reduce": "gradients are reduced once a step; leave it out",
    "average_in_collective": "gradients are sums; leave it out",
}
"""Entries of Megatron's DistributedDataParallelConfig that a user cannot set, and why."""


def ddp_config(config: MegatronConfig) -> Any:
    """Megatron's DistributedDataParallelConfig.

    Raises:
        MegatronConfigError: `override_ddp_config` names what does not exist or is fixed, or Megatron refuses a value.
    """
    key, cls = "megatron.override_ddp_config", import_megatron("distributed").DistributedDataParallelConfig
    check_entries(key, config.override_ddp_config, cls)
    for name in FIXED.keys() & config.override_ddp_config.keys():
        raise MegatronConfigError(f"{key}.{name}: this entry is fixed: {FIXED[name]}")
    options = {"grad_reduce_in_fp32": True, "use_distributed_optimizer": config.use_distributed_optimizer}
    try:
        return cls(**options | config.override_ddp_config)
    except (ValueError, TypeError, AssertionError) as error:
        raise MegatronConfigError(f"{key}: Megatron refuses it ({type(error).__name__}: {error})") from error


def wrap(piece: nn.Module, transformer: Any, ddp: Any | None, index: int) -> nn.Module:
    """A piece in its number type, with gradient buffers where it is trained.

    Args:
        piece: on its device.
        transformer: Megatron's TransformerConfig.
        ddp: of `ddp_config`; None for a piece that is not trained.
        index: which of the stage's pieces.
    """
    if transformer.bf16:
        piece = import_megatron("transformer.module").Float16Module(transformer, piece)
    if ddp is None:
        return piece.eval()
    layout = _buffer_layout(piece, ddp) if ddp.use_distributed_optimizer else None
    return import_megatron("distributed").DistributedDataParallel(
        transformer, ddp, piece, disable_bucketing=index > 0, full_param_layout=layout
    )


def _buffer_layout(piece: nn.Module, ddp: Any) -> Any:
    """Where parameters lie in the distributed optimizer's buffers: Megatron's own, with padding counted in.

    An embedding that two stages share has a bucket of its own. Megatron saves a buffer's optimizer state without what
    pads its buckets, and reads parameters from it where they lie with padding: those behind it get others' state.
    """
    state, cls = import_megatron("parallel_state"), import_megatron("optimizer.distrib_optimizer").DistributedOptimizer
    whole = cls.compute_full_param_layout(
        [parameter for parameter in piece.parameters() if parameter.requires_grad],
        None,
        state.get_data_parallel_world_size(with_context_parallel=True),
        ddp,
        expert_data_parallel_world_size=state.get_expert_data_parallel_world_size(),
    )
    padded = {
        key: replace(buffer, per_bucket_numel_unpadded=[end - start for start, end in buffer.bucket_indices])
        for key, buffer in whole.layouts.items()
    }
    return replace(whole, layouts=padded)


def build_optimizer(chunks: Sequence[nn.Module], optim: OptimConfig, config: MegatronConfig, dtype: torch.dtype) -> Any:
    """Megatron's AdamW over all parameters, decayed alike; it clips nothing by itself."""
    module = import_megatron("optimizer")
    options = module.OptimizerConfig(
        optimizer="adam",
        lr=1.0,  # each step sets its own; a checkpoint's groups are told apart by this one
        weight_decay=optim.weight_decay,
        adam_beta1=optim.betas[0],
        adam_beta2=optim.betas[1],
        adam_eps=optim.eps,
        bf16=dtype == torch.bfloat16,
        params_dtype=dtype,
        use_distributed_optimizer=config.use_distributed_optimizer,
        clip_grad=0.0,
    )
    return module.get_megatron_optimizer(options, list(chunks), config_overrides={}, use_gloo_process_groups=False)
