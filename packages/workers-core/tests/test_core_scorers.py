"""The critic and the reward model."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from ostinato.controller import WorkerSpec
from ostinato.workers.core import (
    CriticConfig,
    CriticWorker,
    ModelConfig,
    OptimConfig,
    RewardModelConfig,
    RewardModelWorker,
)
from ostinato.workers.core.errors import ModelMismatchError, RoleError
from ostinato.workers.core.testing import tiny_reward_model
from ostinato.workers.core.testing.models import byte_tokenizer

ENGINE = "ostinato.workers.core.testing:PlainEngine"


def test_critic_values_the_state_before_each_token_and_learns(lm_path, make_rows, backend):
    """H-29: values stand where the response mask does, read one token earlier."""
    config = CriticConfig(
        model=ModelConfig(path=str(lm_path)), optim=OptimConfig(lr=1e-2), num_mini_batches=2, ppo_epochs=3
    )
    group = backend.launch_one("critic", WorkerSpec(CriticWorker, config, engine=ENGINE))
    group.init_model()
    rows = make_rows(6).drop(["values"])
    values = group.compute_values(rows)
    mask = rows.batch["response_mask"].bool()
    assert bool((values.batch["values"][~mask] == 0).all())
    assert bool((values.batch["values"][mask] != 0).all())
    first = group.update_critic(rows.union(values)).metrics["critic/vf_loss"].value
    later = rows.union(group.compute_values(rows))
    assert group.update_critic(later).metrics["critic/vf_loss"].value < first


def test_critic_checkpoint_and_export(lm_path, make_rows, tmp_path):
    config = CriticConfig(model=ModelConfig(path=str(lm_path)), optim=OptimConfig(lr=1e-2))
    critic = CriticWorker(config, ENGINE)
    with pytest.raises(RoleError, match="init_model"):
        critic.compute_values(make_rows(1))
    critic.init_model()
    rows = make_rows(4)
    critic.update_critic(rows)
    expected = critic.compute_values(rows).batch["values"]
    critic.save_checkpoint(str(tmp_path / "critic"))
    critic.export_hf(str(tmp_path / "hf"))
    loaded, exported = (
        CriticWorker(config, ENGINE),
        CriticWorker(replace(config, model=ModelConfig(path=str(tmp_path / "hf"))), ENGINE),
    )
    loaded.init_model()
    loaded.load_checkpoint(str(tmp_path / "critic"))
    exported.init_model()
    assert torch.equal(loaded.compute_values(rows).batch["values"], expected)
    torch.testing.assert_close(exported.compute_values(rows).batch["values"], expected)


def test_reward_model_agrees_with_transformers(rm_path, lm_path, make_rows, backend):
    from transformers import AutoModelForSequenceClassification

    config = RewardModelConfig(model=ModelConfig(path=str(rm_path)), micro_batch_size_per_gpu=2)
    spec = WorkerSpec(RewardModelWorker, config, engine=ENGINE, policy_path=str(lm_path))
    group = backend.launch_one("reward_model", spec)
    group.init_model()
    rows = make_rows(5)
    scores = group.compute_rm_score(rows).batch["token_level_scores"]
    model = AutoModelForSequenceClassification.from_pretrained(rm_path, dtype=torch.float32).eval()
    for i in range(len(rows)):
        valid = rows.batch["attention_mask"][i].bool()
        with torch.no_grad():
            expected = model(input_ids=rows.batch["input_ids"][i][valid][None]).logits[0, 0]
        last = int(rows.batch["response_mask"][i].nonzero().max())
        assert scores[i, last].item() == pytest.approx(expected.item(), abs=1e-5)
        assert int((scores[i] != 0).sum()) == 1


def test_reward_model_of_another_vocabulary_is_refused(tmp_path, lm_path, make_rows):
    from tokenizers import AddedToken

    path = tiny_reward_model(tmp_path / "rm")
    other = byte_tokenizer()
    other.add_tokens([AddedToken("<tool>", special=True)])
    other.save_pretrained(path)
    config = RewardModelConfig(model=ModelConfig(path=str(path)))
    with pytest.raises(ModelMismatchError, match=r"reward_model\.model\.path.*260 tokens.*<tool>"):
        RewardModelWorker(config, ENGINE, policy_path=str(lm_path)).init_model()
    with pytest.raises(RoleError, match="init_model"):
        RewardModelWorker(config, ENGINE).compute_rm_score(make_rows(1))
