from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from ostinato.algos import policy_losses
from ostinato.protocol import DataProto, merge_metrics
from ostinato.workers.core.config import ActorConfig, CriticConfig, ModelConfig, OptimConfig, PolicyLossConfig
from ostinato.workers.core.engine import StepStats, TokenOutputs, TrainEngine
from ostinato.workers.core.errors import BatchError
from ostinato.workers.core.limits import BatchLimit
from ostinato.workers.core.losses import ActorObjective, CriticObjective
from ostinato.workers.core.testing import PlainConfig, PlainEngine, ThreadRanks
from ostinato.workers.core.update import split_mini_batches, update

OPTIM = OptimConfig(lr=1e-2, weight_decay=0.1, grad_clip=0.5, eps=1e-4)
ALL_TERMS = ActorConfig(entropy_coeff=0.01, use_kl_loss=True, kl_loss_coef=0.1, optim=OPTIM)


def alone(values: torch.Tensor) -> torch.Tensor:
    return values.clone()


def built(path, head="lm", optim=OPTIM, ranks=None, rank=0) -> PlainEngine:
    engine = PlainEngine(head, ModelConfig(path=str(path)), optim, PlainConfig(ranks=ranks, rank=rank))
    engine.build()
    return engine


def weights(engine: PlainEngine) -> dict[str, torch.Tensor]:
    return {name: weight.clone() for name, weight in engine.weight_source().weights()}


def assert_same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    for name, weight in one.items():
        torch.testing.assert_close(weight, other[name], rtol=1e-4, atol=2e-6, msg=lambda text, n=name: f"{n}: {text}")


def assert_same_metrics(one, other) -> None:
    assert one.keys() == other.keys()
    for name, metric in one.items():
        assert metric.value == pytest.approx(other[name].value, rel=2e-4, abs=1e-5), name


def trained(path, rows, objective, *, limit, minis=2, epochs=2, size=1, head="lm"):
    """Train on `size` ranks; rank r holds the r-th piece of every mini-batch."""
    ranks = ThreadRanks(size)
    parts = [mini.chunk(size) for mini in rows.chunk(minis)]

    def work(rank: int):
        engine = built(path, head, ranks=ranks, rank=rank)
        pieces = [
            part[rank].union(DataProto.from_dict({"mini_batch": torch.full((len(part[rank]),), k)}))
            for k, part in enumerate(parts)
        ]
        mine = DataProto.concat(pieces)
        metrics = update(engine, mine, objective, num_mini_batches=minis, epochs=epochs, limit=limit, temperature=0.8)
        return weights(engine), metrics

    results = ranks.run(work)
    for other, _ in results[1:]:
        assert all(torch.equal(weight, other[name]) for name, weight in results[0][0].items())
    return results[0][0], merge_metrics(*[metrics for _, metrics in results])


@pytest.mark.parametrize(
    ("limit", "size"),
    [
        (BatchLimit(micro_batch_size=1), 1),
        (BatchLimit(micro_batch_size=2), 1),
        (BatchLimit(max_tokens=14), 1),
        (BatchLimit(max_tokens=14), 2),
        (BatchLimit(micro_batch_size=2), 3),
    ],
)
def test_update_does_not_depend_on_micro_batches_or_ranks(lm_path, make_rows, limit, size):
    """H-23, H-58, H-75: same weights and metrics for any micro-batch size, token budget and number of ranks."""
    rows, objective = make_rows(9, seed=1), ActorObjective(ALL_TERMS)
    expected, metrics = trained(lm_path, rows, objective, limit=BatchLimit(micro_batch_size=99))
    got, others = trained(lm_path, rows, objective, limit=limit, size=size)
    assert_same(got, expected)
    assert_same_metrics(others, metrics)


@pytest.mark.parametrize("mode", ["token-sum", "seq-mean-token-sum", "seq-mean-token-sum-norm", "seq-mean-token-mean"])
def test_update_does_not_depend_on_the_split_in_any_aggregation(lm_path, make_rows, mode):
    rows, objective = make_rows(6, seed=2), ActorObjective(replace(ALL_TERMS, loss_agg_mode=mode))
    expected, metrics = trained(lm_path, rows, objective, limit=BatchLimit(micro_batch_size=99), epochs=1)
    got, others = trained(lm_path, rows, objective, limit=BatchLimit(max_tokens=12), size=2, epochs=1)
    assert_same(got, expected)
    assert_same_metrics(others, metrics)


@pytest.mark.parametrize("mode", policy_losses())
def test_update_does_not_depend_on_the_split_with_any_policy_loss(lm_path, make_rows, mode):
    """H-30: every registered loss goes through the shared aggregation."""
    config = replace(ALL_TERMS, policy_loss=PolicyLossConfig(loss_mode=mode))
    rows, objective = make_rows(6, seed=3), ActorObjective(config)
    expected, metrics = trained(lm_path, rows, objective, limit=BatchLimit(micro_batch_size=99), epochs=1)
    got, others = trained(lm_path, rows, objective, limit=BatchLimit(micro_batch_size=1), size=2, epochs=1)
    assert_same(got, expected)
    assert_same_metrics(others, metrics)


def test_update_of_the_critic_does_not_depend_on_the_split(lm_path, make_rows):
    rows, objective = make_rows(7, seed=4), CriticObjective(CriticConfig(optim=OPTIM))
    expected, metrics = trained(lm_path, rows, objective, limit=BatchLimit(micro_batch_size=99), head="value")
    got, others = trained(lm_path, rows, objective, limit=BatchLimit(max_tokens=13), size=2, head="value")
    assert_same(got, expected)
    assert_same_metrics(others, metrics)
    assert set(metrics) == {
        f"critic/{name}" for name in ("vf_loss", "vf_clipfrac", "vpred_mean", "grad_norm", "lr", "skipped_steps")
    }


@pytest.mark.parametrize("silent", ["no rows", "no policy token"])
def test_update_a_rank_without_a_valid_token_contributes_zero(lm_path, make_rows, silent):
    """Design: a rank with no valid token contributes exactly zero, and the others are not diluted by it."""
    rows, objective, limit = make_rows(4, seed=5), ActorObjective(ALL_TERMS), BatchLimit(micro_batch_size=2)
    spare = make_rows(2, seed=6)
    mask = torch.zeros_like(spare.batch["response_mask"])
    spare = spare.drop(["response_mask"]).union(DataProto.from_dict({"response_mask": mask}))
    ranks = ThreadRanks(2)
    shares = [rows, spare[[]] if silent == "no rows" else spare]

    def work(rank: int):
        engine = built(lm_path, ranks=ranks, rank=rank)
        metrics = update(engine, shares[rank], objective, num_mini_batches=1, epochs=1, limit=limit)
        return weights(engine), metrics

    (got, first), (_, second) = ranks.run(work)
    single = built(lm_path)
    metrics = update(single, rows, objective, num_mini_batches=1, epochs=1, limit=limit)
    assert_same(got, weights(single))
    assert_same_metrics(merge_metrics(first, second), metrics)
    assert second["actor/pg_loss"].value == 0.0


def test_update_makes_one_step_a_mini_batch_after_all_its_micro_batches(lm_path, make_rows):
    """H-58: clip and step once a mini-batch; the gradient is not divided by the number of micro-batches."""
    engine = built(lm_path)
    limit = BatchLimit(micro_batch_size=1)
    update(engine, make_rows(6), ActorObjective(ALL_TERMS), num_mini_batches=3, epochs=2, limit=limit)
    assert engine.calls == ["forward_backward", "optimizer_step"] * 6
    assert engine.num_steps == 6


def test_update_counts_as_the_plan_says(make_rows):
    """H-71: 32 prompts, n 8, mini 16, 4 ranks, micro 4: 2 updates of 128 responses, 32 a rank, 8 micro-batches."""

    class Counting:
        device = torch.device("cpu")

        def __init__(self) -> None:
            self.steps: list[list[int]] = []

        def reduce(self, values: torch.Tensor) -> torch.Tensor:
            return values * 4 if values.shape == (2, 2) else values.clone()

        def forward_backward(self, micro_batches, fn, *, entropy=False):
            self.steps.append([len(packed) for packed in micro_batches])

        def optimizer_step(self) -> StepStats:
            return StepStats(1.0, 1e-6)

    engine, rows = Counting(), make_rows(256 // 4)
    config = ActorConfig(ppo_mini_batch_size=16, ppo_micro_batch_size_per_gpu=4, num_mini_batches=32 // 16)
    update(
        engine,  # type: ignore[arg-type]
        rows,
        ActorObjective(config),
        num_mini_batches=config.num_mini_batches,
        epochs=1,
        limit=config.update_limit,
    )
    assert engine.steps == [[4] * 8, [4] * 8]


class Scripted:
    """An engine whose model says what it is told: log-probability = old one + `shift` of the row."""

    device = torch.device("cpu")

    def __init__(self, ranks: ThreadRanks | None = None, rank: int = 0) -> None:
        self.ranks, self.rank = ranks, rank

    def reduce(self, values: torch.Tensor) -> torch.Tensor:
        return values.clone() if self.ranks is None else self.ranks.all_reduce(self.rank, values)

    def forward_backward(self, micro_batches, fn, *, entropy=False):
        collected = []
        for packed in micro_batches:
            rows = packed.rows.batch
            log_probs = (rows["old_log_probs"] + rows["shift"][:, None])[packed.mask]
            collected.append(fn(TokenOutputs(log_probs=log_probs, entropy=torch.zeros_like(log_probs)), packed)[1])
        return collected

    def optimizer_step(self) -> StepStats:
        return StepStats(2.0, 1e-6)


def scripted_rows(shifts: list[float], tokens: list[int], advantage: float = -0.5) -> DataProto:
    width = max(tokens)
    mask = (torch.arange(width)[None] < torch.tensor(tokens)[:, None]).long()
    attention = torch.cat([torch.ones(len(tokens), 1, dtype=torch.int64), mask], dim=1)
    return DataProto.from_dict(
        {
            "input_ids": torch.zeros_like(attention),
            "attention_mask": attention,
            "response_mask": mask,
            "old_log_probs": -1.0 * mask,
            "ref_log_prob": -1.0 * mask,
            "advantages": advantage * mask,
            "shift": torch.tensor(shifts),
        }
    )


def scripted(rows: DataProto, config: ActorConfig, size: int, micro: int):
    ranks = ThreadRanks(size)
    pieces = rows.chunk(size)

    def work(rank: int):
        engine: TrainEngine = Scripted(ranks, rank)  # type: ignore[assignment]
        limit = BatchLimit(micro_batch_size=micro)
        return update(engine, pieces[rank], ActorObjective(config), num_mini_batches=1, epochs=1, limit=limit)

    return merge_metrics(*ranks.run(work))


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("micro", [1, 2, 4])
def test_metrics_do_not_grow_with_ranks_or_micro_batches(size, micro):
    """H-75: pg_loss .5 with 1 and 4 micro-batches, 1 and 2 ranks."""
    metrics = scripted(scripted_rows([0.0] * 4, [3, 3, 3, 3]), ActorConfig(), size, micro)
    assert metrics["actor/pg_loss"].value == pytest.approx(0.5)
    assert metrics["actor/loss"].value == pytest.approx(0.5)
    assert metrics["actor/grad_norm"].value == 2.0


@pytest.mark.parametrize("size", [1, 2])
def test_metrics_are_means_over_micro_batches_not_the_last_one(size):
    """H-76: kl_loss 1 then 3, equal tokens: 2."""
    config = ActorConfig(use_kl_loss=True, kl_loss_type="kl")
    assert scripted(scripted_rows([1.0, 3.0], [4, 4]), config, size, 1)["actor/kl_loss"].value == pytest.approx(2.0)


@pytest.mark.parametrize("size", [1, 2])
def test_metrics_weigh_ranks_by_tokens(size):
    """H-77: .8 over 100 tokens and .6 over 200: .6667, not .7; for token means and for aggregated losses."""
    config = ActorConfig(use_kl_loss=True, kl_loss_type="kl")
    metrics = scripted(scripted_rows([0.8, 0.6], [100, 200]), config, size, 1)
    assert metrics["actor/kl_loss"].value == pytest.approx(0.66667, abs=1e-4)
    assert metrics["actor/ppo_kl"].value == pytest.approx(-0.66667, abs=1e-4)


@pytest.mark.parametrize("micro", [1, 2])
def test_loss_is_a_token_mean_over_micro_batches(micro):
    """H-23: 100 tokens of loss 2.0 and 900 of .5 give .65, not 1.25."""
    rows = scripted_rows([0.0, 0.0], [100, 900])
    scale = torch.tensor([[2.0], [0.5]]) * rows.batch["response_mask"]
    rows = rows.drop(["advantages"]).union(DataProto.from_dict({"advantages": -scale}))
    assert scripted(rows, ActorConfig(), 1, micro)["actor/pg_loss"].value == pytest.approx(0.65)


def test_update_of_equal_rewards_keeps_the_kl_gradient(lm_path, make_rows):
    """H-31: advantage 0 leaves the KL gradient, which is expected."""
    rows = make_rows(4)
    rows = rows.drop(["advantages"]).union(
        DataProto.from_dict({"advantages": torch.zeros_like(rows.batch["advantages"])})
    )
    config = ActorConfig(use_kl_loss=True, kl_loss_coef=0.1, optim=OPTIM)
    limit = BatchLimit(micro_batch_size=4)
    metrics = update(built(lm_path), rows, ActorObjective(config), num_mini_batches=1, epochs=1, limit=limit)
    assert metrics["actor/pg_loss"].value == 0.0
    assert metrics["actor/grad_norm"].value > 0


def test_update_on_policy_has_ratio_one_and_a_gradient(lm_path, make_rows):
    """H-67: one mini-batch a step: ratio 1, no clipping, and still a gradient."""
    rows, engine = make_rows(4), built(lm_path)
    from ostinato.workers.core.microbatch import pack

    [old] = engine.forward([pack(rows)], lambda outputs, packed: packed.to_response(outputs.log_probs)) or []
    rows = rows.drop(["old_log_probs"]).union(DataProto.from_dict({"old_log_probs": old}))
    limit = BatchLimit(micro_batch_size=2)
    metrics = update(engine, rows, ActorObjective(ActorConfig()), num_mini_batches=1, epochs=1, limit=limit)
    assert metrics["actor/ppo_kl"].value == pytest.approx(0.0, abs=1e-6)
    assert metrics["actor/pg_clipfrac"].value == 0.0
    assert metrics["actor/grad_norm"].value > 0


def test_update_without_any_policy_token_changes_nothing(lm_path, make_rows, caplog):
    rows = make_rows(4)
    mask = torch.zeros_like(rows.batch["response_mask"])
    rows = rows.drop(["response_mask"]).union(DataProto.from_dict({"response_mask": mask}))
    engine = built(lm_path)
    before = weights(engine)
    limit = BatchLimit(micro_batch_size=2)
    metrics = update(engine, rows, ActorObjective(ALL_TERMS), num_mini_batches=2, epochs=1, limit=limit)
    assert all(torch.equal(weight, before[name]) for name, weight in weights(engine).items())
    assert metrics["actor/skipped_steps"].value == 2
    assert "no policy token" in caplog.text


def test_update_reports_a_gradient_that_is_not_finite(lm_path, make_rows, caplog):
    rows = make_rows(4)
    advantages = rows.batch["advantages"].clone()
    advantages[0, 0] = float("inf")
    rows = rows.drop(["advantages"]).union(DataProto.from_dict({"advantages": advantages}))
    engine = built(lm_path)
    before = weights(engine)
    limit = BatchLimit(micro_batch_size=4)
    metrics = update(engine, rows, ActorObjective(ActorConfig()), num_mini_batches=1, epochs=1, limit=limit)
    assert metrics["actor/skipped_steps"].value == 1
    assert "not finite" in caplog.text
    assert all(torch.equal(weight, before[name]) for name, weight in weights(engine).items())


def test_split_mini_batches_follows_the_column(make_rows):
    rows = make_rows(5).union(DataProto.from_dict({"mini_batch": torch.tensor([1, 0, 1, 3, 0])}))
    assert [len(mini) for mini in split_mini_batches(rows, 99, alone)] == [2, 2, 0, 1]


@pytest.mark.parametrize(("num", "expected"), [(1, [6]), (2, [3, 3]), (3, [2, 2, 2]), (6, [1] * 6), (8, [1] * 6)])
def test_split_mini_batches_merges_a_finer_cut(make_rows, num, expected):
    """One column, cut for the least common multiple of both roles' numbers, serves actor and critic."""
    rows = make_rows(6).union(DataProto.from_dict({"mini_batch": torch.tensor([5, 0, 1, 4, 2, 3])}))
    minis = split_mini_batches(rows, num, alone)
    assert [len(mini) for mini in minis] == expected
    numbers = [mini.batch["mini_batch"].tolist() for mini in minis]
    assert all(max(a) < min(b) for a, b in pairwise(numbers))


def test_split_mini_batches_agrees_over_ranks(make_rows):
    ranks = ThreadRanks(2)
    columns = [torch.tensor([0, 0]), torch.tensor([0, 2])]

    def work(rank: int) -> list[int]:
        rows = make_rows(2).union(DataProto.from_dict({"mini_batch": columns[rank]}))
        return [len(mini) for mini in split_mini_batches(rows, 3, lambda v: ranks.all_reduce(rank, v))]

    assert ranks.run(work) == [[2, 0, 0], [1, 0, 1]]


def test_split_mini_batches_refuses_negative_numbers(make_rows):
    rows = make_rows(2).union(DataProto.from_dict({"mini_batch": torch.tensor([0, -1])}))
    with pytest.raises(BatchError, match="counts from 0"):
        split_mini_batches(rows, 1, alone)
    with pytest.raises(BatchError, match="num_mini_batches"):
        split_mini_batches(make_rows(2), 0, alone)


def test_update_names_a_missing_column(lm_path, make_rows):
    limit = BatchLimit(micro_batch_size=4)
    rows = make_rows(4).drop(["ref_log_prob"])
    with pytest.raises(BatchError, match="ref_log_prob"):
        update(built(lm_path), rows, ActorObjective(ALL_TERMS), num_mini_batches=1, epochs=1, limit=limit)
