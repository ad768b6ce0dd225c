"""What the checks look at where a role trains on Megatron-Core, before a run and where it is about to start."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

from ostinato.ppo.config import PpoConfig
from ostinato.ppo.facts import ModelFacts
from ostinato.ppo.install import how_to_install
from ostinato.ppo.preflight import Checked, sections

ACTOR, REF = "actor_rollout_ref.actor", "actor_rollout_ref.ref"


def megatron(checked: Checked) -> None:
    """Parallel sizes that divide ranks, heads, layers and experts, alike for the roles of one process."""
    hybrid = checked.config.actor_rollout_ref
    if checked.config.needs_reference and hybrid.ref.strategy != hybrid.actor.strategy:
        text = f"{hybrid.ref.strategy} differs from {ACTOR}.strategy={hybrid.actor.strategy}; one engine runs both"
        checked.refuse(f"{REF}.strategy", f"{text}. Leave it out, it follows the actor's", f"{ACTOR}.strategy")
    roles = [entry for entry in sections(checked) if entry[1].strategy == "megatron"]
    if not roles or find_spec("ostinato.workers.megatron") is None:
        return  # keys of an engine that is not here cannot be checked; a launch is refused
    from ostinato.workers.megatron.config import foreign_settings, layout_problems

    for role, section, ranks in roles:
        for key, text in layout_problems(section.megatron, ranks, **_numbers(checked, role)):
            checked.refuse(f"{role}.megatron.{key}", text, "trainer.n_gpus_per_node", "trainer.nnodes")
        if section.ulysses_sequence_parallel_size > 1:
            key = f"{role}.ulysses_sequence_parallel_size"
            text = f"{section.ulysses_sequence_parallel_size} is of the FSDP engine; set it to 1 and use "
            checked.refuse(key, f"{text}{role}.megatron.context_parallel_size", f"{role}.strategy")
        owner, holder = ("actor_rollout_ref", hybrid) if role in (ACTOR, REF) else (role, section)
        for key, text in foreign_settings(holder.model, getattr(section, "optim", None)):
            checked.refuse(f"{owner if key.startswith('model.') else role}.{key}", text, f"{role}.strategy")
        if role != REF:  # the actor's folder
            _weights(checked, role, f"{owner}.model.path")
    _alike(checked, roles)


def _weights(checked: Checked, role: str, key: str) -> None:
    """The engine reads safetensors alone; a folder without any weights is told of where the run starts."""
    facts = checked.models.get("actor" if role == ACTOR else role)
    if facts is None or facts.weight_format != "bin":
        return
    convert = (
        f"import sys; from transformers import {_model_class(facts)} as Model; "
        "Model.from_pretrained(sys.argv[1], dtype='auto').save_pretrained(sys.argv[1])"
    )
    checked.refuse(
        key,
        f"{facts.folder} has its weights in pytorch_model*.bin alone, and the Megatron engine reads *.safetensors; "
        f'take strategy=fsdp, or write them beside with: python -c "{convert}" {shlex.quote(str(facts.folder))}',
        f"{role}.strategy",
    )


def _model_class(facts: ModelFacts) -> str:
    """The class in transformers that keeps the folder's head; a config may hold anything in its place."""
    named = facts.config.get("architectures")
    name = named[0] if isinstance(named, list) and named else None
    return name if isinstance(name, str) and name.isidentifier() else "AutoModelForCausalLM"


def _alike(checked: Checked, roles: list[tuple[str, Any, int]]) -> None:
    """Megatron-Core has one layout a process."""
    reward = checked.config.reward_model
    shared = [entry for entry in roles if entry[0] != "reward_model" or not reward.enable_resource_pool]
    for role, section, _ in shared[1:]:
        first, sizes = shared[0][0], shared[0][1].megatron.sizes
        for name, size in section.megatron.sizes.items():
            if size != sizes[name]:
                text = f"{size} differs from {first}.megatron.{name}={sizes[name]}, and a process has one layout"
                checked.refuse(f"{role}.megatron.{name}", f"{text}; set them alike", f"{first}.megatron.{name}")


def _numbers(checked: Checked, role: str) -> dict[str, int | None]:
    """The numbers of a role's model that sizes must divide; those that are not known are left out of the checks."""
    model = checked.models.get("actor" if role in (ACTOR, REF) else role)
    if model is None or not model.num_heads:
        return {}
    return {
        "num_heads": model.num_heads,
        "num_kv_heads": model.num_kv_heads or model.num_heads,
        "num_layers": model.config.get("num_hidden_layers"),
        "num_experts": model.config.get("num_experts") or 0,
    }


def missing(config: PpoConfig) -> Iterator[str]:
    """What a launch lacks; an `external_lib` may be the trial on a CPU of workers-megatron's README."""
    used = {config.actor_rollout_ref.actor.strategy}
    used |= {config.critic.strategy} if config.needs_critic else set()
    used |= {config.reward_model.strategy} if config.reward_model.enable else set()
    if "megatron" not in used:
        return
    if not all(_found(name) for name in ("ostinato.workers.megatron", "megatron.core")):
        yield f"strategy=megatron: Megatron-Core is not installed: {how_to_install('megatron')}"
    sections = (config.actor_rollout_ref, config.critic, config.reward_model)
    if config.trainer.device == "cpu" and not any(section.model.external_lib for section in sections):
        yield "strategy=megatron: Megatron-Core trains on GPUs only, and this run is on a CPU; use strategy=fsdp"


def _found(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:  # the package above it
        return False
