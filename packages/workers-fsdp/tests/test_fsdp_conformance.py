from __future__ import annotations

import pytest
import torch

from ostinato.workers.core.config import ModelConfig
from ostinato.workers.core.testing import conformance
from ostinato.workers.core.testing.oracle import assert_same_weights, start
from ostinato.workers.core.testing.spawn import spawn
from ostinato.workers.fsdp.saved import SavedWeights
from ostinato.workers.fsdp.testing import four_ranks, fsdp, two_ranks


@pytest.mark.parametrize("check", conformance.CHECKS, ids=lambda check: check.__name__)
@pytest.mark.usefixtures("process_group")
def test_fsdp_one_rank(check, workspace):
    check(fsdp(), workspace)


@pytest.mark.usefixtures("process_group")
def test_fsdp_many_ranks(workspace):
    """H-54, H-55, H-56, H-57, H-58, H-29, H-60 at two and four ranks; saved at one, resumed at two replicas;
    saved at two, resumed at one and at four."""
    conformance.save_for_other_world(fsdp(), workspace)
    first, second = spawn(two_ranks, 2, workspace)
    assert first == second
    assert len(first) == len(conformance.CHECKS) + 15
    conformance.load_from_other_world(fsdp(), workspace)
    whole = start(fsdp(), workspace / "lm")
    whole.engine.load(workspace / "other-world")
    saved = SavedWeights(workspace / "other-world", ModelConfig(path=str(workspace / "lm")), "lm")
    assert_same_weights(dict(saved.weights()), dict(whole.engine.weight_source(torch.float32).weights()), rtol=0)
    spawn(four_ranks, 4, workspace)
