from __future__ import annotations

import pytest
import torch

from ostinato.algos import PolicyLoss, register_policy_loss
from ostinato.protocol import DataProto
from ostinato.workers.core.config import ActorConfig, CriticConfig, ModelConfig, PolicyLossConfig
from ostinato.workers.core.engine import TokenOutputs
from ostinato.workers.core.errors import ConfigError
from ostinato.workers.core.losses import ActorObjective, CriticObjective
from ostinato.workers.core.microbatch import PackedRows, pack
from ostinato.workers.core.testing import PlainConfig, PlainEngine, ThreadRanks
from ostinato.workers.core.update import Counts, MiniBatch

# The table of the field's checked values: two rows of four tokens, all valid but the last.
OLD = torch.tensor([[-1.0, -2.0, -0.5, -3.0], [-1.5, -0.2, -1.0, -1.0]])
NEW = torch.tensor([[-0.7, -2.3, -0.5, -1.0], [-1.0, -0.6, -1.1, -1.0]])
ADVANTAGES = torch.tensor([[1.0, 1.0, 1.0, -1.0], [-2.0, -2.0, -2.0, 9.0]])
MASK = torch.tensor([[1, 1, 1, 1], [1, 1, 1, 0]])


def table(**more: torch.Tensor) -> PackedRows:
    attention = torch.cat([torch.ones(2, 1, dtype=torch.int64), MASK], dim=1)
    return pack(
        DataProto.from_dict(
            {
                "input_ids": torch.zeros_like(attention),
                "attention_mask": attention,
                "response_mask": MASK,
                "old_log_probs": OLD * MASK,
                "advantages": ADVANTAGES * MASK,
                **more,
            }
        )
    )


def run(config: ActorConfig, packed: PackedRows, entropy: torch.Tensor | None = None):
    log_probs = NEW[packed.mask].requires_grad_()
    loss, stats = ActorObjective(config).loss(Counts(7, 2))(TokenOutputs(log_probs=log_probs, entropy=entropy), packed)
    loss.backward()
    assert log_probs.grad is not None
    return loss.item(), packed.to_response(log_probs.grad), stats


def test_actor_loss_gives_the_checked_values():
    loss, grad, stats = run(ActorConfig(), table())
    assert loss == pytest.approx(0.966614, abs=1e-5)
    means = {name: float(total) / float(stats.num_tokens) for name, total in stats.token_sums.items()}
    assert means["pg_clipfrac"] == pytest.approx(0.28571, abs=1e-5)
    assert means["pg_clipfrac_lower"] == pytest.approx(0.14286, abs=1e-5)
    assert means["ppo_kl"] == pytest.approx(-0.28571, abs=1e-5)
    expected = [[0, -0.10583, -0.14286, 0], [0.47106, 0, 0.25852, 0]]
    torch.testing.assert_close(grad, torch.tensor(expected), atol=1e-5, rtol=0)


@pytest.mark.parametrize(("mode", "expected"), [("gpg", -0.414286), ("cispo", -0.481520), ("sapo", 1.364477)])
def test_actor_loss_takes_the_mode(mode, expected):
    loss, _, _ = run(ActorConfig(policy_loss=PolicyLossConfig(loss_mode=mode)), table())
    assert loss == pytest.approx(expected, abs=1e-5)


def test_actor_loss_uses_the_configured_constants():
    """H-74: the dual-clip constant, the clip range and the aggregation that are set are the ones used."""
    base = run(ActorConfig(), table())[0]
    # Token (0, 3): A = -1, ratio e^2 = 7.39; bounded at c: the loss there is c.
    assert base - run(ActorConfig(clip_ratio_c=2.0), table())[0] == pytest.approx(1 / 7, abs=1e-5)
    assert run(ActorConfig(clip_ratio=10.0), table())[0] < base
    assert run(ActorConfig(loss_agg_mode="token-sum"), table())[0] == pytest.approx(7 * base, abs=1e-4)
    by_keyword = ActorConfig(policy_loss=PolicyLossConfig(loss_kwargs={"clip_ratio_c": 2.0}))
    assert run(by_keyword, table())[0] == run(ActorConfig(clip_ratio_c=2.0), table())[0]


def test_actor_loss_adds_entropy_and_kl():
    packed = table(ref_log_prob=(NEW - 0.2) * MASK)
    plain = run(ActorConfig(), packed)[0]
    config = ActorConfig(entropy_coeff=0.5, use_kl_loss=True, kl_loss_coef=2.0, kl_loss_type="low_var_kl")
    loss, _, stats = run(config, packed, entropy=torch.full((7,), 3.0))
    assert float(stats.shares["entropy_loss"]) == pytest.approx(3.0)
    assert float(stats.shares["kl_loss"]) == pytest.approx(0.018731, abs=1e-5)
    assert loss == pytest.approx(plain - 1.5 + 2 * 0.018731, abs=1e-5)


def test_actor_loss_reads_the_correction_weights_as_constants():
    """H-28: rollout-correction weights come with the rows, weigh the loss, and carry no gradient."""
    weights = torch.where(MASK.bool(), 0.5, 0.0)
    assert run(ActorConfig(), table(rollout_is_weights=weights))[0] == pytest.approx(0.5 * 0.966614, abs=1e-5)


def test_actor_loss_ignores_what_lies_under_the_mask():
    """H-27 for the loss: masked values change nothing, NaN included."""
    expected = run(ActorConfig(use_kl_loss=True), table(ref_log_prob=OLD * MASK))
    poison = torch.where(MASK.bool(), 0.0, float("nan"))
    got = run(ActorConfig(use_kl_loss=True), table(ref_log_prob=OLD * MASK + poison, rollout_is_weights=MASK + poison))
    assert got[0] == expected[0]
    assert torch.equal(got[1], expected[1])


def test_actor_loss_of_no_rows_is_zero():
    rows = table().rows
    attention = torch.ones(0, 5, dtype=torch.int64)
    empty = pack(rows[[]].union(DataProto.from_dict({"input_ids": attention, "attention_mask": attention})))
    outputs = TokenOutputs(log_probs=torch.zeros(0, requires_grad=True))
    loss, stats = ActorObjective(ActorConfig()).loss(Counts(7, 2))(outputs, empty)
    assert loss.item() == 0.0
    assert float(stats.num_tokens) == 0


def test_critic_loss_gives_the_checked_value():
    """v = (.5, 2), R = (1, 1), old = (0, 1), clip .5: .3125."""
    packed = pack(
        DataProto.from_dict(
            {
                "input_ids": torch.zeros(1, 3, dtype=torch.int64),
                "attention_mask": torch.ones(1, 3, dtype=torch.int64),
                "response_mask": torch.ones(1, 2, dtype=torch.int64),
                "returns": torch.ones(1, 2),
                "values": torch.tensor([[0.0, 1.0]]),
            }
        )
    )
    objective = CriticObjective(CriticConfig(cliprange_value=0.5))
    loss, stats = objective.loss(Counts(2, 1))(TokenOutputs(values=torch.tensor([0.5, 2.0])), packed)
    assert loss.item() == pytest.approx(0.3125)
    assert float(stats.token_sums["vpred_mean"]) == pytest.approx(2.5)


@pytest.mark.parametrize(
    ("policy_loss", "text"),
    [
        (PolicyLossConfig(tau_pos=2.0), r"policy_loss\.tau_pos: .*'vanilla' has no such parameter"),
        (PolicyLossConfig(loss_kwargs={"clip_ratoi": 1}), r"policy_loss\.loss_kwargs\.clip_ratoi"),
        (PolicyLossConfig(loss_mode="core_test_needs"), r"policy_loss\.loss_kwargs\.strength: .*needs a value"),
    ],
)
def test_policy_loss_parameters_are_checked_by_signature(policy_loss, text):
    @register_policy_loss("core_test_needs")
    def needs(log_probs, old_log_probs, advantages, response_mask, *, strength, weights=None):
        return PolicyLoss(strength * log_probs, {})

    with pytest.raises(ConfigError, match=text):
        ActorObjective(ActorConfig(policy_loss=policy_loss))


def test_policy_loss_of_a_user_gets_its_keywords():
    @register_policy_loss("core_test_own")
    def own(log_probs, old_log_probs, advantages, response_mask, *, strength, weights=None):
        return PolicyLoss(strength * log_probs, {})

    config = ActorConfig(policy_loss=PolicyLossConfig(loss_mode="core_test_own", loss_kwargs={"strength": 7.0}))
    assert run(config, table())[0] == pytest.approx(float((NEW * MASK).sum()), abs=1e-5)


@pytest.mark.parametrize("mode", ["clip_cov", "kl_cov"])
@pytest.mark.parametrize("size", [2, 3])
def test_selected_tokens_are_chosen_over_all_ranks(lm_path, make_rows, mode, size):
    """The choice is made over the whole mini-batch: any split over ranks and micro-batches makes the same one."""
    more = (
        {"clip_cov_lb": 0.0, "clip_cov_ub": 99.0, "clip_cov_ratio": 0.2}
        if mode == "clip_cov"
        else {"kl_cov_ratio": 0.2}
    )
    config = ActorConfig(policy_loss=PolicyLossConfig(loss_mode=mode, **more))
    objective, rows = ActorObjective(config), make_rows(7, seed=8)

    def choose(ranks: ThreadRanks, rank: int, piece: DataProto, micro: int) -> torch.Tensor:
        engine = PlainEngine("lm", ModelConfig(path=str(lm_path)), None, PlainConfig(ranks=ranks, rank=rank), False)
        engine.build()
        size = max(len(piece), 1)
        plan = [list(range(i, min(i + micro, len(piece)))) for i in range(0, size, micro)]
        mini = MiniBatch(engine, piece, plan, 1.0, seed=11)
        return objective.prepare(mini).batch["selected"]

    whole = choose(ThreadRanks(1), 0, rows, 99)
    ranks, pieces = ThreadRanks(size), rows.chunk(size)
    parts = ranks.run(lambda rank: choose(ranks, rank, pieces[rank], 1 + rank))
    assert torch.equal(torch.cat(parts), whole)
    tokens = int(rows.batch["response_mask"].sum())
    assert int(whole.sum()) == int(0.2 * tokens)
    assert not bool((whole & (rows.batch["response_mask"] == 0)).any())
