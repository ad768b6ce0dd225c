"""What a model, the ranks or a device cannot do, refused before an engine is built, with the number that would work.

Nothing here looks at hardware or imports an engine: a model is given by the entries of its `config.json` (an object or
a mapping), a device by its sizes, so that all of it can be asked before a worker starts.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

from ostinato.rollout.config import PREFIX
from ostinato.rollout.errors import ConfigError

if TYPE_CHECKING:
    from ostinato.rollout.config import RolloutConfig

# Of what an engine takes besides weights and cache: activations of one pass and its workspaces.
_RESERVE_BYTES = 1 << 30


def _refuse(key: str, expected: str, got: object, fix: str) -> None:
    raise ConfigError(f"{PREFIX}.{key}: expected {expected}, got {got}. {fix}", key=f"{PREFIX}.{key}")


def _entry(text_config: Any, name: str) -> Any:
    return text_config.get(name) if isinstance(text_config, Mapping) else getattr(text_config, name, None)


def check_parallel(config: RolloutConfig, text_config: Any, world_size: int) -> None:
    """Refuse a tensor parallelism that the heads or the ranks do not allow.

    Args:
        config: everything under `actor_rollout_ref.rollout`.
        text_config: the language model's configuration, an object or a mapping.
        world_size: ranks of the worker group.

    Raises:
        ConfigError: with the nearest smaller size that works.
    """
    size = config.tensor_model_parallel_size
    heads = int(_entry(text_config, "num_attention_heads") or size)
    kv_heads = int(_entry(text_config, "num_key_value_heads") or heads)

    def fits(n: int) -> bool:
        return world_size % n == 0 and heads % n == 0 and (kv_heads % n == 0 or n % kv_heads == 0)

    if not fits(size):
        best = max(n for n in range(1, size + 1) if fits(n))
        expected = f"a divisor of the {world_size} ranks and of the model's {heads} attention heads ({kv_heads} for kv)"
        _refuse("tensor_model_parallel_size", expected, size, f"{best} works.")


def cache_bytes_per_token(config: RolloutConfig, text_config: Any) -> int:
    """What keys and values of one token take on one rank."""
    heads = int(_entry(text_config, "num_attention_heads"))
    kv_heads = int(_entry(text_config, "num_key_value_heads") or heads)
    head_dim = _head_size(text_config)
    local = max(1, kv_heads // config.tensor_model_parallel_size)
    return 2 * int(_entry(text_config, "num_hidden_layers")) * local * head_dim * config.torch_dtype.itemsize


def _head_size(text_config: Any) -> int:
    stated = _entry(text_config, "head_dim")
    return int(stated or _entry(text_config, "hidden_size") // _entry(text_config, "num_attention_heads"))


def check_head_size(text_config: Any, sizes: Collection[int]) -> None:
    """Refuse a model with attention heads of a size that the engine's kernels lack.

    Args:
        text_config: the language model's configuration, an object or a mapping. A model that compresses its keys and
            values (`kv_lora_rank`) has other sizes in the kernel and is let pass.
        sizes: channels a head that the kernels know.

    Raises:
        ConfigError: with the sizes that work.
    """
    size = _head_size(text_config)
    if _entry(text_config, "kv_lora_rank") is None and size not in sizes:
        expected = f"a model whose heads have {', '.join(map(str, sorted(sizes)))} channels on this device"
        _refuse("name", expected, size, "hf works.")


def check_memory(config: RolloutConfig, *, weights: int, cache: int, free: int, total: int) -> None:
    """Refuse a `gpu_memory_utilization` that cannot hold the engine, or that the device does not have.

    Args:
        config: everything under `actor_rollout_ref.rollout`.
        weights: bytes of the weights on one rank.
        cache: bytes of the keys and values of one longest sequence on one rank.
        free: free bytes of the device.
        total: bytes of the device.

    Raises:
        ConfigError: with a number that works.
    """
    share = config.gpu_memory_utilization
    need = weights + cache + _RESERVE_BYTES
    least = math.ceil(100 * need / total) / 100
    most = math.floor(100 * free / total) / 100
    gib = 1 << 30
    about = (
        f"the engine needs {need / gib:.1f} GiB (weights {weights / gib:.1f}, one sequence {cache / gib:.1f}, "
        f"workspace {_RESERVE_BYTES / gib:.0f}), and {free / gib:.1f} of {total / gib:.1f} GiB are free"
    )
    if least > most:
        fix = "Offload training state, spread the model over more ranks, or take a smaller one."
        _refuse("gpu_memory_utilization", f"room for the engine: {about}", share, fix)
    if share < least:
        _refuse("gpu_memory_utilization", f"at least {least:g}: {about}", share, f"{least:g} works.")
    if share > most:
        _refuse("gpu_memory_utilization", f"at most {most:g}: {about}", share, f"{most:g} works.")


def context_length(config: RolloutConfig, text_config: Any) -> int:
    """Most tokens of prompt and response together: what is configured, cut to what the model has positions for.

    Raises:
        ConfigError: a `max_model_len` beyond the model's positions.
    """
    known = _entry(text_config, "max_position_embeddings")
    if known is None:
        return config.context_length
    if config.max_model_len is not None and config.max_model_len > known:
        expected = f"at most the model's max_position_embeddings={known}"
        _refuse("max_model_len", expected, config.max_model_len, f"{known} works.")
    return min(config.context_length, int(known))


def checked_context(config: RolloutConfig, text_config: Any) -> int:
    """`context_length`, where a longest prompt leaves room for a token in it.

    Raises:
        ConfigError: prompts that fill the model's positions, or a `max_model_len` beyond them.
    """
    length = context_length(config, text_config)
    if config.prompt_length >= length:
        fix = f"{length - 1} works; data.max_prompt_length sets it."
        _refuse("prompt_length", f"fewer than the model's {length} positions", config.prompt_length, fix)
    return length


def check_model(config: RolloutConfig, text_config: Any, *, world_size: int) -> int:
    """Refuse what the model or the number of ranks cannot do; knows nothing of a device.

    Args:
        config: everything under `actor_rollout_ref.rollout`.
        text_config: the language model's configuration, an object or a mapping.
        world_size: ranks of the worker group.

    Returns:
        Most tokens of prompt and response together.

    Raises:
        ConfigError: with a number that works.
    """
    length = checked_context(config, text_config)
    check_parallel(config, text_config, world_size)
    return length


def check_device(config: RolloutConfig, text_config: Any, *, parameters: int, free: int, total: int) -> int:
    """Refuse a share of a device that the engine of this model cannot live in, or that is not free.

    Args:
        config: everything under `actor_rollout_ref.rollout`.
        text_config: the language model's configuration, an object or a mapping.
        parameters: of the whole model, a shared one once.
        free: free bytes of the device when the engine is built.
        total: bytes of the device.

    Returns:
        Bytes of weights and cache together, which is the share less what the engine works in.

    Raises:
        ConfigError: with a number that works.
    """
    length = checked_context(config, text_config)
    weights = parameters * config.torch_dtype.itemsize // config.tensor_model_parallel_size
    cache = cache_bytes_per_token(config, text_config) * length
    check_memory(config, weights=weights, cache=cache, free=free, total=total)
    return int(config.gpu_memory_utilization * total) - _RESERVE_BYTES
