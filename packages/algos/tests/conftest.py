"""What the tests of the estimators share: a call of any of them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from ostinato.algos import get_adv_estimator, keywords


@pytest.fixture
def estimate() -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    """Calls any estimator by its name, with harmless values for what it wants beside."""

    def call(name, rewards, mask, groups, rollouts=None, **given):
        fn = get_adv_estimator(name)
        zeros = torch.zeros_like(rewards)
        supply = {
            "groups": groups,
            "rollouts": rollouts,
            "values": zeros,
            "gamma": 0.9,
            "lam": 0.8,
            "reward_baselines": zeros.sum(-1),
            "log_probs": zeros - 1.0,
            "sum_pi_squared": zeros + 0.5,
            "reward_scores": {"all": torch.where(mask.bool(), rewards, zeros).sum(-1)},
            **given,
        }
        return fn(rewards, mask, **{key: supply[key] for key in keywords(fn) if key in supply})

    return call
