"""A model from a Hugging Face folder, laid out over the ranks of a mesh.

Every rank makes the model on the meta device and shards it there; rank 0 alone reads the folder and sends one weight
after another. No rank ever holds the whole model, unless the folder keeps its weights in another form than the model
does: then rank 0 makes it from the folder first.
"""

from __future__ import annotations

import copy
import logging
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import (
    AutoModelForCausalLM,
    AutoModelForTokenClassification,
    PretrainedConfig,
    PreTrainedModel,
)

from ostinato.rollout.model_config import ATTENTION, read_model_config
from ostinato.workers.core.config import ModelConfig
from ostinato.workers.core.engine import Head
from ostinato.workers.core.value_head import fresh_value_head
from ostinato.workers.core.weight_index import find_index, read_index
from ostinato.workers.fsdp.attention import VARLEN, choose_attention, dense_attention, registered_name
from ostinato.workers.fsdp.config import FsdpConfig, torch_dtype
from ostinato.workers.fsdp.errors import FsdpConfigError, ModelLoadError
from ostinato.workers.fsdp.folder import Read, loose_tensors, open_folder
from ostinato.workers.fsdp.head import fuse_head
from ostinato.workers.fsdp.liger import use_liger_kernels
from ostinato.workers.fsdp.lora import add_adapter, first_value, folder_name, is_adapter, keep_frozen_in
from ostinato.workers.fsdp.ulysses import check_model

logger = logging.getLogger(__name__)

_RANDOM = ("drop", "jitter")
"""What the names of a config's entries contain that make training random."""

_CLASSIFIER_ENDINGS = ("ForSequenceClassification", "ForTokenClassification", "RewardModel")


def read_config(model: ModelConfig, head: Head) -> PretrainedConfig:
    """The folder's model config with `override_config` applied.

    Nothing in it is random in training (dropout, skipped layers, noise on a router's input): between two forward passes
    of the same weights that would make the probability ratio of an unchanged policy differ from 1. A value head has one
    label.
    """
    if not model.path:
        raise ModelLoadError("model.path: expected a Hugging Face folder or name, got nothing.")
    config = read_model_config(model.path, model.override_config, trust_remote_code=model.trust_remote_code)
    config.use_cache = False
    for part in (config, config.get_text_config()):
        for name, value in list(vars(part).items()):
            if isinstance(value, float) and any(word in name for word in _RANDOM):
                setattr(part, name, 0.0)
    if head == "value":
        if any(name.endswith(_CLASSIFIER_ENDINGS) for name in config.architectures or ()) and config.num_labels != 1:
            raise ModelLoadError(
                f"model.path {model.path}: expected a classifier with 1 label, got {config.num_labels}. "
                "A value head or reward model gives one number a token."
            )
        config.num_labels = 1
    return config


def set_attention(module: nn.Module, model: ModelConfig) -> None:
    """Give a model its attention: `override_config.attn_implementation`, or the fastest that fits where it is absent.

    Raises:
        ModelLoadError: `varlen` was asked for without packing.
    """
    requested = model.override_config.get(ATTENTION)
    if not model.use_remove_padding:
        if requested == VARLEN:
            raise ModelLoadError(
                f"model.override_config.{ATTENTION}: {VARLEN} runs packed rows only; set model.use_remove_padding=True "
                f"or {ATTENTION}=sdpa."
            )
        requested = requested or dense_attention(module)
    cast(PreTrainedModel, module).set_attn_implementation(choose_attention(module, requested))


def _auto_class(head: Head) -> Any:
    return AutoModelForCausalLM if head == "lm" else AutoModelForTokenClassification


def _finish_head(module: nn.Module, config: PretrainedConfig) -> None:
    """Drop the value head's bias, which only folders of token classifiers hold, and dropout that no config names."""
    score = getattr(module, "score", None)
    if isinstance(score, nn.Linear) and not any(
        name.endswith("ForTokenClassification") for name in config.architectures or ()
    ):
        score.register_parameter("bias", None)
    for child in module.modules():
        if isinstance(child, nn.Dropout):
            child.p = 0.0


def _in_dtype(config: PretrainedConfig, dtype: torch.dtype) -> PretrainedConfig:
    """The config with another dtype: a token classifier of older transformers builds its body from the config's own."""
    changed = copy.copy(config)
    changed.dtype = dtype
    return changed


def make_meta_module(model: ModelConfig, config: PretrainedConfig, head: Head, dtype: torch.dtype) -> nn.Module:
    """The model without storage."""
    with torch.device("meta"):
        module = _auto_class(head).from_config(
            _in_dtype(config, dtype),
            dtype=dtype,
            trust_remote_code=model.trust_remote_code,
        )
    _finish_head(module, config)
    return module


def load_full_module(
    model: ModelConfig, config: PretrainedConfig, head: Head, dtype: torch.dtype, *, require_head: bool
) -> nn.Module:
    """The whole model with the folder's weights, in host memory.

    Args:
        model: Which folder.
        config: What `read_config` gave.
        head: "lm" or "value".
        dtype: Type of the weights.
        require_head: Whether a folder without a trained value head is an error (a reward model), or gets a fresh head
            (a critic): normal, standard deviation 1e-3, the same on every run.

    Raises:
        ModelLoadError: The folder lacks weights of the model.
    """
    module, report = _auto_class(head).from_pretrained(
        model.path,
        config=_in_dtype(config, dtype),
        dtype=dtype,
        trust_remote_code=model.trust_remote_code,
        output_loading_info=True,
    )
    _finish_head(module, config)
    missing = {name for name in report["missing_keys"] if name in dict(module.named_parameters())}
    if head == "value" and "score.weight" in missing:
        missing -= {"score.weight", "score.bias"}
        if require_head:
            raise ModelLoadError(
                f"model.path {model.path}: expected a trained head `score.weight`, found none "
                f"(architectures {config.architectures}). Give the folder of a sequence classifier with one label."
            )
        module.score.weight.data = _fresh_head(module)
        logger.info("%s has no value head; a fresh one starts near 0.", model.path)
    if missing:
        raise ModelLoadError(f"model.path {model.path}: weights are missing from the folder: {sorted(missing)[:5]} …")
    return module


def _fresh_head(module: Any) -> torch.Tensor:
    weight = module.score.weight
    return fresh_value_head(weight.shape[1], weight.dtype)


def read_weights(
    model: ModelConfig, config: PretrainedConfig, head: Head, module: nn.Module, dtype: torch.dtype, *, trainable: bool
) -> Read:
    """How rank 0 comes to each weight: straight from the folder where that can be, else from the whole model.

    Args:
        model: Which folder.
        config: What `read_config` gave.
        head: "lm" or "value".
        module: The model without storage, not sharded yet.
        dtype: Type of the whole model.
        trainable: False makes a trained value head compulsory.

    Raises:
        ModelLoadError: The folder does not hold such a model.
        ModelFolderError: The index of its weights leads nowhere.
    """
    if index := find_index(Path(model.path)):
        read_index(index)  # transformers says IndexError of an empty one

    def made(name: str) -> torch.Tensor:
        if head == "value" and trainable and name == "score.weight":
            return _fresh_head(module)
        raise KeyError(name)

    read = open_folder(model.path, module, made)
    if read is not None:
        return read
    full = load_full_module(model, config, head, dtype, require_head=not trainable)
    sources = {name: parameter.detach() for name, parameter in full.named_parameters()}
    sources |= {name: getattr(child, attribute) for child, attribute, name in loose_tensors(full)}
    return lambda name: sources[folder_name(name)]


def layer_classes(module: nn.Module, names: tuple[str, ...]) -> set[str]:
    """Class names of the blocks that are sharded on their own.

    Raises:
        ModelLoadError: No such block is in the model.
    """
    wanted = set(names) or set(getattr(module, "_no_split_modules", None) or ())
    found = wanted & {type(child).__name__ for child in module.modules()}
    if not found:
        raise ModelLoadError(
            f"fsdp_config.wrap_policy: no block of {type(module).__name__} is called {sorted(wanted)}. Name the class "
            "of its layers in wrap_policy.transformer_layer_cls_to_wrap."
        )
    return found


def shard(module: nn.Module, mesh: DeviceMesh, device: torch.device, config: FsdpConfig) -> list[FSDPModule]:
    """Shard a model: each block on its own, then what is left at the root.

    The embeddings stay with the root where they are tied to the head: a tied weight must lie in one group.

    Returns:
        The sharded modules, the root last.
    """
    dtype = config.compute_dtype(device)
    policy = MixedPrecisionPolicy(
        param_dtype=None if dtype == config.master_dtype else dtype,
        reduce_dtype=torch_dtype(config.reduce_dtype, "reduce_dtype"),
    )
    offload = CPUOffloadPolicy(pin_memory=device.type == "cuda") if config.offload_policy else OffloadPolicy()
    arguments: dict[str, Any] = {"mesh": mesh, "mp_policy": policy, "offload_policy": offload}
    classes = layer_classes(module, config.layer_names())
    blocks = [child for child in module.modules() if type(child).__name__ in classes]
    units = list(blocks)
    head = module.get_output_embeddings()  # pyright: ignore[reportCallIssue, reportAttributeAccessIssue]
    embeddings = module.get_input_embeddings()  # pyright: ignore[reportCallIssue, reportAttributeAccessIssue]
    if embeddings is not None and (head is None or head.weight is not embeddings.weight):
        units.append(embeddings)
    for unit in units:
        fully_shard(unit, reshard_after_forward=config.reshard_after_forward, **arguments)
    fully_shard(module, reshard_after_forward=False, **arguments)
    if config.forward_prefetch:
        for block, following in pairwise(blocks):
            cast(FSDPModule, block).set_modules_to_forward_prefetch([cast(FSDPModule, following)])
    sharded = [cast(FSDPModule, unit) for unit in (*units, module)]
    for unit in sharded:
        # FSDP averages by default; ostinato's losses are divided by global counts, so gradients are sums. Without
        # forced sums a factor of 1 becomes a pre-multiplied reduction, which gloo lacks.
        unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)
    return sharded


def send_weights(module: nn.Module, read: Read | None, device: torch.device, *, host: bool) -> None:
    """Fill a sharded model without storage with what rank 0 reads, one tensor after another.

    Args:
        module: The sharded model on the meta device.
        read: Gives each weight on rank 0, None elsewhere.
        device: Where weights are sent.
        host: Keep the shards in host memory (`offload_policy`).
    """
    loose = list(loose_tensors(module))
    shapes = [(child, attribute, name, getattr(child, attribute)) for child, attribute, name in loose]
    module.to_empty(device="cpu" if host else device)

    def receive(name: str, like: torch.Tensor) -> torch.Tensor:
        if is_adapter(name):
            return first_value(name, like).to(device)
        if read is None:
            tensor = torch.empty(like.shape, dtype=like.dtype, device=device)
        else:
            tensor = read(name).to(device=device, dtype=like.dtype).contiguous()
        dist.broadcast(tensor, src=0)
        return tensor

    with torch.no_grad():
        for name, parameter in module.named_parameters():
            assert isinstance(parameter, DTensor), f"{name} is not sharded"
            whole = receive(name, parameter)
            part = distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=None)
            parameter.to_local().copy_(part.to_local())
        for child, attribute, name, like in shapes:
            tensor = receive(name, like)
            if attribute in child._buffers:
                child._buffers[attribute] = tensor
            else:
                setattr(child, attribute, tensor)


def build_module(
    model: ModelConfig, head: Head, mesh: DeviceMesh, device: torch.device, config: FsdpConfig, *, trainable: bool
) -> tuple[nn.Module, list[FSDPModule]]:
    """Load and shard a model; collective over all ranks.

    Args:
        model: Which folder, and how.
        head: "lm" or "value".
        mesh: The ranks.
        device: Where it trains.
        config: The layout.
        trainable: False freezes the weights, and makes a trained value head compulsory.

    Returns:
        The model and its sharded modules, the root last.

    Raises:
        ModelLoadError: The folder does not hold such a model; raised on every rank.
        FsdpConfigError: The model cannot be trained so.
    """
    hf_config = read_config(model, head)
    module = make_meta_module(model, hf_config, head, config.master_dtype)
    module.requires_grad_(trainable)
    if trainable and model.lora_rank > 0:
        add_adapter(module, model, head)
        keep_frozen_in(module, config.compute_dtype(device))
    if any(parameter.requires_grad and parameter.dtype == torch.float16 for parameter in module.parameters()):
        raise FsdpConfigError(
            f"fsdp_config.model_dtype={config.model_dtype}: expected fp32 or bf16 for weights that are trained. "
            "AdamW's second moments and its epsilon are 0 in float16, and the first step would make the weights "
            "infinite. For float16 products set fsdp_config.dtype=fp16 and leave model_dtype at fp32."
        )
    if head == "lm" and model.use_fused_kernels:
        fuse_head(module)
    if model.use_liger:
        use_liger_kernels(module, device)
    set_attention(module, model)
    if config.ulysses_sequence_parallel_size > 1:
        attention = cast(Any, module).config._attn_implementation
        check_model(module, config.ulysses_sequence_parallel_size, attention, registered_name(VARLEN))
    if trainable and model.enable_gradient_checkpointing:
        module.gradient_checkpointing_enable({"use_reentrant": False})  # pyright: ignore[reportCallIssue]
    read: Read | None = None
    failure: list[ModelLoadError | None] = [None]
    if dist.get_rank() == 0:
        try:
            read = read_weights(model, hf_config, head, module, config.master_dtype, trainable=trainable)
        except Exception as error:  # every rank must learn of it, or the others wait for weights
            logger.exception("%s could not be loaded", model.path)
            failure = [
                error
                if isinstance(error, ModelLoadError)
                else ModelLoadError(
                    f"model.path {model.path}: {type(error).__name__}: {error}. Where a file is missing, empty or cut "
                    "off, fetch or copy the folder again."
                )
            ]
    dist.broadcast_object_list(failure, src=0)
    if failure[0] is not None:
        raise failure[0]
    units = shard(module, mesh, device, config)
    send_weights(module, read, device, host=config.offload_policy)
    return module, units
