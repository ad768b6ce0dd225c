from __future__ import annotations

from types import SimpleNamespace

import pytest

from ostinato.rollout import RolloutConfig
from ostinato.rollout.errors import ConfigError
from ostinato.rollout.limits import (
    cache_bytes_per_token,
    check_device,
    check_head_size,
    check_memory,
    check_model,
    check_parallel,
    checked_context,
)
from ostinato.rollout.testing import save_tiny_model

GIB = 1 << 30
TEXT = SimpleNamespace(num_attention_heads=12, num_key_value_heads=4, num_hidden_layers=2, hidden_size=96)


def config(**keys) -> RolloutConfig:
    return RolloutConfig(**{"name": "fake", "prompt_length": 8, "response_length": 8, **keys})


@pytest.mark.parametrize(("size", "world"), [(1, 1), (1, 3), (2, 4), (4, 4), (12, 12)])
def test_limits_parallel_sizes_that_work(size, world):
    check_parallel(config(tensor_model_parallel_size=size), TEXT, world)


@pytest.mark.parametrize(("size", "world", "works"), [(8, 8, 4), (5, 5, 1), (4, 6, 2), (6, 6, 3 - 1), (24, 24, 12)])
def test_limits_refuse_parallel_sizes_with_one_that_works(size, world, works):
    with pytest.raises(ConfigError, match=rf"\b{works} works") as caught:
        check_parallel(config(tensor_model_parallel_size=size), TEXT, world)
    assert caught.value.key == "actor_rollout_ref.rollout.tensor_model_parallel_size"
    check_parallel(config(tensor_model_parallel_size=works), TEXT, world)


def test_limits_cache_counts_local_heads():
    """2 (k, v) x 2 layers x 4 heads x 8 x 2 bytes; half of it on two ranks; never less than one head."""
    assert cache_bytes_per_token(config(), TEXT) == 256
    assert cache_bytes_per_token(config(tensor_model_parallel_size=2), TEXT) == 128
    assert cache_bytes_per_token(config(tensor_model_parallel_size=8), TEXT) == 64


def test_limits_memory_too_low_says_what_works():
    sizes = {"weights": 14 * GIB, "cache": GIB, "free": 60 * GIB, "total": 80 * GIB}
    with pytest.raises(ConfigError, match=r"at least 0\.2: .* 16\.0 GiB .* 0\.2 works"):
        check_memory(config(gpu_memory_utilization=0.1), **sizes)
    check_memory(config(gpu_memory_utilization=0.2), **sizes)


def test_limits_memory_too_high_says_what_works():
    sizes = {"weights": 14 * GIB, "cache": GIB, "free": 60 * GIB, "total": 80 * GIB}
    with pytest.raises(ConfigError, match=r"at most 0\.75: .* 0\.75 works") as caught:
        check_memory(config(gpu_memory_utilization=0.9), **sizes)
    assert caught.value.key == "actor_rollout_ref.rollout.gpu_memory_utilization"
    check_memory(config(gpu_memory_utilization=0.75), **sizes)


def test_limits_memory_of_a_full_device():
    with pytest.raises(ConfigError, match="Offload"):
        check_memory(config(), weights=14 * GIB, cache=GIB, free=10 * GIB, total=80 * GIB)


def test_limits_context_is_the_models(tmp_path):
    save_tiny_model(tmp_path, max_position_embeddings=16)
    from transformers import AutoConfig

    model = AutoConfig.from_pretrained(tmp_path)
    assert checked_context(config(), model) == 16
    assert checked_context(config(response_length=20), model) == 16
    with pytest.raises(ConfigError, match=r"prompt_length.* 15 works"):
        checked_context(config(prompt_length=16), model)
    with pytest.raises(ConfigError, match="max_position_embeddings=16, got 17"):
        checked_context(config(max_model_len=17), model)


LLAMA = {
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "max_position_embeddings": 8192,
}


def test_limits_ask_only_the_entries_of_a_config_json():
    """A mapping does: preflight has no transformers model, no ranks and no device."""
    sizes = {"prompt_length": 1024, "response_length": 2048}
    assert check_model(config(**sizes), LLAMA, world_size=8) == 3072
    with pytest.raises(ConfigError, match="4 works"):
        check_model(config(tensor_model_parallel_size=6, **sizes), LLAMA, world_size=12)
    with pytest.raises(ConfigError, match="8191 works"):
        check_model(config(prompt_length=8192), LLAMA, world_size=8)
    with pytest.raises(ConfigError, match="8192 works"):
        check_model(config(max_model_len=9000), LLAMA, world_size=8)


def test_limits_device_of_eight_billion_parameters():
    """16 GB of weights, 128 KiB of cache a token, 1 GiB to work in, on 80 GiB of which 50 are free."""
    device = {"parameters": 8_000_000_000, "free": 50 * GIB, "total": 80 * GIB}
    keys = {"prompt_length": 1024, "response_length": 7168}
    assert cache_bytes_per_token(config(**keys), LLAMA) == 128 << 10
    assert check_device(config(gpu_memory_utilization=0.5, **keys), LLAMA, **device) == 39 * GIB
    with pytest.raises(ConfigError, match=r"at most 0\.62: .* 0\.62 works"):
        check_device(config(gpu_memory_utilization=0.7, **keys), LLAMA, **device)
    with pytest.raises(ConfigError, match=r"at least 0\.22: .* 16\.9 GiB .* 0\.22 works"):
        check_device(config(gpu_memory_utilization=0.1, **keys), LLAMA, **device)
    spread = config(gpu_memory_utilization=0.13, tensor_model_parallel_size=2, **keys)
    assert check_device(spread, LLAMA, **device) == int(0.13 * 80 * GIB) - GIB


def test_limits_refuse_heads_that_the_kernels_lack():
    """LLAMA's are of 128 by its widths; a stated `head_dim` counts first; compressed keys and values are let pass."""
    check_head_size(LLAMA, [64, 128])
    check_head_size({**LLAMA, "kv_lora_rank": 512}, [64])
    check_head_size({**LLAMA, "head_dim": 64}, [64])
    with pytest.raises(ConfigError, match=r"heads have 32, 64 channels.*got 128\. hf works") as caught:
        check_head_size(LLAMA, [64, 32])
    assert caught.value.key == "actor_rollout_ref.rollout.name"
