"""What differs between versions of SGLang (0.5.14 to 0.5.23), and every private place it is met at."""

# pyright: reportMissingImports=false
from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import multiprocessing
import os
import random
import signal
import socket
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

logger = logging.getLogger(__name__)


# --- in the scheduler's process ---


def run_scheduler(*args: Any, **kwargs: Any) -> None:
    """The main function of a scheduler process: what SGLang runs there, with this module's changes made first."""
    from sglang.srt.managers.scheduler import run_scheduler_process

    _no_end_tokens_of_its_own()
    _seed_each_row()
    _exact_logits()
    run_scheduler_process(*args, **kwargs)


def _no_end_tokens_of_its_own() -> None:
    """A request's `stop_token_ids` alone end it; SGLang adds the model's, and `ignore_eos` switches both off."""
    from sglang.srt.configs.model_config import ModelConfig

    ModelConfig._get_hf_eos_token_id = lambda self: set()


def _seed_each_row() -> None:
    """Honour a request's `sampling_seed`.

    SGLang does so only with `enable_deterministic_inference`, whose kernels make all else slower.
    """
    from sglang.srt.layers import sampler
    from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo

    from ostinato.rollout.backends.sglang_scheduler import draw

    make = SamplingBatchInfo.from_schedule_batch.__func__
    # Newer versions return what they captured for `return_sampling_mask` as well.
    in_pair = hasattr(sampler, "_SamplingMaskCapture")

    def from_schedule_batch(cls: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        info = make(cls, batch, *args, **kwargs)
        seeds = [request.sampling_params.sampling_seed or 0 for request in batch.reqs]
        info.sampling_seed = torch.tensor(seeds, dtype=torch.int64).to(info.device, non_blocking=True)
        return info

    def sample(self: Any, probs: torch.Tensor, info: Any, positions: torch.Tensor, simple: bool) -> Any:
        restrict = None if simple else (info.top_ks, info.top_ps, info.min_ps)
        # Batches that SGLang makes to warm up have no requests.
        seeds = torch.zeros_like(positions) if info.sampling_seed is None else info.sampling_seed
        tokens = draw(probs, seeds.to(torch.int64), positions, restrict)
        return (tokens, None) if in_pair else tokens

    SamplingBatchInfo.from_schedule_batch = classmethod(from_schedule_batch)
    sampler.Sampler._sample_from_probs = sample


def _exact_logits() -> None:
    """Versions whose `enable_fp32_lm_head` converts the whole head at each token: let the product give float32."""
    from sglang.srt.layers.logits_processor import LogitsProcessor

    compute = LogitsProcessor._compute_lm_head
    if "out" in inspect.signature(compute).parameters:
        return

    def compute_lm_head(self: Any, hidden: torch.Tensor, head: Any, bias: Any = None) -> torch.Tensor:
        weight = None if hasattr(head, "apply_lora") else getattr(head, "weight", None)
        half = hidden.is_cuda and hidden.dtype in (torch.bfloat16, torch.float16)
        if self.use_fp32_lm_head and half and isinstance(weight, torch.Tensor) and hidden.dtype == weight.dtype:
            return torch.mm(hidden, weight.T, out_dtype=torch.float32)
        return compute(self, hidden, head, bias)

    LogitsProcessor._compute_lm_head = compute_lm_head


def tensor_parallel_group() -> Any:
    """The process group of the schedulers of one engine; None where there is one."""
    from sglang.srt.distributed.parallel_state import get_tp_group

    group = get_tp_group()
    return group.device_group if group.world_size > 1 else None


# --- in the worker's process ---


def make_engine(options: Mapping[str, Any]) -> Any:
    """An `Engine` whose schedulers run `run_scheduler`, its event loop set up, its handlers of signals taken out."""
    from sglang.srt.entrypoints.engine import Engine

    class OwnEngine(Engine):
        run_scheduler_process_func = staticmethod(run_scheduler)

        def shutdown(self) -> None:
            """Do nothing when Python ends: children end with their parent, and this would end those of others."""

    engine = OwnEngine(custom_sigquit_handler=_note_failed_child, **options)
    # SGLang would otherwise do this at the first call, and keep SIGTERM until its loop runs again.
    engine.loop.run_until_complete(_started(engine.tokenizer_manager))
    for number in (signal.SIGTERM, signal.SIGQUIT):
        with contextlib.suppress(ValueError, RuntimeError):  # not in the main thread
            engine.loop.remove_signal_handler(number)
    return engine


async def _started(manager: Any) -> None:
    manager.auto_create_handle_loop()


def discard(engine: Any) -> None:
    """Let go of an engine whose processes are about to be ended."""
    watchdog = getattr(engine.tokenizer_manager, "_subprocess_watchdog", None)
    if watchdog is not None:
        watchdog.stop()
    engine.loop.run_until_complete(_cancelled())
    engine.loop.close()


async def _cancelled() -> None:
    tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def begin_update(manager: Any) -> Any:
    """The coroutine that begins a load, or None where a version has none."""
    return _bracket(manager, "begin_weight_update", "BeginWeightUpdateReqInput")


def end_update(manager: Any) -> Any:
    """The coroutine that ends a load, or None where a version has none."""
    return _bracket(manager, "end_weight_update", "EndWeightUpdateReqInput")


def _bracket(manager: Any, method: str, request: str) -> Any:
    if not hasattr(manager, method):
        return None
    from sglang.srt.managers import io_struct

    return getattr(manager, method)(getattr(io_struct, request)(), None)


def portable_handles() -> None:
    """Let handles of GPU memory name the device by its identity: a scheduler may count devices in another order."""
    from sglang.srt.utils.patch_torch import monkey_patch_torch_reductions

    monkey_patch_torch_reductions()


def attention_backend(device: torch.device) -> str | None:
    """The attention that an installation lacks kernels for otherwise; None leaves the choice to SGLang."""
    if device.type == "cpu":
        return "torch_native"
    import importlib.util

    spec = importlib.util.find_spec("sgl_kernel")
    places = [] if spec is None else list(spec.submodule_search_locations or ())
    return None if any((Path(place) / "flash_ops.abi3.so").exists() for place in places) else "triton"


def free_port() -> int:
    """A port that nothing listens at now, outside the range that systems hand out, and a process's own for its pid."""
    first, count = 20000, 12000
    for step in range(count):
        port = first + (os.getpid() * 31 + step * 7) % count
        with socket.socket() as opened, contextlib.suppress(OSError):
            opened.bind(("127.0.0.1", port))
            return port
    raise OSError(f"no port from {first} to {first + count} is free")


@contextlib.contextmanager
def build_environment(devices: str | None) -> Iterator[None]:
    """Settings that children read from the environment, and all that SGLang changes for its process put back.

    Args:
        devices: what `CUDA_VISIBLE_DEVICES` is for the children; None leaves it.
    """
    settings = {
        # Lengths are checked by the adapter; SGLang wants two places more than it fills.
        "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",
        # Training takes its share of one device before the others.
        "SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK": "0",
    }
    if devices is not None:
        settings["CUDA_VISIBLE_DEVICES"] = devices
    before = dict(os.environ)
    main = threading.current_thread() is threading.main_thread()
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGQUIT)}
    start_method = multiprocessing.get_start_method(allow_none=True)
    policy = asyncio.get_event_loop_policy()
    root, own = logging.getLogger(), logging.getLogger("sglang")
    logging_state = (root.level, list(root.handlers), own.level)
    quiet = logging.getLogger("sglang.srt.entrypoints.engine")
    quiet.addFilter(_says_something)
    numbers = (random.getstate(), np.random.get_state(), torch.get_rng_state())
    os.environ.update(settings)
    # It tells all of its several hundred settings.
    own.setLevel(logging.WARNING)
    # Each engine has a loop of its own, made under a policy of its own.
    asyncio.set_event_loop_policy(_loop_policy())
    try:
        yield
    finally:
        for name in [name for name in os.environ if name not in before]:
            del os.environ[name]
        os.environ.update(before)
        multiprocessing.set_start_method(start_method, force=True)
        asyncio.set_event_loop_policy(policy)
        root.setLevel(logging_state[0])
        root.handlers[:] = logging_state[1]
        own.setLevel(logging_state[2])
        quiet.removeFilter(_says_something)
        random.setstate(numbers[0])
        np.random.set_state(numbers[1])
        torch.set_rng_state(numbers[2])
        if main:
            signal.signal(signal.SIGTERM, handlers[signal.SIGTERM] or signal.SIG_DFL)
            # A scheduler that fails sends SIGQUIT, which would end this process without a word; calls notice its end.
            signal.signal(signal.SIGQUIT, _note_failed_child)


def _note_failed_child(number: int, frame: object) -> None:
    logger.error("an SGLang process failed; its own output says why")


def _loop_policy() -> asyncio.AbstractEventLoopPolicy:
    try:
        import uvloop
    except ImportError:
        return asyncio.DefaultEventLoopPolicy()
    return uvloop.EventLoopPolicy()


def _says_something(record: logging.LogRecord) -> bool:
    return "custom SIGQUIT handler" not in record.getMessage()
