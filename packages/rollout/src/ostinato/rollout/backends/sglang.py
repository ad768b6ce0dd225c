"""SGLang beside training: its schedulers are children of a rollout group's first rank and share the ranks' devices.

Runs with SGLang 0.5.14 to 0.5.23. Weights are handed over as shared memory (CUDA IPC on a GPU, each scheduler from its
own rank's copy), a bucket with one call of `update_weights_from_tensor`; what a scheduler does with them is in
`sglang_scheduler`, what versions of SGLang do differently in `sglang_versions`, how ranks wait for each other in
`sglang_ranks`.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

import asyncio
import atexit
import itertools
import json
import logging
import os
import time
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, Unpack

import numpy as np
import torch

from ostinato.rollout.assemble import Completion, assemble, prompt_token_ids, rollout_ids
from ostinato.rollout.backends.adapter import EngineAdapter, EngineOptions
from ostinato.rollout.backends.sglang_ranks import EngineRanks, HeldSignals
from ostinato.rollout.backends.sglang_scheduler import LOADER, checksum_line, last_line, manifest
from ostinato.rollout.backends.sglang_versions import (
    attention_backend,
    begin_update,
    build_environment,
    discard,
    end_update,
    free_port,
    make_engine,
    portable_handles,
)
from ostinato.rollout.buckets import aligned_bytes
from ostinato.rollout.config import PREFIX
from ostinato.rollout.errors import ConfigError, EngineStateError
from ostinato.rollout.seeding import engine_seed, row_seeds

if TYPE_CHECKING:
    from collections.abc import Coroutine, Sequence

    from ostinato.protocol import DataProto
    from ostinato.rollout.assemble import FinishReason
    from ostinato.rollout.base import Bucket, WakeTag
    from ostinato.rollout.config import RolloutConfig, SamplingParams

logger = logging.getLogger(__name__)

T = TypeVar("T")

# How often a call that waits looks whether the engine's processes are there.
_POLL_SECONDS = 1.0
# How long requests of a call that was broken off may take to end.
_DRAIN_SECONDS = 60.0
# A `top_p` that leaves the likeliest token alone.
_ONE_TOKEN = 1e-9
_MEMORY = {"weights": ("weights",), "kv_cache": ("kv_cache", "cuda_graph")}


class SglangRollout(EngineAdapter):
    """Generates with SGLang in processes of its own.

    One engine spans `tensor_model_parallel_size` consecutive ranks of the process group, each of which makes the same
    calls with the same prompts; the first of them owns the engine, and a call returns on all of them together. Samples
    depend on (seed, step, rollout_id) through one seed a request.

    Args:
        config: everything under `actor_rollout_ref.rollout`.
        model_path: folder with `config.json`; weights are read only where `load_format` is not "dummy".
        options: as `EngineAdapter` takes them, `engine_options` for `sglang.Engine`. On `device` this rank trains;
            the engine takes the devices of its ranks.

    Raises:
        ConfigError: what the model, the ranks or the device cannot do, before anything is built.
    """

    name = "sglang"

    def __init__(self, config: RolloutConfig, *, model_path: str | Path, **options: Unpack[EngineOptions]):
        super().__init__(config, model_path=model_path, **options)
        on_gpu = self._device.type == "cuda"
        arguments = self._arguments() | self._engine_options
        self._sleeps = on_gpu and bool(arguments["enable_memory_saver"])
        self._ranks = EngineRanks(config.tensor_model_parallel_size)
        self._requests = itertools.count()
        self._stale_cache = False
        self._pending: asyncio.Task[Any] | None = None
        self._outgoing: torch.Tensor | None = None
        self._processes: list[Any] = []
        self._ranks.call_with_each(self._build, arguments, own=_visible(self._device))
        if on_gpu:
            portable_handles()
        # What waking takes, in bytes; the margin before the engine has slept once.
        self._sizes = dict.fromkeys(_MEMORY, 0)
        if not self._loaded:
            self._fall_asleep()

    def _arguments(self) -> dict[str, Any]:
        config, on_gpu = self._config, self._device.type == "cuda"
        arguments: dict[str, Any] = {
            "model_path": str(self._model_path),
            "skip_tokenizer_init": True,
            "trust_remote_code": self._trust_remote_code,
            "dtype": str(config.torch_dtype).removeprefix("torch."),
            # bf16 rounding of logits is a part of the distance between log-probabilities of rollout and training.
            "enable_fp32_lm_head": config.torch_dtype != torch.float32,
            "load_format": config.load_format,
            "custom_weight_loader": [LOADER],
            "random_seed": engine_seed(config.seed, 0, self._dp_rank),
            # SGLang keeps two places of a sequence to itself.
            "context_length": self._context_length + 8,
            "max_running_requests": config.max_num_seqs,
            "chunked_prefill_size": max(config.max_num_batched_tokens, 1),
            "max_prefill_tokens": max(config.max_num_batched_tokens, self._context_length + 8),
            "tp_size": config.tensor_model_parallel_size,
            "device": self._device.type,
            "attention_backend": attention_backend(self._device),
            "sampling_backend": "pytorch",
            "grammar_backend": "none",
            "skip_server_warmup": True,
            "enable_memory_saver": on_gpu and config.free_cache_engine,
            "disable_cuda_graph": config.enforce_eager or not on_gpu,
            "log_level": "error",
        }
        if self._overrides:
            arguments["json_model_override_args"] = json.dumps(self._overrides)
        if not on_gpu:
            longest = self._context_length + 8
            places = max(longest, min(config.max_num_seqs * longest, 1 << 16), 1 << 12)
            return arguments | {"disable_overlap_schedule": True, "max_total_tokens": places}
        static, free = self._check_device()
        if config.torch_dtype == torch.float32:
            raise ConfigError(
                f"{PREFIX}.dtype: SGLang's kernels on a GPU take bfloat16 and float16, got float32. Set it to "
                f"bfloat16, or {PREFIX}.name to vllm or hf.",
                key=f"{PREFIX}.dtype",
            )
        # Graphs of decoding alone: a rollout is nearly all decoding.
        return arguments | {"disable_prefill_cuda_graph": True, "mem_fraction_static": round(static / free, 4)}

    def _build(self, arguments: dict[str, Any], devices: Sequence[str | None]) -> None:
        import psutil

        spread = len(devices) > 1 and None not in devices
        visible = ",".join(str(name) for name in devices) if spread else None
        arguments = arguments | {"nccl_port": free_port(), "base_gpu_id": 0 if spread else (self._device.index or 0)}
        before = {child.pid for child in psutil.Process().children()}
        try:
            with build_environment(visible):
                self._engine = make_engine(arguments)
        finally:
            # Python waits for children before it ends, and these would serve for ever. What is registered last runs
            # first.
            atexit.register(_end_processes_of, weakref.ref(self), os.getpid())
            tracker = _resource_tracker()
            self._processes = [
                child for child in psutil.Process().children() if child.pid not in before and child.pid != tracker
            ]
            if self._engine is None:
                self._end_processes()

    # --- calls into the engine ---

    def _wait(self, call: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine of the engine to its end, or find out that the engine's processes have ended."""
        return self._finish(self._engine.loop.create_task(call))

    def _finish(self, task: asyncio.Task[T]) -> T:
        while not task.done():
            self._run_loop(asyncio.wait({task}, timeout=_POLL_SECONDS))
            if not task.done():
                self._require_processes()
        return task.result()

    def _run_loop(self, call: Coroutine[Any, Any, T]) -> T:
        # What a handler raises within the loop ends the task that just runs, which may be SGLang's own.
        with HeldSignals():
            return self._engine.loop.run_until_complete(call)

    def _require_processes(self) -> None:
        import psutil

        gone = [child.pid for child in self._processes if not child.is_running() or _is_zombie(child, psutil)]
        if gone:
            raise EngineStateError(
                f"sglang rollout: {len(gone)} of {len(self._processes)} processes of the engine have ended (pid "
                f"{', '.join(map(str, gone))}); their output above says why. Start the run again; where memory was "
                f"short, with a smaller {PREFIX}.gpu_memory_utilization."
            )

    @property
    def _manager(self) -> Any:
        return self._engine.tokenizer_manager

    # --- memory ---

    def wake(self, tag: WakeTag) -> None:
        """Map memory for the weights or for the cache again (a GPU with `free_cache_engine`)."""
        super().wake(tag)
        self._flush()

    def _sleeping_bytes(self, tag: WakeTag) -> int:
        return self._sizes[tag]

    def _resume(self, tag: WakeTag) -> None:
        self._ranks.call(self._resume_now, _MEMORY[tag])

    def _resume_now(self, tags: Sequence[str]) -> None:
        from sglang.srt.managers.io_struct import ResumeMemoryOccupationReqInput

        self._wait(self._manager.resume_memory_occupation(ResumeMemoryOccupationReqInput(tags=list(tags)), None))

    def _release_now(self, tags: Sequence[str]) -> None:
        from sglang.srt.managers.io_struct import ReleaseMemoryOccupationReqInput

        self._wait(self._manager.release_memory_occupation(ReleaseMemoryOccupationReqInput(tags=list(tags)), None))

    def _flush(self) -> None:
        """Drop what was cached of older weights; a cache whose memory was given back must not be touched."""
        if self._stale_cache and "kv_cache" in self._awake:
            self._ranks.call(self._flush_now)
            self._stale_cache = False

    def _flush_now(self) -> None:
        answer = self._wait(self._manager.flush_cache())
        if not answer.success:
            raise EngineStateError(f"sglang rollout: the cache of older weights was not dropped: {answer.message}")

    def _fall_asleep(self) -> None:
        if self._sleeps:
            for tag in [tag for tag in ("kv_cache", "weights") if tag in self._awake]:
                before = torch.cuda.mem_get_info(self._device)[0]
                self._ranks.call(self._release_now, _MEMORY[tag])
                self._sizes[tag] = max(torch.cuda.mem_get_info(self._device)[0] - before, 0)
        self._awake.clear()

    def close(self) -> None:
        """End the engine's processes."""
        self._state.close()
        if self._engine is not None:
            discard(self._engine)
            self._end_processes()
        self._engine = self._outgoing = None

    def _end_processes(self) -> None:
        import psutil

        everything = [*self._processes]
        for child in self._processes:
            try:
                everything += child.children(recursive=True)
            except psutil.NoSuchProcess:
                continue
        for child in everything:
            try:
                child.kill()
            except psutil.NoSuchProcess:
                continue
        psutil.wait_procs(everything, timeout=30)
        self._processes = []

    # --- weights ---

    def load_weights(self, bucket: Bucket) -> None:
        """Hand some weights to the schedulers; they copy while the next bucket fills."""
        self._accept(bucket)
        begins = not self._loading
        # What the last call handed over is read from memory that may be filled anew after this one.
        self._ranks.call(self._begin_update if begins else self._finish_pending)
        if begins:
            self._loading = True
            self._came = set()
        self._hand_over(self._lines(self._fresh(bucket), begins=begins))

    def _lines(self, bucket: list[tuple[str, torch.Tensor]], *, begins: bool) -> list[tuple[str, torch.Tensor]]:
        """Pieces of memory that other processes can read, and what lies in them."""
        if self._device.type == "cpu":
            offsets = list(itertools.accumulate((aligned_bytes(t.nbytes) for _, t in bucket), initial=0))
            if self._outgoing is None or self._outgoing.numel() < offsets[-1]:
                self._outgoing = torch.empty(max(offsets[-1], 1), dtype=torch.uint8).share_memory_()
            for (_, tensor), offset in zip(bucket, offsets[:-1], strict=True):
                place = self._outgoing[offset : offset + tensor.nbytes]
                place.view(tensor.dtype).view(tensor.shape).copy_(tensor)
            return [(manifest(bucket, offsets[:-1], begins=begins), self._outgoing)]
        storages: dict[int, list[tuple[str, torch.Tensor]]] = {}
        for name, tensor in bucket:
            on_device = tensor.to(self._device).contiguous()
            storages.setdefault(on_device.untyped_storage().data_ptr(), []).append((name, on_device))
        lines = []
        for number, piece in enumerate(storages.values()):
            storage = piece[0][1].untyped_storage()
            memory = torch.empty(0, dtype=torch.uint8, device=self._device).set_(storage)
            offsets = [int(tensor.storage_offset()) * tensor.element_size() for _, tensor in piece]
            lines.append((manifest(piece, offsets, begins=begins and number == 0), memory))
        torch.cuda.current_stream(self._device).synchronize()
        return lines

    def _hand_over(self, lines: list[tuple[str, torch.Tensor]]) -> None:
        from sglang.srt.utils import MultiprocessingSerializer

        # A tensor made here must stay until the schedulers have read it.
        self._sent = lines
        size = self._config.tensor_model_parallel_size
        if self._device.type == "cpu":
            # One memory serves all schedulers.
            payloads = [MultiprocessingSerializer.serialize(lines) for _ in range(size)] if self._ranks.first else []
            self._ranks.call(self._submit, payloads)
        else:
            self._ranks.call_with_each(self._submit, own=MultiprocessingSerializer.serialize(lines))

    def _submit(self, payloads: Sequence[bytes]) -> None:
        from sglang.srt.managers.io_struct import UpdateWeightsFromTensorReqInput

        request = UpdateWeightsFromTensorReqInput(
            serialized_named_tensors=list(payloads), load_format=LOADER, flush_cache=False
        )
        self._pending = self._engine.loop.create_task(self._manager.update_weights_from_tensor(request, None))
        # Far enough for the request to leave; its answer is waited for later.
        self._run_loop(asyncio.sleep(0.0))

    def _finish_pending(self) -> None:
        if self._pending is not None:
            task, self._pending = self._pending, None
            _require_success("load_weights", self._finish(task))

    def _begin_update(self) -> None:
        call = begin_update(self._manager)
        if call is not None:
            _require_success("load_weights", self._wait(call))

    def _end_update(self) -> None:
        self._finish_pending()
        call = end_update(self._manager)
        if call is not None:
            _require_success("finish_load", self._wait(call))

    def _end_load(self) -> None:
        self._ranks.call(self._end_update)
        self._loading = False

    def finish_load(self) -> None:
        """Check that every weight came, and drop what was cached of older weights."""
        self._state.finish_load()
        self._ranks.call(self._finish_pending)
        self._hand_over([(last_line(list(self._owners())), torch.zeros(1, device=self._device))])
        self._end_load()
        self._sent: list[tuple[str, torch.Tensor]] = []
        if self._device.type == "cuda":
            torch.cuda.ipc_collect()
        self._stale_cache = True
        self._flush()

    def checksums(self) -> dict[str, int]:
        """A checksum of every weight as the engine holds it; collective over the ranks of one engine."""
        self._state.require_whole("checksums")
        specs = self._owners()
        sums = torch.zeros(len(specs), dtype=torch.int64, device=self._device)
        if self._device.type == "cpu":
            sums = sums.share_memory_()
        self._ranks.call(self._begin_update)
        self._hand_over([(checksum_line(specs), sums)])
        self._ranks.call(self._end_update)
        # On a CPU the first rank's memory serves all schedulers.
        told = self._ranks.call(sums.tolist) if self._device.type == "cpu" else sums.tolist()
        return dict(zip(specs, told, strict=True))

    # --- generation ---

    def generate(self, prompts: DataProto, sampling: SamplingParams) -> DataProto:
        """Answer each prompt row once; see `Rollout.generate`."""
        prompts, _, limits = self._admit(prompts, sampling)
        requests = self._requests_of(limits.tolist(), rollout_ids(prompts), sampling)
        answers = self._ranks.call(self._run, prompt_token_ids(prompts), requests) if len(prompts) else []
        completions = [_completion(row, answer) for row, answer in enumerate(answers)]
        finite = [np.isfinite(np.asarray(each.log_probs, dtype=np.float64)).all() for each in completions]
        self._require_finite(np.flatnonzero(~np.asarray(finite, dtype=bool)), prompts)
        return assemble(prompts, completions, response_length=self._config.response_length, pad_token_id=self._pad)

    def _requests_of(self, limits: list[int], numbers: np.ndarray, sampling: SamplingParams) -> list[dict[str, Any]]:
        # Greedy tokens of a temperature other than 1 are drawn from one token, because log-probabilities keep it:
        # SGLang's own greedy draw reports those of temperature 1.
        plain_greedy = sampling.greedy and sampling.log_prob_temperature == 1
        shared: dict[str, Any] = {
            "temperature": 0.0 if plain_greedy else sampling.log_prob_temperature,
            "top_p": 1.0 if plain_greedy else _ONE_TOKEN if sampling.greedy else sampling.top_p,
            "top_k": -1 if sampling.greedy or sampling.top_k <= 0 else sampling.top_k,
            "min_p": 0.0 if sampling.greedy else sampling.min_p,
            # The model's own end tokens are taken out of the schedulers: this list says it all.
            "ignore_eos": sampling.ignore_eos,
            "stop_token_ids": None if sampling.ignore_eos else list(self._ends(sampling)),
        }
        seeds = row_seeds(sampling.seed, sampling.step, numbers).tolist()
        return [
            shared | {"max_new_tokens": limit, "sampling_seed": seed} for limit, seed in zip(limits, seeds, strict=True)
        ]

    def _run(self, token_lists: list[list[int]], requests: list[dict[str, Any]]) -> list[dict[str, Any]]:
        from sglang.srt.managers.io_struct import GenerateReqInput

        request = GenerateReqInput(
            input_ids=token_lists,
            sampling_params=requests,
            return_logprob=True,
            # SGLang aborts every request whose name begins like the one it is told.
            rid=[f"ostinato-{next(self._requests)}-" for _ in token_lists],
        )
        task = self._engine.loop.create_task(self._answers(request))
        try:
            return self._finish(task)
        except BaseException:
            # The engine must be idle when it is put to sleep, and the next call must not wait for the rest of this.
            self._drain(task)
            raise

    async def _answers(self, request: Any) -> list[dict[str, Any]]:
        answers = await self._manager.generate_request(request, None).__anext__()
        return answers if isinstance(answers, list) else [answers]

    def _drain(self, task: asyncio.Task[Any]) -> None:
        try:
            self._require_processes()
        except EngineStateError:
            return
        self._manager.abort_request(abort_all=True)
        end = time.monotonic() + _DRAIN_SECONDS
        while not task.done() and time.monotonic() < end:  # in turns: a second interrupt is heard between them
            self._run_loop(asyncio.wait({task}, timeout=_POLL_SECONDS))
        if task.done() and not task.cancelled():
            task.exception()
        flushed = self._wait(self._manager.flush_cache(timeout_s=_DRAIN_SECONDS))
        if not flushed.success:
            logger.error("sglang rollout: requests of a call that was broken off go on: %s", flushed.message)


def _completion(row: int, answer: Mapping[str, Any]) -> Completion:
    meta = answer["meta_info"]
    reason = (meta.get("finish_reason") or {}).get("type")
    known: FinishReason = reason if reason in ("stop", "length") else "abort"
    tokens = [int(token) for token in answer["output_ids"]]
    log_probs = [float(entry[0]) for entry in meta.get("output_token_logprobs") or ()]
    if known == "abort":
        # It is not trained on; what came before the end may be told in part.
        log_probs = (log_probs + [0.0] * len(tokens))[: len(tokens)]
    return Completion(row=row, token_ids=tokens, log_probs=log_probs, finish_reason=known)


def _require_success(what: str, answer: Any) -> None:
    success, message = (answer[0], answer[1]) if isinstance(answer, tuple) else (answer.success, answer.message)
    if not success:
        raise EngineStateError(f"sglang rollout, {what}: the engine refused the weights: {message}")


def _visible(device: torch.device) -> str | None:
    """How `CUDA_VISIBLE_DEVICES` names a device; None on a CPU."""
    if device.type != "cuda":
        return None
    names = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    return names[device.index or 0] if names else str(device.index or 0)


def _resource_tracker() -> int | None:
    """The process of Python's that all children share."""
    from multiprocessing import resource_tracker

    return getattr(resource_tracker._resource_tracker, "_pid", None)


def _is_zombie(child: Any, psutil: Any) -> bool:
    try:
        return child.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def _end_processes_of(rollout: weakref.ref[SglangRollout], owner: int) -> None:
    # A fork of the owner that ends has no say over its children.
    if os.getpid() == owner and (left := rollout()) is not None:
        left._end_processes()
