"""The checks of a run before anything starts; `preflight_launch` has those where it is about to start.

The static checks need no network and look neither at hardware nor at installed engines, so that a run for a cluster can
be checked on a laptop. They collect every fault; what is allowed but probably not meant is a warning.
"""

from __future__ import annotations

import difflib
import logging
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from ostinato.ppo.config import PpoConfig, sharing_ranks
from ostinato.ppo.errors import ConfigError, Problem
from ostinato.ppo.facts import DataFacts, ModelFacts, TokenizerFacts
from ostinato.workers.core.config import PolicyLossConfig

logger = logging.getLogger(__name__)

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"

ULYSSES = "ulysses_sequence_parallel_size"
SEQUENCE_LOSSES, SEQUENCE_MODE = ("gspo", "geo_mean"), "seq-mean-token-mean"


@dataclass
class Checked:
    """A configuration and what the checks found out about it.

    Attributes:
        config: the configuration; model paths lead to local folders.
        problems: faults; empty where the run may start.
        warnings: what is allowed but probably not meant.
        models: role (`actor`, `critic`, `reward_model`) -> its model.
        tokenizer: the actor's tokenizer.
        train: the training files.
        val: the validation files.
    """

    config: PpoConfig
    problems: list[Problem] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    models: dict[str, ModelFacts] = field(default_factory=dict)
    tokenizer: TokenizerFacts | None = None
    train: list[DataFacts] = field(default_factory=list)
    val: list[DataFacts] = field(default_factory=list)

    def refuse(self, key: str, text: str, *also: str) -> None:
        """Note a fault of `key`, in which the keys `also` have a part."""
        self.problems.append(Problem(key, text, also))

    def warn(self, key: str, text: str) -> None:
        """Note what is allowed but probably not meant."""
        self.warnings.append(f"{key}: {text}")

    @property
    def num_train_prompts(self) -> int:
        """Training prompts, before overlong ones are filtered out."""
        rows, limit = sum(file.num_rows for file in self.train), self.config.data.train_max_samples
        return rows if limit < 0 else min(rows, limit)

    @property
    def estimator(self) -> Callable[..., Any] | None:
        """The advantage estimator, or None where its name is not known."""
        from ostinato.algos import adv_estimators, get_adv_estimator

        name = self.config.algorithm.adv_estimator
        return get_adv_estimator(name) if name in adv_estimators() else None

    @property
    def needs_critic(self) -> bool:
        """As the configuration says; False where the estimator is not known."""
        return self.estimator is not None and self.config.needs_critic


def check(config: PpoConfig) -> Checked:
    """Run the static checks, log warnings, refuse faults.

    Raises:
        ConfigError: all faults at once.
    """
    checked = examine(config)
    if checked.problems:
        raise ConfigError(checked.problems)
    for warning in checked.warnings:
        logger.warning(warning)
    return checked


def examine(config: PpoConfig) -> Checked:
    """Run the static checks; faults and warnings are on the result, nothing is logged or raised."""
    from ostinato.ppo import preflight_files as files
    from ostinato.ppo.preflight_megatron import megatron

    checked = Checked(config)
    for look_at in (_algorithm, _policy_loss, _kl, _correction, _batches, _parallel, _validation):
        look_at(checked)
    for look_at in (files.data, files.models, files.reward_function, files.run_folder):
        look_at(checked)
    for look_at in (_engines, _heads, _lengths, megatron):  # these need the model's own numbers
        look_at(checked)
    files.absolute_paths(checked)
    return checked


def one_of(name: object, known: Iterable[str]) -> str:
    """The text for a name that is not among the known ones, with the nearest."""
    known = list(known)
    near = difflib.get_close_matches(str(name).lower(), known, n=1)
    hint = f" (did you mean {near[0]}?)" if near else ""
    return f"expected one of {', '.join(known)}, got {name!r}{hint}"


def _algorithm(checked: Checked) -> None:
    from ostinato.algos import adv_estimators, keywords
    from ostinato.ppo.sections import OFFERED

    algorithm, n = checked.config.algorithm, checked.config.actor_rollout_ref.rollout.n
    key, name = "algorithm.adv_estimator", algorithm.adv_estimator
    if checked.estimator is None:
        text = "PPO, with a critic, is gae" if name.lower() == "ppo" else one_of(name, adv_estimators())
        checked.refuse(key, text)
        return
    wanted = keywords(checked.estimator)
    if lacking := [word for word, needed in wanted.items() if needed and word not in OFFERED]:
        checked.refuse(key, f"{name} needs {', '.join(lacking)}, which no step gives; there are {', '.join(OFFERED)}")
    if "groups" in wanted and n == 1:
        checked.refuse(
            f"{ROLLOUT}.n",
            f"{key}={name} compares the answers to one prompt with each other, and n=1 gives one answer: every "
            "advantage would be 0. Set n to 2 or more (8 is usual), or take an estimator without groups",
            key,
        )
    if "reward_scores" in wanted:
        keys, weights = algorithm.gdpo_reward_keys, algorithm.gdpo_reward_weights
        if checked.config.reward_model.enable:
            text = f"{name} needs the results of a reward function, and reward_model.enable=True gives one score a row"
            checked.refuse(key, text, "reward_model.enable")
        if not keys:
            checked.refuse("algorithm.gdpo_reward_keys", f"{key}={name} needs the reward function's result keys", key)
        if weights and len(weights) != len(keys):
            checked.refuse(
                "algorithm.gdpo_reward_weights",
                f"expected one weight a key or none, got {len(weights)} weights for {len(keys)} keys",
                "algorithm.gdpo_reward_keys",
            )


def _policy_loss(checked: Checked) -> None:
    from ostinato.algos import policy_losses

    actor = checked.config.actor_rollout_ref.actor
    loss = actor.policy_loss
    if loss.loss_mode not in policy_losses():
        text = "PPO's clipped loss is vanilla" if loss.loss_mode.lower() == "ppo" else None
        checked.refuse(f"{ACTOR}.policy_loss.loss_mode", text or one_of(loss.loss_mode, policy_losses()))
        return
    if loss != PolicyLossConfig():  # the default has all it needs; what tells of the others imports tensordict
        _loss_arguments(checked)
    if loss.loss_mode in SEQUENCE_LOSSES and actor.loss_agg_mode != SEQUENCE_MODE:
        checked.warn(
            f"{ACTOR}.loss_agg_mode",
            f"{loss.loss_mode} is defined on sequences, which {SEQUENCE_MODE} weighs alike; {actor.loss_agg_mode} does "
            "not",
        )


def _loss_arguments(checked: Checked) -> None:
    """Try what the policy loss and its token selector are called with: the same code reads it in the run."""
    from ostinato.algos import get_policy_loss, get_token_selector
    from ostinato.workers.core.errors import ConfigError as WorkerConfigError
    from ostinato.workers.core.losses import policy_loss_arguments

    actor = checked.config.actor_rollout_ref.actor
    mode = actor.policy_loss.loss_mode
    try:
        policy_loss_arguments(get_policy_loss(mode), get_token_selector(mode), actor)
    except WorkerConfigError as error:
        name, _, text = str(error).partition(": ")
        checked.refuse(name, text)


def _kl(checked: Checked) -> None:
    from ostinato.algos.kl import KL_KINDS

    algorithm, actor = checked.config.algorithm, checked.config.actor_rollout_ref.actor
    kinds = [kind for kind in KL_KINDS if kind != "full"]
    if algorithm.kl_penalty == "full":
        checked.refuse(
            "algorithm.kl_penalty", "full needs both models' logits; here are log-probabilities of sampled tokens"
        )
    elif algorithm.kl_penalty not in kinds:
        checked.refuse("algorithm.kl_penalty", one_of(algorithm.kl_penalty, kinds))
    if algorithm.use_kl_in_reward and actor.use_kl_loss:
        checked.warn(
            "algorithm.use_kl_in_reward",
            f"BOTH KL TERMS ARE ON: algorithm.use_kl_in_reward=True subtracts KL from the reward "
            f"(kl_coef={algorithm.kl_ctrl.kl_coef}) and {ACTOR}.use_kl_loss=True adds it to the loss "
            f"(kl_loss_coef={actor.kl_loss_coef}), so it counts twice. Switch one of them off unless you mean it",
        )


def _correction(checked: Checked) -> None:
    """Try the correction on one token: its names and thresholds are read by the same code as in the run."""
    import torch

    from ostinato.algos import rollout_correction
    from ostinato.algos.errors import AlgosError
    from ostinato.ppo.schema import to_mapping

    token = torch.zeros(1, 1)
    settings = to_mapping(checked.config.algorithm.rollout_correction)
    try:
        rollout_correction(token, token, torch.ones(1, 1), **settings)
    except AlgosError as error:
        name, colon, text = str(error).partition(": ")
        key = f".{name}" if colon and name in settings else ""
        checked.refuse(f"algorithm.rollout_correction{key}", text if key else str(error))


def _roles(checked: Checked) -> Iterator[tuple[str, int, int]]:
    """The trained roles, their mini-batch sizes in prompts, and how many ranks share a row."""
    config = checked.config
    actor = config.actor_rollout_ref.actor
    yield ACTOR, actor.ppo_mini_batch_size, sharing_ranks(actor)
    if checked.needs_critic:
        yield "critic", config.critic_mini_batch_size, sharing_ranks(config.critic)


def _batches(checked: Checked) -> None:
    config = checked.config
    prompts, n = config.data.train_batch_size, config.actor_rollout_ref.rollout.n
    for role, asked, shared in _roles(checked):
        key, mini, ranks = f"{role}.ppo_mini_batch_size", min(asked, prompts), max(config.world_size // shared, 1)
        if asked > prompts:
            checked.warn(
                key,
                f"{asked} prompts are more than data.train_batch_size={prompts} prompts; clamped to {prompts}: one "
                "update a step",
            )
        if mini * n < ranks:
            checked.refuse(
                key,
                f"{mini} prompts × {ROLLOUT}.n={n} = {mini * n} rows a mini-batch; {mini * n} rows // {ranks} ranks "
                f"(trainer.n_gpus_per_node={config.trainer.n_gpus_per_node} × trainer.nnodes={config.trainer.nnodes}"
                + (f" ÷ {shared} that share each row" if shared > 1 else "")
                + ") "
                f"= 0 rows a rank. Set it to {math.ceil(ranks / n)} or more"
                + (", and data.train_batch_size with it" if asked > prompts or prompts * n < ranks else ""),
                "data.train_batch_size",
                f"{ROLLOUT}.n",
                "trainer.n_gpus_per_node",
            )
        elif prompts % mini:
            updates = prompts // mini
            checked.warn(
                key,
                f"data.train_batch_size={prompts} prompts are no multiple of {mini} prompts: {prompts} // {mini} = "
                f"{updates} updates of about {prompts / updates:.1f} prompts each",
            )


def sections(checked: Checked) -> Iterator[tuple[str, Any, int]]:
    """Every role with an engine: its dotted name, section, and number of ranks."""
    config, world = checked.config, checked.config.world_size
    yield ACTOR, config.actor_rollout_ref.actor, world
    if config.needs_reference:
        yield "actor_rollout_ref.ref", config.actor_rollout_ref.ref, world
    if checked.needs_critic:
        yield "critic", config.critic, world
    reward = config.reward_model
    if reward.enable:
        own = reward.n_gpus_per_node * reward.nnodes if reward.enable_resource_pool else world
        yield "reward_model", reward, own


def _ranks(config: PpoConfig) -> str:
    per_node, nodes = config.trainer.n_gpus_per_node, config.trainer.nnodes
    return f"trainer.n_gpus_per_node={per_node} × trainer.nnodes={nodes} = {config.world_size} ranks"


def _parallel(checked: Checked) -> None:
    config = checked.config
    world, trainer, shape = config.world_size, config.trainer, _ranks(config)
    reward = config.reward_model
    for role, section, ranks in sections(checked):
        size, shared = section.fsdp_config.fsdp_size, section.ulysses_sequence_parallel_size
        if size > 0 and ranks % size:
            checked.refuse(f"{role}.fsdp_config.fsdp_size", f"{size} does not divide {ranks} ranks")
        if ranks % shared:
            checked.refuse(f"{role}.{ULYSSES}", f"{shared} does not divide {ranks} ranks", "trainer.n_gpus_per_node")
    if trainer.backend == "local" and (world > 1 or (reward.enable and reward.enable_resource_pool)):
        checked.refuse(
            "trainer.backend",
            f"local runs everything in one process, and {shape}{' plus a pool of its own' if world == 1 else ''} were "
            "asked for. Use trainer.backend=ray",
            "trainer.n_gpus_per_node",
        )


def _validation(checked: Checked) -> None:
    trainer = checked.config.trainer
    asking = ["val_before_train"] if trainer.val_before_train else []
    asking += ["test_freq"] if trainer.test_freq > 0 else []
    if asking and not checked.config.data.val_files:
        checked.refuse("data.val_files", f"no file is given, and trainer.{asking[0]} asks for validation")


def _engines(checked: Checked) -> None:
    config, actor, key = checked.config, checked.models.get("actor"), f"{ROLLOUT}.tensor_model_parallel_size"
    world, tp = config.world_size, config.actor_rollout_ref.rollout.tensor_model_parallel_size
    fitting = [n for n in range(1, min(tp, world) + 1) if world % n == 0 and (actor is None or _fits_heads(actor, n))]
    if tp > 1 and config.actor_rollout_ref.rollout.name == "hf":
        text = f"the hf engine runs on one rank, got {tp}; set it to 1, or take vllm or sglang"
        checked.refuse(key, text, f"{ROLLOUT}.name")
    elif tp not in fitting:
        reason = f"does not divide the ranks: {_ranks(config)}" if world % tp or actor is None else _misfit(actor)
        text = f"{tp} {reason}; {', '.join(map(str, fitting))} would"
        checked.refuse(key, text, "trainer.n_gpus_per_node", "trainer.nnodes")
    elif config.trainer.n_gpus_per_node % tp:
        per_node = config.trainer.n_gpus_per_node
        checked.warn(key, f"an engine of {tp} ranks spans nodes ({per_node} a node), which is slow")


def _heads(checked: Checked) -> None:
    for role, section, _ in sections(checked):
        model = checked.models.get("actor" if role.startswith("actor_rollout_ref") else role)
        size = section.ulysses_sequence_parallel_size
        if model is not None and not _fits_heads(model, size):
            fitting = [str(n) for n in range(1, (model.num_heads or 1) + 1) if _fits_heads(model, n)]
            checked.refuse(f"{role}.{ULYSSES}", f"{size} {_misfit(model)}; {', '.join(fitting)} would")


def _fits_heads(model: ModelFacts, ranks: int) -> bool:
    """Whether a model's attention can be spread over so many ranks, as far as its heads are known."""
    heads, kv_heads = model.num_heads or ranks, model.num_kv_heads or model.num_heads or ranks
    return heads % ranks == 0 and (kv_heads % ranks == 0 or ranks % kv_heads == 0)


def _misfit(model: ModelFacts) -> str:
    kv_heads = model.num_kv_heads or model.num_heads
    return f"does not fit the {model.num_heads} attention heads and {kv_heads} key/value heads of {model.folder}"


def _lengths(checked: Checked) -> None:
    config = checked.config
    data, rollout = config.data, config.actor_rollout_ref.rollout
    total = data.max_prompt_length + data.max_response_length
    prompt, response = data.max_prompt_length, data.max_response_length
    text = f"data.max_prompt_length={prompt} + data.max_response_length={response} = {total}"
    for width, source in (("prompt_length", "max_prompt_length"), ("response_length", "max_response_length")):
        if getattr(rollout, width) != getattr(data, source):
            differs = f"{getattr(rollout, width)} differs from data.{source}={getattr(data, source)}"
            checked.refuse(f"{ROLLOUT}.{width}", f"{differs}; leave it out, it follows that", f"data.{source}")
    for role, model in checked.models.items():
        most = model.max_positions
        if most is not None and total > most:
            works = f"{most - prompt} works" if prompt < most else f"prompts of {most - 1} leave room for one"
            checked.refuse(
                "data.max_response_length",
                f"{text} tokens, but the {role}'s model {model.folder} has {most} positions; {works}",
                "data.max_prompt_length",
            )
        if role == "actor" and most is not None and (longest := rollout.max_model_len or 0) > most:
            beyond = f"{longest} tokens are more than the {most} positions of {model.folder}"
            checked.refuse(f"{ROLLOUT}.max_model_len", f"{beyond}; {most} works, and null is {total}")
    if rollout.max_model_len is not None and rollout.max_model_len < total:
        checked.warn(f"{ROLLOUT}.max_model_len", f"{rollout.max_model_len} tokens cut responses short: {text}")
    budget = config.actor_rollout_ref.actor.update_limit.max_tokens
    if budget is not None and budget < total:
        checked.warn(
            f"{ACTOR}.ppo_max_token_len_per_gpu", f"{budget} tokens are less than one full row ({text}); it runs alone"
        )
