from __future__ import annotations

import pytest
import torch

from ostinato.workers.core.testing.spawn import spawn
from ostinato.workers.megatron.testing import runs


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_megatron_one_gpu(megatron_workspace):
    passed = spawn(runs.one_gpu, 1, megatron_workspace, device_type="cuda")
    assert all(passed)


@pytest.mark.multigpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_megatron_two_gpus(megatron_workspace):
    """TP 2, PP 2, EP 2, DP 2; CP 2, sequence parallelism and thd packing where TransformerEngine is installed."""
    passed = spawn(runs.two_gpus, 2, megatron_workspace, device_type="cuda")
    assert all(passed)


@pytest.mark.multigpu
@pytest.mark.skipif(torch.cuda.device_count() < 4, reason="needs four GPUs")
def test_megatron_four_gpus(megatron_workspace):
    """TP 2 × DP 2, PP 2 × TP 2 and PP 2 × DP 2."""
    passed = spawn(runs.four_ranks, 4, megatron_workspace, "cuda", device_type="cuda")
    assert all(passed)
