"""The configuration's keys, defaults and derived values, and the reference page made from them."""

from __future__ import annotations

import os
import pickle
import re
import runpy
import sys
from dataclasses import FrozenInstanceError, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import pytest

from ostinato.ppo.config import FOLLOWS, PpoConfig, follow
from ostinato.ppo.errors import CheckpointError, ConfigError, LaunchError, PpoError, Problem, RunFolderBusy
from ostinato.ppo.schema import build, key_type, leaves, nearest_key, to_mapping, type_text

ROOT = Path(__file__).resolve().parents[3]
SNAPSHOT = Path(__file__).with_name("config_keys.txt")


def value_of(config: Any, key: str) -> Any:
    for part in key.split("."):
        config = getattr(config, part)
    return config


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("data.train_batch_size", 1024),
        ("data.max_prompt_length", 512),
        ("data.max_response_length", 512),
        ("actor_rollout_ref.actor.ppo_mini_batch_size", 256),
        ("actor_rollout_ref.actor.ppo_epochs", 1),
        ("actor_rollout_ref.actor.optim.lr", 1e-6),
        ("actor_rollout_ref.actor.clip_low", 0.2),
        ("actor_rollout_ref.actor.clip_high", 0.2),
        ("actor_rollout_ref.actor.clip_ratio_c", 3.0),
        ("actor_rollout_ref.actor.entropy_coeff", 0.0),
        ("actor_rollout_ref.actor.grad_clip", 1.0),
        ("actor_rollout_ref.actor.loss_agg_mode", "token-mean"),
        ("actor_rollout_ref.actor.use_kl_loss", False),
        ("critic.optim.lr", 1e-5),
        ("critic.cliprange_value", 0.5),
        ("actor_rollout_ref.rollout.n", 1),
        ("actor_rollout_ref.rollout.temperature", 1.0),
        ("actor_rollout_ref.rollout.tensor_model_parallel_size", 1),
        ("actor_rollout_ref.rollout.gpu_memory_utilization", 0.5),
        ("algorithm.adv_estimator", "gae"),
        ("algorithm.gamma", 1.0),
        ("algorithm.lam", 1.0),
        ("algorithm.use_kl_in_reward", False),
        ("trainer.logger", ["console"]),
        ("trainer.save_freq", -1),
        ("trainer.test_freq", -1),
        ("trainer.val_before_train", False),
        ("trainer.resume_mode", "auto"),
        ("trainer.device", "auto"),
        ("reward_model.enable", False),
        ("needs_reference", False),
        ("needs_critic", True),
    ],
)
def test_ppo_config_defaults(key, value):
    assert value_of(PpoConfig(), key) == value


def test_ppo_config_micro_batches_are_by_tokens_unless_a_size_is_given():
    roles = {"actor_rollout_ref.actor": "ppo_", "critic": "ppo_", "actor_rollout_ref.ref": "log_prob_"}
    for role, name in roles.items():
        limit = "log_prob_limit" if name == "log_prob_" else "update_limit"
        assert value_of(PpoConfig(), f"{role}.{limit}").max_tokens
        section: Any = {f"{name}micro_batch_size_per_gpu": 3}
        for part in reversed(role.split(".")):
            section = {part: section}
        config = PpoConfig.from_mapping(section)
        assert value_of(config, f"{role}.{limit}").micro_batch_size == 3
        for other in set(roles) - {role}:
            limit = "log_prob_limit" if roles[other] == "log_prob_" else "update_limit"
            assert value_of(config, f"{other}.{limit}").max_tokens


def test_ppo_config_keys_are_a_snapshot():
    """A new key is a decision: write it into config_keys.txt too (OSTINATO_WRITE_SNAPSHOTS=1 does)."""
    keys = "\n".join(sorted(key for key, *_ in leaves(PpoConfig))) + "\n"
    if os.environ.get("OSTINATO_WRITE_SNAPSHOTS"):
        SNAPSHOT.write_text(keys)
    assert keys == SNAPSHOT.read_text()


def test_ppo_config_reference_page_is_current(monkeypatch):
    """The tool ends with an error where it is not."""
    monkeypatch.setattr(sys, "argv", ["gen_config_docs.py", "--check"])
    names = runpy.run_path(str(ROOT / "tools" / "gen_config_docs.py"), run_name="__main__")
    assert "document" in names


def test_ppo_config_every_key_of_the_app_has_a_meaning_on_the_page():
    page = (ROOT / "docs" / "config.md").read_text()
    for section in ("data", "algorithm", "trainer", "custom_reward_function", "algorithm.kl_ctrl"):
        body = re.search(rf"^## {re.escape(section)}\n(.*?)(?=^## |\Z)", page, re.MULTILINE | re.DOTALL)
        assert body is not None
        rows = [line for line in body[1].splitlines() if line.startswith("| `")]
        assert rows
        assert all(row.split(" | ")[-1].rstrip(" |") for row in rows), section


def test_ppo_config_dual_clip_constant_reaches_the_actor():
    """H-74: set to 2, the actor's section holds 2, and nothing else changed."""
    config = PpoConfig.from_mapping({"actor_rollout_ref": {"actor": {"clip_ratio_c": 2}}})
    assert config.actor_rollout_ref.actor.clip_ratio_c == 2.0
    actor = replace(config.actor_rollout_ref.actor, clip_ratio_c=3.0)
    assert replace(config, actor_rollout_ref=replace(config.actor_rollout_ref, actor=actor)) == PpoConfig()


def test_ppo_config_mapping_round_trip():
    config = PpoConfig.from_mapping({"data": {"train_files": "a.parquet"}, "trainer": {"experiment_name": "x"}})
    assert PpoConfig.from_mapping(to_mapping(config)) == config
    assert pickle.loads(pickle.dumps(config)) == config


def test_ppo_config_keys_that_follow_others():
    assert set(FOLLOWS) | set(FOLLOWS.values()) <= {key for key, *_ in leaves(PpoConfig)}
    for key, source in FOLLOWS.items():
        special = {"seed": 9, "path": "m", "strategy": "megatron", "sequence_parallel": True}
        new: Any = special.get(source.rpartition(".")[2], 5)
        setting: Any = new
        for part in reversed(source.split(".")):
            setting = {part: setting}
        before = pickle.dumps(setting)
        assert value_of(PpoConfig.from_mapping(setting), key) == new
        follow(setting)
        assert pickle.dumps(setting) == before  # its operand is left alone
    config = PpoConfig.from_mapping({"trainer": {"seed": 1}, "data": {"seed": 2}})
    assert (config.data.seed, config.actor_rollout_ref.rollout.seed) == (2, 1)


@pytest.mark.parametrize(("batch", "mini", "updates"), [(32, 16, 2), (32, 32, 1), (32, 64, 1), (33, 16, 2), (8, 1, 8)])
def test_ppo_config_mini_batches(batch, mini, updates):
    """H-71: prompts // prompts, whatever n is."""
    for n in (1, 8):
        hybrid = {"actor": {"ppo_mini_batch_size": mini}, "rollout": {"n": n}}
        config = PpoConfig.from_mapping({"data": {"train_batch_size": batch}, "actor_rollout_ref": hybrid})
        assert config.actor_rollout_ref.actor.num_mini_batches == updates
        assert config.critic.num_mini_batches == updates
        assert config.rows_per_step == batch * n


def test_ppo_config_lengths_of_a_run_and_of_its_schedules():
    config = PpoConfig.from_mapping(
        {
            "data": {"train_batch_size": 10},
            "actor_rollout_ref": {"actor": {"ppo_mini_batch_size": 5, "ppo_epochs": 2}},
            "critic": {"ppo_epochs": 1, "ppo_mini_batch_size": 2},
            "trainer": {"total_epochs": 3, "critic_warmup": 4},
        }
    )
    assert (config.steps_per_epoch(47), config.total_steps(47)) == (4, 12)
    filled = config.with_total_steps(47)
    assert filled.actor_rollout_ref.actor.optim.total_training_steps == (12 - 4) * 2 * 2
    assert filled.critic.optim.total_training_steps == 12 * 1 * 5
    assert filled.with_total_steps(1000) == filled  # what is filled in stays
    limited = replace(config, trainer=replace(config.trainer, total_training_steps=7))
    assert limited.total_steps(47) == 7


def test_ppo_config_is_frozen_and_paths_of_home_are_resolved(monkeypatch):
    monkeypatch.setenv("HOME", "/home/someone")
    config = PpoConfig.from_mapping(
        {
            "data": {"train_files": ["~/a", "b"]},
            "custom_reward_function": {"path": "~/r.py"},
            "trainer": {"default_local_dir": "~/out"},
        }
    )
    assert config.data.train_files == ["/home/someone/a", "b"]
    assert config.custom_reward_function.path == "/home/someone/r.py"
    assert config.trainer.default_local_dir == "/home/someone/out"
    with pytest.raises(FrozenInstanceError):
        config.data.shuffle = False  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize(
    ("section", "values"),
    [
        ("data", {"train_batch_size": 0}),
        ("data", {"max_response_length": 0}),  # the rollout's width follows it, and its fault is not told again
        ("data", {"val_batch_size": 0}),
        ("algorithm", {"gamma": 1.5}),
        ("algorithm", {"lam": -0.1}),
        ("algorithm.kl_ctrl", {"horizon": 0}),
        ("algorithm.kl_ctrl", {"target_kl": 0}),
        ("trainer", {"nnodes": 0}),
        ("trainer", {"n_gpus_per_node": 0}),
        ("trainer", {"total_training_steps": 0}),
        ("trainer", {"max_actor_ckpt_to_keep": 0}),
        ("trainer", {"max_critic_ckpt_to_keep": 0}),
        ("custom_reward_function", {"timeout_seconds": 0}),
    ],
)
def test_ppo_config_refuses_numbers_out_of_range(section, values):
    setting: Any = values
    for part in reversed(section.split(".")):
        setting = {part: setting}
    with pytest.raises(ConfigError) as refusal:
        PpoConfig.from_mapping(setting)
    (name,) = values
    assert [problem.key for problem in refusal.value.problems] == [f"{section}.{name}"]


# --- mappings and dataclasses ---------------------------------------------------------------------


@dataclass(frozen=True)
class Inner:
    rate: float = 0.5
    kind: Literal["a", "b", 3] = "a"
    names: list[str] = field(default_factory=list)
    pair: tuple[float, float] = (0.0, 1.0)
    free: dict[str, Any] = field(default_factory=dict)
    inner_only: int = field(default=7, metadata={"derived": True})

    def __post_init__(self) -> None:
        if self.rate < 0:
            raise ValueError(f"rate: expected at least 0, got {self.rate}")


@dataclass(frozen=True)
class Outer:
    inner: Inner = field(default_factory=Inner)
    limit: int | None = None
    path: Path = Path()
    on: bool = True
    text: str = ""


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"inner": {"rate": 1}}, 1.0),
        ({"inner": {"rate": True}}, "inner.rate: expected float, got True (bool)"),
        ({"inner": {"rate": "1"}}, "inner.rate: expected float, got '1' (str)"),
        ({"inner": {"kind": 3}}, 3),
        ({"inner": {"kind": True}}, "inner.kind: expected one of a, b, 3, got True (bool)"),
        ({"inner": {"names": "x"}}, ["x"]),
        ({"inner": {"names": {"a": 1}}}, "inner.names: expected a list of str, got a mapping with a"),
        ({"inner": {"names": None}}, "inner.names: expected a list of str, got null"),
        ({"inner": {"pair": [1, 2]}}, (1.0, 2.0)),
        ({"inner": {"free": {"x": {"y": 1}}}}, {"x": {"y": 1}}),
        ({"inner": 3}, "inner: expected a section, got 3 (int)"),
        ({"inner": {"inner_only": 8}}, "inner.inner_only: there is no such key"),
        ({"limit": None}, None),
        ({"limit": 2.0}, 2),
        ({"limit": float("inf")}, "limit: expected int or null, got inf (float)"),
        ({"limit": "x"}, "limit: expected int or null, got 'x' (str)"),
        ({"path": "a/b"}, Path("a/b")),
        ({"on": 1}, "on: expected bool, got 1 (int)"),
        ({"text": 3}, "3"),
        ({"text": None}, "text: expected str, got null"),
        ({"texts": {"a": {"b": 1, "c": 2}}}, "texts.a.b: there is no such key"),
        ({"inner": {"rate": -1.0}}, "inner.rate: expected at least 0, got -1.0"),
    ],
)
def test_ppo_config_conversion(values, expected):
    problems: list[Problem] = []
    made = build(Outer, values, problems)
    if isinstance(expected, str) and ": " in expected:
        assert any(str(problem).startswith(expected) for problem in problems), problems
        assert made == Outer()  # the fault is left out, the rest can be looked at
    else:
        assert problems == []
        (name, value), got = next(iter(values.items())), made
        got = getattr(got, name)
        if isinstance(value, dict):
            got = getattr(got, next(iter(value)))
        assert got == expected
        assert type(got) is type(expected)


def test_ppo_config_conversion_collects_every_fault():
    problems: list[Problem] = []
    build(Outer, {"inner": {"rate": -1, "kind": "c", "oops": 1}, "on": "yes", "limt": 3}, problems)
    assert {problem.key for problem in problems} == {"inner.rate", "inner.kind", "inner.oops", "on", "limt"}


def test_ppo_config_nearest_keys():
    assert nearest_key(Outer, "limt") == "limit"
    assert nearest_key(Outer, "innner.rate") == "inner.rate"
    assert nearest_key(Outer, "rate") == "inner.rate"
    assert nearest_key(Outer, "zzzzzz") is None
    assert key_type(Outer, "inner.free.any.thing") is Any
    assert key_type(Outer, "inner.rate.x") is None
    assert type_text(key_type(Outer, "limit")) == "int or null"


@pytest.mark.parametrize(
    "error",
    [ConfigError([Problem("a.b", "wrong", ("c",))]), LaunchError("x"), CheckpointError("x"), RunFolderBusy("x")],
)
def test_ppo_config_errors_survive_pickling(error):
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error)
    assert str(copy) == str(error)
    assert isinstance(copy, PpoError)
    assert isinstance(copy, ValueError | RuntimeError)
