"""The SGLang adapter against an engine that answers SGLang's calls in this process, so that it needs no SGLang."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ostinato.rollout import RolloutConfig, build_rollout, check_rollout
from ostinato.rollout.errors import ConfigError, EngineStateError, GenerationError, WeightMismatchError
from ostinato.rollout.reshard import reshard
from ostinato.rollout.testing import ModuleWeights, Setting, make_prompts, save_tiny_model
from ostinato.rollout.testing.conformance import (
    MODEL_CHECKS,
    PROTOCOL_CHECKS,
    Check,
    check_abandoned_load,
    check_aborted_rows,
    check_checksums,
)
from ostinato.rollout.testing.sglang_stand_in import Engine, Manager, stand_in

pytest.importorskip("psutil", reason="the adapter finds its processes with psutil, which SGLang brings along")

GIB = 1 << 30
CHECKS: list[Check] = [*PROTOCOL_CHECKS, *MODEL_CHECKS, check_checksums, check_abandoned_load]


@pytest.fixture(autouse=True)
def sglang(monkeypatch):
    """`sglang` as far as the adapter knows it."""
    stand_in(monkeypatch)


@pytest.fixture(scope="module")
def setting(tmp_path_factory) -> Setting:
    return Setting("sglang", tmp_path_factory.mktemp("sglang"))


def make(config: RolloutConfig, path: Path, **options: Any) -> Any:
    return build_rollout(config, model_path=path, **options)


@pytest.fixture
def rollout(setting: Setting) -> Any:
    return make(setting.config(), setting.model()[0])


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
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


@pytest.fixture
def ctrl_c_is_heeded():
    """A test session in the background ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("ctrl_c_is_heeded")
@pytest.mark.parametrize("call", ["update_weights_from_tensor", "generate_request", "abort_request"])
def test_sglang_an_interrupt_does_not_end_the_engines_own_tasks(rollout: Any, setting: Setting, call):
    """Ctrl-C while one of them runs: it goes on, and the call that waits is what ends."""
    loop, manager, tasks = rollout._engine.loop, rollout._manager, []

    async def own() -> None:
        signal.raise_signal(signal.SIGINT)
        await asyncio.sleep(0)

    def meanwhile(*args: Any, **named: Any) -> Any:
        delattr(manager, call)  # once
        tasks.append(loop.create_task(own()))
        return method(*args, **named)

    def stop() -> None:
        raise KeyboardInterrupt

    method = getattr(manager, call)
    setattr(manager, call, meanwhile)
    if call == "abort_request":  # what follows another interrupt
        manager.before_token = stop
    with pytest.raises(KeyboardInterrupt), reshard(ModuleWeights(setting.model()[1]), rollout):
        rollout.generate(make_prompts([[5, 6, 7]]), setting.config().sampling())
    loop.run_until_complete(asyncio.wait(tasks, timeout=5))
    assert [task.exception() for task in tasks] == [None]


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


def test_sglang_on_a_cpu_has_a_cache_for_a_longest_sequence(setting: Setting, tmp_path):
    save_tiny_model(tmp_path, max_position_embeddings=100_000)
    make(setting.config(response_length=90_000), tmp_path)
    assert Engine.made[-1]["max_total_tokens"] >= 90_008
    assert Engine.made[-1]["context_length"] <= Engine.made[-1]["max_total_tokens"]


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
    path, _ = setting.model()
    with pytest.raises(ConfigError, match=works):
        check_rollout(setting.config(**changes), model_path=path, world_size=1, device="cuda:0")
    check_rollout(setting.config(), model_path=path, world_size=1, device="cuda:0")


def test_sglang_early_check_counts_what_torch_only_keeps_as_free(setting: Setting, monkeypatch):
    """The roles that were built before leave it in PyTorch's cache."""
    free = [10 * GIB]
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: free.append(60 * GIB))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device=None: (free[-1], 80 * GIB))
    config = setting.config(gpu_memory_utilization=0.7)
    check_rollout(config, model_path=setting.model()[0], world_size=1, device="cuda:0")
    assert len(free) == 2, "the cache was emptied, once"


TWO_RANKS = """
import os, signal, subprocess, sys
from pathlib import Path
import pytest, torch
torch.multiprocessing._prctl_pr_set_pdeathsig(signal.SIGKILL)  # a test run that is killed takes its ranks along
signal.signal(signal.SIGINT, signal.default_int_handler)  # a test session in the background ignores it
rank, path = int(sys.argv[1]), Path(sys.argv[2])
from ostinato.rollout import build_rollout
from ostinato.rollout.errors import EngineStateError
from ostinato.rollout.reshard import reshard
from ostinato.rollout.testing import ModuleWeights, Setting, make_prompts, save_tiny_model
from ostinato.rollout.testing.sglang_stand_in import Engine, stand_in

stand_in(pytest.MonkeyPatch())
build = Engine.__init__
def with_scheduler(self, **options):
    build(self, **options)
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
Engine.__init__ = with_scheduler
setting = Setting("sglang", path / str(rank))
model, module = setting.model()  # before there are ranks: transformers writes a model on the first one alone
torch.distributed.init_process_group("gloo", init_method=f"file://{path}/store", rank=rank, world_size=2)
config = setting.config(tensor_model_parallel_size=2)
rollout = build_rollout(config, model_path=model)
assert (rollout._engine is None) == (rank == 1), "the first rank owns the engine"
sampling = config.sampling(eos_token_ids=())
def answers(*prompts):
    return rollout.generate(make_prompts(list(prompts)), sampling).batch["responses"].tolist()
with reshard(ModuleWeights(module), rollout, bucket_megabytes=1, check=True):
    rows = answers([5, 6], [7])
if rank == 0:
    assert len(Engine.made) == 1 and Engine.made[0]["tp_size"] == 2
    rollout._manager.refuse = "not these"
try:
    with reshard(ModuleWeights(module), rollout):
        pass
except EngineStateError as error:
    print(rows, "refused the weights: not these" in str(error))
if rank == 0:
    rollout._manager.refuse = ""

def interrupt():
    os.kill(os.getpid(), signal.SIGINT)
with reshard(ModuleWeights(module), rollout):
    # The rank that waits: its Ctrl-C comes once it has the answer, and the next call has its own.
    broadcast = torch.distributed.broadcast_object_list
    def interrupted(*args, **named):
        torch.distributed.broadcast_object_list = broadcast
        interrupt()
        broadcast(*args, **named)
    if rank == 1:
        torch.distributed.broadcast_object_list = interrupted
    try:
        answers([5, 6], [7])
        waited = rank == 0
    except KeyboardInterrupt:
        waited = rank == 1
    print(waited, answers([9], [8, 7]), answers([5, 6], [7]) == rows)
    # The rank that acts: the other one is told.
    if rank == 0:
        rollout._manager.before_token = interrupt
    try:
        answers([9, 8])
    except KeyboardInterrupt:
        print("told" if rank == 0 else "interrupted")
    except EngineStateError as error:
        print("told" if "rank 0, which holds the engine, failed: KeyboardInterrupt" in str(error) else error)
    if rank == 0:
        rollout._manager.before_token = None
    print(answers([5, 6], [7]) == rows)
    # A rank that is a call behind does not take another one's answer.
    try:
        if rank == 1:
            rollout._ranks._calls -= 1
        answers([5, 6], [7])
        print("of another call")
    except EngineStateError as error:
        print("of another call" if "and this rank at" in str(error) else error)
    rollout._ranks._calls += rank
    # Nobody catches it: both end.
    if rank == 0:
        (path / "schedulers").write_text(" ".join(str(child.pid) for child in rollout._processes))
        rollout._manager.before_token = interrupt
    answers([9, 8])
"""


def test_sglang_two_ranks_share_an_engine(tmp_path):
    """Both make the same calls; the second has the same answers and the same error, interrupted or not.

    An interrupt that nobody catches ends both, and the engine's processes with them.
    """
    import psutil

    (tmp_path / "ranks.py").write_text(TWO_RANKS)
    words = [sys.executable, str(tmp_path / "ranks.py")]
    running = [
        subprocess.Popen([*words, str(rank), str(tmp_path)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    told = [process.communicate(timeout=170) for process in running]
    assert told[0][0] == told[1][0], [errors[-2000:] for _, errors in told]
    first, *then = told[0][0].splitlines()
    assert first.endswith("True")
    assert [line[:4] + line[-4:] for line in then[:1]] == ["TrueTrue"]
    assert then[1:] == ["told", "True", "of another call"]
    assert [process.returncode for process in running] == [-signal.SIGINT, 1]
    assert "rank 0, which holds the engine, failed: KeyboardInterrupt" in told[1][1]
    schedulers = (tmp_path / "schedulers").read_text().split()
    assert schedulers
    assert not any(psutil.pid_exists(int(pid)) for pid in schedulers)
