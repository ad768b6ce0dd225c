"""What the adapters of this wheel do alike: `Adapter` for all, `EngineAdapter` for engines with memory of their own.

An adapter says in its `__init__` what it wants and has; here is what follows from that.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypedDict, Unpack

import torch

from ostinato.rollout.assemble import check_prompts, rollout_ids
from ostinato.rollout.config import PREFIX
from ostinato.rollout.errors import ConfigError, GenerationError
from ostinato.rollout.lifecycle import Lifecycle
from ostinato.rollout.limits import check_device, check_model
from ostinato.rollout.model_config import ATTENTION, end_tokens, pad_token, read_model_config
from ostinato.rollout.names import check_shape

if TYPE_CHECKING:
    import numpy as np

    from ostinato.protocol import DataProto
    from ostinato.rollout.base import Bucket, TensorSpec, WakeTag
    from ostinato.rollout.config import RolloutConfig, SamplingParams

MEBIBYTE = 1 << 20
# What is left free on the device beside an engine that wakes, for libraries that take their own.
_MARGIN_BYTES = 512 * MEBIBYTE


class AdapterOptions(TypedDict, total=False):
    """What `build_rollout` passes to every adapter besides the configuration and the folder; see `Adapter`."""

    device: torch.device | str
    dp_rank: int
    dp_size: int
    tokenizer: Any
    override_config: Mapping[str, Any] | None
    trust_remote_code: bool


class EngineOptions(AdapterOptions, total=False):
    """What an `EngineAdapter` may be given besides."""

    engine_options: Mapping[str, Any] | None


class Adapter:
    """What every rollout engine of this wheel holds and answers alike.

    A subclass calls `_hold` once it knows its weights, and sets `_context_length`, `_eos`, `_pad` and `_vocab_size`
    (the last three are what `_read_model` finds).

    Args:
        config: everything under `actor_rollout_ref.rollout`.
        device: where to compute.
        dp_rank: place among `dp_size` independent engines.
        dp_size: number of independent engines.
        tokenizer: gives padding and end tokens; None takes the model's.
        override_config: entries of the model's config that replace those of its folder.
        trust_remote_code: run code that comes with the model.

    Attributes:
        name: the engine's name, for messages.
    """

    name: ClassVar[str]
    _context_length: int
    _eos: tuple[int, ...]
    _pad: int
    _vocab_size: int | None = None

    def __init__(
        self,
        config: RolloutConfig,
        *,
        device: torch.device | str = "cpu",
        dp_rank: int = 0,
        dp_size: int = 1,
        tokenizer: Any = None,
        override_config: Mapping[str, Any] | None = None,
        trust_remote_code: bool = False,
    ):
        self._config = config
        self._device = torch.device(device)
        self._dp_rank, self._dp_size = dp_rank, dp_size
        self._tokenizer = tokenizer
        self._overrides = {key: value for key, value in (override_config or {}).items() if key != ATTENTION}
        self._trust_remote_code = trust_remote_code
        # Whether the engine reads its weights by itself when it is built.
        self._loaded = config.load_format != "dummy"

    def _read_model(self, path: str | Path) -> tuple[Any, Any]:
        """The configuration of a folder's model, and that of its language model; finds its tokens."""
        model_config: Any = read_model_config(path, self._overrides, trust_remote_code=self._trust_remote_code)
        text_config = model_config.get_text_config(decoder=True)
        self._eos = end_tokens(path, text_config, self._tokenizer)
        self._pad = pad_token(self._tokenizer, model_config, self._eos)
        self._vocab_size = getattr(text_config, "vocab_size", None)
        return model_config, text_config

    def _specs_of(self, model_config: Any) -> dict[str, TensorSpec]:
        """The weights of a model that is not built."""
        from ostinato.rollout.live_weights import model_specs

        return model_specs(model_config, self._config.torch_dtype, trust_remote_code=self._trust_remote_code)

    def _hold(self, specs: Mapping[str, TensorSpec], *, loaded: bool) -> None:
        """Say which weights the engine wants, and whether it has read them by itself."""
        self._specs = dict(specs)
        self._state = Lifecycle(self.name, self._specs, loaded=loaded)

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

    def _accept(self, bucket: Bucket) -> None:
        """Note that a bucket comes, or refuse it: by state, name or shape."""
        self._state.load(name for name, _ in bucket)
        for name, tensor in bucket:
            check_shape(self.name, name, tensor.shape, self._specs[name].shape)

    def _admit(self, prompts: DataProto, sampling: SamplingParams) -> tuple[DataProto, torch.Tensor, torch.Tensor]:
        """Begin a generation, or refuse it.

        Returns:
            The prompts on the CPU, (B,) int64 tokens of each, and (B,) int64 most tokens of each response.

        Raises:
            EngineStateError: the engine is not ready.
            PromptError: prompts that no engine can take.
            ConfigError: `max_tokens` beyond `response_length`.
        """
        self._state.require_ready()
        prompts = prompts.to("cpu")
        lengths = check_prompts(prompts, self._context_length, self._vocab_size)
        most = self._config.response_length
        if sampling.max_tokens is not None and sampling.max_tokens > most:
            raise ConfigError(
                f"sampling.max_tokens: expected at most {PREFIX}.response_length={most}, got {sampling.max_tokens}.",
                key="sampling.max_tokens",
            )
        return prompts, lengths, (self._context_length - lengths).clamp(max=sampling.max_tokens or most)

    def _ends(self, sampling: SamplingParams) -> tuple[int, ...]:
        """The tokens that end a response of this call; one that the model does not have ends none."""
        if sampling.ignore_eos:
            return ()
        ends = self._eos if sampling.eos_token_ids is None else sampling.eos_token_ids
        return tuple(token for token in ends if token >= 0 and (self._vocab_size is None or token < self._vocab_size))

    def _require_finite(self, bad: Sequence[int] | np.ndarray, prompts: DataProto) -> None:
        """Refuse a generation with rows whose log-probabilities are not numbers.

        Args:
            bad: their places.
            prompts: the rows they answer, one to one.
        """
        if len(bad):
            raise GenerationError(
                f"{self.name} rollout, generate: log-probabilities of {len(bad)} rows are not finite numbers "
                f"(rollout_id {rollout_ids(prompts)[bad[:8]].tolist()}). The weights hold NaN or overflow in "
                f"{self._config.dtype}: check the last update, or set {PREFIX}.dtype=float32."
            )


class EngineAdapter(Adapter, ABC):
    """A generation engine with memory of its own on training's device, which it gives back while it sleeps.

    A subclass builds the engine, all of it awake, sets `_sleeps` where its memory can be given back, and calls
    `_fall_asleep` where the weights are still to come.

    Args:
        config: everything under `actor_rollout_ref.rollout`.
        model_path: folder with `config.json`; weights are read only where `load_format` is not "dummy".
        engine_options: further arguments of the engine itself, over those that the adapter makes.
        options: as `Adapter` takes them.

    Raises:
        ConfigError: what the model or the ranks cannot do.
    """

    def __init__(
        self,
        config: RolloutConfig,
        *,
        model_path: str | Path,
        engine_options: Mapping[str, Any] | None = None,
        **options: Unpack[AdapterOptions],
    ):
        super().__init__(config, **options)
        self._engine_options = dict(engine_options or {})
        if self._device.type == "cuda" and self._device.index is None:
            self._device = torch.device("cuda", torch.cuda.current_device())
        self._model_path = model_path
        self._model_config, self._text_config = self._read_model(model_path)
        world_size = self._dp_size * config.tensor_model_parallel_size
        self._context_length = check_model(config, self._text_config, world_size=world_size)
        self._hold(self._specs_of(self._model_config), loaded=self._loaded)
        self._engine: Any = None
        self._sleeps = False
        self._awake: set[str] = {"weights", "kv_cache"}
        # Whether a load has begun, and which of its weights have come, tied ones under their owner's name.
        self._loading = False
        self._came: set[str] = set()

    @classmethod
    def examine(
        cls,
        config: RolloutConfig,
        *,
        model_path: str | Path,
        world_size: int,
        device: torch.device | str = "cpu",
        override_config: Mapping[str, Any] | None = None,
        trust_remote_code: bool = False,
    ) -> None:
        """Refuse what `__init__` would, before anybody loads weights; see `build.check_rollout`."""
        from ostinato.rollout.live_weights import model_specs

        model_config = read_model_config(model_path, override_config, trust_remote_code=trust_remote_code)
        text_config = model_config.get_text_config(decoder=True)
        check_model(config, text_config, world_size=world_size)
        if torch.device(device).type == "cuda":
            torch.cuda.empty_cache()  # what building other roles left in it will be taken again, or given back
            specs = model_specs(model_config, config.torch_dtype, trust_remote_code=trust_remote_code)
            _check_share(config, text_config, specs, torch.device(device))

    def _owners(self) -> dict[str, TensorSpec]:
        """The weights with memory of their own: those that are tied to no other."""
        return _untied(self._specs)

    def _check_device(self) -> tuple[int, int]:
        """Refuse a share of the GPU that the engine cannot live in.

        Returns:
            Bytes of weights and cache together, and free bytes of the device.
        """
        return _check_share(self._config, self._text_config, self._specs, self._device)

    @property
    def makes_room(self) -> bool:
        """Whether `wake` empties torch's cache by itself where the device is short of memory."""
        return True

    def wake(self, tag: WakeTag) -> None:
        """Map memory for the weights or for the cache again (a GPU with `free_cache_engine`)."""
        self._state.wake(tag)
        if self._sleeps and tag not in self._awake:
            if torch.cuda.mem_get_info(self._device)[0] < self._sleeping_bytes(tag) + _MARGIN_BYTES:
                torch.cuda.empty_cache()
            self._resume(tag)
        self._awake.add(tag)

    def sleep(self) -> None:
        """Give the memory of weights and cache back; new weights must come before the next use."""
        self._state.sleep()
        if self._state.closed:
            return
        if self._loading:
            self._end_load()
        self._fall_asleep()

    @abstractmethod
    def _sleeping_bytes(self, tag: WakeTag) -> int:
        """What `_resume` takes."""

    @abstractmethod
    def _resume(self, tag: WakeTag) -> None:
        """Map the memory of what sleeps again."""

    @abstractmethod
    def _fall_asleep(self) -> None:
        """Give back the memory of what is awake, where the engine sleeps, and note that nothing is."""

    @abstractmethod
    def _end_load(self) -> None:
        """End a load that has begun, whole or not."""

    def _fresh(self, bucket: Bucket) -> list[tuple[str, torch.Tensor]]:
        """The weights of a bucket that this load has not brought yet, tied ones once and under their owner's name."""
        named = {self._specs[name].tied_to or name: tensor for name, tensor in bucket}
        fresh = [(name, tensor) for name, tensor in named.items() if name not in self._came]
        self._came.update(name for name, _ in fresh)
        return fresh


def _untied(specs: Mapping[str, TensorSpec]) -> dict[str, TensorSpec]:
    return {name: spec for name, spec in specs.items() if spec.tied_to is None}


def _check_share(
    config: RolloutConfig, text_config: Any, specs: Mapping[str, TensorSpec], device: torch.device
) -> tuple[int, int]:
    parameters = sum(math.prod(spec.shape) for spec in _untied(specs).values())
    free, total = torch.cuda.mem_get_info(device)
    return check_device(config, text_config, parameters=parameters, free=free, total=total), free
