"""What actor and critic are trained for: loss closures over one micro-batch, made of the functions of `ostinato.algos`.

A closure aggregates once, with the mini-batch's global counts, and returns its share; no other place divides.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ostinato.algos import aggregate, get_policy_loss, keywords, kl_penalty, value_loss
from ostinato.protocol import DataProto
from ostinato.workers.core.config import ActorConfig, CriticConfig
from ostinato.workers.core.engine import LossFn, TokenOutputs, TrainEngine
from ostinato.workers.core.errors import BatchError, ConfigError
from ostinato.workers.core.microbatch import PackedRows
from ostinato.workers.core.update import Counts, MicroStats


class ActorObjective:
    """Policy loss, entropy bonus and KL term.

    loss = agg(policy loss) − entropy_coeff·agg(entropy) + kl_loss_coef·agg(kl), one `loss_agg_mode` for all three.
    Reads `old_log_probs`, `advantages`, `response_mask`, with `use_kl_loss` `ref_log_prob`, and `rollout_is_weights`
    where it is there; all (b, R).
    """

    prefix = "actor"

    def __init__(self, config: ActorConfig) -> None:
        self.config = config
        self.policy_loss = get_policy_loss(config.policy_loss.loss_mode)
        self.arguments = policy_loss_arguments(self.policy_loss, config)

    @property
    def entropy(self) -> bool:
        """Whether the loss needs entropies."""
        return self.config.entropy_coeff != 0

    def prepare(self, engine: TrainEngine, mini_batch: DataProto, plan: Sequence[Sequence[int]]) -> DataProto:
        """Nothing of this loss depends on the whole mini-batch beyond its counts."""
        del engine, plan
        return mini_batch

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

    def prepare(self, engine: TrainEngine, mini_batch: DataProto, plan: Sequence[Sequence[int]]) -> DataProto:
        """Nothing of this loss depends on the whole mini-batch beyond its counts."""
        del engine, plan
        return mini_batch

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


def policy_loss_arguments(policy_loss: Callable[..., Any], config: ActorConfig) -> dict[str, Any]:
    """Choose what a policy loss is called with, by the names in its own signature.

    Args:
        policy_loss: a registered loss.
        config: gives the clip constants, and `policy_loss.loss_kwargs`, which win.

    Returns:
        Keyword arguments, `weights` excepted.

    Raises:
        ConfigError: `loss_kwargs` names something that the loss does not have, or something that it needs is missing.
    """
    key = "actor_rollout_ref.actor.policy_loss.loss_kwargs"
    mode = config.policy_loss.loss_mode
    named = {name: needed for name, needed in keywords(policy_loss).items() if name != "weights"}
    known: dict[str, Any] = {
        "clip_ratio_low": config.clip_low,
        "clip_ratio_high": config.clip_high,
        "clip_ratio_c": config.clip_ratio_c,
    }
    given = dict(config.policy_loss.loss_kwargs)
    foreign = [name for name in given if name not in named]
    if foreign:
        raise ConfigError(f"{key}: policy loss '{mode}' has no {foreign}; it takes {list(named)}")
    arguments = {name: value for name, value in (known | given).items() if name in named}
    missing = [name for name, needed in named.items() if needed and name not in arguments]
    if missing:
        raise ConfigError(f"{key}: policy loss '{mode}' needs {missing}; give them there")
    return arguments


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
