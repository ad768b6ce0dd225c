from __future__ import annotations

import dataclasses
import pickle

import pytest
import torch

from ostinato.rollout import RolloutConfig, SamplingParams, ValidationConfig, errors

PREFIX = "actor_rollout_ref.rollout"


def test_config_has_the_documented_defaults():
    config = RolloutConfig()
    assert (config.n, config.temperature, config.tensor_model_parallel_size, config.gpu_memory_utilization) == (
        1,
        1.0,
        1,
        0.5,
    )
    assert (config.prompt_length, config.response_length, config.context_length) == (512, 512, 1024)
    assert config.val_kwargs == ValidationConfig(temperature=0.0, n=1, do_sample=False)
    assert config.torch_dtype is torch.bfloat16
    assert config.load_format == "dummy"


def test_config_keys_are_the_known_set():
    """Growing this set is a decision."""
    assert {f.name for f in dataclasses.fields(RolloutConfig)} == {
        "name", "n", "temperature", "top_p", "top_k", "min_p", "do_sample", "prompt_length", "response_length",
        "tensor_model_parallel_size", "gpu_memory_utilization", "dtype", "seed", "ignore_eos", "enforce_eager",
        "free_cache_engine", "max_num_seqs", "max_num_batched_tokens", "max_model_len", "load_format",
        "update_weights_bucket_megabytes", "check_weights", "log_prob_micro_batch_size_per_gpu",
        "log_prob_use_dynamic_bsz", "log_prob_max_token_len_per_gpu", "val_kwargs",
    }  # fmt: skip
    assert {f.name for f in dataclasses.fields(ValidationConfig)} == {
        "temperature", "top_p", "top_k", "min_p", "n", "do_sample",
    }  # fmt: skip


@pytest.mark.parametrize("name", ["vllm", "sglang", "hf", "fake"])
def test_config_knows_every_engine_without_installing_it(name):
    assert RolloutConfig(name=name).name == name


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("name", "vlm"), ("n", 0), ("n", "8"), ("n", True), ("temperature", 0), ("temperature", -1.0),
        ("temperature", float("nan")), ("temperature", "hot"), ("temperature", 0.009),
        ("temperature", 2.1), ("top_p", 0.9), ("top_p", 0), ("top_p", 1.5),
        ("top_k", 50), ("top_k", -2), ("top_k", 1.5), ("min_p", 0.1), ("do_sample", 1), ("prompt_length", 0),
        ("response_length", 0), ("tensor_model_parallel_size", 0), ("gpu_memory_utilization", 0),
        ("gpu_memory_utilization", 1.01), ("gpu_memory_utilization", -0.5),
        ("gpu_memory_utilization", float("nan")), ("dtype", "int8"), ("seed", -1), ("seed", 2**63),
        ("ignore_eos", "yes"),
        ("enforce_eager", None), ("free_cache_engine", 0), ("max_num_seqs", 0), ("max_num_batched_tokens", 0),
        ("max_model_len", 512), ("load_format", "magic"), ("update_weights_bucket_megabytes", 0),
        ("log_prob_micro_batch_size_per_gpu", 0), ("log_prob_use_dynamic_bsz", 2),
        ("log_prob_max_token_len_per_gpu", 0),
    ],
)  # fmt: skip
def test_config_refuses_with_the_dotted_key(key, value):
    with pytest.raises(errors.ConfigError) as caught:
        RolloutConfig(**{key: value})
    assert caught.value.key == f"{PREFIX}.{key}"
    assert str(caught.value).startswith(f"{PREFIX}.{key}: ")


@pytest.mark.parametrize(
    ("key", "value"), [("temperature", -1), ("top_p", 0), ("top_k", -3), ("min_p", 2), ("n", 0), ("do_sample", "no")]
)
def test_config_refuses_validation_values_with_the_dotted_key(key, value):
    with pytest.raises(errors.ConfigError) as caught:
        RolloutConfig(val_kwargs={key: value})
    assert caught.value.key == f"{PREFIX}.val_kwargs.{key}"


def test_config_refuses_unknown_validation_key_and_sampling_at_temperature_zero():
    with pytest.raises(errors.ConfigError, match=r"val_kwargs.topk: no such key"):
        RolloutConfig(val_kwargs={"topk": 1})
    with pytest.raises(errors.ConfigError, match=r"val_kwargs.temperature"):
        RolloutConfig(val_kwargs={"do_sample": True})


@pytest.mark.parametrize(("key", "value"), [("top_p", 0.7), ("top_k", 20), ("min_p", 0.05)])
def test_config_allows_restricted_sampling_in_validation_alone(key, value):
    config = RolloutConfig(val_kwargs={key: value, "temperature": 0.6, "do_sample": True, "n": 4})
    assert getattr(config.sampling(validate=True), key) == value
    assert getattr(config.sampling(), key) == getattr(SamplingParams(), key)


def test_config_refuses_many_greedy_samples():
    with pytest.raises(errors.ConfigError, match="do_sample"):
        RolloutConfig(do_sample=False, n=2)
    assert RolloutConfig(do_sample=False).sampling().greedy
    asked = RolloutConfig(temperature=0.7, n=4).sampling(greedy=True)
    assert asked.greedy
    assert asked.log_prob_temperature == 0.7


def test_config_sampling_carries_step_and_keeps_validation_streams_apart():
    config = RolloutConfig(temperature=0.7, seed=5, ignore_eos=True, response_length=9)
    train, validate = config.sampling(step=3), config.sampling(step=3, validate=True)
    assert (train.temperature, train.seed, train.step, train.max_tokens, train.ignore_eos) == (0.7, 5, 3, 9, True)
    assert validate.greedy
    assert validate.seed != train.seed
    assert config.sampling(eos_token_ids=(7,)).eos_token_ids == (7,)


def test_sampling_greedy_and_log_prob_temperature():
    assert SamplingParams(temperature=0).greedy
    assert SamplingParams(temperature=0).log_prob_temperature == 1.0
    assert SamplingParams(temperature=0.5, do_sample=False).greedy
    assert SamplingParams(temperature=0.5, do_sample=False).log_prob_temperature == 0.5
    assert SamplingParams(eos_token_ids=[3, 4]).eos_token_ids == (3, 4)


@pytest.mark.parametrize("key", ["max_tokens", "seed", "step", "temperature", "top_p"])
def test_sampling_refuses_negative_values(key):
    with pytest.raises(errors.ConfigError, match=f"sampling.{key}"):
        SamplingParams(**{key: -1})


@pytest.mark.parametrize(
    ("key", "values"),
    [
        ("max_tokens", [0, 1.5, True]),
        ("seed", [2**63, 0.5]),
        ("temperature", [1e-8, 0.009, 2.001, float("nan"), float("inf"), None]),
        ("eos_token_ids", [3, "12", [1.5], [None]]),
    ],
)
def test_sampling_refuses_what_engines_take_for_something_else(key, values):
    """vLLM draws at 0.01 where less is asked and refuses more than 2; a text is no list of tokens."""
    for value in values:
        with pytest.raises(errors.ConfigError, match=f"sampling.{key}: ") as caught:
            SamplingParams(**{key: value})
        assert caught.value.key == f"sampling.{key}"


def test_sampling_takes_tokens_of_any_kind_of_integer():
    assert SamplingParams(eos_token_ids=torch.tensor([7, 9])).eos_token_ids == (7, 9)
    assert SamplingParams(eos_token_ids=()).eos_token_ids == ()


def test_config_pickles():
    config = RolloutConfig(val_kwargs={"n": 2})
    assert pickle.loads(pickle.dumps(config)) == config
