"""The embedded engine: a transformers model in this process, on a CPU or one GPU, with its own copy of the weights."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

import numpy as np
import torch
from transformers import AutoModelForCausalLM
from transformers.initialization import no_init_weights

from ostinato.rollout.assemble import PaddedResponses, assemble_padded, rollout_ids
from ostinato.rollout.backends.adapter import Adapter, AdapterOptions
from ostinato.rollout.config import PREFIX
from ostinato.rollout.decoding import Decoded, Decoder, DecodeRequest
from ostinato.rollout.errors import ConfigError
from ostinato.rollout.limits import context_length
from ostinato.rollout.live_weights import LiveWeights

if TYPE_CHECKING:
    from ostinato.protocol import DataProto
    from ostinato.rollout.base import Bucket, WakeTag
    from ostinato.rollout.config import RolloutConfig, SamplingParams


class HfRollout(Adapter):
    """Generates with a transformers causal language model.

    Any model of `AutoModelForCausalLM` whose cache holds keys and values works; weights go by the names that the
    model's folder has for them. Samples depend on (seed, step, rollout_id) and the row's own prompt, not on the other
    rows.

    Args:
        config: everything under `actor_rollout_ref.rollout`.
        model_path: folder with `config.json`; weights are read only where `load_format` is not "dummy".
        options: as `Adapter` takes them.

    Raises:
        ConfigError: tensor parallelism, or a context that the model's positions do not cover.
    """

    name = "hf"

    def __init__(self, config: RolloutConfig, *, model_path: str | Path, **options: Unpack[AdapterOptions]):
        if config.tensor_model_parallel_size != 1:
            key = f"{PREFIX}.tensor_model_parallel_size"
            raise ConfigError(
                f"{key}: the hf engine runs on one device, got {config.tensor_model_parallel_size}. "
                "Set it to 1, or take another engine.",
                key=key,
            )
        super().__init__(config, **options)
        model_config, text_config = self._read_model(model_path)
        self._context_length = context_length(config, text_config)
        self._model = self._build(model_path, model_config)
        self._weights = LiveWeights(self._model)
        self._hold(self._weights.specs(), loaded=self._loaded)
        self._decoder = Decoder(
            self._model, max_num_seqs=config.max_num_seqs, max_num_batched_tokens=config.max_num_batched_tokens
        )
        if not self._loaded:
            self._weights.drop()

    def _build(self, model_path: str | Path, model_config: Any) -> Any:
        options: dict[str, Any] = {"dtype": self._config.torch_dtype, "trust_remote_code": self._trust_remote_code}
        model: Any
        if not self._loaded:
            with no_init_weights(), self._device:
                model = AutoModelForCausalLM.from_config(model_config, **options)
            # Tying is part of the initialisation that was skipped.
            model.tie_weights()
        else:
            model = AutoModelForCausalLM.from_pretrained(model_path, config=model_config, **options)
            torch.nn.Module.to(model, self._device)
        return model.eval().requires_grad_(False)

    def wake(self, tag: WakeTag) -> None:
        """Take memory for the weights; the cache takes its own while it generates."""
        self._state.wake(tag)
        if tag == "weights":
            self._weights.allocate(self._device)

    def load_weights(self, bucket: Bucket) -> None:
        """Copy some weights into the live parameters, cast to their dtype."""
        self._accept(bucket)
        for name, tensor in bucket:
            self._weights.load(name, tensor)

    def finish_load(self) -> None:
        """Check that every weight came."""
        self._state.finish_load()

    def checksums(self) -> dict[str, int]:
        """A checksum of every weight, each memory once."""
        self._state.require_whole("checksums")
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
        prompts, lengths, limits = self._admit(prompts, sampling)
        decoded = self._decode(prompts, lengths, limits, sampling)
        valid = torch.arange(decoded.log_probs.shape[1]) < decoded.lengths[:, None]
        self._require_finite((valid & ~decoded.log_probs.isfinite()).any(-1).nonzero().flatten().tolist(), prompts)
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

    def _decode(
        self, prompts: DataProto, lengths: torch.Tensor, limits: torch.Tensor, sampling: SamplingParams
    ) -> Decoded:
        most = self._config.response_length
        batch = len(lengths)
        token_ids, log_probs = torch.full((batch, most), self._pad), torch.zeros(batch, most)
        if batch == 0:
            return Decoded(token_ids, log_probs, lengths, lengths.bool())
        assert prompts.batch is not None
        # Whatever stands in the padding need not be a token of this model.
        input_ids = prompts.batch["input_ids"].long() * prompts.batch["attention_mask"].bool()
        request = DecodeRequest(
            input_ids=input_ids,
            lengths=lengths,
            limits=limits,
            rollout_ids=rollout_ids(prompts),
            sampling=sampling,
            eos_token_ids=self._ends(sampling),
        )
        decoded = self._decoder.decode(request, self._device)
        width = decoded.token_ids.shape[1]
        token_ids[:, :width], log_probs[:, :width] = decoded.token_ids, decoded.log_probs
        return Decoded(token_ids, log_probs, decoded.lengths, decoded.stopped)
