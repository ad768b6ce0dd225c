"""The SGLang adapter against an engine that answers SGLang's calls in this process, so that it needs no SGLang.

The engine runs what the adapter sends to schedulers (the weight loader, the draw by seed) over a transformers model.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import types
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch

from ostinato.rollout import RolloutConfig, build_rollout
from ostinato.rollout.backends import sglang_scheduler
from ostinato.rollout.errors import ConfigError, EngineStateError, GenerationError, WeightMismatchError
from ostinato.rollout.live_weights import LiveWeights
from ostinato.rollout.reshard import reshard
from ostinato.rollout.testing import ModuleWeights, Setting, make_prompts
from ostinato.rollout.testing.conformance import MODEL_CHECKS, PROTOCOL_CHECKS, Check, check_aborted_rows

pytest.importorskip("psutil", reason="the adapter finds its processes with psutil, which SGLang brings along")

GIB = 1 << 30


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


def done(success: bool = True, message: str = "") -> SimpleNamespace:
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
        return done()

    async def end_weight_update(self, request: Any, _: None) -> Any:
        assert self.in_update
        self.in_update = False
        self.calls.append("end")
        return done()

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
        return done()

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
        restrict = tuple(torch.tensor([value]) for value in (top_k, params["top_p"], params["min_p"]))
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


@pytest.fixture(autouse=True)
def sglang(monkeypatch):
    """`sglang` as far as the adapter knows it."""
    stand_in(monkeypatch)


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


@pytest.fixture(scope="module")
def setting(tmp_path_factory) -> Setting:
    return Setting("sglang", tmp_path_factory.mktemp("sglang"))


def make(config: RolloutConfig, path: Path, **options: Any) -> Any:
    return build_rollout(config, model_path=path, **options)


@pytest.fixture
def rollout(setting: Setting) -> Any:
    return make(setting.config(), setting.model()[0])


@pytest.mark.parametrize("check", [*PROTOCOL_CHECKS, *MODEL_CHECKS], ids=lambda check: check.__name__)
def test_sglang_adapter_conforms(check: Check, setting: Setting):
    check(make, setting)


def test_sglang_adapter_marks_aborted_rows(setting: Setting):
    def abort(rollout: Any, rows: Collection[int]) -> None:
        rollout._manager.abort = set(rows)

    check_aborted_rows(make, replace(setting, abort=abort))


def test_sglang_order_of_waking_loading_and_flushing(rollout: Any, setting: Setting, monkeypatch):
    """H-50, H-51: weights wake, come, then the cache wakes, and only then is it flushed; it is released first."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device=None: (40 * GIB, 80 * GIB))
    rollout._sleeps = True
    rollout._fall_asleep()
    rollout._manager.calls.clear()
    for _ in range(2):
        with reshard(ModuleWeights(setting.model()[1]), rollout, bucket_megabytes=1) as engine:
            engine.generate(make_prompts([[5, 6]]), setting.config().sampling())
    once = [
        ("resume", "weights"), "begin", "update", "update", "update", "end", ("resume", "kv_cache", "cuda_graph"),
        "flush", "generate", ("release", "kv_cache", "cuda_graph"), ("release", "weights"),
    ]  # fmt: skip
    calls = rollout._manager.calls
    assert [call for call in once if call != "update"] * 2 == [call for call in calls if call != "update"]
    assert calls[2] == "update"
    assert calls[calls.index("end") - 1] == "update"


def test_sglang_an_awake_cache_is_flushed_at_the_end_of_a_load(rollout: Any, setting: Setting):
    for _ in range(2):
        with reshard(ModuleWeights(setting.model()[1]), rollout):
            pass
    rollout.wake("weights")
    rollout.wake("kv_cache")
    before = rollout._manager.calls.count("flush")
    for name, tensor in setting.model()[1].named_parameters():
        rollout.load_weights([(name, tensor.detach())])
    rollout.finish_load()
    assert rollout._manager.calls.count("flush") == before + 1


@pytest.mark.parametrize("tied", [True, False])
def test_sglang_weights_are_those_that_were_sent(tied: bool, setting: Setting):
    """Checksums of both sides, at the watched load and at a repeated one; a load given up between them."""
    path, _ = setting.model(tied=tied)
    rollout = make(setting.config(), path)
    for seed in (0, 1):
        _, module = setting.model(tied=tied, seed=seed)
        with reshard(ModuleWeights(module), rollout, bucket_megabytes=1, check=True):
            pass
        rollout.wake("weights")
        rollout.load_weights([(name, tensor.detach() * 0) for name, tensor in list(module.named_parameters())[:2]])
        rollout.sleep()


def test_sglang_a_refused_load_is_an_error(rollout: Any, setting: Setting):
    """SGLang answers (False, message) and goes on."""
    rollout._manager.refuse = "not these"
    with (
        pytest.raises(EngineStateError, match="refused the weights: not these"),
        reshard(ModuleWeights(setting.model()[1]), rollout),
    ):
        pass


def test_sglang_wrong_shape_is_refused(rollout: Any):
    rollout.wake("weights")
    with pytest.raises(WeightMismatchError, match="wanted"):
        rollout.load_weights([("model.norm.weight", torch.zeros(3))])


def test_sglang_numbers_that_are_none_are_refused(rollout: Any, setting: Setting):
    _, module = setting.model()
    with reshard(ModuleWeights(module), rollout) as engine:
        with torch.no_grad():
            rollout._manager.model.inner.lm_head.weight.fill_(float("nan"))
        with pytest.raises(GenerationError, match=r"rollout_id \[0, 1\]"):
            engine.generate(make_prompts([[5], [6]]), setting.config().sampling())


def test_sglang_an_interrupted_call_ends_its_requests(rollout: Any, setting: Setting):
    """What stops a call half way (Ctrl-C) leaves an engine that is idle, and the next call answers its own prompts."""
    prompts, sampling = make_prompts([[5, 6, 7]] * 3), setting.config().sampling(eos_token_ids=())

    def stop() -> None:
        raise KeyboardInterrupt

    with reshard(ModuleWeights(setting.model()[1]), rollout):
        expected = rollout.generate(prompts, sampling).batch["responses"]
        rollout._manager.before_token = stop
        with pytest.raises(KeyboardInterrupt):
            rollout.generate(prompts, sampling)
        assert rollout._manager.calls[-2:] == ["abort all", "flush"]
        rollout._manager.before_token = None
        assert torch.equal(rollout.generate(prompts, sampling).batch["responses"], expected)


def test_sglang_a_lost_process_is_an_error(rollout: Any, setting: Setting, monkeypatch):
    """A call that waits for an engine which is gone ends with its name."""
    import psutil

    import ostinato.rollout.backends.sglang as adapter

    monkeypatch.setattr(adapter, "_POLL_SECONDS", 0.01)
    gone = subprocess.Popen([sys.executable, "-c", ""])
    rollout._processes = [psutil.Process(gone.pid)]
    monkeypatch.setattr(Manager, "flush_cache", lambda self, timeout_s=None: asyncio.sleep(60))
    with (
        pytest.raises(EngineStateError, match=rf"1 of 1 processes of the engine have ended \(pid {gone.pid}\)"),
        reshard(ModuleWeights(setting.model()[1]), rollout),
    ):
        pass
    gone.wait()


def test_sglang_options_on_a_gpu(setting: Setting, monkeypatch):
    """The share is of the whole device, SGLang's of what is free; of the share the workspace goes off."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device=None: (60 * GIB, 80 * GIB))
    path, _ = setting.model()
    config = setting.config(dtype="bfloat16", gpu_memory_utilization=0.5, max_num_seqs=7, seed=3)
    rollout = make(config, path, device="cuda:0", dp_rank=1, dp_size=2)
    [options] = Engine.made
    assert options["mem_fraction_static"] == pytest.approx((40 - 1) / 60, abs=1e-4)
    assert options["enable_memory_saver"]
    assert options["enable_fp32_lm_head"]
    assert not options["disable_cuda_graph"]
    assert options["load_format"] == "dummy"
    assert options["max_running_requests"] == 7
    make(config, path, device="cuda:0", dp_size=2)
    assert options["random_seed"] != Engine.made[1]["random_seed"], "each engine has a seed of its own"
    assert rollout._manager.calls == ["start", ("release", "kv_cache", "cuda_graph"), ("release", "weights")]


@pytest.mark.parametrize(
    ("changes", "key", "works"),
    [
        ({"tensor_model_parallel_size": 3}, "tensor_model_parallel_size", "1 works"),
        ({"max_model_len": 4096}, "max_model_len", "1024 works"),
        ({"prompt_length": 1024}, "prompt_length", "1023 works"),
        ({"gpu_memory_utilization": 0.9}, "gpu_memory_utilization", "0.75 works"),
        ({"gpu_memory_utilization": 0.01}, "gpu_memory_utilization", "0.02 works"),
    ],
)
def test_sglang_bad_input_is_refused_before_anything_is_built(changes, key, works, setting: Setting, monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device=None: (60 * GIB, 80 * GIB))
    with pytest.raises(ConfigError, match=works) as caught:
        make(setting.config(**changes), setting.model()[0], device="cuda:0")
    assert caught.value.key == f"actor_rollout_ref.rollout.{key}"
    assert Engine.made == []


def test_sglang_draws_follow_splitmix64():
    """Numbers 0 to 4 of the generator that starts at 1234567."""
    expected = [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]
    numbers = sglang_scheduler.uniforms(torch.full((5,), 1234567), torch.arange(5))
    assert numbers.tolist() == [((word >> 12) + 0.5) / 2**52 for word in expected]


@pytest.mark.parametrize("size", [3, 511, 512, 513, 2000])
def test_sglang_draws_invert_the_cumulative_distribution(size: int):
    """Against one sum in float64; tokens of weight 0 at both ends and in between are never drawn."""
    generator = torch.Generator().manual_seed(size)
    weights = torch.rand(64, size, generator=generator) * (torch.rand(64, size, generator=generator) > 0.7)
    weights[:, 0] = weights[:, -1] = 0
    weights[:, size // 2] = 1.0
    numbers = torch.rand(64, generator=generator, dtype=torch.float64)
    numbers[0], numbers[1] = 2.0**-53, 1 - 2.0**-53
    tokens = sglang_scheduler.invert(weights, numbers)
    exact = weights.double().cumsum(-1)
    expected = torch.searchsorted(exact, numbers[:, None] * exact[:, -1:], right=True).squeeze(-1)
    assert (tokens != expected).sum() == 0
    assert bool((weights.gather(1, tokens[:, None]) > 0).all())


def test_sglang_draws_keep_to_the_restrictions():
    probabilities = torch.tensor([[0.1, 0.4, 0.2, 0.3]]).repeat(400, 1)
    seeds, positions = torch.arange(400), torch.full((400,), 7)

    def seen(top_k: int, top_p: float, min_p: float) -> set[int]:
        restrict = (torch.full((400,), top_k), torch.full((400,), top_p), torch.full((400,), min_p))
        return set(sglang_scheduler.draw(probabilities, seeds, positions, restrict).tolist())

    assert (
        seen(1 << 30, 1.0, 0.0) == {0, 1, 2, 3} == set(sglang_scheduler.draw(probabilities, seeds, positions).tolist())
    )
    assert seen(2, 1.0, 0.0) == {1, 3}
    assert seen(1 << 30, 0.6, 0.0) == {1, 3}
    assert seen(1 << 30, 1.0, 0.45) == {1, 2, 3}
    assert seen(1 << 30, 1e-9, 0.0) == {1}


TWO_RANKS = """
import signal, sys
from pathlib import Path
import pytest, torch
torch.multiprocessing._prctl_pr_set_pdeathsig(signal.SIGKILL)  # a test run that is killed takes its ranks along
folder, rank, path = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
sys.path.insert(0, folder)
import test_rollout_sglang_contract as contract
from ostinato.rollout.errors import EngineStateError
from ostinato.rollout.reshard import reshard
from ostinato.rollout.testing import ModuleWeights, Setting, make_prompts

contract.stand_in(pytest.MonkeyPatch())
setting = Setting("sglang", path / str(rank))
model, module = setting.model()  # before there are ranks: transformers writes a model on the first one alone
torch.distributed.init_process_group("gloo", init_method=f"file://{path}/store", rank=rank, world_size=2)
config = setting.config(tensor_model_parallel_size=2)
rollout = contract.make(config, model)
assert (rollout._engine is None) == (rank == 1), "the first rank owns the engine"
with reshard(ModuleWeights(module), rollout, bucket_megabytes=1, check=True):
    rows = rollout.generate(make_prompts([[5, 6], [7]]), config.sampling(eos_token_ids=()))
if rank == 0:
    assert len(contract.Engine.made) == 1 and contract.Engine.made[0]["tp_size"] == 2
    rollout._manager.refuse = "not these"
try:
    with reshard(ModuleWeights(module), rollout):
        pass
except EngineStateError as error:
    print(rows.batch["responses"].tolist(), "refused the weights: not these" in str(error))
"""


def test_sglang_two_ranks_share_an_engine(tmp_path):
    """Both make the same calls; the second has the same answers and the same error."""
    (tmp_path / "ranks.py").write_text(TWO_RANKS)
    words = [sys.executable, str(tmp_path / "ranks.py"), str(Path(__file__).parent)]
    running = [
        subprocess.Popen([*words, str(rank), str(tmp_path)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    told = [process.communicate(timeout=170) for process in running]
    assert [process.returncode for process in running] == [0, 0], [errors[-2000:] for _, errors in told]
    assert told[0][0] == told[1][0]
    assert told[0][0].strip().endswith("True")
