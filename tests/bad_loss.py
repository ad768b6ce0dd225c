"""Named as `model.external_lib`, this registers a policy loss that raises."""

from __future__ import annotations

from ostinato.algos import register_policy_loss


@register_policy_loss("of_mine")
def of_mine(log_probs, old_log_probs, advantages, response_mask, *, weights=None):
    return {}["of mine"]
