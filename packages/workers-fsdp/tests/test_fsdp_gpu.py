from __future__ import annotations

import pytest
import torch

from ostinato.workers.core.testing.spawn import spawn
from ostinato.workers.fsdp.testing.runs import one_gpu, one_rank_saves, two_ranks


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_fsdp_one_gpu(workspace):
    [passed] = spawn(one_gpu, 1, workspace, device_type="cuda")
    assert passed


@pytest.mark.multigpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_fsdp_two_gpus(workspace):
    spawn(one_rank_saves, 1, workspace, device_type="cuda")
    passed = spawn(two_ranks, 2, workspace, "cuda", device_type="cuda")
    assert all(passed)
