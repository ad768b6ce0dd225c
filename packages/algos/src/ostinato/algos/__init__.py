"""The maths of RL post-training: pure functions over tensors, nothing but torch beneath them."""

from __future__ import annotations

from ostinato.algos.advantages import gae, optimal_token_baseline, reinforce_plus_plus, remax
from ostinato.algos.aggregate import AGGREGATION_MODES, aggregate, count_valid
from ostinato.algos.correction import (
    IMPORTANCE_LEVELS,
    REJECTION_KINDS,
    RolloutCorrection,
    rollout_correction,
    rollout_probs_diff,
)
from ostinato.algos.covariance import clip_cov, kl_cov, select_clip_cov, select_kl_cov
from ostinato.algos.errors import (
    AlgosError,
    ArgumentError,
    SecondOrderError,
    ShapeError,
    SingletonGroupWarning,
    UnknownNameError,
)
from ostinato.algos.fused import (
    token_log_probs_and_entropy_from_hidden,
    token_log_probs_from_hidden,
    token_sum_pi_squared_from_hidden,
)
from ostinato.algos.group_advantages import (
    gdpo,
    gpg,
    grpo,
    grpo_passk,
    opo,
    reinforce_plus_plus_baseline,
    rloo,
)
from ostinato.algos.groups import group_index
from ostinato.algos.kl import KL_KINDS, AdaptiveKLController, FixedKLController, kl_penalty
from ostinato.algos.logprob import (
    full_kl,
    token_entropy,
    token_log_probs,
    token_log_probs_and_entropy,
    token_sum_pi_squared,
)
from ostinato.algos.masked import masked_mean, masked_sum, masked_whiten
from ostinato.algos.policy import PolicyLoss, cispo, geo_mean, gpg_loss, gspo, sapo, vanilla
from ostinato.algos.registry import (
    adv_estimators,
    get_adv_estimator,
    get_policy_loss,
    get_token_selector,
    keywords,
    policy_losses,
    register_adv_est,
    register_policy_loss,
)
from ostinato.algos.rewards import place_outcome, rewards_with_kl
from ostinato.algos.trust_region import dppo_kl, dppo_tv, dro
from ostinato.algos.value import response_states, value_loss

__all__ = [
    "AGGREGATION_MODES",
    "IMPORTANCE_LEVELS",
    "KL_KINDS",
    "REJECTION_KINDS",
    "AdaptiveKLController",
    "AlgosError",
    "ArgumentError",
    "FixedKLController",
    "PolicyLoss",
    "RolloutCorrection",
    "SecondOrderError",
    "ShapeError",
    "SingletonGroupWarning",
    "UnknownNameError",
    "adv_estimators",
    "aggregate",
    "cispo",
    "clip_cov",
    "count_valid",
    "dppo_kl",
    "dppo_tv",
    "dro",
    "full_kl",
    "gae",
    "gdpo",
    "geo_mean",
    "get_adv_estimator",
    "get_policy_loss",
    "get_token_selector",
    "gpg",
    "gpg_loss",
    "group_index",
    "grpo",
    "grpo_passk",
    "gspo",
    "keywords",
    "kl_cov",
    "kl_penalty",
    "masked_mean",
    "masked_sum",
    "masked_whiten",
    "opo",
    "optimal_token_baseline",
    "place_outcome",
    "policy_losses",
    "register_adv_est",
    "register_policy_loss",
    "reinforce_plus_plus",
    "reinforce_plus_plus_baseline",
    "remax",
    "response_states",
    "rewards_with_kl",
    "rloo",
    "rollout_correction",
    "rollout_probs_diff",
    "sapo",
    "select_clip_cov",
    "select_kl_cov",
    "token_entropy",
    "token_log_probs",
    "token_log_probs_and_entropy",
    "token_log_probs_and_entropy_from_hidden",
    "token_log_probs_from_hidden",
    "token_sum_pi_squared",
    "token_sum_pi_squared_from_hidden",
    "value_loss",
    "vanilla",
]
