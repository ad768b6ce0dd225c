"""The same seeds give the same numbers in this process, on Ray, on one rank, and on two that share rows or tokens."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
from toy_runs import batches_seen, metrics_of, nested, toy_overrides, untimed

from ostinato.ppo import run as run_module
from ostinato.ppo.config import PpoConfig

pytestmark = pytest.mark.e2e

EXACT = [
    "prompts",
    "responses",
    "input_ids",
    "attention_mask",
    "response_mask",
    "token_level_scores",
    "uid",
    "rollout_id",
]
CLOSE = ["rollout_log_probs", "old_log_probs", "ref_log_prob", "values", "advantages", "returns"]


def first_step(monkeypatch, toy, folder, **more):
    """Run two steps; return the first step's columns in rollout order, and the metrics."""
    seen = batches_seen(monkeypatch)
    config = PpoConfig.from_mapping(nested(toy_overrides(toy, folder, **more)))
    run_module.train(config, emit=lambda event: None)
    batch = seen[0]
    order = np.argsort(np.asarray(batch.non_tensor_batch["rollout_id"].tolist()))
    return batch.reorder(order), metrics_of(folder)


def column(batch, name):
    return batch.non_tensor_batch[name] if name in batch.non_tensor_batch else batch.batch[name].numpy()


def digest(values):
    data = repr(values.tolist()).encode() if values.dtype == object else np.ascontiguousarray(values).tobytes()
    return hashlib.sha256(data).hexdigest()


@pytest.mark.parametrize("algorithm", ["grpo", "gae"])
def test_parity_of_backends_and_world_sizes(monkeypatch, toy, tmp_path, ray_session, algorithm):
    options = {"algorithm.adv_estimator": algorithm, "actor_rollout_ref.actor.use_kl_loss": True}
    runs = {
        "local": {"trainer.backend": "local"},
        "ray": {"trainer.backend": "ray"},
        "ray, two ranks": {"trainer.backend": "ray", "trainer.n_gpus_per_node": 2},
    }
    if algorithm == "gae":  # actor, reference and critic, each with its tokens on both ranks
        roles = ("actor_rollout_ref.actor", "actor_rollout_ref.ref", "critic")
        shared = {f"{role}.ulysses_sequence_parallel_size": 2 for role in roles}
        runs["ray, two ranks that share sequences"] = {**runs["ray, two ranks"], **shared}
    results = {
        name: first_step(monkeypatch, toy, tmp_path / str(index), **options, **more)
        for index, (name, more) in enumerate(runs.items())
    }
    batch, lines = results.pop("local")
    assert len(lines) == 2
    for name, (other, other_lines) in results.items():
        for key in EXACT:
            assert digest(column(batch, key)) == digest(column(other, key)), (name, key)
        for key in CLOSE:
            if key in batch.columns:
                np.testing.assert_allclose(column(batch, key), column(other, key), atol=1e-5, err_msg=f"{name}: {key}")
        for mine, theirs in zip(lines, other_lines, strict=True):
            if name == "ray":
                assert untimed(mine) == untimed(theirs)
            for key in ("actor/pg_loss", "actor/kl_loss", "actor/grad_norm", "critic/vf_loss", "critic/score/mean"):
                if key in mine:
                    assert mine[key] == pytest.approx(theirs[key], abs=1e-6, rel=1e-6), (name, key)
