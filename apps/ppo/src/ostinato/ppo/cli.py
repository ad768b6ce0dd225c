"""The command line: `ostinato-ppo key=value …`, which is `python -m ostinato.ppo key=value …`.

The only module that knows Hydra and OmegaConf. Every fault of one command is found and printed together; a command that
cannot run ends with code 2 and without a traceback.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import logging
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ostinato.ppo.ending import Interrupts, failure_text, outlook

if TYPE_CHECKING:
    from hydra.core.override_parser.types import Override

    from ostinato.ppo.config import PpoConfig
    from ostinato.ppo.errors import Problem
    from ostinato.ppo.preflight import Checked

logger = logging.getLogger(__name__)

PROGRAM = "ostinato-ppo"
CONFIG_PACKAGE, CONFIG_NAME, SCHEMA_NAME = "ostinato.ppo.conf", "ppo", "ostinato_ppo_schema"

USAGE = """\
usage: ostinato-ppo [key=value ...] [options]          (the same as: python -m ostinato.ppo ...)
       ostinato-ppo export CHECKPOINT --to DIR         a Hugging Face folder from a checkpoint; export --help

Trains a language model with reinforcement learning: the model answers prompts, a reward function scores the
answers, and the model is updated to score higher. PPO, GRPO and relatives; one loop, any number of GPUs.

Five keys to begin with (each other key has a default):
  data.train_files=FILE                 parquet with the prompts and the right answers
  actor_rollout_ref.model.path=FOLDER   the model to train, a Hugging Face folder or a cached name
  actor_rollout_ref.rollout.name=NAME   what generates the answers: hf (everywhere), vllm, sglang
  algorithm.adv_estimator=NAME          gae is PPO with a critic; grpo needs none, but actor_rollout_ref.rollout.n > 1
  trainer.n_gpus_per_node=N             GPUs to use; without GPUs, processes

Three commands:
  # 1. make the GSM8K data; without --local_dataset_path the package `datasets` fetches it
  python -m ostinato.ppo.prepare.gsm8k --local_dir ~/data/gsm8k --local_dataset_path FOLDER_OF_TRAIN_AND_TEST_JSONL
  # 2. check a run and see its plan, without starting anything
  ostinato-ppo algorithm.adv_estimator=grpo data.train_files=$HOME/data/gsm8k/train.parquet \\
    actor_rollout_ref.model.path=Qwen/Qwen2.5-0.5B-Instruct actor_rollout_ref.rollout.n=8 trainer.dry_run=True
  # 3. run it with vLLM, validate every 10 steps, save every 50
  ostinato-ppo algorithm.adv_estimator=grpo data.train_files=$HOME/data/gsm8k/train.parquet \\
    data.val_files=$HOME/data/gsm8k/test.parquet actor_rollout_ref.model.path=Qwen/Qwen2.5-0.5B-Instruct \\
    actor_rollout_ref.rollout.name=vllm actor_rollout_ref.rollout.n=8 trainer.test_freq=10 trainer.save_freq=50

options:
  --cfg job                 print the whole resolved configuration as YAML, and stop
  -cd, --config-dir DIR     a folder with YAML files of your own
  -cn, --config-name NAME   the file of that folder to start from; it begins with `defaults: [ppo, _self_]`
  --version                 print the version
  -h, --help                this text

Lists are written [a,b]. Every key, its type, default and meaning: docs/config.md of the source, or --cfg job.
"""


def main(argv: Sequence[str] | None = None, *, exits: bool = False) -> int:
    """Check a command, print its plan, and run it.

    Args:
        argv: arguments without the program's name; None takes the process's own.
        exits: the process ends after this; see `Interrupts`.

    Returns:
        Exit code: 0 done, 1 this machine cannot run it or the run failed on its way, 2 the command is faulty, 130
        Ctrl-C ended it, 143 SIGTERM did.
    """
    with Interrupts(exits=exits) as interrupts:
        try:
            return _main(argv, interrupts)
        except KeyboardInterrupt:
            return interrupts.say(PROGRAM)


def _main(argv: Sequence[str] | None, interrupts: Interrupts) -> int:
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments[:1] == ["export"]:
        from ostinato.ppo import export

        interrupts.text = lambda: "nothing was written"
        return export.main(arguments[1:])
    options = _parse(arguments)
    if isinstance(options, int):
        return options
    from ostinato.ppo.errors import ConfigError
    from ostinato.ppo.run import LOG_FORMAT

    logging.basicConfig(level=logging.INFO, format=LOG_FORMAT)

    try:
        config, problems = compose(options.overrides, config_dir=options.config_dir, config_name=options.config_name)
        if options.cfg and not problems:
            return _write(yaml_text(config))
        checked = _check(config, problems)
    except ConfigError as error:
        return _fail(error.problems)
    from ostinato.ppo.plan import plan_text

    dry = checked.config.trainer.dry_run
    if not dry:
        interrupts.text = lambda: outlook(checked.config)
    _write(plan_text(checked))
    for warning in checked.warnings:
        logger.warning(warning)
    if dry:
        return _write("Everything checked; nothing was started (trainer.dry_run=True).\n")
    return _run(checked.config)


def _run(config: PpoConfig) -> int:
    """Run a checked configuration; what the app or the cluster refuses ends without a traceback, a bug with one."""
    from ostinato.ppo.console import ConsoleView
    from ostinato.ppo.errors import ConfigError
    from ostinato.ppo.run import run

    try:
        with ConsoleView() as view:
            run(config, on_event=view)
    except ConfigError as error:
        return _fail(error.problems)
    except Exception as error:
        text = failure_text(error, PROGRAM, config)
        if text is None:
            raise
        sys.stderr.write(text)
        return 1
    return 0


def compose(
    overrides: Sequence[str] = (), *, config_dir: str | Path | None = None, config_name: str | None = None
) -> tuple[PpoConfig, list[Problem]]:
    """A configuration from overrides, and from YAML files where a folder is named.

    Args:
        overrides: `key=value` as on the command line; `+key=value` and `++key=value` mean the same.
        config_dir: a folder of YAML files; they find the app's own by name (`defaults: [ppo, _self_]`).
        config_name: the file to start from; None is the app's own.

    Returns:
        The configuration, in which faulty keys have their defaults, and the faults.

    Raises:
        ConfigError: the files themselves cannot be read or put together.
    """
    import hydra
    from hydra.core.global_hydra import GlobalHydra
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    from ostinato.ppo.errors import ConfigError, Problem

    register_schema()
    GlobalHydra.instance().clear()
    name = (config_name or CONFIG_NAME).removesuffix(".yaml")
    try:
        if config_dir is None:
            opened = hydra.initialize_config_module(CONFIG_PACKAGE, version_base="1.3")
        elif Path(config_dir).is_dir():
            opened = hydra.initialize_config_dir(str(Path(config_dir).absolute()), version_base="1.3")
        else:
            raise ConfigError([Problem("--config-dir", f"there is no folder {config_dir}")])
        with opened:
            groups = GlobalHydra.instance().config_loader().get_group_options
            accepted, problems = screen(overrides, is_group=lambda group: bool(groups(group)))
            if config_dir is not None:
                accepted += _searchpath(Path(config_dir) / f"{name}.yaml", accepted)
            config, more = from_hydra(hydra.compose(name, overrides=accepted))
    except (HydraException, OmegaConfBaseException) as error:
        key, reason = getattr(error, "full_key", None) or "configuration", str(error).partition("\n    full_key:")[0]
        raise ConfigError([Problem(key, reason)]) from error
    return config, problems + [problem for problem in more if problem not in problems]


def screen(overrides: Iterable[str], *, is_group: Callable[[str], bool]) -> tuple[list[str], list[Problem]]:
    """Sort overrides into those that Hydra may apply and faults.

    Args:
        overrides: as on the command line.
        is_group: whether a name is a group of the user's own YAML files.

    Returns:
        The accepted ones, rewritten so that Hydra also takes free keys (`reward_kwargs.method=flexible`), and faults.
    """
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    from ostinato.ppo.errors import Problem

    parser = OverridesParser.create()
    accepted: list[str] = []
    problems: list[Problem] = []
    for text in overrides:
        try:
            override = parser.parse_override(_tilde_quoted(text))
            if not override.key_or_group:
                problems.append(Problem(text, "expected key=value, without spaces around the ="))
                continue
        except HydraException as error:
            reason = str(error).splitlines()[0]
            problems.append(Problem(text, f"expected key=value ({reason}); values with spaces or signs need quotes"))
            continue
        name = override.key_or_group
        # Asking Hydra copies all that it has, so only what may be a group's name is asked about.
        group = "/" in name or "@" in text.partition("=")[0] or ("." not in name and is_group(name))
        problem = None if group else _fault(override)
        if problem is not None:
            problems.append(problem)
        elif group or name.startswith("hydra."):
            accepted.append(text)
        else:
            accepted.append("++" + _tilde_quoted(text).lstrip("+"))
    return accepted, problems


def _tilde_quoted(text: str) -> str:
    """An override whose value begins with `~`, which shells leave alone there, in the quotes that Hydra wants."""
    key, equals, value = text.partition("=")
    return f"{key}='{value}'" if equals and value.startswith("~") and "'" not in value else text


def _fault(override: Override) -> Problem | None:
    """What is wrong with an override of a key, told from the key alone."""
    from ostinato.ppo.config import PpoConfig
    from ostinato.ppo.errors import Problem
    from ostinato.ppo.schema import key_type, section_type, unknown

    key = override.key_or_group
    if key.startswith("hydra.") and key != "hydra.searchpath":
        return Problem(key, "ostinato runs no Hydra jobs; of Hydra's own keys only hydra.searchpath has an effect")
    if key == "hydra.searchpath":
        return None
    known = key_type(PpoConfig, key)
    if known is None:
        return unknown(PpoConfig, key)
    if override.is_sweep_override():
        return Problem(key, f"several values; a list is written [a,b], and sweeps are not run: {override.input_line}")
    if override.is_delete():
        return Problem(key, "keys cannot be deleted; set a value, or null where the key allows it")
    if section_type(known) is not None and not isinstance(override.value(), dict):
        return Problem(key, f"is a section, got {override.value()!r}; set the keys below it, {key}.NAME=VALUE")
    return None


def _searchpath(primary: Path, accepted: Sequence[str]) -> list[str]:
    """The override that lets a user's file find the app's, next to what the file or the command line names itself."""
    from omegaconf import OmegaConf

    own = f"pkg://{CONFIG_PACKAGE}"
    if any(text.startswith("hydra.searchpath=") for text in accepted) or not primary.is_file():
        return []
    named = OmegaConf.select(OmegaConf.load(primary), "hydra.searchpath") or []
    return ["hydra.searchpath=[" + ",".join(dict.fromkeys([*named, own])) + "]"]


def register_schema() -> None:
    """Enter every key with its default into Hydra's store, as `ostinato_ppo_schema`."""
    from hydra.core.config_store import ConfigStore

    from ostinato.ppo.config import FOLLOWS, PpoConfig
    from ostinato.ppo.schema import to_mapping

    schema = to_mapping(PpoConfig())
    for key, source in FOLLOWS.items():
        *path, name = key.split(".")
        section = schema
        for part in path:
            section = section[part]
        section[name] = f"${{{source}}}"
    schema["trainer"]["default_local_dir"] = "checkpoints/${trainer.project_name}/${trainer.experiment_name}"
    ConfigStore.instance().store(SCHEMA_NAME, schema)


def from_hydra(composed: Any) -> tuple[PpoConfig, list[Problem]]:
    """A configuration from what Hydra composed.

    Args:
        composed: the OmegaConf node, of this command or of a Hydra app of your own.

    Returns:
        The configuration, in which faulty keys have their defaults, and the faults.
    """
    from omegaconf import OmegaConf

    from ostinato.ppo.config import PpoConfig

    values: Any = OmegaConf.to_container(composed, resolve=True)
    values.pop("hydra", None)
    missing = list(_import_extensions(values))
    config, problems = PpoConfig.read(values)
    return config, missing + problems


def _import_extensions(values: Mapping[str, Any]) -> Iterator[Problem]:
    """Import what registers estimators, losses or engines of the user's own, before their names are looked up."""
    from ostinato.ppo.errors import Problem

    for section in ("actor_rollout_ref", "critic", "reward_model"):
        module = ((values.get(section) or {}).get("model") or {}).get("external_lib")
        if module:
            try:
                importlib.import_module(str(module))
            except Exception as error:  # a user's module may raise anything; all of it is a fault of this key
                hint = ". Put its folder on PYTHONPATH" if isinstance(error, ModuleNotFoundError) else ""
                yield Problem(f"{section}.model.external_lib", f"{module!r} cannot be imported: {error!r}{hint}")


def yaml_text(config: PpoConfig) -> str:
    """Every key of a configuration with its value, as YAML."""
    from omegaconf import OmegaConf

    from ostinato.ppo.schema import to_mapping

    return OmegaConf.to_yaml(OmegaConf.create(to_mapping(config)))


def _check(config: PpoConfig, problems: list[Problem]) -> Checked:
    """The static checks; a consequence of a fault that is already known is not told again.

    Raises:
        ConfigError: there is any fault.
    """
    from ostinato.ppo.errors import ConfigError
    from ostinato.ppo.preflight import examine

    checked = examine(config)
    known = {key for problem in problems for key in (problem.key, *problem.also)}
    further = [problem for problem in checked.problems if not known & {problem.key, *problem.also}]
    if problems or further:
        raise ConfigError([*problems, *further])
    return checked


def _parse(arguments: list[str]) -> argparse.Namespace | int:
    """The options and overrides of a command, or the exit code where there is nothing more to do."""
    parser = argparse.ArgumentParser(PROGRAM, add_help=False, usage=USAGE.splitlines()[0].removeprefix("usage: "))
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--cfg", choices=["job"])
    parser.add_argument("--config-dir", "-cd")
    parser.add_argument("--config-name", "-cn")
    parser.add_argument("--version", action="store_true")
    parser.add_argument("--help", "-h", action="store_true")
    try:
        options, unknown = parser.parse_known_intermixed_args(arguments)
        if unknown:
            keys = any("=" in text for text in unknown)
            hint = "; keys are written without dashes, key=value" if keys else ""
            parser.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")
    except SystemExit as stop:
        return int(stop.code or 0)
    if options.help:
        return _write(USAGE)
    if options.version:
        return _write(f"{PROGRAM} {importlib.metadata.version(PROGRAM)}\n")
    if not arguments:
        sys.stderr.write(USAGE)
        return 2
    return options


def _write(text: str) -> int:
    sys.stdout.write(text)
    sys.stdout.flush()
    return 0


def _fail(problems: Sequence[Problem]) -> int:
    count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
    lines = "".join(f"  {problem}\n" for problem in problems)
    sys.stderr.write(f"{PROGRAM}: this cannot run ({count}):\n{lines}")
    return 2
