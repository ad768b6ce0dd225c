"""An engine that answers SGLang's calls in this process, for tests of the adapter where SGLang is not installed.

It runs what the adapter sends to schedulers (the weight loader, the draw by seed) over a transformers model.
"""

# ruff: noqa: D102  # the methods are SGLang's
from __future__ import annotations

import asyncio
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from ostinato.rollout.backends import sglang_scheduler
from ostinato.rollout.live_weights import LiveWeights

if TYPE_CHECKING:
    import pytest


class Model(torch.nn.Module):
    """A transformers model with the loader that an engine's models have."""

    def __init__(self, path: str):
        from transformers import AutoConfig, AutoModelForCausalLM

        super().__init__()
        self.inner = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path)).float().eval()

    def load_weights(self, weights: Any) -> None:
        live = LiveWeights(self.inner)
        for name, tensor in weights:
            live.load(name, tensor)


@dataclass
class Request:
    """Any of SGLang's requests."""

    input_ids: list[list[int]] = field(default_factory=list)
    sampling_params: list[dict[str, Any]] = field(default_factory=list)
    rid: list[str] = field(default_factory=list)
    return_logprob: bool = False
    serialized_named_tensors: list[Any] = field(default_factory=list)
    load_format: str = ""
    flush_cache: bool = True
    tags: list[str] = field(default_factory=list)


def _done(success: bool = True, message: str = "") -> SimpleNamespace:
    return SimpleNamespace(success=success, message=message)


class Manager:
    """What the adapter uses of SGLang's `TokenizerManager`, newer versions' weight-update brackets included."""

    def __init__(self, options: dict[str, Any]):
        self.model = Model(options["model_path"])
        self.loader = options["custom_weight_loader"][0]
        self.calls: list[Any] = []
        self.abort: set[int] = set()
        self.before_token: Callable[[], None] | None = None
        self.in_update = False
        self.refuse = ""

    def auto_create_handle_loop(self) -> None:
        self.calls.append("start")

    async def begin_weight_update(self, request: Any, _: None) -> Any:
        assert not self.in_update
        self.in_update = True
        self.calls.append("begin")
        return _done()

    async def end_weight_update(self, request: Any, _: None) -> Any:
        assert self.in_update
        self.in_update = False
        self.calls.append("end")
        return _done()

    async def update_weights_from_tensor(self, request: Request, _: None) -> tuple[bool, str]:
        if self.refuse or not self.in_update:
            return False, self.refuse or "no update has begun"
        assert request.load_format == self.loader
        assert not request.flush_cache, "the cache may not be there"
        self.calls.append("update")
        sglang_scheduler.take(self.model, request.serialized_named_tensors[0])
        return True, ""

    async def release_memory_occupation(self, request: Request, _: None) -> None:
        self.calls.append(("release", *request.tags))

    async def resume_memory_occupation(self, request: Request, _: None) -> None:
        self.calls.append(("resume", *request.tags))

    async def flush_cache(self, timeout_s: float | None = None) -> Any:
        self.calls.append("flush")
        return _done()

    def abort_request(self, rid: str = "", abort_all: bool = False) -> None:
        self.calls.append("abort all")

    async def generate_request(self, request: Request, _: None) -> Any:
        assert request.return_logprob
        assert len(set(request.rid)) == len(request.rid)
        self.calls.append("generate")
        yield [
            self.answer(row, tokens, params)
            for row, (tokens, params) in enumerate(zip(request.input_ids, request.sampling_params, strict=True))
        ]

    @torch.no_grad()
    def answer(self, row: int, prompt: list[int], params: dict[str, Any]) -> dict[str, Any]:
        """One row, by SGLang's rules: at temperature 0 the likeliest token and log-probabilities of temperature 1."""
        ids, told, reason = list(prompt), [], "length"
        greedy = params["temperature"] == 0
        while len(told) < params["max_new_tokens"]:
            if row in self.abort:
                reason = "abort"
                break
            if self.before_token is not None:
                self.before_token()
            logits = self.model.inner(input_ids=torch.tensor([ids])).logits[:, -1].float()
            probabilities = (logits / (1.0 if greedy else params["temperature"])).softmax(-1)
            token = int(logits.argmax()) if greedy else self.draw(probabilities, params, len(ids) - 1)
            told.append((float(probabilities[0, token].log()), token, None))
            ids.append(token)
            if not params["ignore_eos"] and token in (params["stop_token_ids"] or ()):
                reason = "stop"
                break
        meta = {"finish_reason": {"type": reason}, "output_token_logprobs": told}
        return {"output_ids": [token for _, token, _ in told], "meta_info": meta}

    @staticmethod
    def draw(probabilities: torch.Tensor, params: dict[str, Any], place: int) -> int:
        top_k = params["top_k"] if params["top_k"] > 0 else 1 << 30
        restrict = (torch.tensor([top_k]), torch.tensor([params["top_p"]]), torch.tensor([params["min_p"]]))
        seeds, positions = torch.tensor([params["sampling_seed"]]), torch.tensor([place])
        return int(sglang_scheduler.draw(probabilities, seeds, positions, restrict))


class Engine:
    """What the adapter uses of `sglang.Engine`."""

    made: ClassVar[list[dict[str, Any]]] = []

    def __init__(self, **options: Any):
        self.made.append(options)
        self.tokenizer_manager = Manager(options)
        self.loop = asyncio.new_event_loop()


class Serializer:
    """Memory stays where it is."""

    @staticmethod
    def serialize(lines: Any) -> Any:
        return lines


def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put the modules that the adapter imports where it will look for them."""
    io_struct: Any = types.ModuleType("sglang.srt.managers.io_struct")
    for name in (
        "BeginWeightUpdateReqInput",
        "EndWeightUpdateReqInput",
        "GenerateReqInput",
        "ReleaseMemoryOccupationReqInput",
        "ResumeMemoryOccupationReqInput",
        "UpdateWeightsFromTensorReqInput",
    ):
        setattr(io_struct, name, Request)
    utils: Any = types.ModuleType("sglang.srt.utils")
    utils.MultiprocessingSerializer = Serializer
    patch_torch: Any = types.ModuleType("sglang.srt.utils.patch_torch")
    patch_torch.monkey_patch_torch_reductions = lambda: None
    parallel: Any = types.ModuleType("sglang.srt.distributed.parallel_state")
    parallel.get_tp_group = lambda: SimpleNamespace(world_size=1)
    engine: Any = types.ModuleType("sglang.srt.entrypoints.engine")
    engine.Engine = Engine
    for module in (io_struct, utils, patch_torch, parallel, engine):
        parts = module.__name__.split(".")
        for end in range(1, len(parts)):
            name = ".".join(parts[:end])
            if name not in sys.modules or not name.startswith("sglang"):
                package: Any = types.ModuleType(name)
                package.__path__ = []
                package.__spec__ = types.SimpleNamespace(submodule_search_locations=[], name=name, loader=None)
                monkeypatch.setitem(sys.modules, name, package)
        monkeypatch.setitem(sys.modules, module.__name__, module)
    Engine.made.clear()
