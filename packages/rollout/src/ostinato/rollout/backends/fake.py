"""A scripted engine for tests: no model, the same answers each time, every call recorded, the protocol enforced."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

import torch

from ostinato.rollout.assemble import Completion, FinishReason, assemble, prompt_token_ids, rollout_ids
from ostinato.rollout.backends.adapter import Adapter, AdapterOptions
from ostinato.rollout.buckets import checksum
from ostinato.rollout.model_config import read_model_config
from ostinato.rollout.seeding import row_uniforms

if TYPE_CHECKING:
    from ostinato.protocol import DataProto
    from ostinato.rollout.base import Bucket, TensorSpec, WakeTag
    from ostinato.rollout.config import RolloutConfig, SamplingParams

Script = Callable[[Sequence[int], int, "SamplingParams"], Sequence[int]]
"""What to answer: (prompt tokens, rollout_id, sampling) -> response tokens, cut at the limit and after an end token."""


class FakeRollout(Adapter):
    """Answers from a script.

    By default a response is `response_length` tokens drawn from the row's own random stream (or, where sampling is
    greedy, computed from the prompt), so that samples differ by row, step and seed and repeat exactly.

    Args:
        config: everything under `actor_rollout_ref.rollout`.
        model_path: folder with a `config.json` whose weights the engine then wants; None, or a folder without one,
            wants those of `specs`.
        specs: the weights the engine wants, where there is no `config.json`.
        script: what to answer.
        abort: rows (by `rollout_id`) that the engine gives up half way.
        rows_per_rollout: by `rollout_id`, how many rows come back (1 where absent).
        vocab_size: tokens are below it.
        options: as `Adapter` takes them; without a tokenizer, padding is 0 and the end token 1.

    Attributes:
        calls: name and argument of every call so far.
        weights: what `load_weights` brought, by name.
        abort: as above; may be changed between calls.
        rows_per_rollout: as above; may be changed between calls.
    """

    name = "fake"

    def __init__(
        self,
        config: RolloutConfig,
        *,
        model_path: str | Path | None = None,
        specs: Mapping[str, TensorSpec] | None = None,
        script: Script | None = None,
        abort: Collection[int] = (),
        rows_per_rollout: Mapping[int, int] | None = None,
        vocab_size: int = 512,
        **options: Unpack[AdapterOptions],
    ):
        super().__init__(config, **options)
        self._hold(self._specs_of_folder(model_path) if specs is None else specs, loaded=False)
        self._context_length = config.context_length
        self._script = script or self._default_script
        self._num_tokens = self._vocab_size = vocab_size
        self._eos = (_token(self._tokenizer, "eos_token_id", 1),)
        self._pad = _token(self._tokenizer, "pad_token_id", 0)
        self.abort = set(abort)
        self.rows_per_rollout = dict(rows_per_rollout or {})
        self.calls: list[tuple[str, Any]] = []
        self.weights: dict[str, torch.Tensor] = {}

    def _specs_of_folder(self, path: str | Path | None) -> dict[str, TensorSpec]:
        if path is None or not (Path(path) / "config.json").is_file():
            return {}
        return self._specs_of(read_model_config(path, self._overrides, trust_remote_code=self._trust_remote_code))

    def wake(self, tag: WakeTag) -> None:
        """Record the call."""
        self.calls.append(("wake", tag))
        self._state.wake(tag)

    def load_weights(self, bucket: Bucket) -> None:
        """Keep a copy of what comes."""
        self.calls.append(("load_weights", tuple(name for name, _ in bucket)))
        self._accept(bucket)
        for name, tensor in bucket:
            self.weights[name] = tensor.detach().to(self._device, self._specs[name].dtype, copy=True)

    def finish_load(self) -> None:
        """Check that every weight came."""
        self.calls.append(("finish_load", None))
        self._state.finish_load()

    def checksums(self) -> dict[str, int]:
        """A checksum of every weight that came."""
        self._state.require_whole("checksums")
        return {name: checksum(tensor) for name, tensor in self.weights.items()}

    def sleep(self) -> None:
        """Forget the weights."""
        self.calls.append(("sleep", None))
        self._state.sleep()
        self.weights.clear()

    def close(self) -> None:
        """Record the call; nothing works afterwards."""
        self.calls.append(("close", None))
        self._state.close()
        self.weights.clear()

    def _default_script(self, prompt: Sequence[int], rollout_id: int, sampling: SamplingParams) -> list[int]:
        count, tokens = self._config.response_length, self._num_tokens - 2
        if sampling.greedy:
            return [2 + (sum(prompt) * 31 + 7 * j * j) % tokens for j in range(count)]
        uniforms = row_uniforms(sampling.seed, sampling.step, torch.tensor([rollout_id]).numpy(), 0, count)[0]
        return [2 + int(u * tokens) for u in uniforms.tolist()]

    def _cut(self, tokens: Sequence[int], limit: int, sampling: SamplingParams) -> tuple[list[int], FinishReason]:
        ends = self._ends(sampling)
        for j, token in enumerate(tokens[:limit]):
            if token in ends:
                return list(tokens[: j + 1]), "stop"
        return list(tokens[:limit]), "length"

    def generate(self, prompts: DataProto, sampling: SamplingParams) -> DataProto:
        """Answer from the script; see `Rollout.generate`."""
        self.calls.append(("generate", (len(prompts), sampling)))
        prompts, _, limits = self._admit(prompts, sampling)
        asked = zip(prompt_token_ids(prompts), rollout_ids(prompts).tolist(), limits.tolist(), strict=True)
        completions: list[Completion] = []
        for row, (prompt, number, limit) in enumerate(asked):
            tokens, reason = self._cut(self._script(prompt, number, sampling), limit, sampling)
            if number in self.abort:
                tokens, reason = tokens[: len(tokens) // 2], "abort"
            log_probs = [-math.log(self._num_tokens)] * len(tokens)
            count = self.rows_per_rollout.get(number, 1)
            completions += [Completion(row, tokens, log_probs, reason)] * count
        return assemble(prompts, completions, response_length=self._config.response_length, pad_token_id=self._pad)


def _token(tokenizer: Any, name: str, default: int) -> int:
    token = getattr(tokenizer, name, None)
    return default if token is None else int(token)
