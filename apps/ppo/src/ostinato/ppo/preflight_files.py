"""The static checks that look at files: data, models, the reward function, the run folder."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ostinato.ppo.facts import DataFacts, ModelFacts, Unreadable, model_folder, read_data, read_model, read_tokenizer
from ostinato.ppo.run_folder import MARKER, complete_steps, model_fingerprint
from ostinato.ppo.sections import CustomRewardConfig, RewardManagerConfig

if TYPE_CHECKING:
    from ostinato.ppo.preflight import Checked
    from ostinato.workers.core.config import ModelConfig


def data(checked: Checked) -> None:
    """Data files: there, parquet, with the columns, not empty, and enough for one step."""
    section = checked.config.data
    if not section.train_files:
        checked.refuse("data.train_files", "not set; give a parquet file, data.train_files=FILE, or a list [a,b]")
    checked.train = _read_files(checked, "data.train_files", section.train_files)
    checked.val = _read_files(checked, "data.val_files", section.val_files)
    prompts, batch = checked.num_train_prompts, section.train_batch_size
    if len(checked.train) == len(section.train_files) and 0 < prompts < batch:
        checked.refuse(
            "data.train_batch_size",
            f"{prompts} prompts in data.train_files // {batch} prompts a step = 0 steps an epoch; set it to "
            f"{prompts} or less",
            "data.train_files",
            "data.train_max_samples",
        )


def _read_files(checked: Checked, key: str, paths: list[str]) -> list[DataFacts]:
    found = []
    for path in paths:
        try:
            facts = read_data(path, checked.config.data.prompt_key)
        except Unreadable as error:
            checked.refuse(key, str(error))
            continue
        if _usable(checked, key, path, facts):
            found.append(facts)
    return found


def _usable(checked: Checked, key: str, path: str, facts: DataFacts) -> bool:
    """Note what a file lacks; True where it lacks nothing."""
    before, config = len(checked.problems), checked.config
    has = f"it has {', '.join(facts.columns)}"
    if facts.num_rows == 0:
        checked.refuse(key, f"{path} has no rows")
    if facts.prompt_kind == "missing":
        checked.refuse("data.prompt_key", f"{path} has no column {config.data.prompt_key!r}; {has}", key)
    elif facts.prompt_kind == "other":
        checked.refuse(
            "data.prompt_key",
            f"column {config.data.prompt_key!r} of {path} holds neither chat messages (role, content) nor text",
            key,
        )
    if config.reward_model.enable:
        return len(checked.problems) == before
    if "reward_model" not in facts.columns:
        checked.refuse(key, f"{path} has no column 'reward_model' (a mapping with 'ground_truth'); {has}")
    elif not facts.has_ground_truth:
        checked.refuse(key, f"column 'reward_model' of {path} holds no mappings with 'ground_truth', the right answer")
    if "data_source" not in facts.columns:
        checked.refuse(key, f"{path} has no column 'data_source', which chooses the reward function; {has}")
    elif config.custom_reward_function.path is None:
        _known_sources(checked, key, path, facts)
    return len(checked.problems) == before


def absolute_paths(checked: Checked) -> None:
    """Make every path of `checked.config` absolute: the loop may run in another process than this one."""
    config = checked.config
    data, trainer, reward = config.data, config.trainer, config.custom_reward_function
    files = {name: [os.path.abspath(path) for path in getattr(data, name)] for name in ("train_files", "val_files")}
    names = ("default_local_dir", "resume_from_path", "rollout_data_dir", "validation_data_dir")
    folders = {name: getattr(trainer, name) and os.path.abspath(getattr(trainer, name)) for name in names}
    checked.config = replace(
        config,
        data=replace(data, **files),
        trainer=replace(trainer, **folders),
        custom_reward_function=replace(reward, path=reward.path and os.path.abspath(reward.path)),
    )


def _known_sources(checked: Checked, key: str, path: str, facts: DataFacts) -> None:
    from ostinato.ppo.rewards import known_data_sources

    unknown = [source for source in facts.data_sources if source not in known_data_sources()]
    if unknown:
        checked.refuse(
            key,
            f"{path} has rows of data_source {unknown[0]!r}, for which there is no reward function; known: "
            f"{', '.join(known_data_sources())}. Give your own as custom_reward_function.path",
            "custom_reward_function.path",
        )


def models(checked: Checked) -> None:
    """Model folders, the actor's tokenizer, and paths that lead to them; resolves `checked.config`'s model paths."""
    config = checked.config
    hybrid, critic, reward = config.actor_rollout_ref, config.critic, config.reward_model
    policy = _model(checked, "actor", "actor_rollout_ref.model", hybrid.model)
    if policy is not None:
        _tokenizer(checked, policy)
        hybrid = replace(hybrid, model=policy)
    if checked.needs_critic and (model := _model(checked, "critic", "critic.model", critic.model)):
        critic = replace(critic, model=model)
        _vocabulary(checked, "critic.model", model, policy)
    if reward.enable and (model := _model(checked, "reward_model", "reward_model.model", reward.model)):
        reward = replace(reward, model=model)
        _vocabulary(checked, "reward_model.model", model, policy)
    checked.config = replace(config, actor_rollout_ref=hybrid, critic=critic, reward_model=reward)


def _model(checked: Checked, role: str, key: str, model: ModelConfig) -> ModelConfig | None:
    """A role's model with local paths, or None where there is a fault."""
    if not model.path:
        checked.refuse(f"{key}.path", "not set; give a Hugging Face model folder, or the name of a cached model")
        return None
    if any(problem.key == "actor_rollout_ref.model.path" for problem in checked.problems) and (
        model.path == checked.config.actor_rollout_ref.model.path
    ):
        return None  # the same folder's fault is told once
    try:
        facts = read_model(model.path, model.override_config)
        tokenizer = str(model_folder(model.tokenizer_path)) if model.tokenizer_path else None
    except Unreadable as error:
        checked.refuse(f"{key}.path", str(error))
        return None
    _weights(checked, f"{key}.path", facts)
    checked.models[role] = facts
    return replace(model, path=str(facts.folder), tokenizer_path=tokenizer)


def _weights(checked: Checked, key: str, facts: ModelFacts) -> None:
    if not facts.has_weights:
        checked.warn(key, f"{facts.folder} has no weight files, and a run needs them")


def _vocabulary(checked: Checked, key: str, model: ModelConfig, policy: ModelConfig | None) -> None:
    """A model that reads the policy's token ids has the policy's vocabulary."""
    if policy is None or checked.tokenizer is None:
        return
    own, theirs = Path(model.resolved_tokenizer_path), Path(policy.resolved_tokenizer_path)
    if _same_file(own / "tokenizer.json", theirs / "tokenizer.json"):
        return
    from ostinato.workers.core.errors import ModelMismatchError
    from ostinato.workers.core.factory import check_vocabulary

    try:
        read_tokenizer(str(own))
        check_vocabulary(model, str(theirs), key)
    except (Unreadable, ModelMismatchError) as error:
        checked.refuse(f"{key}.path", str(error).removeprefix(f"{key}.path: "))
    except Exception as error:  # a tokenizer's own code may raise anything
        checked.refuse(f"{key}.path", f"its vocabulary cannot be compared with the policy's: {error}")


def _same_file(one: Path, other: Path) -> bool:
    return one == other or (one.is_file() and other.is_file() and one.read_bytes() == other.read_bytes())


def _tokenizer(checked: Checked, model: ModelConfig) -> None:
    key = "actor_rollout_ref.model." + ("tokenizer_path" if model.tokenizer_path else "path")
    try:
        tokenizer = read_tokenizer(model.resolved_tokenizer_path)
    except Unreadable as error:
        checked.refuse(key, str(error))
        return
    checked.tokenizer = tokenizer
    chats = [facts for facts in (*checked.train, *checked.val) if facts.prompt_kind == "chat"]
    if chats and not tokenizer.has_chat_template:
        checked.refuse(
            key,
            f"column {checked.config.data.prompt_key!r} of the data holds chat messages, but the tokenizer of "
            f"{model.resolved_tokenizer_path} has no chat template (a base model?). Take the instruct model, give a "
            "tokenizer that has one (actor_rollout_ref.model.tokenizer_path), or prepare the prompts as plain text",
            "data.prompt_key",
        )
    if tokenizer.pad_token is None and tokenizer.eos_token is None:
        checked.refuse(
            key, f"the tokenizer of {model.resolved_tokenizer_path} has neither a pad_token nor an eos_token"
        )
    elif tokenizer.pad_token is None:
        checked.warn(key, f"no pad_token; padding uses the eos_token {tokenizer.eos_token!r} (masks come from lengths)")


def reward_function(checked: Checked) -> None:
    """The user's reward function: the file is there, imports, has the function, and it can be called as it will be."""
    from ostinato.ppo.rewards.custom import check_source, load_function
    from ostinato.ppo.rewards.errors import ScorerError
    from ostinato.ppo.rewards.recipe import Recipe

    section = checked.config.custom_reward_function
    key, whole = "custom_reward_function.path", checked.config.reward_manager.name == "batch"
    _reward_manager(checked)
    try:
        if section.path is None:
            if section.name != CustomRewardConfig.name:
                checked.warn(f"{_REWARD}.name", f"{section.name} has no effect without {_REWARD}.path, its file")
            Recipe(kwargs=section.reward_kwargs).check()
            return
        check_source(section.path, section.name)
        load_function(section.path, section.name, section.reward_kwargs, whole=whole)
    except ScorerError as error:
        text = str(error)
        named = next(
            (name for name in ("path", "name", "reward_kwargs") if text.startswith(f"{_REWARD}.{name}: ")), None
        )
        checked.refuse(f"{_REWARD}.{named}" if named else key, text.partition(": ")[2])
    except Exception as error:  # the user's file may raise anything when it is imported
        checked.refuse(key, f"{section.path} cannot be imported: {type(error).__name__}: {error}")


_REWARD = "custom_reward_function"


def _reward_manager(checked: Checked) -> None:
    """The manager is known, and has what it needs; the default needs nothing, and no import of what it scores with."""
    config = checked.config
    manager, key, limit = config.reward_manager, "reward_manager.name", config.data.max_response_length
    if manager.name == RewardManagerConfig.name:
        return
    from ostinato.ppo.preflight import one_of
    from ostinato.ppo.rewards import reward_managers

    if manager.name not in reward_managers():
        checked.refuse(key, one_of(manager.name, reward_managers()))
    elif config.reward_model.enable:
        checked.warn(key, f"{manager.name} has no effect with reward_model.enable=True")
    elif manager.name == "batch" and config.custom_reward_function.path is None:
        checked.refuse(
            f"{_REWARD}.path", f"not set, and {key}=batch calls your own function; the built-in ones score rows", key
        )
    elif manager.name == "dapo" and not 1 <= manager.overlong_buffer.len <= limit:
        checked.refuse(
            "reward_manager.overlong_buffer.len",
            f"{key}=dapo needs 1 to data.max_response_length={limit} tokens, got {manager.overlong_buffer.len}",
            "data.max_response_length",
        )


def run_folder(checked: Checked) -> None:
    """Loggers known, the checkpoint to resume from there, the run folder not another model's."""
    from ostinato.ppo.loggers import LOGGERS

    trainer = checked.config.trainer
    for name in trainer.logger:
        if name not in LOGGERS:
            checked.refuse("trainer.logger", f"expected some of {', '.join(LOGGERS)}, got {name!r}")
    folder, actor = Path(trainer.default_local_dir), checked.models.get("actor")
    if trainer.resume_mode == "resume_path":
        _resume_path(checked, trainer.resume_from_path)
    elif trainer.resume_from_path is not None:
        checked.warn("trainer.resume_from_path", f"has no effect with trainer.resume_mode={trainer.resume_mode}")
    if folder.exists() and not folder.is_dir():
        checked.refuse("trainer.default_local_dir", f"{folder} is a file")
    elif (folder / "run.json").exists() and actor is not None:
        _same_model(checked, folder, actor)
    if trainer.resume_mode == "disable" and (steps := complete_steps(folder)):
        checked.warn(
            "trainer.resume_mode",
            f"disable starts from step 1 in a folder that holds a checkpoint of step {steps[-1]} already, {folder}; a "
            "later run that resumes takes the highest number, whichever run wrote it",
        )


def _resume_path(checked: Checked, path: str | None) -> None:
    key = "trainer.resume_from_path"
    if not path:
        checked.refuse(key, "not set, and trainer.resume_mode=resume_path needs it", "trainer.resume_mode")
    elif not Path(path).is_dir():
        checked.refuse(key, f"there is no folder {path}")
    elif not (Path(path) / MARKER).exists():
        checked.refuse(
            key, f"{path} is no whole checkpoint: expected a global_step_N folder with a file {MARKER} in it"
        )
    elif (actor := checked.models.get("actor")) and (model := _other_model(checked, key, Path(path).parent, actor)):
        checked.refuse(key, f"{path} is a checkpoint of another model ({model}); this run's is {_named(actor)}")


def _same_model(checked: Checked, folder: Path, actor: ModelFacts) -> None:
    key = "trainer.default_local_dir"
    if model := _other_model(checked, key, folder, actor):
        checked.refuse(
            key,
            f"{folder} holds checkpoints of another model ({model}); this run's is {_named(actor)}. Give this run a "
            "folder of its own (trainer.experiment_name)",
            "trainer.experiment_name",
        )


def _other_model(checked: Checked, key: str, folder: Path, actor: ModelFacts) -> str | None:
    """The model whose checkpoints a run folder holds, where that is not the actor's."""
    if not (folder / "run.json").exists():
        return None
    try:
        known: Any = json.loads((folder / "run.json").read_text())["model"]
        model = ", ".join(known["architectures"] or ["unknown"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        checked.refuse(key, f"{folder / 'run.json'} cannot be read: {error!r}")
        return None
    return model if complete_steps(folder) and known != model_fingerprint(actor.folder) else None


def _named(actor: ModelFacts) -> str:
    return f"{actor.folder} ({actor.architecture})"
