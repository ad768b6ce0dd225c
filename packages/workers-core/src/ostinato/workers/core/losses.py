"""What actor and critic are trained for: loss closures over one micro-batch, made of the functions of `ostinato.algos`.

A closure aggregates once, with the mini-batch's global counts, and returns its share; no other place divides.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from ostinato.algos import aggregate, get_policy_loss, get_token_selector, keywords, kl_penalty, value_loss
from ostinato.protocol import DataProto
from ostinato.workers.core.config import ActorConfig, CriticConfig
from ostinato.workers.core.engine import LossFn, TokenOutputs
from ostinato.workers.core.errors import BatchError, ConfigError
from ostinato.workers.core.microbatch import PackedRows
from ostinato.workers.core.selection import with_selected
from ostinato.workers.core.update import Counts, MicroStats, MiniBatch


class ActorObjective:
    """Policy loss, entropy bonus and KL term.

    loss = agg(policy loss) − entropy_coeff·agg(entropy) + kl_loss_coef·agg(kl), one `loss_agg_mode` for all three.
    Reads `old_log_probs`, `advantages`, `response_mask`, with `use_kl_loss` `ref_log_prob`, and `rollout_is_weights`
    where it is there; all (b, R).
    """

    prefix = "actor"

    def __init__(self, config: ActorConfig) -> None:
        self.config = config
        mode = config.policy_loss.loss_mode
        self.policy_loss = get_policy_loss(mode)
        self.selector = get_token_selector(mode)
        self.arguments, self.selector_arguments = policy_loss_arguments(self.policy_loss, self.selector, config)

    @property
    def entropy(self) -> bool:
        """Whether the loss needs entropies."""
        return self.config.entropy_coeff != 0

    def prepare(self, mini_batch: MiniBatch) -> DataProto:
        """Choose the tokens that the policy loss treats apart, where it does; costs one forward pass."""
        if self.selector is None:
            return mini_batch.rows
        log_probs = mini_batch.log_probs()
        if log_probs is None:
            return mini_batch.rows
        seed = {"seed": mini_batch.seed} if "seed" in keywords(self.selector) else {}
        selector = partial(self.selector, **self.selector_arguments, **seed)
        return with_selected(mini_batch.engine, mini_batch.rows, log_probs, selector)

    def loss(self, counts: Counts) -> LossFn[MicroStats]:
        """Make the closure for the micro-batches of one mini-batch."""
        config = self.config

        def actor_loss(outputs: TokenOutputs, packed: PackedRows) -> tuple[torch.Tensor, MicroStats]:
            mask = packed.mask
            log_probs = packed.to_response(_present(outputs.log_probs, "log_probs"))
            policy = self.policy_loss(
                log_probs,
                _column(packed, "old_log_probs"),
                _column(packed, "advantages"),
                mask,
                weights=_optional(packed, "rollout_is_weights"),
                **({"selected": _column(packed, "selected")} if self.selector else {}),
                **self.arguments,
            )
            pg_loss = _aggregate(policy.loss, mask, config, counts)
            loss, shares = pg_loss, {"pg_loss": pg_loss}
            if self.entropy:
                entropy_loss = _aggregate(
                    packed.to_response(_present(outputs.entropy, "entropy")), mask, config, counts
                )
                loss = loss - config.entropy_coeff * entropy_loss
                shares["entropy_loss"] = entropy_loss
            if config.use_kl_loss:
                kl = kl_penalty(log_probs, _column(packed, "ref_log_prob"), config.kl_loss_type, mask)
                kl_loss = _aggregate(kl, mask, config, counts)
                loss = loss + config.kl_loss_coef * kl_loss
                shares["kl_loss"] = kl_loss
            shares["loss"] = loss
            return loss, _stats(shares, policy.diagnostics, mask)

        return actor_loss


class CriticObjective:
    """Clipped value loss; reads `values` (the old ones), `returns` and `response_mask`, all (b, R)."""

    prefix = "critic"
    entropy = False

    def __init__(self, config: CriticConfig) -> None:
        self.config = config

    def prepare(self, mini_batch: MiniBatch) -> DataProto:
        """Nothing of this loss depends on the whole mini-batch beyond its counts."""
        return mini_batch.rows

    def loss(self, counts: Counts) -> LossFn[MicroStats]:
        """Make the closure for the micro-batches of one mini-batch."""
        config = self.config

        def critic_loss(outputs: TokenOutputs, packed: PackedRows) -> tuple[torch.Tensor, MicroStats]:
            mask = packed.mask
            values = packed.to_response(_present(outputs.values, "values"))
            per_token, clipped = value_loss(
                values, _column(packed, "returns"), _column(packed, "values"), mask, config.cliprange_value
            )
            loss = _aggregate(per_token, mask, config, counts)
            return loss, _stats({"vf_loss": loss}, {"vf_clipfrac": clipped, "vpred_mean": values}, mask)

        return critic_loss


def policy_loss_arguments(
    policy_loss: Callable[..., Any], selector: Callable[..., Any] | None, config: ActorConfig
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Choose what a policy loss and its token selector are called with, by the names in their own signatures.

    Args:
        policy_loss: a registered loss.
        selector: its token selector, if it has one.
        config: gives the clip constants and `policy_loss`.

    Returns:
        Keyword arguments of the loss and of the selector, those excepted that depend on the batch.

    Raises:
        ConfigError: a parameter is set that neither has, or one is missing that has no default.
    """
    key = "actor_rollout_ref.actor.policy_loss"
    mode = config.policy_loss.loss_mode
    of_loss = {name: needed for name, needed in keywords(policy_loss).items() if name not in ("weights", "selected")}
    of_selector = {name: needed for name, needed in (keywords(selector) if selector else {}).items() if name != "seed"}
    given = config.policy_loss.parameters
    for name in given:
        if name not in of_loss | of_selector:
            place = "loss_kwargs." if name in config.policy_loss.loss_kwargs else ""
            raise ConfigError(
                f"{key}.{place}{name}: policy loss '{mode}' has no such parameter; it takes {[*of_loss, *of_selector]}"
            )
    known = {
        "clip_ratio_low": config.clip_low,
        "clip_ratio_high": config.clip_high,
        "clip_ratio_c": config.clip_ratio_c,
    } | given
    for name, needed in (of_loss | of_selector).items():
        if needed and name not in known:
            raise ConfigError(f"{key}.loss_kwargs.{name}: policy loss '{mode}' needs a value and has no default")
    return {name: known[name] for name in of_loss if name in known}, {
        name: known[name] for name in of_selector if name in known
    }


def _aggregate(
    values: torch.Tensor, mask: torch.Tensor, config: ActorConfig | CriticConfig, counts: Counts
) -> torch.Tensor:
    return aggregate(
        values,
        mask,
        config.loss_agg_mode,
        num_tokens=counts.num_tokens,
        num_sequences=counts.num_sequences,
        scale_factor=config.loss_scale_factor,
    )


def _stats(shares: dict[str, torch.Tensor], per_token: dict[str, torch.Tensor], mask: torch.Tensor) -> MicroStats:
    zero = torch.zeros((), dtype=torch.float32, device=mask.device)
    return MicroStats(
        shares={name: share.detach() for name, share in shares.items()},
        token_sums={name: torch.where(mask, value.detach().float(), zero).sum() for name, value in per_token.items()},
        num_tokens=mask.sum(),
    )


def _column(packed: PackedRows, name: str) -> torch.Tensor:
    column = _optional(packed, name)
    if column is None:
        raise BatchError(f"loss: column '{name}' is missing; the rows hold {sorted(packed.rows.columns)}")
    return column


def _optional(packed: PackedRows, name: str) -> torch.Tensor | None:
    batch = packed.rows.batch
    return batch[name] if batch is not None and name in packed.rows.columns else None


def _present(output: torch.Tensor | None, name: str) -> torch.Tensor:
    assert output is not None, f"the engine gave no {name}"
    return output
