from __future__ import annotations

import pickle
from dataclasses import fields, replace

import pytest

from ostinato.rollout import RolloutConfig
from ostinato.workers.core.config import (
    ActorConfig,
    CheckpointConfig,
    CriticConfig,
    ModelConfig,
    OptimConfig,
    RefConfig,
    RewardModelConfig,
    rollout_log_prob_limit,
)
from ostinato.workers.core.errors import BatchError, ConfigError, EngineImportError, ModelMismatchError, RoleError
from ostinato.workers.core.factory import find_engine, prepare_model
from ostinato.workers.core.limits import BatchLimit
from ostinato.workers.core.optim import lr_factor


@pytest.mark.parametrize(
    ("make", "key"),
    [
        (lambda: ActorConfig(clip_ratio_c=0.5), "actor_rollout_ref.actor.clip_ratio_c"),
        (lambda: ActorConfig(clip_ratio_c=1.0), "actor_rollout_ref.actor.clip_ratio_c"),
        (lambda: ActorConfig(clip_ratio_low=-0.1), "actor_rollout_ref.actor.clip_ratio_low"),
        (lambda: ActorConfig(clip_ratio_high=-0.1), "actor_rollout_ref.actor.clip_ratio_high"),
        (lambda: ActorConfig(loss_agg_mode="mean"), "actor_rollout_ref.actor.loss_agg_mode"),
        (lambda: ActorConfig(loss_scale_factor=0), "actor_rollout_ref.actor.loss_scale_factor"),
        (lambda: ActorConfig(kl_loss_type="full"), "actor_rollout_ref.actor.kl_loss_type"),
        (lambda: ActorConfig(kl_loss_type="k3++"), "actor_rollout_ref.actor.kl_loss_type"),
        (lambda: ActorConfig(kl_loss_coef=-1), "actor_rollout_ref.actor.kl_loss_coef"),
        (lambda: ActorConfig(ppo_epochs=0), "actor_rollout_ref.actor.ppo_epochs"),
        (lambda: ActorConfig(ppo_mini_batch_size=0), "actor_rollout_ref.actor.ppo_mini_batch_size"),
        (lambda: ActorConfig(num_mini_batches=0), "actor_rollout_ref.actor.num_mini_batches"),
        (lambda: ActorConfig(grad_clip=0), "actor_rollout_ref.actor.grad_clip"),
        (lambda: ActorConfig(strategy="ddp"), "actor_rollout_ref.actor.strategy"),
        (lambda: ActorConfig(use_dynamic_bsz=False), "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu"),
        (lambda: ActorConfig(ppo_max_token_len_per_gpu=0), "actor_rollout_ref.actor.ppo_max_token_len_per_gpu"),
        (lambda: RefConfig(log_prob_micro_batch_size_per_gpu=0), "actor_rollout_ref.ref.log_prob_micro_batch_size"),
        (lambda: CriticConfig(cliprange_value=0), "critic.cliprange_value"),
        (lambda: CriticConfig(forward_micro_batch_size_per_gpu=0), "critic.forward_micro_batch_size_per_gpu"),
        (lambda: CriticConfig(num_mini_batches=0), "critic.num_mini_batches"),
        (lambda: RewardModelConfig(max_token_len_per_gpu=0), "reward_model.max_token_len_per_gpu"),
        (lambda: RewardModelConfig(model=ModelConfig(lora_rank=4)), "reward_model.model.lora_rank"),
        (lambda: ModelConfig(lora_rank=-1), "model.lora_rank"),
        (lambda: ModelConfig(lora_alpha=0), "model.lora_alpha"),
        (lambda: ModelConfig(target_modules=[]), "model.target_modules"),
        (lambda: CriticConfig(ulysses_sequence_parallel_size=0), "critic.ulysses_sequence_parallel_size"),
        (lambda: OptimConfig(lr=-1), "optim.lr"),
        (lambda: OptimConfig(betas=(0.9, 1.0)), "optim.betas"),
        (lambda: OptimConfig(lr_scheduler_type="linear"), "optim.lr_scheduler_type"),
        (lambda: OptimConfig(optimizer="SGD"), "optim.optimizer"),
        (
            lambda: ActorConfig(strategy="megatron", optim=OptimConfig(optimizer="AdamW8bit")),
            "actor_rollout_ref.actor.optim.optimizer",
        ),
        (lambda: OptimConfig(num_cycles=0), "optim.num_cycles"),
        (lambda: CheckpointConfig(save_contents=["model"]), "checkpoint.save_contents"),
        (lambda: OptimConfig(min_lr_ratio=2), "optim.min_lr_ratio"),
        (lambda: OptimConfig(lr_scheduler_type="cosine").check_resolved(), "optim.total_training_steps"),
        (lambda: prepare_model(ModelConfig(), "critic.model"), "critic.model.path"),
        (lambda: prepare_model(ModelConfig(path="x", external_lib="no_such"), "m"), "m.external_lib"),
    ],
)
def test_config_refuses_with_the_dotted_key(make, key):
    """A-130 (a dual-clip constant below 1) and its kind: a value that cannot work is refused when it is set."""
    with pytest.raises(ConfigError) as caught:
        make()
    assert str(caught.value).startswith(key)


def test_config_defaults_are_the_documented_ones():
    actor, critic = ActorConfig(), CriticConfig()
    assert (actor.ppo_mini_batch_size, actor.ppo_epochs, actor.optim.lr) == (256, 1, 1e-6)
    assert (actor.clip_low, actor.clip_high, actor.clip_ratio_c) == (0.2, 0.2, 3.0)
    assert (actor.entropy_coeff, actor.grad_clip, actor.loss_agg_mode) == (0.0, 1.0, "token-mean")
    assert not actor.use_kl_loss
    assert (actor.kl_loss_coef, actor.kl_loss_type) == (0.001, "low_var_kl")
    assert (critic.optim.lr, critic.cliprange_value) == (1e-5, 0.5)


def test_config_an_explicit_micro_batch_size_turns_the_budget_off():
    assert ActorConfig().update_limit == BatchLimit(max_tokens=16384)
    assert ActorConfig(ppo_micro_batch_size_per_gpu=8).update_limit == BatchLimit(micro_batch_size=8)
    both = ActorConfig(ppo_micro_batch_size_per_gpu=8, use_dynamic_bsz=True)
    assert both.update_limit == BatchLimit(max_tokens=16384)
    assert RefConfig(log_prob_micro_batch_size_per_gpu=4).log_prob_limit == BatchLimit(micro_batch_size=4)
    assert rollout_log_prob_limit(RolloutConfig()) == BatchLimit(max_tokens=16384)
    assert rollout_log_prob_limit(RolloutConfig(log_prob_micro_batch_size_per_gpu=2)) == BatchLimit(micro_batch_size=2)
    both = RolloutConfig(log_prob_micro_batch_size_per_gpu=2, log_prob_use_dynamic_bsz=True)
    assert rollout_log_prob_limit(both) == BatchLimit(max_tokens=16384)
    again = replace(RolloutConfig(log_prob_micro_batch_size_per_gpu=2), log_prob_micro_batch_size_per_gpu=None)
    assert rollout_log_prob_limit(again) == BatchLimit(max_tokens=16384)


def test_config_token_budgets_count_for_every_rank_that_shares_a_micro_batch():
    shared = {"ulysses_sequence_parallel_size": 4}
    whole = BatchLimit(max_tokens=4 * 16384)
    critic = CriticConfig(**shared)
    limits = (ActorConfig(**shared).update_limit, RefConfig(**shared).log_prob_limit, RewardModelConfig(**shared).limit)
    assert {*limits, critic.update_limit, critic.forward_limit, rollout_log_prob_limit(RolloutConfig(), 4)} == {whole}
    assert ActorConfig(ppo_micro_batch_size_per_gpu=8, **shared).update_limit == BatchLimit(micro_batch_size=8)


def test_config_engine_gets_the_roles_sequence_size():
    assert RefConfig(fsdp_config=None).engine_config is None
    assert ActorConfig(ulysses_sequence_parallel_size=2).engine_config == {"ulysses_sequence_parallel_size": 2}
    given = ActorConfig(fsdp_config={"fsdp_size": 1}, ulysses_sequence_parallel_size=2).engine_config
    assert given == {"fsdp_size": 1, "ulysses_sequence_parallel_size": 2}
    assert CriticConfig(ppo_micro_batch_size_per_gpu=3).forward_limit == BatchLimit(micro_batch_size=3)
    assert CriticConfig(forward_max_token_len_per_gpu=99).forward_limit == BatchLimit(max_tokens=99)


def test_config_replace_carries_no_stale_value():
    actor = replace(replace(ActorConfig(), clip_ratio=0.3), ppo_micro_batch_size_per_gpu=2)
    assert (actor.clip_low, actor.clip_high) == (0.3, 0.3)
    assert replace(actor, grad_clip=0.5).engine_optim.grad_clip == 0.5


def test_config_marks_what_the_trainer_fills_in():
    derived = {field.name for cls in (ActorConfig, OptimConfig) for field in fields(cls) if field.metadata}
    assert derived == {"num_mini_batches", "sum_pi_squared", "grad_clip"}


def test_config_reads_offload_flags_from_an_object_or_a_mapping():
    assert not ActorConfig().param_offload
    assert ActorConfig(fsdp_config={"param_offload": True}).param_offload
    assert not ActorConfig(fsdp_config={"param_offload": True}).optimizer_offload


def test_lr_factor_warms_up_and_decays():
    constant = OptimConfig(lr_warmup_steps=4)
    assert [lr_factor(step, constant) for step in range(6)] == [0.25, 0.5, 0.75, 1, 1, 1]
    cosine = OptimConfig(
        lr_warmup_steps_ratio=0.2, total_training_steps=10, lr_scheduler_type="cosine", min_lr_ratio=0.1
    )
    factors = [lr_factor(step, cosine) for step in range(12)]
    assert factors[:3] == [0.5, 1.0, 1.0]
    assert factors[6] == pytest.approx(0.55)
    assert factors[10:] == pytest.approx([0.1, 0.1])
    waves = replace(cosine, num_cycles=1.0, lr_warmup_steps_ratio=0.0)
    assert [round(lr_factor(step, waves), 3) for step in (0, 5, 10)] == [1.0, 0.1, 1.0]
    assert lr_factor(0, OptimConfig()) == 1.0


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("ostinato.workers.core", "module:name"),
        ("no.such.module:X", "cannot import"),
        ("ostinato.workers.core.engine:Nothing", "has no 'Nothing'"),
    ],
)
def test_find_engine_says_what_is_wrong(path, text):
    with pytest.raises(EngineImportError, match=text):
        find_engine(path)


@pytest.mark.parametrize("error", [ConfigError, BatchError, EngineImportError, RoleError, ModelMismatchError])
def test_errors_survive_pickling(error):
    copy = pickle.loads(pickle.dumps(error("where: what")))
    assert type(copy) is error
    assert str(copy) == "where: what"
