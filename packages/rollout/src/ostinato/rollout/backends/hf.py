"""The embedded engine: a transformers model in this process, on a CPU or one GPU, with its own copy of the weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, GenerationConfig
from transformers.initialization import no_init_weights

from ostinato.rollout.assemble import PaddedResponses, assemble_padded, check_prompts, rollout_ids
from ostinato.rollout.config import PREFIX
from ostinato.rollout.decoding import Decoded, Decoder, DecodeRequest
from ostinato.rollout.errors import ConfigError, GenerationError
from ostinato.rollout.lifecycle import Lifecycle
from ostinato.rollout.limits import context_length
from ostinato.rollout.live_weights import LiveWeights
from ostinato.rollout.model_config import read_model_config

if TYPE_CHECKING:
    from ostinato.protocol import DataProto
    from ostinato.rollout.base import Bucket, TensorSpec, WakeTag
    from ostinato.rollout.config import RolloutConfig, SamplingParams


def end_tokens(model_path: str | Path, model_config: Any, tokenizer: Any = None) -> tuple[int, ...]:
    """The tokens that end a response: those of `generation_config.json` and the tokenizer, else those of the config."""
    found: list[int] = []
    if (Path(model_path) / "generation_config.json").is_file():
        found += _as_ids(GenerationConfig.from_pretrained(model_path).eos_token_id)
    found += _as_ids(getattr(tokenizer, "eos_token_id", None))
    return tuple(dict.fromkeys(found or _as_ids(getattr(model_config, "eos_token_id", None))))


def _as_ids(value: int | Sequence[int] | None) -> list[int]:
    if value is None:
        return []
    return [int(value)] if isinstance(value, int) else [int(token) for token in value]


class HfRollout:
    """Generates with a transformers causal language model.

    Any model of `AutoModelForCausalLM` whose cache holds keys and values works; weights go by the names that the
    model's folder has for them. Samples depend on (seed, step, rollout_id) and the row's own prompt, not on the other
    rows.

    Args:
        config: everything under `actor_rollout_ref.rollout`.
        model_path: folder with `config.json`; weights are read only where `load_format` is not "dummy".
        device: where to compute.
        dp_rank: place among `dp_size` independent engines.
        dp_size: number of independent engines.
        tokenizer: gives padding and end tokens; None takes the model's.
        override_config: entries of the model's config that replace those of its folder.
        trust_remote_code: run code that comes with the model.

    Raises:
        ConfigError: tensor parallelism, or a context that the model's positions do not cover.
    """

    def __init__(
        self,
        config: RolloutConfig,
        *,
        model_path: str | Path,
        device: torch.device | str = "cpu",
        dp_rank: int = 0,
        dp_size: int = 1,
        tokenizer: Any = None,
        override_config: Mapping[str, Any] | None = None,
        trust_remote_code: bool = False,
    ):
        if config.tensor_model_parallel_size != 1:
            key = f"{PREFIX}.tensor_model_parallel_size"
            raise ConfigError(
                f"{key}: the hf engine runs on one device, got {config.tensor_model_parallel_size}. "
                "Set it to 1, or take another engine.",
                key=key,
            )
        self._config = config
        self._dp_rank, self._dp_size = dp_rank, dp_size
        self._device = torch.device(device)
        model_config = read_model_config(model_path, override_config, trust_remote_code=trust_remote_code)
        self._context_length = context_length(config, model_config.get_text_config(decoder=True))
        self._model = self._build(model_path, model_config, trust_remote_code)
        self._weights = LiveWeights(self._model)
        self._specs = self._weights.specs()
        self._eos = end_tokens(model_path, model_config.get_text_config(decoder=True), tokenizer)
        self._pad = pad_token(tokenizer, model_config, self._eos)
        self._decoder = Decoder(
            self._model, max_num_seqs=config.max_num_seqs, max_num_batched_tokens=config.max_num_batched_tokens
        )
        loaded = config.load_format != "dummy"
        self._state = Lifecycle("hf", self._specs, loaded=loaded)
        if not loaded:
            self._weights.drop()

    def _build(self, model_path: str | Path, model_config: Any, trust_remote_code: bool) -> Any:
        options: dict[str, Any] = {"dtype": self._config.torch_dtype, "trust_remote_code": trust_remote_code}
        model: Any
        if self._config.load_format == "dummy":
            with no_init_weights(), self._device:
                model = AutoModelForCausalLM.from_config(model_config, **options)
            # Tying is part of the initialisation that was skipped.
            model.tie_weights()
        else:
            model = AutoModelForCausalLM.from_pretrained(model_path, config=model_config, **options)
            torch.nn.Module.to(model, self._device)
        return model.eval().requires_grad_(False)

    @property
    def dp_rank(self) -> int:
        """This engine's place among the independent ones."""
        return self._dp_rank

    @property
    def dp_size(self) -> int:
        """How many independent engines there are."""
        return self._dp_size

    def specs(self) -> dict[str, TensorSpec]:
        """The weights the engine wants, tied names included."""
        return dict(self._specs)

    def wake(self, tag: WakeTag) -> None:
        """Take memory for the weights; the cache takes its own while it generates."""
        self._state.wake(tag)
        if tag == "weights":
            self._weights.allocate(self._device)

    def load_weights(self, bucket: Bucket) -> None:
        """Copy some weights into the live parameters, cast to their dtype."""
        self._state.load(name for name, _ in bucket)
        for name, tensor in bucket:
            self._weights.load(name, tensor)

    def finish_load(self) -> None:
        """Check that every weight came."""
        self._state.finish_load()

    def checksums(self) -> dict[str, int]:
        """A checksum of every weight, each memory once."""
        return self._weights.checksums()

    def sleep(self) -> None:
        """Give the weights' memory back (with `free_cache_engine`); new weights must come before the next use."""
        self._state.sleep()
        if self._config.free_cache_engine:
            self._weights.drop()

    def close(self) -> None:
        """Drop the weights for good."""
        self._state.close()
        self._weights.drop()

    def generate(self, prompts: DataProto, sampling: SamplingParams) -> DataProto:
        """Answer each prompt row once; see `Rollout.generate`."""
        self._state.require_ready()
        prompts = prompts.to("cpu")
        lengths = check_prompts(prompts, self._context_length)
        decoded = self._decode(prompts, lengths, sampling)
        self._check_numbers(decoded, prompts)
        return assemble_padded(
            prompts,
            PaddedResponses(
                rows=np.arange(len(lengths)),
                token_ids=decoded.token_ids,
                lengths=decoded.lengths,
                log_probs=decoded.log_probs,
                finish_reasons=np.where(decoded.stopped.numpy(), "stop", "length").astype(object),
            ),
            pad_token_id=self._pad,
        )

    def _decode(self, prompts: DataProto, lengths: torch.Tensor, sampling: SamplingParams) -> Decoded:
        most = self._config.response_length
        if sampling.max_tokens is not None and sampling.max_tokens > most:
            raise ConfigError(
                f"sampling.max_tokens: expected at most {PREFIX}.response_length={most}, got {sampling.max_tokens}.",
                key="sampling.max_tokens",
            )
        batch = len(lengths)
        token_ids, log_probs = torch.full((batch, most), self._pad), torch.zeros(batch, most)
        if batch == 0:
            return Decoded(token_ids, log_probs, lengths, lengths.bool())
        eos = self._eos if sampling.eos_token_ids is None else sampling.eos_token_ids
        assert prompts.batch is not None
        # Whatever stands in the padding need not be a token of this model.
        input_ids = prompts.batch["input_ids"].long() * prompts.batch["attention_mask"].bool()
        request = DecodeRequest(
            input_ids=input_ids,
            lengths=lengths,
            limits=(self._context_length - lengths).clamp(max=sampling.max_tokens or most),
            rollout_ids=rollout_ids(prompts),
            sampling=sampling,
            eos_token_ids=() if sampling.ignore_eos else eos,
        )
        decoded = self._decoder.decode(request, self._device)
        width = decoded.token_ids.shape[1]
        token_ids[:, :width], log_probs[:, :width] = decoded.token_ids, decoded.log_probs
        return Decoded(token_ids, log_probs, decoded.lengths, decoded.stopped)

    def _check_numbers(self, decoded: Decoded, prompts: DataProto) -> None:
        valid = torch.arange(decoded.log_probs.shape[1]) < decoded.lengths[:, None]
        bad = (valid & ~decoded.log_probs.isfinite()).any(-1).nonzero().flatten().tolist()
        if bad:
            numbers = rollout_ids(prompts)[bad[:8]].tolist()
            raise GenerationError(
                f"hf rollout, generate: logits of {len(bad)} rows are not finite numbers (rollout_id {numbers}). "
                f"The weights hold NaN or overflow in {self._config.dtype}: check the last update, or set "
                f"{PREFIX}.dtype=float32."
            )


def pad_token(tokenizer: Any, model_config: Any, eos: tuple[int, ...]) -> int:
    """Only fills places: masks come from lengths, so any token serves where none is declared."""
    for holder in (tokenizer, model_config.get_text_config(decoder=True)):
        token = getattr(holder, "pad_token_id", None)
        if isinstance(token, int) and token >= 0:
            return token
    return eos[0] if eos else 0
