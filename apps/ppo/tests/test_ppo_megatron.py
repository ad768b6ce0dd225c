"""`strategy=megatron`: what follows from it, and what is refused before anything starts."""

from __future__ import annotations

import importlib.util
import os
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from ostinato.ppo import preflight_megatron
from ostinato.ppo.config import PpoConfig
from ostinato.ppo.facts import ModelFacts, read_model
from ostinato.ppo.install import how_to_install
from ostinato.ppo.placement import ENGINES, place
from ostinato.ppo.plan import memory_plan
from ostinato.ppo.preflight import Checked, examine
from ostinato.ppo.testing import write_model
from ostinato.workers.core.factory import find_engine

ACTOR, REF = "actor_rollout_ref.actor", "actor_rollout_ref.ref"
WEIGHTS = "pytorch_model.bin"
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 6}


def checked(tmp_path, *, ranks=4, model=None, **settings) -> Checked:
    """A configuration with the actor on Megatron, and what the check found."""
    values = {"trainer": {"n_gpus_per_node": ranks}, "actor_rollout_ref": {"actor": {"strategy": "megatron"}}}
    for key, value in {"algorithm.adv_estimator": "grpo", **settings}.items():
        *path, name = key.split(".")
        section = values
        for part in path:
            section = section.setdefault(part, {})
        section[name] = value
    config = PpoConfig.from_mapping(values)
    facts = ModelFacts(tmp_path, {**HEADS, **(model or {})}, "safetensors", 1000)
    found = Checked(config, models={"actor": facts, "critic": facts})
    preflight_megatron.megatron(found)
    return found


def sizes(role=ACTOR, **sizes):
    return {f"{role}.megatron.{name}_size": size for name, size in sizes.items()}


def test_ppo_megatron_is_one_key_for_actor_and_reference(tmp_path):
    config = checked(tmp_path, **sizes(tensor_model_parallel=2), **{f"{ACTOR}.use_kl_loss": True}).config
    assert config.actor_rollout_ref.ref.strategy == "megatron"
    assert config.actor_rollout_ref.ref.megatron.tensor_model_parallel_size == 2
    actor = place(config).roles["actor"]
    assert actor.kwargs["engine"] == ENGINES["megatron"]
    assert find_engine(actor.kwargs["engine"]).__name__ == "MegatronEngine"
    assert config.actor_rollout_ref.actor.engine_config is config.actor_rollout_ref.actor.megatron


@pytest.mark.parametrize(
    ("settings", "key", "text"),
    [
        (sizes(tensor_model_parallel=3), f"{ACTOR}.megatron.tensor_model_parallel_size", "take one of [1, 2]"),
        (sizes(tensor_model_parallel=4), f"{ACTOR}.megatron.tensor_model_parallel_size", "2 key/value heads"),
        (sizes(pipeline_model_parallel=4), f"{ACTOR}.megatron.pipeline_model_parallel_size", "take one of [1, 2]"),
        (sizes(expert_model_parallel=2), f"{ACTOR}.megatron.expert_model_parallel_size", "the model has none"),
        (
            {f"{REF}.strategy": "fsdp", f"{ACTOR}.use_kl_loss": True},
            f"{REF}.strategy",
            "one engine runs both",
        ),
        (
            {
                "critic.strategy": "megatron",
                "algorithm.adv_estimator": "gae",
                **sizes(tensor_model_parallel=2),
                **sizes("critic", tensor_model_parallel=1),
            },
            "critic.megatron.tensor_model_parallel_size",
            "a process has one layout",
        ),
        ({"actor_rollout_ref.model.lora_rank": 8}, "actor_rollout_ref.model.lora_rank", "set it to 0"),
        (
            {"actor_rollout_ref.model.enable_activation_offload": True},
            "actor_rollout_ref.model.enable_activation_offload",
            "set it to False",
        ),
        ({f"{ACTOR}.ulysses_sequence_parallel_size": 2}, f"{ACTOR}.ulysses_sequence_parallel_size", "context_parallel"),
    ],
)
def test_ppo_megatron_refuses_before_anything_starts(tmp_path, settings, key, text):
    found = checked(tmp_path, **settings)
    problems = {problem.key: problem.text for problem in found.problems}
    assert key in problems
    assert text in problems[key]


ROLES = ["actor_rollout_ref", "critic", "reward_model"]
ODD = """it's "$HOME" `x` ~ * ; & \\n \\\n line"""
"""A folder's name with everything in it that a shell or Python's source text reads otherwise."""


def spoken_words(command: str, folder: Path) -> list[str]:
    """What a shell makes of `python ...`, in a folder of ours for the one word that is not python's."""
    (folder / "bin").mkdir()
    (folder / "bin" / "python").write_text("#!/bin/sh\nprintf '%s\\0' \"$@\"\n")
    (folder / "bin" / "python").chmod(0o755)
    path = {"PATH": f"{folder / 'bin'}:{os.defpath}"}
    done = subprocess.run(["/bin/sh", "-c", command], env=path, capture_output=True, text=True, check=True)
    return done.stdout.split("\0")[:-1]


@pytest.mark.parametrize(("role", "name"), [*((role, "bare") for role in ROLES), (ROLES[0], ODD)])
def test_ppo_megatron_folder_with_bin_weights_alone_is_refused_with_what_converts_it(
    role, name, make, tmp_path, monkeypatch
):
    """Before Ray starts, which the engine's own refusal comes after; the command that it gives does what it says."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    folder = Path(write_model(tmp_path / name))
    paths = {f"{name}.model.path": str(tmp_path / "model") for name in ROLES}
    wanted = {"algorithm.adv_estimator": "gae", "reward_model.enable": True, **paths, f"{role}.model.path": str(folder)}
    strategy = f"{ACTOR if role == 'actor_rollout_ref' else role}.strategy"
    config = make(**wanted, **{strategy: "megatron"})
    assert examine(config).problems == []  # no weights at all: a warning, as for every engine
    torch.save(AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder)).state_dict(), folder / WEIGHTS)
    assert examine(make(**wanted)).problems == []
    [problem] = examine(config).problems
    assert (problem.key, problem.also) == (f"{role}.model.path", (strategy,))
    assert "pytorch_model*.bin alone, and the Megatron engine reads *.safetensors" in problem.text
    option, code, path = spoken_words("python -c" + problem.text.partition("python -c")[2], tmp_path)
    assert (option, path) == ("-c", str(folder))
    monkeypatch.setattr("sys.argv", ["-c", path])
    exec(code, {})
    assert examine(config).problems == []
    assert read_model(str(folder)).weight_format == "safetensors"


@pytest.mark.parametrize("named", [None, [], "LlamaForCausalLM", [None], ['M; print("x")'], ["$(x)"], {"a": 1}])
def test_ppo_megatron_command_holds_no_other_text_of_a_models_config(named, tmp_path):
    """It is copied into a shell."""
    facts = ModelFacts(tmp_path, {"architectures": named}, "bin", 1000)
    found = Checked(PpoConfig.from_mapping({"actor_rollout_ref": {"actor": {"strategy": "megatron"}}}))
    found.models["actor"] = facts
    preflight_megatron.megatron(found)
    [text] = [problem.text for problem in found.problems if problem.key == "actor_rollout_ref.model.path"]
    assert "from transformers import AutoModelForCausalLM as Model; " in text


def test_ppo_megatron_layout_that_fits_is_not_refused(tmp_path):
    fitting = sizes(tensor_model_parallel=2, pipeline_model_parallel=2)
    found = checked(tmp_path, ranks=8, **fitting, **{"critic.strategy": "megatron", "algorithm.adv_estimator": "gae"})
    assert found.problems == []
    assert found.config.critic.megatron.sizes == found.config.actor_rollout_ref.actor.megatron.sizes


def test_ppo_megatron_memory_is_planned_by_its_own_sizes(tmp_path):
    found = checked(tmp_path, ranks=4, **sizes(tensor_model_parallel=2))
    plan = next(entry for entry in memory_plan(found) if entry.role == "actor")
    assert (plan.weights, plan.gradients, plan.optimizer) == (500 * 2, 500 * 4, 500 * 12 / 2)


def test_ppo_megatron_missing_names_the_install_line(monkeypatch):
    config = PpoConfig.from_mapping({"actor_rollout_ref": {"actor": {"strategy": "megatron"}}})
    real = importlib.util.find_spec
    assert list(preflight_megatron.missing(config)) == []
    hidden = lambda name: None if name.startswith("megatron") else real(name)  # noqa: E731
    monkeypatch.setattr(preflight_megatron, "find_spec", hidden)
    assert how_to_install("megatron") in next(preflight_megatron.missing(config))
    fsdp = replace(config.actor_rollout_ref, actor=replace(config.actor_rollout_ref.actor, strategy="fsdp"))
    assert list(preflight_megatron.missing(replace(config, actor_rollout_ref=fsdp))) == []


def test_ppo_megatron_on_a_cpu_is_refused_at_launch_unless_a_module_is_named():
    """Before a worker starts; the module may be the README's trial on a CPU."""
    actor = {"actor": {"strategy": "megatron"}}
    on = lambda device, **model: PpoConfig.from_mapping(  # noqa: E731
        {"trainer": {"device": device}, "actor_rollout_ref": {**actor, "model": model}}
    )
    assert [line for line in preflight_megatron.missing(on("cpu")) if "use strategy=fsdp" in line]
    assert list(preflight_megatron.missing(on("cuda"))) == []
    assert list(preflight_megatron.missing(on("cpu", external_lib="my_cpu_trial"))) == []
