"""Megatron-Core on a CPU, for tests and trials: what it asks of `torch.cuda` is answered by the CPU.

Megatron-Core calls `torch.cuda` unconditionally. `install` gives its modules, and only them, a `torch` whose `cuda` is
the CPU; nothing else in the process sees it. (Replaced globally, such functions corrupt what other libraries make:
transformers' rotary tables, for one.) The two methods of `torch.Tensor` that Megatron compares or calls answer as on a
GPU only where the caller is a module of Megatron.
"""

from __future__ import annotations

import importlib
import sys
from contextlib import contextmanager, nullcontext
from types import ModuleType
from typing import Any

import torch

MODULES = (
    "megatron.core.parallel_state",
    "megatron.core.models.gpt.gpt_model",
    "megatron.core.models.gpt.gpt_layer_specs",
    "megatron.core.distributed",
    "megatron.core.distributed.finalize_model_grads",
    "megatron.core.optimizer",
    "megatron.core.pipeline_parallel.schedules",
    "megatron.core.transformer.moe.moe_layer",
    "megatron.core.transformer.moe.experts",
    "megatron.core.dist_checkpointing",
    "megatron.core.dist_checkpointing.strategies.torch",
    "megatron.core.dist_checkpointing.strategies.fully_parallel",
    "megatron.core.dist_checkpointing.strategies.filesystem_async",
    "megatron.core.dist_checkpointing.strategies.state_dict_saver",
)
"""What the engine imports, some of it late: all of it must be there when the modules are given their `torch`."""

FACTORIES = ("zeros", "ones", "empty", "full", "tensor", "arange", "rand", "randn", "zeros_like", "ones_like")
CPU = torch.device("cpu")


class _Stream:
    """A stream or event on which nothing waits."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: self

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *exc: object) -> None: ...


def _nothing(*args: Any, **kwargs: Any) -> None: ...


class _Nvtx:
    range_push = range_pop = mark = staticmethod(_nothing)

    @staticmethod
    @contextmanager
    def range(*args: Any, **kwargs: Any) -> Any:
        yield


class _Cuda:
    """`torch.cuda` with the CPU as its one device."""

    Stream = Event = _Stream
    nvtx = _Nvtx
    set_device = synchronize = empty_cache = staticmethod(_nothing)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cuda, name)

    @staticmethod
    def current_device() -> torch.device:
        return CPU

    @staticmethod
    def device_count() -> int:
        return 1

    @staticmethod
    def manual_seed(seed: int) -> None:
        torch.manual_seed(seed)

    @staticmethod
    def get_rng_state(*args: Any) -> torch.Tensor:
        return torch.get_rng_state()

    @staticmethod
    def set_rng_state(state: torch.Tensor, *args: Any) -> None:
        torch.set_rng_state(state)

    @staticmethod
    def current_stream(*args: Any) -> _Stream:
        return _Stream()

    default_stream = current_stream

    @staticmethod
    def stream(*args: Any) -> Any:
        return nullcontext()

    @staticmethod
    def is_current_stream_capturing() -> bool:
        return False


def _on_cpu(factory: Any) -> Any:
    def make(*args: Any, **kwargs: Any) -> torch.Tensor:
        if "cuda" in str(kwargs.get("device", "")):
            kwargs["device"] = CPU
        return factory(*args, **kwargs)

    return make


class CpuTorch(ModuleType):
    """`torch` as Megatron's modules see it."""

    def __init__(self) -> None:
        super().__init__("torch")
        self.cuda = _Cuda()
        for name in FACTORIES:
            setattr(self, name, _on_cpu(getattr(torch, name)))

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


_TORCH = CpuTorch()
_REPLACED: list[tuple[dict[str, Any], str, Any]] = []
"""What `install` has replaced: where, its name, what was there."""
_TYPE, _CUDA = torch.Tensor.type, torch.Tensor.cuda


def install() -> None:
    """Import Megatron-Core and give its modules a CPU; harmless when called again."""
    for name in MODULES:
        importlib.import_module(name)
    for name, module in list(sys.modules.items()):
        if name.startswith("megatron.core") and vars(module).get("torch") is torch:
            _replace(vars(module), "torch", _TORCH)
    if torch.Tensor.type is not _TYPE:
        return
    random = vars(importlib.import_module("megatron.core.tensor_parallel.random"))
    _replace(random, "_get_cuda_rng_state", lambda *args, **kwargs: torch.get_rng_state())
    _replace(random, "_set_cuda_rng_state", lambda state, *args, **kwargs: torch.set_rng_state(state))
    dispatcher = vars(importlib.import_module("megatron.core.transformer.moe.token_dispatcher"))
    _replace(dispatcher, "maybe_move_tensor_to_cpu", _stay)
    torch.Tensor.type = _type  # pyright: ignore[reportAttributeAccessIssue]
    torch.Tensor.cuda = _cuda  # pyright: ignore[reportAttributeAccessIssue]


def uninstall() -> None:
    """Put everything back."""
    while _REPLACED:
        names, name, value = _REPLACED.pop()
        names[name] = value
    torch.Tensor.type = _TYPE
    torch.Tensor.cuda = _CUDA


def _replace(names: dict[str, Any], name: str, value: Any) -> None:
    _REPLACED.append((names, name, names[name]))
    names[name] = value


def _stay(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor


def _megatron_asks() -> bool:
    return str(sys._getframe(2).f_globals.get("__name__", "")).startswith("megatron.")


def _type(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """`Tensor.type`; Megatron's optimizers sort parameters by names such as `torch.cuda.FloatTensor`."""
    answer = _TYPE(tensor, *args, **kwargs)
    if isinstance(answer, str) and not args and not kwargs and _megatron_asks():
        return answer.replace("torch.", "torch.cuda.")
    return answer


def _cuda(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """`Tensor.cuda`; a tensor of a CPU engine is where it should be."""
    return tensor if _megatron_asks() else _CUDA(tensor, *args, **kwargs)
