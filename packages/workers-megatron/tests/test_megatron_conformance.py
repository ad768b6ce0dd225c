from __future__ import annotations

import pytest

from ostinato.workers.core.testing import conformance
from ostinato.workers.core.testing.spawn import spawn
from ostinato.workers.megatron.testing import runs


@pytest.mark.parametrize("check", conformance.CHECKS, ids=lambda check: check.__name__)
@pytest.mark.usefixtures("megatron_on_cpu")
def test_megatron_one_rank(check, megatron_workspace):
    check(runs.megatron(), megatron_workspace)


@pytest.mark.usefixtures("megatron_on_cpu")
def test_megatron_one_rank_plain_optimizer(megatron_workspace):
    for check in (conformance.check_parity, conformance.check_non_finite_gradient, conformance.check_save_load):
        check(runs.megatron(**runs.PLAIN), megatron_workspace)


@pytest.mark.slow
@pytest.mark.usefixtures("megatron_on_cpu")
def test_megatron_two_ranks(megatron_workspace):
    """H-59, H-60, H-54 to H-58, H-29 with two ranks: TP, PP, DP with both optimizers, EP; resumed at TP 2, PP 2, 1."""
    first, second = spawn(runs.two_ranks, 2, megatron_workspace)
    assert first == second
    assert len(first) == 2 * len(conformance.CHECKS) + 6 + 6
    conformance.load_from_other_world(runs.megatron(), megatron_workspace)
