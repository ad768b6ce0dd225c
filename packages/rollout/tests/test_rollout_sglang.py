"""SGLang, real: on a CPU with stand-ins for three functions of vLLM. One engine a configuration serves all tests."""

from __future__ import annotations

import importlib.util
import inspect
import os
import signal
import subprocess
import sys
from collections.abc import Collection
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from ostinato.rollout import Rollout, RolloutConfig, build_rollout, check_installed
from ostinato.rollout.errors import ConfigError, EngineStateError
from ostinato.rollout.reshard import reshard
from ostinato.rollout.testing import ModuleWeights, Setting, engine_setting, make_prompts, run_conformance
from ostinato.rollout.testing.conformance import ENGINE_CHECKS, MODEL_CHECKS, PROTOCOL_CHECKS, Check, check_aborted_rows
from ostinato.rollout.testing.setting import MakeRollout

GPU = torch.cuda.is_available()
STUB = Path(__file__).parent / "sglang_cpu_stub"
pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="SGLang is not installed"),
    pytest.mark.slow,
]


@pytest.fixture(scope="module", autouse=True)
def stub():
    """SGLang's layers take three functions from vLLM where there is no GPU; its children find them by PYTHONPATH."""
    with pytest.MonkeyPatch.context() as patch:
        if not GPU:
            patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(STUB), os.environ.get("PYTHONPATH")])))
            patch.setenv("SGLANG_USE_CPU_ENGINE", "0")
            patch.syspath_prepend(str(STUB))
        yield


@pytest.fixture(scope="module")
def setting(tmp_path_factory) -> Setting:
    return engine_setting("sglang", tmp_path_factory.mktemp("sglang"))


@pytest.fixture(scope="module")
def engines(engines: MakeRollout) -> MakeRollout:
    if GPU:
        pytest.skip("float32, which SGLang refuses on a GPU; the test marked `gpu` examines bfloat16 there")
    return engines


def test_sglang_building_leaves_the_process_as_it_was(setting: Setting, engines: MakeRollout):
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    environment, terminate = dict(os.environ), signal.getsignal(signal.SIGTERM)
    engines(setting.config(), setting.model()[0])
    assert dict(os.environ) == environment
    assert signal.getsignal(signal.SIGTERM) is terminate
    assert torch.equal(torch.rand(3), expected)


def test_sglang_is_known_as_installed():
    check_installed("sglang")


@pytest.mark.parametrize("check", [*PROTOCOL_CHECKS, *MODEL_CHECKS, *ENGINE_CHECKS], ids=lambda check: check.__name__)
def test_sglang_conforms(check: Check, engines: MakeRollout, setting: Setting):
    check(engines, setting)


def test_sglang_marks_aborted_rows(engines: MakeRollout, setting: Setting):
    """H-46 with a real engine that is told to give up a request as soon as it has it."""

    def abort(rollout: Any, rows: Collection[int]) -> None:
        manager = rollout._manager
        first = int(str(rollout._requests)[6:-1])
        names = [f"ostinato-{first + row}-" for row in rows]
        for method in ("_send_one_request", "_send_batch_request"):
            inner = getattr(type(manager), method).__get__(manager)
            setattr(manager, method, partial(sending, manager, names, inner) if rows else inner)

    def sending(manager: Any, names: list[str], inner: Any, requests: Any) -> Any:
        answer = inner(requests)
        return told(manager, names, answer) if inspect.isawaitable(answer) else give_up(manager, names, answer)

    async def told(manager: Any, names: list[str], answer: Any) -> Any:
        return give_up(manager, names, await answer)

    def give_up(manager: Any, names: list[str], answer: Any) -> Any:
        for name in names:
            manager.abort_request(name)
        return answer

    check_aborted_rows(engines, replace(setting, abort=abort))


def test_sglang_an_interrupted_call_leaves_nothing_behind(engine: Any, setting: Setting, monkeypatch):
    """What stops a call half way (Ctrl-C) must not be answered by the next one."""
    _, module = setting.model()
    prompts, sampling = make_prompts([[5, 6, 7]] * 3), setting.config().sampling(eos_token_ids=())
    with reshard(ModuleWeights(module), engine):
        expected = engine.generate(prompts, sampling).batch["responses"]
        with monkeypatch.context() as patch:

            def stop(task: Any) -> None:
                engine._engine.loop.run_until_complete(asyncio_sleep())
                raise KeyboardInterrupt

            patch.setattr(engine, "_finish", stop)
            patch.setattr(engine, "_wait", lambda call: engine._engine.loop.run_until_complete(call))
            with pytest.raises(KeyboardInterrupt):
                engine.generate(prompts, sampling)
        assert torch.equal(engine.generate(prompts, sampling).batch["responses"], expected)


async def asyncio_sleep() -> None:
    import asyncio

    await asyncio.sleep(0.01)


def test_sglang_processes_end_with_the_engine_and_are_missed(setting: Setting):
    """One that is killed is an error of the next call; `close` ends the rest, and only its own."""
    import psutil

    other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    rollout: Any = build_rollout(setting.config(max_num_seqs=8), model_path=setting.model()[0], device="cpu")
    children = list(rollout._processes)
    assert children
    children[0].kill()
    with (
        pytest.raises(EngineStateError, match="processes of the engine have ended"),
        reshard(ModuleWeights(setting.model()[1]), rollout),
    ):
        pass
    rollout.close()
    assert not any(psutil.pid_exists(child.pid) for child in children)
    assert other.poll() is None
    other.kill()
    other.wait()


ORPHANS = """
import os, sys
from ostinato.rollout import RolloutConfig, build_rollout

if __name__ == "__main__":
    config = RolloutConfig(name="sglang", dtype="float32", prompt_length=8, response_length=8)
    rollout = build_rollout(config, model_path=sys.argv[1])
    print(*[child.pid for child in rollout._processes], flush=True)
    os.kill(os.getpid(), 9)
"""


@pytest.mark.skipif(GPU, reason="of children alone, which a device does not change")
def test_sglang_processes_die_with_the_worker(setting: Setting, tmp_path):
    import psutil

    (tmp_path / "orphans.py").write_text(ORPHANS)
    run = subprocess.run(
        [sys.executable, str(tmp_path / "orphans.py"), str(setting.model()[0])],
        capture_output=True, text=True, timeout=550, check=False,
    )  # fmt: skip
    assert run.returncode == -9, run.stderr[-2000:]
    alive = [psutil.Process(int(pid)) for pid in run.stdout.split()[-2:] if psutil.pid_exists(int(pid))]
    assert psutil.wait_procs(alive, timeout=10)[1] == []


@pytest.mark.skipif(GPU, reason="of children alone, which a device does not change")
def test_sglang_processes_do_not_keep_python_from_ending(setting: Setting, tmp_path):
    """An engine that nobody closed, and an error on the way."""
    (tmp_path / "left.py").write_text(ORPHANS.replace("os.kill(os.getpid(), 9)", "raise SystemExit(3)"))
    run = subprocess.run(
        [sys.executable, str(tmp_path / "left.py"), str(setting.model()[0])],
        capture_output=True, text=True, timeout=550, check=False,
    )  # fmt: skip
    assert run.returncode == 3, run.stderr[-2000:]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_sglang_conforms_asleep_between_calls_on_a_gpu(tmp_path):
    """Memory unmapped between generations, checksums of every weight after each load.

    Without a prefix cache: a prompt that is read from it is rounded otherwise, and a repeated draw may differ.
    """
    exclude = {"check_prompt_lengths", "check_split", "check_left_padding"}
    overrides = {"gpu_memory_utilization": 0.05}
    setting = Setting("sglang", tmp_path, dtype="bfloat16", atol=0.25, overrides=overrides)

    def make(config: RolloutConfig, path: Path) -> Rollout:
        options = {"disable_radix_cache": True}
        return build_rollout(config, model_path=path, device="cuda", engine_options=options)

    with pytest.raises(ConfigError, match="take bfloat16 and float16"):
        make(replace(setting.config(), dtype="float32"), setting.model()[0])
    run_conformance(make, setting, exclude=exclude)
    path, module = setting.model()
    rollout = make(setting.config(), path)
    for _ in range(2):
        with reshard(ModuleWeights(module), rollout, check=True):
            inside = torch.cuda.mem_get_info()[0]
        assert torch.cuda.mem_get_info()[0] - inside > 1 << 30
    rollout.close()
