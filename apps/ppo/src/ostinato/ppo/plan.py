"""The plan of a run in a few lines: what a step is, who runs where, what it should need, where its results go."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ostinato.ppo.config import PpoConfig, sharing_ranks
from ostinato.ppo.facts import ModelFacts
from ostinato.ppo.preflight import Checked
from ostinato.ppo.run_folder import newest_for
from ostinato.workers.core.config import ModelConfig


@dataclass(frozen=True)
class UpdatePlan:
    """One trained role's share of a step.

    Attributes:
        updates: optimizer steps of one pass over the step's rows.
        passes: passes over the rows (`ppo_epochs`).
        prompts: prompts of one update.
        rows: responses of one update, `prompts × rollout.n`.
        rows_per_rank: of these, on one rank, or on the ranks that share them; the larger number where they do
            not divide.
        micro_batches: micro-batches of one update on one rank; None where a token budget decides.
        token_budget: that budget, or None.
    """

    updates: int
    passes: int
    prompts: int
    rows: int
    rows_per_rank: int
    micro_batches: int | None
    token_budget: int | None


def update_plan(config: PpoConfig, role: str) -> UpdatePlan:
    """Work out the batch arithmetic of `actor` or `critic`: prompts are divided by prompts, rows by ranks.

    Args:
        config: the run.
        role: `actor` or `critic`.
    """
    section: Any = config.actor_rollout_ref.actor if role == "actor" else config.critic
    prompts = math.ceil(config.data.train_batch_size / section.num_mini_batches)
    rows = prompts * config.actor_rollout_ref.rollout.n
    per_rank = math.ceil(rows * sharing_ranks(section) / config.world_size)
    limit = section.update_limit
    micro = math.ceil(per_rank / limit.micro_batch_size) if limit.micro_batch_size else None
    return UpdatePlan(section.num_mini_batches, section.ppo_epochs, prompts, rows, per_rank, micro, limit.max_tokens)


@dataclass(frozen=True)
class MemoryPlan:
    """What one rank needs for a model that does not change with the batch, in bytes.

    Attributes:
        role: whose.
        weights: this rank's shard of the master weights (the whole copy of a rollout engine).
        gradients: its shard of the gradients.
        optimizer: its shard of Adam's two moments.
        offloaded: what of it lies in host memory while others have their turn.
    """

    role: str
    weights: float
    gradients: float = 0.0
    optimizer: float = 0.0
    offloaded: str = ""

    @property
    def total(self) -> float:
        """All of it."""
        return self.weights + self.gradients + self.optimizer


def memory_plan(checked: Checked) -> list[MemoryPlan]:
    """Estimate the steady memory a rank of every model: parameters × bytes ÷ ranks that share them.

    Activations, gathered layers and the KV cache come on top; a model whose size is not known is left out.
    """
    config, models = checked.config, checked.models
    hybrid, actor = config.actor_rollout_ref, models.get("actor")
    plans = [
        _trained("actor", hybrid.actor, hybrid.model, actor, config.world_size),
        # With an adapter the reference is the actor's own model.
        _frozen(
            "reference",
            hybrid.ref,
            actor if config.needs_reference and not hybrid.model.lora_rank else None,
            config.world_size,
        ),
        _engine(config, actor),
        _trained("critic", config.critic, config.critic.model, models.get("critic"), config.world_size),
    ]
    reward = config.reward_model
    own = reward.n_gpus_per_node * reward.nnodes if reward.enable_resource_pool else config.world_size
    plans.append(_frozen("reward model", reward, models.get("reward_model"), own))
    return [plan for plan in plans if plan is not None]


def _shard(section: Any, model: ModelFacts | None, ranks: int) -> float | None:
    """Parameters of one rank; None where they are not known, or the engine's wheel and so its sizes are missing."""
    if model is None or model.num_parameters is None:
        return None
    if section.strategy == "megatron":
        if isinstance(section.megatron, Mapping):
            return None
        return model.num_parameters / (
            section.megatron.tensor_model_parallel_size * section.megatron.pipeline_model_parallel_size
        )
    size = section.fsdp_config.fsdp_size
    return model.num_parameters / (size if size > 0 else ranks)


def _trained(role: str, section: Any, settings: ModelConfig, model: ModelFacts | None, ranks: int) -> MemoryPlan | None:
    """Gradients and optimizer state are those of all weights; an adapter's are too small to plan for."""
    layout, count = section.fsdp_config, _shard(section, model, ranks)
    if count is None:
        return None
    if settings.lora_rank:
        return _frozen(role, section, model, ranks)
    if section.strategy == "megatron":
        return _megatron(role, section.megatron, count, ranks)
    width, away = layout.master_dtype.itemsize, []
    away += ["weights"] if layout.param_offload or layout.offload_policy else []
    away += ["optimizer"] if layout.optimizer_offload or layout.offload_policy else []
    return MemoryPlan(role, count * width, count * width, 2 * count * width, " and ".join(away))


def _megatron(role: str, layout: Any, count: float, ranks: int) -> MemoryPlan:
    """Weights in the products' type, gradients in float32; moments and the optimizer's own weights may be dealt out."""
    full = layout.dtype == "fp32"
    copies = layout.tensor_model_parallel_size * layout.pipeline_model_parallel_size
    dealt = ranks / copies if layout.use_distributed_optimizer else 1
    away = [name for name, flag in (("weights", layout.param_offload), ("optimizer", layout.optimizer_offload)) if flag]
    own = 8 if full else 12
    return MemoryPlan(role, count * (4 if full else 2), count * 4, own * count / dealt, " and ".join(away))


def _frozen(role: str, section: Any, model: ModelFacts | None, ranks: int) -> MemoryPlan | None:
    layout, count = section.fsdp_config, _shard(section, model, ranks)
    if count is None:
        return None
    if section.strategy == "megatron":
        away = "weights" if section.megatron.param_offload else ""
        return MemoryPlan(role, count * (4 if section.megatron.dtype == "fp32" else 2), offloaded=away)
    away = "weights" if layout.param_offload or layout.offload_policy else ""
    return MemoryPlan(role, count * layout.master_dtype.itemsize, offloaded=away)


def _engine(config: PpoConfig, model: ModelFacts | None) -> MemoryPlan | None:
    if model is None or model.num_parameters is None:
        return None
    rollout = config.actor_rollout_ref.rollout
    copy = model.num_parameters * rollout.torch_dtype.itemsize / rollout.tensor_model_parallel_size
    return MemoryPlan(f"rollout ({rollout.name})", copy, offloaded="weights" if rollout.free_cache_engine else "")


def plan_text(checked: Checked) -> str:
    """The whole plan as text, one heading a line."""
    entries = [*_what(checked), *_step(checked), *_where(checked), *_memory(checked), *_output(checked)]
    lines, last = [], ""
    for heading, text in entries:
        lines.append(f"  {'' if heading == last else heading:<11} {text}")
        last = heading
    return "plan\n" + "\n".join(lines) + "\n"


def _what(checked: Checked) -> Iterator[tuple[str, str]]:
    config, policy = checked.config, checked.models["actor"]
    estimator = config.algorithm.adv_estimator
    yield "run", f"{estimator}, {config.actor_rollout_ref.actor.policy_loss.loss_mode} policy loss"
    rank = config.actor_rollout_ref.model.lora_rank
    size = f"{_count(policy.num_parameters)} parameters" + (f", adapters of rank {rank}" if rank else "")
    yield "policy", f"{policy.architecture}, {size}, {policy.folder}"
    if checked.needs_critic:
        critic = checked.models["critic"]
        yield "critic", f"{critic.architecture}, {_count(critic.num_parameters)} parameters, {critic.folder}"
    else:
        yield "critic", f"none: {estimator} learns no value function"
    yield "reference", _reference(config)
    yield "reward", _reward(checked)


def _reference(config: PpoConfig) -> str:
    actor, algorithm = config.actor_rollout_ref.actor, config.algorithm
    terms = []
    if actor.use_kl_loss:
        terms.append(f"KL in the loss ({actor.kl_loss_type} × {actor.kl_loss_coef})")
    if algorithm.use_kl_in_reward:
        terms.append(f"KL in the reward ({algorithm.kl_penalty} × {algorithm.kl_ctrl.kl_coef})")
    return "the initial policy; " + " and ".join(terms) if terms else "none: no KL term is on"


def _reward(checked: Checked) -> str:
    config = checked.config
    if config.reward_model.enable:
        return f"reward model {checked.models['reward_model'].folder}"
    own, manager = config.custom_reward_function, config.reward_manager
    function = f"{own.name} of {own.path}" if own.path else "the built-in function of each row's data_source"
    if manager.name == "dapo":
        buffer = manager.overlong_buffer
        return f"{function}, less up to {buffer.penalty_factor:g} over the last {buffer.len} tokens of a response"
    return function if manager.name == "naive" else f"{function}, by the {manager.name} manager"


def _step(checked: Checked) -> Iterator[tuple[str, str]]:
    config, prompts = checked.config, checked.num_train_prompts
    batch, n = config.data.train_batch_size, config.actor_rollout_ref.rollout.n
    val = sum(facts.num_rows for facts in checked.val)
    yield (
        "data",
        f"{prompts} training prompts, {val or 'no'} validation prompts; up to {config.data.max_prompt_length} prompt + "
        f"{config.data.max_response_length} response tokens",
    )
    yield (
        "step",
        f"{batch} prompts × n {n} = {config.rows_per_step} responses; "
        f"{math.ceil(config.rows_per_step / config.world_size)} a rank",
    )
    for role in ("actor", "critic") if checked.needs_critic else ("actor",):
        yield f"{role} step", _update_text(update_plan(config, role))
    total, limit = config.total_steps(prompts), config.trainer.total_training_steps
    epoch = f"{_many(config.steps_per_epoch(prompts), 'step')} an epoch ({prompts} // {batch})"
    epochs = f"{epoch} × {_many(config.trainer.total_epochs, 'epoch')}"
    planned = epochs if limit is None else f"trainer.total_training_steps={limit}"
    passes = "" if limit is None else f", {total / max(config.steps_per_epoch(prompts), 1):.3g} passes over the data"
    actor = update_plan(config, "actor")
    yield (
        "length",
        f"{planned} = {_many(total, 'step')}, {_many(total * actor.updates * actor.passes, 'update')} of the actor"
        + passes,
    )


def _update_text(plan: UpdatePlan) -> str:
    micro = (
        f"micro-batches up to {plan.token_budget} tokens"
        if plan.micro_batches is None
        else _many(plan.micro_batches, "micro-batch", "micro-batches")
    )
    passes = f"{plan.passes} passes × " if plan.passes > 1 else ""
    updates = f"{passes}{_many(plan.updates, 'update')} of {_many(plan.prompts, 'prompt')} = {plan.rows} responses"
    return f"{updates}; {plan.rows_per_rank} a rank in {micro}"


def _where(checked: Checked) -> Iterator[tuple[str, str]]:
    config, trainer = checked.config, checked.config.trainer
    rollout = config.actor_rollout_ref.rollout
    tp = rollout.tensor_model_parallel_size
    roles = ["actor", f"rollout ({rollout.name})"]
    roles += ["reference"] if config.needs_reference else []
    roles += ["critic"] if checked.needs_critic else []
    reward = config.reward_model
    roles += ["reward model"] if reward.enable and not reward.enable_resource_pool else []
    ranks = f"{_many(trainer.nnodes, 'node')} × {_many(trainer.n_gpus_per_node, 'process', 'processes')}"
    yield "where", f"{ranks}, device {trainer.device}, backend {trainer.backend}"
    yield "where", f"on all of them in turns: {', '.join(roles)}"
    yield "where", f"{_many(config.world_size // tp, 'rollout engine')} of {_many(tp, 'rank')}"
    if reward.enable and reward.enable_resource_pool:
        yield "where", f"on a pool of its own, {reward.nnodes} × {reward.n_gpus_per_node} processes: reward model"


def _memory(checked: Checked) -> Iterator[tuple[str, str]]:
    plans = memory_plan(checked)
    if not plans:
        yield "memory", "not estimated: the model's size is not known"
        return
    for plan in plans:
        parts = [f"weights {_size(plan.weights)}"]
        if plan.optimizer:
            parts += [f"gradients {_size(plan.gradients)}", f"optimizer {_size(plan.optimizer)}"]
        away = f"; {plan.offloaded} leave the device between turns" if plan.offloaded else ""
        yield "memory", f"{plan.role}: {_size(plan.total)} a rank ({', '.join(parts)}){away}"
    rollout = checked.config.actor_rollout_ref.rollout
    cache = (
        "the samples' KV cache, as long as they are drawn"
        if rollout.name == "hf"
        else f"the engine's KV cache, within {rollout.gpu_memory_utilization:.0%} of a GPU in all"
    )
    yield "memory", f"on top: activations and gathered layers; {cache}"


def _output(checked: Checked) -> Iterator[tuple[str, str]]:
    trainer = checked.config.trainer
    folder, resume = Path(trainer.default_local_dir), trainer.resume_mode
    saves, tests = _every(trainer.save_freq), _every(trainer.test_freq)
    yield "output", f"{folder}; metrics to {', '.join(trainer.logger)}"
    before = ", and before the first step" if trainer.val_before_train else ""
    if resume == "resume_path":
        resume = f"from {trainer.resume_from_path}"
    elif resume == "auto" and (found := newest_for(folder, checked.config.trained_roles, warn=False)):
        resume = f"auto, from {found.name}"
    yield "output", f"checkpoint {saves}; validation {tests}{before}; resume {resume}"


def _every(steps: int) -> str:
    if steps <= 0:
        return "never"
    return "every step" if steps == 1 else f"every {steps} steps"


def _many(number: int, one: str, more: str = "") -> str:
    return f"{number} {one if number == 1 else more or one + 's'}"


def _count(number: int | None) -> str:
    if number is None:
        return "an unknown number of"
    for unit, name in ((1e9, "B"), (1e6, "M"), (1e3, "K")):
        if number >= unit:
            return f"{number / unit:.3g}{name}"
    return str(number)


def _size(number: float) -> str:
    for unit, name in ((2**30, "GiB"), (2**20, "MiB")):
        if number >= unit:
            return f"{number / unit:.3g} {name}"
    return f"{number / 2**10:.3g} KiB"
