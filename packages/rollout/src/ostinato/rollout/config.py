"""What a user may set about generation, checked when it is set; key names are the field's."""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, NoReturn

import torch

from ostinato.rollout.backends import find_backend
from ostinato.rollout.errors import ConfigError

PREFIX = "actor_rollout_ref.rollout"

_DTYPES = {
    "bfloat16": torch.bfloat16,
    "bf16": torch.bfloat16,
    "float16": torch.float16,
    "fp16": torch.float16,
    "float32": torch.float32,
    "fp32": torch.float32,
}
_LOAD_FORMATS = ("dummy", "auto", "safetensors")

# What every engine draws at as asked: vLLM takes less for 0.01, and refuses more.
_TEMPERATURES = (0.01, 2.0)
_MOST_SEED = 2**63 - 1

# Validation draws from its own streams, so that it neither repeats nor disturbs the samples of a training step.
_VALIDATION_STREAM = 0x5EED_7E57


def _refuse(key: str, expected: str, got: object, fix: str) -> NoReturn:
    raise ConfigError(f"{key}: expected {expected}, got {got!r}. {fix}", key=key)


def _check_int(key: str, value: object, least: int, fix: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        _refuse(key, f"an integer of at least {least}", value, fix)


def _check_number(key: str, value: object, low: float, high: float, fix: str, *, open_low: bool = False) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        _refuse(key, "a finite number", value, fix)
    elif value > high or value < low or (open_low and value == low):
        _refuse(key, f"a number in {'(' if open_low else '['}{low:g}, {high:g}]", value, fix)


def _check_temperature(key: str, value: Any, *, zero: bool) -> None:
    low, high = _TEMPERATURES
    fix = f"{'0 is greedy, ' if zero else ''}1 the model's own distribution."
    _check_number(key, value, 0, high, fix, open_low=not zero)
    if 0 < value < low:
        _refuse(key, f"a number in [{low:g}, {high:g}]{' or 0' if zero else ''}", value, fix)


def _check_seed(key: str, value: Any) -> None:
    fix = "Take any number from 0 to 2**63 - 1."
    _check_int(key, value, 0, fix)
    if value > _MOST_SEED:
        _refuse(key, "an integer below 2**63", value, fix)


def _token_ids(key: str, value: Any) -> tuple[int, ...]:
    try:
        return tuple(operator.index(token) for token in value)
    except TypeError:
        _refuse(key, "a list of token ids", value, "Write (7,) for one token, () for none.")


def _check_bool(key: str, value: object) -> None:
    if not isinstance(value, bool):
        _refuse(key, "true or false", value, "Write true or false.")


def _check_filters(prefix: str, top_p: object, top_k: object, min_p: object) -> None:
    _check_number(f"{prefix}.top_p", top_p, 0, 1, "1 keeps every token.", open_low=True)
    _check_number(f"{prefix}.min_p", min_p, 0, 1, "0 keeps every token.")
    if isinstance(top_k, bool) or not isinstance(top_k, int) or top_k < -1:
        _refuse(f"{prefix}.top_k", "an integer of at least 1, or -1 or 0 for no limit", top_k, "-1 keeps every token.")


@dataclass(frozen=True)
class SamplingParams:
    """How the tokens of one call are drawn.

    A token is drawn from softmax(logits / temperature), restricted by `top_k`, `top_p` and `min_p` where they are set;
    the returned log-probability is always that of the temperature-scaled distribution before any restriction.

    Attributes:
        temperature: 0.01 to 2; 0 means greedy, and log-probabilities are then those of temperature 1.
        top_p: keep the smallest set of tokens whose probability reaches this; 1 keeps all.
        top_k: keep that many tokens; -1 or 0 keeps all.
        min_p: keep tokens of at least this share of the likeliest token's probability; 0 keeps all.
        do_sample: False takes the likeliest token whatever the temperature, which then only scales log-probabilities.
        max_tokens: most tokens of a response; None is the engine's `response_length`.
        seed: first part of the key of the random streams.
        step: second part of the key: another step, other samples. The third part is each row's `rollout_id`.
        ignore_eos: go on after an end token.
        eos_token_ids: tokens that end a response (they belong to it); None is the model's own, () is none.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    do_sample: bool = True
    max_tokens: int | None = None
    seed: int = 0
    step: int = 0
    ignore_eos: bool = False
    eos_token_ids: tuple[int, ...] | None = None

    def __post_init__(self):
        _check_temperature("sampling.temperature", self.temperature, zero=True)
        _check_filters("sampling", self.top_p, self.top_k, self.min_p)
        _check_bool("sampling.do_sample", self.do_sample)
        _check_bool("sampling.ignore_eos", self.ignore_eos)
        if self.max_tokens is not None:
            _check_int("sampling.max_tokens", self.max_tokens, 1, "None is the engine's response_length.")
        _check_seed("sampling.seed", self.seed)
        _check_int("sampling.step", self.step, 0, "It is the number of the training step.")
        if self.eos_token_ids is not None:
            object.__setattr__(self, "eos_token_ids", _token_ids("sampling.eos_token_ids", self.eos_token_ids))

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is taken at each place."""
        return not self.do_sample or self.temperature == 0

    @property
    def log_prob_temperature(self) -> float:
        """What logits are divided by before log-probabilities are taken."""
        return self.temperature if self.temperature > 0 else 1.0


@dataclass(frozen=True)
class ValidationConfig:
    """How validation samples (`actor_rollout_ref.rollout.val_kwargs`); greedy unless set otherwise.

    Attributes:
        temperature: what logits are divided by where `do_sample` is set, 0.01 to 2.
        top_p: draw from the smallest set of tokens whose probability reaches this; 1 keeps all.
        top_k: draw from that many likeliest tokens; -1 or 0 keeps all.
        min_p: draw from tokens of at least this share of the likeliest token's probability; 0 keeps all.
        n: answers to each validation prompt; above 1 there are best-of and majority values as well.
        do_sample: draw; false takes the likeliest token each time.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    n: int = 1
    do_sample: bool = False

    def __post_init__(self):
        prefix = f"{PREFIX}.val_kwargs"
        _check_temperature(f"{prefix}.temperature", self.temperature, zero=True)
        _check_filters(prefix, self.top_p, self.top_k, self.min_p)
        _check_int(f"{prefix}.n", self.n, 1, "It is the number of answers to each validation prompt.")
        _check_bool(f"{prefix}.do_sample", self.do_sample)
        if self.do_sample and self.temperature == 0:
            _refuse(f"{prefix}.temperature", "a positive number with do_sample=true", 0, "Set it, or do_sample=false.")


@dataclass(frozen=True)
class RolloutConfig:
    """Everything under `actor_rollout_ref.rollout`.

    Training uses log-probabilities of the temperature-scaled full distribution, so it samples from exactly that one:
    `top_p`, `top_k` and `min_p` are refused here and allowed in `val_kwargs`.

    Attributes:
        name: the engine: vllm, sglang, hf, fake, or a registered one.
        n: responses to each training prompt.
        temperature: what logits are divided by, in sampling and in every log-probability of training; 0.01 to 2.
        top_p: 1, which keeps every token; anything else is refused in training.
        top_k: -1 or 0, which keep every token; anything else is refused in training.
        min_p: 0, which keeps every token; anything else is refused in training.
        do_sample: draw; false takes the likeliest token each time, and then `n` must be 1.
        prompt_length: width of the padded prompts, in tokens (the app sets it from `data.max_prompt_length`).
        response_length: width of the padded responses, in tokens (`data.max_response_length`).
        tensor_model_parallel_size: ranks that one engine is spread over; `hf` takes only 1.
        gpu_memory_utilization: share of the device memory that the engine may take in all.
        dtype: what the engine computes in.
        seed: key of the random streams, together with step and `rollout_id`.
        ignore_eos: go on after an end token until the response is full, for measurements.
        enforce_eager: an engine that captures CUDA graphs does without them; `hf` captures none.
        free_cache_engine: give device memory back between generations.
        max_num_seqs: most rows decoded at once.
        max_num_batched_tokens: most prompt tokens run at once.
        max_model_len: most tokens of prompt and response together; None is the sum of both lengths.
        load_format: "dummy" builds the engine without reading weights, which come from the training engine.
        update_weights_bucket_megabytes: what a bucket of weights takes, with room for the tensor that
            comes next; a sync takes two.
        check_weights: after every sync compare a checksum of each weight in training and in the engine; for finding out
            whether an engine's loader changes weights, as it takes longer than the sync.
        log_prob_micro_batch_size_per_gpu: rows in one forward pass for log-probabilities; setting it switches dynamic
            micro-batches off.
        log_prob_use_dynamic_bsz: micro-batches under a token budget; None: on unless an explicit size is given.
        log_prob_max_token_len_per_gpu: that budget: tokens in one forward pass for log-probabilities.
    """

    name: str = "hf"
    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    do_sample: bool = True
    prompt_length: int = 512
    response_length: int = 512
    tensor_model_parallel_size: int = 1
    gpu_memory_utilization: float = 0.5
    dtype: str = "bfloat16"
    seed: int = 0
    ignore_eos: bool = False
    enforce_eager: bool = False
    free_cache_engine: bool = True
    max_num_seqs: int = 1024
    max_num_batched_tokens: int = 8192
    max_model_len: int | None = None
    load_format: str = "dummy"
    update_weights_bucket_megabytes: int = 512
    check_weights: bool = False
    log_prob_micro_batch_size_per_gpu: int | None = None
    log_prob_use_dynamic_bsz: bool | None = None
    log_prob_max_token_len_per_gpu: int = 16384
    val_kwargs: ValidationConfig = field(default_factory=ValidationConfig)

    def __post_init__(self):
        if isinstance(self.val_kwargs, Mapping):
            object.__setattr__(self, "val_kwargs", _validation_from_mapping(self.val_kwargs))
        find_backend(self.name)
        self._check_sampling()
        self._check_sizes()
        for key in ("do_sample", "ignore_eos", "enforce_eager", "free_cache_engine", "check_weights"):
            _check_bool(f"{PREFIX}.{key}", getattr(self, key))
        if self.log_prob_use_dynamic_bsz is not None:
            _check_bool(f"{PREFIX}.log_prob_use_dynamic_bsz", self.log_prob_use_dynamic_bsz)
        if self.dtype not in _DTYPES:
            _refuse(f"{PREFIX}.dtype", f"one of {', '.join(_DTYPES)}", self.dtype, "bfloat16 is the usual choice.")
        if self.load_format not in _LOAD_FORMATS:
            fix = "dummy takes the weights from the training engine."
            _refuse(f"{PREFIX}.load_format", f"one of {', '.join(_LOAD_FORMATS)}", self.load_format, fix)

    def _check_sampling(self) -> None:
        _check_temperature(f"{PREFIX}.temperature", self.temperature, zero=False)
        _check_filters(PREFIX, self.top_p, self.top_k, self.min_p)
        for key, off in (("top_p", self.top_p == 1), ("top_k", self.top_k <= 0), ("min_p", self.min_p == 0)):
            if not off:
                reason = (
                    "training needs log-probabilities of the distribution it samples from, and uses those of the "
                    f"temperature-scaled full one. Leave {key} alone; {PREFIX}.val_kwargs.{key} may be set."
                )
                _refuse(f"{PREFIX}.{key}", "no restriction in training", getattr(self, key), reason)
        _check_int(f"{PREFIX}.n", self.n, 1, "It is the number of responses to each prompt.")
        if not self.do_sample and self.n > 1:
            fix = "Greedy responses to one prompt are all equal: set do_sample=true or n=1."
            _refuse(f"{PREFIX}.do_sample", f"true where n is {self.n}", self.do_sample, fix)
        _check_seed(f"{PREFIX}.seed", self.seed)

    def _check_sizes(self) -> None:
        least_one = (
            "prompt_length",
            "response_length",
            "tensor_model_parallel_size",
            "max_num_seqs",
            "max_num_batched_tokens",
            "update_weights_bucket_megabytes",
            "log_prob_max_token_len_per_gpu",
        )
        for key in least_one:
            _check_int(f"{PREFIX}.{key}", getattr(self, key), 1, "It is a count.")
        if self.log_prob_micro_batch_size_per_gpu is not None:
            key = f"{PREFIX}.log_prob_micro_batch_size_per_gpu"
            _check_int(key, self.log_prob_micro_batch_size_per_gpu, 1, "It is a count of rows; null is by tokens.")
        _check_number(
            f"{PREFIX}.gpu_memory_utilization", self.gpu_memory_utilization, 0, 1, "0.5 is half.", open_low=True
        )
        if self.max_model_len is not None:
            fix = f"A prompt may hold {self.prompt_length} tokens and needs room for one more; null is the sum of both."
            _check_int(f"{PREFIX}.max_model_len", self.max_model_len, self.prompt_length + 1, fix)

    @property
    def torch_dtype(self) -> torch.dtype:
        """`dtype` as torch knows it."""
        return _DTYPES[self.dtype]

    @property
    def context_length(self) -> int:
        """Most tokens of prompt and response together."""
        return self.max_model_len or self.prompt_length + self.response_length

    def sampling(
        self,
        *,
        step: int = 0,
        validate: bool = False,
        greedy: bool = False,
        eos_token_ids: tuple[int, ...] | None = None,
    ) -> SamplingParams:
        """The sampling parameters of one call.

        Args:
            step: number of the training step.
            validate: use `val_kwargs` and streams of their own.
            greedy: take the likeliest token, whatever is configured; log-probabilities keep their temperature.
            eos_token_ids: tokens that end a response; None is the model's own.
        """
        chosen = self.val_kwargs if validate else self
        return SamplingParams(
            temperature=chosen.temperature,
            top_p=chosen.top_p,
            top_k=chosen.top_k,
            min_p=chosen.min_p,
            do_sample=chosen.do_sample and not greedy,
            max_tokens=self.response_length,
            seed=self.seed ^ (_VALIDATION_STREAM << 31) if validate else self.seed,
            step=step,
            ignore_eos=self.ignore_eos,
            eos_token_ids=eos_token_ids,
        )


def _validation_from_mapping(values: Mapping[str, Any]) -> ValidationConfig:
    known = [f.name for f in fields(ValidationConfig)]
    for name in values:
        if name not in known:
            key = f"{PREFIX}.val_kwargs.{name}"
            raise ConfigError(f"{key}: no such key; known are {', '.join(known)}.", key=key)
    return ValidationConfig(**values)
