from __future__ import annotations

import importlib.util
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch import nn

from ostinato.workers.core.testing.oracle import STILL, make_rows, start
from ostinato.workers.core.testing.spawn import spawn
from ostinato.workers.fsdp.errors import ModelLoadError
from ostinato.workers.fsdp.liger import use_liger_kernels
from ostinato.workers.fsdp.testing import fsdp

CUDA = torch.device("cuda")
PATCHES = "liger_kernel.transformers.monkey_patch"


def model(kind: str) -> nn.Module:
    module = nn.Linear(2, 2)
    module.config = SimpleNamespace(model_type=kind)
    return module


@pytest.fixture
def liger(monkeypatch):
    """What Liger was asked for."""
    asked: list[tuple[nn.Module, dict[str, bool]]] = []
    patches = ModuleType(PATCHES)
    patches.__dict__["MODEL_TYPE_TO_APPLY_LIGER_FN"] = {"qwen2": None}
    patches.__dict__["_apply_liger_kernel_to_instance"] = lambda module, **kwargs: asked.append((module, kwargs))
    for name in ("liger_kernel", "liger_kernel.transformers"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, PATCHES, patches)
    return asked


def test_liger_leaves_the_head_to_the_engine(liger):
    module = model("qwen2")
    use_liger_kernels(module, CUDA)
    assert liger == [(module, {"cross_entropy": False, "fused_linear_cross_entropy": False})]


def test_liger_is_refused_where_it_cannot_run(liger, monkeypatch):
    with pytest.raises(ModelLoadError, match="run on GPUs, this rank trains on cpu"):
        use_liger_kernels(model("qwen2"), torch.device("cpu"))
    with pytest.raises(ModelLoadError, match="no kernels for gpt2 models"):
        use_liger_kernels(model("gpt2"), CUDA)
    monkeypatch.setitem(sys.modules, PATCHES, None)
    with pytest.raises(ModelLoadError, match=r"pip install 'ostinato-workers-fsdp\[liger\]'"):
        use_liger_kernels(model("qwen2"), CUDA)
    assert liger == []


@pytest.mark.usefixtures("process_group")
def test_an_engine_with_liger_says_so_on_a_cpu(workspace):
    with pytest.raises(ModelLoadError, match=r"model\.use_liger"):
        start(fsdp(), workspace / "lm", optim=STILL, use_liger=True)


def with_and_without(folder):
    """Mean distance of log-probabilities, and both gradient norms, bfloat16."""
    rows, found = make_rows(6, seed=3), []
    for use in (False, True):
        driver = start(fsdp(), folder, optim=STILL, use_liger=use)
        log_probs = torch.cat([part["log_probs"] for part in driver.outputs(rows, 3)])
        found.append((log_probs, driver.train(rows, 2)[1].grad_norm))
    (plain, norm), (ours, our_norm) = found
    return (plain - ours).abs().mean().item(), norm, our_norm


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.skipif(importlib.util.find_spec("liger_kernel") is None, reason="Liger is not installed")
def test_liger_changes_no_more_than_rounding_does(workspace):
    [(distance, norm, our_norm)] = spawn(with_and_without, 1, workspace / "lm", device_type="cuda")
    assert distance < 0.01
    assert our_norm == pytest.approx(norm, rel=0.02)
