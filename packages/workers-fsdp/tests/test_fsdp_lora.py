from __future__ import annotations

import importlib.util

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, GPT2Config

from ostinato.protocol import DataProto
from ostinato.rollout import RolloutConfig
from ostinato.workers.core import ActorConfig, ActorRolloutRefConfig, ActorRolloutRefWorker
from ostinato.workers.core.config import ModelConfig, OptimConfig
from ostinato.workers.core.testing import tiny_causal_lm
from ostinato.workers.core.testing.lora import ADAPTER, check_lora
from ostinato.workers.core.testing.oracle import STILL, VOCAB, make_rows, start
from ostinato.workers.fsdp import FsdpEngine
from ostinato.workers.fsdp.errors import CheckpointError, FsdpConfigError
from ostinato.workers.fsdp.lora import is_adapter
from ostinato.workers.fsdp.testing import fsdp

pytestmark = pytest.mark.usefixtures("process_group")


def _build(path, head="lm", **model):
    engine = FsdpEngine(head=head, model=ModelConfig(path=str(path), **model))
    engine.build()
    return engine


def test_lora_trains_as_peft_does(workspace):
    check_lora(fsdp(), workspace)


def test_lora_trains_the_adapter_alone(workspace):
    driver = start(fsdp(), workspace / "lm", **ADAPTER)
    driver.train(make_rows(4, seed=1))
    module, optimizer = driver.engine._module, driver.engine._optimizer
    trained = {name for name, parameter in module.named_parameters() if parameter.requires_grad}
    assert trained == {name for name, _ in module.named_parameters() if is_adapter(name)}
    assert len(optimizer.state) == len(trained) == 2 * 7 * 2
    assert not any("lm_head" in name or "embed" in name for name in trained)
    critic = start(fsdp(), workspace / "lm", head="value", **ADAPTER)
    others = {name for name, parameter in critic.engine._module.named_parameters() if parameter.requires_grad} - trained
    assert others == {"score.weight"}


def test_lora_keeps_frozen_weights_in_the_type_of_the_forward_pass(workspace):
    driver = start(fsdp(dtype="bf16"), workspace / "tied", **ADAPTER)
    rows = make_rows(4, seed=1)
    first, second = driver.train(rows)[0], driver.train(rows)[0]
    assert second < first
    for name, parameter in driver.engine._module.named_parameters():
        assert parameter.dtype == (torch.float32 if is_adapter(name) else torch.bfloat16), name
    assert {tensor.dtype for tensor in driver.state().values()} == {torch.bfloat16}


def test_lora_begins_alike_in_every_run_and_not_alike_in_every_layer(workspace):
    first, second = (
        {name: p.to_local().clone() for name, p in _build(workspace / "lm", **ADAPTER)._module.named_parameters()}
        for _ in range(2)
    )
    assert all(torch.equal(first[name], second[name]) for name in first)
    a = [tensor for name, tensor in first.items() if "q_proj.lora_A" in name]
    assert not torch.equal(a[0], a[1])
    assert 0.9 * 32**-0.5 < a[0].abs().max() <= 32**-0.5
    assert all(tensor.abs().max() == 0 for name, tensor in first.items() if "lora_B" in name)


@pytest.mark.parametrize(
    ("targets", "excluded", "expected"),
    [
        (["q_proj", "v_proj"], None, {"q_proj", "v_proj"}),
        ("all-linear", ["down_proj", "up_proj", "gate_proj"], {"q_proj", "k_proj", "v_proj", "o_proj"}),
        (r".*\.mlp\..*_proj", r".*down.*", {"gate_proj", "up_proj"}),
    ],
)
def test_lora_targets(workspace, targets, excluded, expected):
    engine = _build(workspace / "lm", target_modules=targets, exclude_modules=excluded, **ADAPTER)
    assert {
        name.split(".lora_")[0].split(".")[-1] for name, _ in engine._module.named_parameters() if is_adapter(name)
    } == expected
    assert set(dict(engine.weight_source().weights())) == set(load_file(workspace / "lm" / "model.safetensors"))


def test_lora_on_the_head_trains_without_the_fused_one(workspace, tmp_path):
    from peft import PeftModel

    driver = start(fsdp(), workspace / "lm", target_modules=["lm_head", "q_proj"], **ADAPTER)
    driver.train(make_rows(4, seed=1))
    driver.engine.save(tmp_path)
    plain = AutoModelForCausalLM.from_pretrained(workspace / "lm")
    merged = PeftModel.from_pretrained(plain, tmp_path / "lora_adapter").merge_and_unload().state_dict()
    for name, tensor in driver.state().items():
        torch.testing.assert_close(tensor, merged[name])


def test_lora_on_weights_that_lie_the_other_way_round_comes_merged_as_pefts(tmp_path):
    """GPT-2's: a wide one could not be merged, a square one was merged turned, without a word."""
    from peft import PeftModel

    torch.manual_seed(0)
    config = GPT2Config(vocab_size=VOCAB, n_embd=16, n_layer=1, n_head=2, n_positions=32)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "gpt2")
    driver = start(fsdp(), tmp_path / "gpt2", target_modules=["c_attn", "c_proj"], **ADAPTER)
    driver.train(make_rows(4, seed=1))
    driver.engine.save(tmp_path / "saved")
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "gpt2")
    merged = PeftModel.from_pretrained(plain, tmp_path / "saved" / "lora_adapter").merge_and_unload().state_dict()
    for name, tensor in driver.state().items():
        torch.testing.assert_close(tensor, merged[name])


def test_lora_refuses_what_it_cannot_train(workspace, monkeypatch):
    with pytest.raises(FsdpConfigError, match=r"target_modules.*lm_head.*shares its weight"):
        _build(workspace / "tied", target_modules=["lm_head"], **ADAPTER)
    with pytest.raises(FsdpConfigError, match=r"target_modules.*embed_tokens is Embedding"):
        _build(workspace / "lm", target_modules=["embed_tokens"], **ADAPTER)
    with pytest.raises(FsdpConfigError, match=r"target_modules=\['no_such'\]"):
        _build(workspace / "lm", target_modules=["no_such"], **ADAPTER)
    with pytest.raises(FsdpConfigError, match=r"critic\.model\.exclude_modules"):
        _build(workspace / "value", head="value", exclude_modules=".*x", **ADAPTER)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(FsdpConfigError, match=r"pip install 'ostinato-workers-fsdp\[lora\]'"):
        _build(workspace / "lm", **ADAPTER)


def test_lora_of_a_frozen_engine_is_the_folders_model(workspace):
    engine = FsdpEngine(head="lm", model=ModelConfig(path=str(workspace / "lm"), **ADAPTER), trainable=False)
    engine.build()
    assert not any(is_adapter(name) for name, _ in engine._module.named_parameters())


def test_lora_adapter_that_cannot_be_written_is_an_error(workspace, tmp_path):
    driver = start(fsdp(), workspace / "lm", optim=STILL, **ADAPTER)
    (tmp_path / "lora_adapter").write_text("in the way")
    with pytest.raises(CheckpointError, match="lora_adapter cannot be written"):
        driver.engine.save(tmp_path)
    assert dist.is_initialized()


def test_lora_policy_is_its_own_reference(tmp_path):
    """Two GRPO steps with a KL loss: sampling from merged weights, the reference from the same engine, adapter off."""
    model = ModelConfig(path=str(tiny_causal_lm(tmp_path / "model")), **ADAPTER)
    config = ActorRolloutRefConfig(
        model=model,
        actor=ActorConfig(optim=OptimConfig(lr=2e-2), use_kl_loss=True, kl_loss_coef=0.1),
        rollout=RolloutConfig(name="hf", dtype="float32", prompt_length=4, response_length=6, n=4, load_format="dummy"),
    )
    worker = ActorRolloutRefWorker(config, "actor_rollout_ref")
    worker.init_model()
    assert worker._ref is None, "a second engine was built"
    base, kl = None, []
    for step in (1, 2):
        ids = torch.tensor([[65, 66, 67, 68]] * 4)
        prompts = {
            "input_ids": ids,
            "attention_mask": torch.ones_like(ids),
            "position_ids": torch.arange(4).expand(4, 4),
        }
        rows = {"uid": ["a"] * 4, "rollout_id": list(range(4))}
        batch = worker.generate_sequences(DataProto.from_dict(prompts, rows, {"global_step": step}))
        batch = batch.union(worker.compute_log_prob(batch)).union(worker.compute_ref_log_prob(batch))
        columns = batch.batch
        torch.testing.assert_close(columns["old_log_probs"], columns["rollout_log_probs"], rtol=1e-4, atol=1e-4)
        assert torch.equal(columns["old_log_probs"], columns["ref_log_prob"]) is (step == 1)
        base = batch if base is None else base
        mask = columns["response_mask"]
        scores = columns["responses"].double().mul(mask).sum(1)
        advantages = ((scores - scores.mean()) / scores.std())[:, None].float() * mask
        metrics = worker.update_actor(batch.union(DataProto.from_dict({"advantages": advantages}))).metrics
        assert metrics["actor/grad_norm"].value > 0
        kl.append(metrics["actor/kl_loss"].value)
    assert kl[0] == 0.0 < kl[1]
    assert torch.equal(worker.compute_ref_log_prob(base).batch["ref_log_prob"], base.batch["ref_log_prob"])
    worker.export_hf(str(tmp_path / "merged"))
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").state_dict()
    state = dict(worker._actor.engine.weight_source().weights())
    assert all(torch.equal(exported[name], tensor) for name, tensor in state.items())
