"""A scripted engine for tests: no model, the same answers each time, every call recorded, the protocol enforced."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ostinato.rollout.assemble import Completion, FinishReason, assemble, check_prompts, prompt_token_ids, rollout_ids
from ostinato.rollout.buckets import checksum
from ostinato.rollout.errors import WeightMismatchError
from ostinato.rollout.lifecycle import Lifecycle
from ostinato.rollout.seeding import row_uniforms

if TYPE_CHECKING:
    from ostinato.protocol import DataProto
    from ostinato.rollout.base import Bucket, TensorSpec, WakeTag
    from ostinato.rollout.config import RolloutConfig, SamplingParams

Script = Callable[[Sequence[int], int, "SamplingParams"], Sequence[int]]
"""What to answer: (prompt tokens, rollout_id, sampling) -> response tokens, cut at the limit and after an end token."""


class FakeRollout:
    """Answers from a script.

    By default a response is `response_length` tokens drawn from the row's own random stream (or, where sampling is
    greedy, computed from the prompt), so that samples differ by row, step and seed and repeat exactly.

    Args:
        config: everything under `actor_rollout_ref.rollout`.
        model_path: folder with a `config.json` whose weights the engine then wants; None, or a folder without one,
            wants those of `specs`.
        device: where received weights are kept.
        dp_rank: place among `dp_size` independent engines.
        dp_size: number of independent engines.
        tokenizer: gives padding and end tokens; None is 0 and 1.
        override_config: entries of the model's config that replace those of its folder.
        trust_remote_code: run code that comes with the model.
        specs: the weights the engine wants, where there is no `config.json`.
        script: what to answer.
        abort: rows (by `rollout_id`) that the engine gives up half way.
        rows_per_rollout: by `rollout_id`, how many rows come back (1 where absent).
        vocab_size: tokens are below it.

    Attributes:
        calls: name and argument of every call so far.
        weights: what `load_weights` brought, by name.
        abort: as above; may be changed between calls.
        rows_per_rollout: as above; may be changed between calls.
    """

    def __init__(
        self,
        config: RolloutConfig,
        *,
        model_path: str | Path | None = None,
        device: torch.device | str = "cpu",
        dp_rank: int = 0,
        dp_size: int = 1,
        tokenizer: Any = None,
        override_config: Mapping[str, Any] | None = None,
        trust_remote_code: bool = False,
        specs: Mapping[str, TensorSpec] | None = None,
        script: Script | None = None,
        abort: Collection[int] = (),
        rows_per_rollout: Mapping[int, int] | None = None,
        vocab_size: int = 512,
    ):
        self._config = config
        self._dp_rank, self._dp_size = dp_rank, dp_size
        self._device = torch.device(device)
        folder = {"overrides": override_config, "trust_remote_code": trust_remote_code}
        self._specs = dict(specs) if specs is not None else _specs_of_folder(model_path, config.torch_dtype, folder)
        self._script = script or self._default_script
        self._vocab_size = vocab_size
        self._eos = (_token(tokenizer, "eos_token_id", 1),)
        self._pad = _token(tokenizer, "pad_token_id", 0)
        self._state = Lifecycle("fake", self._specs)
        self.abort = set(abort)
        self.rows_per_rollout = dict(rows_per_rollout or {})
        self.calls: list[tuple[str, Any]] = []
        self.weights: dict[str, torch.Tensor] = {}

    @property
    def dp_rank(self) -> int:
        """This engine's place among the independent ones."""
        return self._dp_rank

    @property
    def dp_size(self) -> int:
        """How many independent engines there are."""
        return self._dp_size

    def specs(self) -> dict[str, TensorSpec]:
        """The weights the engine wants."""
        return dict(self._specs)

    def wake(self, tag: WakeTag) -> None:
        """Record the call."""
        self.calls.append(("wake", tag))
        self._state.wake(tag)

    def load_weights(self, bucket: Bucket) -> None:
        """Keep a copy of what comes."""
        self.calls.append(("load_weights", tuple(name for name, _ in bucket)))
        self._state.load(name for name, _ in bucket)
        for name, tensor in bucket:
            spec = self._specs[name]
            if tuple(tensor.shape) != spec.shape:
                line = f"{name}: sent {tuple(tensor.shape)}, wanted {spec.shape}"
                raise WeightMismatchError(f"fake rollout, load_weights: {line}. Send full tensors.", shapes=(line,))
            self.weights[name] = tensor.detach().to(self._device, spec.dtype, copy=True)

    def finish_load(self) -> None:
        """Check that every weight came."""
        self.calls.append(("finish_load", None))
        self._state.finish_load()

    def checksums(self) -> dict[str, int]:
        """A checksum of every weight that came."""
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
        count, tokens = self._config.response_length, self._vocab_size - 2
        if sampling.greedy:
            return [2 + (sum(prompt) * 31 + 7 * j * j) % tokens for j in range(count)]
        uniforms = row_uniforms(sampling.seed, sampling.step, torch.tensor([rollout_id]).numpy(), 0, count)[0]
        return [2 + int(u * tokens) for u in uniforms.tolist()]

    def _cut(self, tokens: Sequence[int], limit: int, sampling: SamplingParams) -> tuple[list[int], FinishReason]:
        ends = () if sampling.ignore_eos else self._eos if sampling.eos_token_ids is None else sampling.eos_token_ids
        for j, token in enumerate(tokens[:limit]):
            if token in ends:
                return list(tokens[: j + 1]), "stop"
        return list(tokens[:limit]), "length"

    def generate(self, prompts: DataProto, sampling: SamplingParams) -> DataProto:
        """Answer from the script; see `Rollout.generate`."""
        self.calls.append(("generate", (len(prompts), sampling)))
        self._state.require_ready()
        context = self._config.context_length
        check_prompts(prompts, context)
        most = min(sampling.max_tokens or self._config.response_length, self._config.response_length)
        completions: list[Completion] = []
        for row, (prompt, number) in enumerate(
            zip(prompt_token_ids(prompts), rollout_ids(prompts).tolist(), strict=True)
        ):
            limit = min(most, context - len(prompt))
            tokens, reason = self._cut(self._script(prompt, number, sampling), limit, sampling)
            if number in self.abort:
                tokens, reason = tokens[: len(tokens) // 2], "abort"
            log_probs = [-math.log(self._vocab_size)] * len(tokens)
            count = self.rows_per_rollout.get(number, 1)
            completions += [Completion(row, tokens, log_probs, reason)] * count
        return assemble(prompts, completions, response_length=self._config.response_length, pad_token_id=self._pad)


def _specs_of_folder(
    model_path: str | Path | None, dtype: torch.dtype, options: Mapping[str, Any]
) -> dict[str, TensorSpec]:
    if model_path is None or not (Path(model_path) / "config.json").is_file():
        return {}
    from transformers import AutoModelForCausalLM

    from ostinato.rollout.live_weights import LiveWeights
    from ostinato.rollout.model_config import read_model_config

    config = read_model_config(model_path, **options)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=options["trust_remote_code"])
    return LiveWeights(model).specs()


def _token(tokenizer: Any, name: str, default: int) -> int:
    token = getattr(tokenizer, name, None)
    return default if token is None else int(token)
