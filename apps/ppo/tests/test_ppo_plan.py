"""The plan: sizes, memory, length, and the facts that it rests on."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest

from ostinato.ppo.facts import read_model
from ostinato.ppo.plan import memory_plan, plan_text
from ostinato.ppo.preflight import examine
from ostinato.ppo.testing import write_model

ROLLOUT, ACTOR, PATH = "actor_rollout_ref.rollout", "actor_rollout_ref.actor", "actor_rollout_ref.model.path"


def test_ppo_preflight_parameters_are_counted_from_the_weights(tmp_path):
    folder = Path(write_model(tmp_path / "m"))
    estimate = read_model(str(folder)).num_parameters
    attention, mlp = 2 * 32 * 32 + 2 * 32 * 16, 3 * 32 * 64
    assert estimate == 2 * (attention + mlp + 64) + 64 * 32 + 32
    header = {"a": {"dtype": "F32", "shape": [3, 5], "data_offsets": [0, 60]}, "__metadata__": {"format": "pt"}}
    raw = json.dumps(header).encode()
    for name in ("model-1-of-2.safetensors", "model-2-of-2.safetensors"):
        (folder / name).write_bytes(struct.pack("<Q", len(raw)) + raw + bytes(60))
    facts = read_model(str(folder))
    assert facts.num_parameters == 30
    assert facts.has_weights


def test_ppo_preflight_memory_plan(make):
    changes = {
        "trainer.n_gpus_per_node": 4,
        f"{ACTOR}.use_kl_loss": True,
        f"{ACTOR}.fsdp_config": {"param_offload": True, "optimizer_offload": True},
        f"{ROLLOUT}.tensor_model_parallel_size": 2,
        f"{ROLLOUT}.name": "vllm",
        "algorithm.adv_estimator": "gae",
        "critic.fsdp_config": {"fsdp_size": 2},
    }
    checked = examine(make(**changes))
    count = checked.models["actor"].num_parameters
    assert count is not None
    plans = {plan.role: plan for plan in memory_plan(checked)}
    assert plans["actor"].total == pytest.approx(count * 16 / 4)
    assert plans["actor"].offloaded == "weights and optimizer"
    assert plans["critic"].total == pytest.approx(count * 16 / 2)
    assert plans["reference"].total == pytest.approx(count * 4 / 4)
    assert plans["rollout (vllm)"].total == pytest.approx(count * 2 / 2)
    assert "KV cache, within 50% of a GPU in all" in plan_text(checked)
    embedded = plan_text(examine(make()))
    assert "KV cache" in embedded
    assert "of a GPU in all" not in embedded


def test_ppo_preflight_memory_plan_of_an_adapter(make):
    """Weights alone, once: the reference is the actor's model, and the adapter's own state is small."""
    checked = examine(make(**{"actor_rollout_ref.model.lora_rank": 8, f"{ACTOR}.use_kl_loss": True}))
    plans = {plan.role: plan for plan in memory_plan(checked)}
    assert plans["actor"].total == pytest.approx(checked.models["actor"].num_parameters * 4)
    assert "reference" not in plans
    assert "parameters, adapters of rank 8, " in plan_text(checked)


def test_ppo_preflight_plan_without_a_known_size(make, tmp_path):
    checked = examine(make(**{PATH: write_model(tmp_path / "odd", hidden_size=None)}))
    assert memory_plan(checked) == []
    assert "not estimated" in plan_text(checked)


def test_ppo_preflight_plan_tells_the_checkpoint_that_the_run_goes_on_from(make, tmp_path):
    """The newest with a part of each role, as the run takes it; a path that is not taken is not told."""
    for step, roles in ((1, ("actor", "critic")), (2, ("actor",))):
        for role in roles:
            (tmp_path / f"global_step_{step}" / role).mkdir(parents=True)
        (tmp_path / f"global_step_{step}" / "COMPLETE").touch()
    here = {"trainer.default_local_dir": str(tmp_path)}
    assert "; resume auto, from global_step_2" in plan_text(examine(make(**here)))
    assert "; resume auto, from global_step_1" in plan_text(examine(make(**here, **{"algorithm.adv_estimator": "gae"})))
    path = {"trainer.resume_from_path": str(tmp_path / "global_step_1")}
    for mode, told in (("resume_path", f"from {path['trainer.resume_from_path']}"), ("disable", "disable")):
        assert (
            plan_text(examine(make(**here, **path, **{"trainer.resume_mode": mode})))
            .rstrip()
            .endswith(f"; resume {told}")
        )


def test_ppo_preflight_length_tells_the_passes_over_the_data(make):
    """A step budget counts whatever the epochs: fewer steps than they give, or more."""
    assert "1 step an epoch (40 // 32) × 2 epochs = 2 steps, 4 updates of the actor\n" in plan_text(
        examine(make(**{"trainer.total_epochs": 2}))
    )
    text = plan_text(examine(make(**{"trainer.total_epochs": 2, "trainer.total_training_steps": 5})))
    assert "trainer.total_training_steps=5 = 5 steps, 10 updates of the actor, 5 passes over the data\n" in text


@pytest.mark.parametrize(
    ("name", "content", "text"),
    [
        ("model.safetensors", b"version https://git-lfs.github.com/spec/v1", "run `git lfs pull`"),
        ("model.safetensors", b"\xff" * 16, "not a whole safetensors file: OverflowError"),
        ("model.safetensors", b"\2" + b"\0" * 7 + b"[]", "not a whole safetensors file: AttributeError"),
        ("model.safetensors", b"\x08" + b"\0" * 7 + b'{"a":{}}', "not a whole safetensors file: KeyError: 'shape'"),
        ("config.json", b"[]", "expected a JSON object, got list"),
    ],
)
def test_facts_of_files_that_are_something_else_are_a_problem_of_their_key(make, tmp_path, name, content, text):
    """They ended the checks with an error of Python's."""
    config = make()
    (tmp_path / "model" / name).write_bytes(content)
    problems = [problem for problem in examine(config).problems if problem.key == PATH]
    assert len(problems) == 1
    assert text in problems[0].text


@pytest.mark.parametrize(
    ("index", "content", "text"),
    [
        ("model.safetensors.index.json", "{", "cannot be read (JSONDecodeError"),
        ("model.safetensors.index.json", '{"weight_map": {}}', "expected a `weight_map`"),
        ("pytorch_model.bin.index.json", "{}", "expected a `weight_map`"),
        ("pytorch_model.bin.index.json", '{"weight_map": {"a": "gone.bin"}}', "gone.bin, which is not there"),
    ],
)
def test_facts_of_an_index_that_leads_to_no_weights_are_a_problem_of_their_key(make, tmp_path, index, content, text):
    """It ended a worker with an IndexError; without any weights there is nothing that it could lead to."""
    config = make()
    (tmp_path / "model" / index).write_text(content)
    assert not examine(config).problems
    (tmp_path / "model" / "pytorch_model-00001-of-00001.bin").touch()
    [problem] = examine(config).problems
    assert problem.key == PATH
    assert index in problem.text
    assert text in problem.text
