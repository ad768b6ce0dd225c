"""Reward managers: a function for a whole batch, classes, the overlong penalty, managers of one's own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ostinato.ppo.config import PpoConfig
from ostinato.ppo.preflight import Checked
from ostinato.ppo.preflight_files import reward_function
from ostinato.ppo.rewards import build_reward, register_reward_manager, reward_managers
from ostinato.ppo.rewards import manager as managers
from ostinato.ppo.rewards.custom import load_function
from ostinato.ppo.rewards.errors import RowFailedError, ScorerError
from ostinato.ppo.rewards.manager import overlong_penalty
from ostinato.protocol import DataProto

ROW = "data_source, solution_str, ground_truth, extra_info=None"
WHOLE = "data_sources, solution_strs, ground_truths, extra_infos"


class Letters:
    """A tokenizer whose token i is the i-th letter."""

    def batch_decode(self, rows: list[list[int]], skip_special_tokens: bool) -> list[str]:
        return ["".join(map(chr, row)) for row in rows]


def batch_of(*texts: str, width: int = 8, **columns: Any) -> DataProto:
    responses = torch.zeros(len(texts), width, dtype=torch.int64)
    for row, text in enumerate(texts):
        responses[row, : len(text)] = torch.tensor([ord(letter) for letter in text])
    truths = [{"ground_truth": number} for number in range(len(texts))]
    return DataProto.from_dict(
        {"responses": responses, "response_mask": (responses > 0).long()},
        {"data_source": ["s"] * len(texts), "reward_model": truths, **columns},
    )


def reward_of(folder: Path, source: str, manager: str, name: str = "compute_score", **more: Any):
    path = folder / "my_reward.py"
    path.write_text(source)
    section = {"path": str(path), "name": name, "num_processes": 1, "timeout_seconds": 5.0}
    values = {
        "data": {"max_response_length": 8},
        "custom_reward_function": section | more.pop("section", {}),
        "reward_manager": {"name": manager} | more,
    }
    return build_reward(PpoConfig.from_mapping(values), Letters(), {})


# --- a whole batch ---------------------------------------------------------------------------------------------------


def test_batch_manager_calls_the_function_once_with_all_rows(tmp_path: Path):
    source = f"""
calls = 0
def compute_score({WHOLE}):
    global calls
    calls += 1
    assert data_sources == ["s"] * 3 and ground_truths == [0, 1, 2] and extra_infos[0] == {{"k": 1}}
    best = max(map(len, solution_strs))
    return [{{"score": len(text) / best, "calls": calls, "text": text}} for text in solution_strs]
"""
    with reward_of(tmp_path, source, "batch") as reward:
        scored = reward(batch_of("a", "bbbb", "cc", extra_info=[{"k": 1}, None, None]))
    assert scored.non_tensor_batch["reward/score"].tolist() == [0.25, 1.0, 0.5]
    assert scored.non_tensor_batch["reward/calls"].tolist() == [1, 1, 1]
    assert scored.non_tensor_batch["reward/text"].tolist() == ["a", "bbbb", "cc"]
    assert scored.batch["token_level_scores"][1, 3] == 1.0
    assert scored.metrics["reward/errors"].value == 0


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        ("raise RuntimeError", "errors"), ("import os; os._exit(1)", "errors"), ("return [1.0]", "errors"),
        ("return 1.0", "errors"), ("return {'score': 1}", "errors"), ("while True: pass", "timeouts"),
        ("x = []\n    while True: x.append(bytearray(10**8))", "errors"),
    ],
)  # fmt: skip
def test_batch_manager_gives_every_row_the_default_where_the_call_fails(tmp_path: Path, body: str, kind: str):
    source = f"def compute_score({WHOLE}):\n    if 'good' in solution_strs: return [1.0, 1.0]\n    {body}\n"
    section = {"timeout_seconds": 1.0 if kind == "timeouts" else 30.0, "default_score": -1.0}
    with reward_of(tmp_path, source, "batch", section=section) as reward:
        scored = reward(batch_of("a", "b"))
        assert scored.non_tensor_batch["reward/score"].tolist() == [-1.0, -1.0]
        assert scored.metrics["reward/errors"].value == 2
        assert scored.metrics["reward/timeouts"].value == (2 if kind == "timeouts" else 0)
        assert reward(batch_of("good", "b")).non_tensor_batch["reward/score"].tolist() == [1.0, 1.0]


def test_batch_manager_fails_single_rows_alone(tmp_path: Path):
    source = f"def compute_score({WHOLE}): return [1, None, {{'acc': 1}}, float('nan'), {{'score': 2}}]"
    batch = batch_of(*"abcde")
    with reward_of(tmp_path, source, "batch") as reward:
        scored = reward(batch)
        assert len(reward(batch[:0])) == 0
    assert scored.non_tensor_batch["reward/score"].tolist() == [1, 0, 0, 0, 2]
    assert scored.metrics["reward/errors"].value == 3
    with reward_of(tmp_path, source, "batch", section={"on_error": "raise"}) as reward, pytest.raises(RowFailedError):
        reward(batch)


def test_batch_manager_does_not_see_aborted_rows(tmp_path: Path):
    source = f"def compute_score({WHOLE}): return [len(solution_strs)] * len(solution_strs)"
    with reward_of(tmp_path, source, "batch") as reward:
        scored = reward(batch_of("a", "b", "c", finish_reason=["stop", "abort", "stop"]))
    assert scored.non_tensor_batch["reward/score"].tolist() == [2, 0, 2]


# --- classes ---------------------------------------------------------------------------------------------------------

CLASS = f"""
class Judge:
    made = 0
    def __init__(self, scale=1.0):
        Judge.made += 1
        self.scale = scale
    def __call__(self, {ROW}):
        return {{"score": self.scale * len(solution_str), "made": Judge.made}}

class Base:
    def __call__(self, {WHOLE}):
        return [self.value] * len(data_sources)

class Jury(Base):
    value = 0.5
"""


def test_class_is_made_once_and_called_like_a_function(tmp_path: Path):
    options = {"reward_kwargs": {"scale": 2.0}}
    with reward_of(tmp_path, CLASS, "naive", "Judge", section=options) as reward:
        for _ in range(2):
            scored = reward(batch_of("a", "bb", "ccc"))
            assert scored.non_tensor_batch["reward/score"].tolist() == [2, 4, 6]
            assert scored.non_tensor_batch["reward/made"].tolist() == [1, 1, 1]
    with reward_of(tmp_path, CLASS, "batch", "Jury") as reward:
        assert reward(batch_of("a", "b")).non_tensor_batch["reward/score"].tolist() == [0.5, 0.5]


@pytest.mark.parametrize(
    ("source", "kwargs", "whole", "error"),
    [
        ("class C: pass", {}, False, r"without __call__; expected compute_score\(data_source"),
        (f"class C:\n  def __call__(self, {ROW}): ...", {"a": 1}, False, "reward_kwargs"),
        (f"class C:\n  def __call__(self, {ROW}): ...", {}, True, "data_sources"),
        (f"class C:\n  async def __call__(self, {ROW}): ...", {}, False, "is async"),
        (f"def C({ROW}): ...", {}, True, r"expected compute_score\(data_sources"),
        (f"def C({WHOLE}): ...", {}, False, r"expected compute_score\(data_source,"),
    ],
)
def test_load_function_refuses_what_the_manager_cannot_call(tmp_path: Path, source, kwargs, whole, error):
    path = tmp_path / "my_reward.py"
    path.write_text(source)
    with pytest.raises(ScorerError, match=error):
        load_function(str(path), "C", kwargs, whole=whole)


def test_class_is_not_made_by_the_static_check(tmp_path: Path):
    path = tmp_path / "my_reward.py"
    path.write_text(f"class C:\n  def __init__(self): raise SystemExit\n  def __call__(self, {ROW}): ...\n")
    assert load_function(str(path), "C", {}).__name__ == "C"


# --- the overlong penalty --------------------------------------------------------------------------------------------


def test_overlong_penalty_grows_evenly_over_the_buffer():
    """DAPO eq. 13: limit 8, buffer 4: nothing up to 4, then a quarter a token."""
    lengths = np.arange(9)
    expected = [0, 0, 0, 0, 0, -0.25, -0.5, -0.75, -1]
    assert overlong_penalty(lengths, 8, 4, 1.0).tolist() == expected
    assert overlong_penalty(lengths, 8, 4, 2.0).tolist() == [2 * value for value in expected]
    assert overlong_penalty(lengths, 8, 8, 1.0).tolist() == (-lengths / 8).tolist()
    assert overlong_penalty(lengths, 8, 1, 1.0).tolist() == [0] * 8 + [-1]


def test_dapo_manager_takes_the_penalty_off_the_score(tmp_path: Path):
    source = f"def compute_score({ROW}): return 1.0 if 'x' not in solution_str else 1 / 0"
    batch = batch_of("a" * 4, "a" * 6, "a" * 8, "x" * 8, "a" * 8, finish_reason=["stop"] * 4 + ["abort"])
    with reward_of(tmp_path, source, "dapo", overlong_buffer={"len": 4}) as reward:
        scored = reward(batch)
    columns = scored.non_tensor_batch
    assert columns["reward/score"].tolist() == [1, 1, 1, 0, 0]
    assert columns["reward/acc"].tolist() == [1, 1, 1, 0, 0]
    assert columns["reward/overlong_penalty"].tolist() == [0, -0.5, -1, -1, 0]
    assert columns["reward/overlong"].tolist() == [0, 1, 1, 1, 0]
    assert scored.batch["token_level_scores"].sum(-1).tolist() == [1, 0.5, 0, -1, 0]
    assert scored.metrics["reward/overlong/mean"].value == pytest.approx(0.6)
    assert scored.metrics["reward/errors"].value == 1


def test_dapo_manager_counts_policy_tokens_only(tmp_path: Path):
    batch = batch_of("a" * 8)
    batch.batch["response_mask"][0, 2:5] = 0  # tool output
    with reward_of(tmp_path, f"def compute_score({ROW}): return 1.0", "dapo", overlong_buffer={"len": 4}) as reward:
        assert reward(batch).non_tensor_batch["reward/overlong_penalty"].tolist() == [-0.25]


# --- names -----------------------------------------------------------------------------------------------------------


def test_manager_of_ones_own(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(managers, "_MANAGERS", dict(managers._MANAGERS))

    @register_reward_manager("constant")
    class Constant:
        def __init__(self, config: Any, tokenizer: Any) -> None:
            self.value = config.algorithm.gamma

    assert reward_managers() == ["batch", "constant", "dapo", "naive"]
    assert register_reward_manager("constant")(Constant) is Constant  # pyright: ignore[reportArgumentType]
    config = PpoConfig.from_mapping({"reward_manager": {"name": "constant"}})
    assert build_reward(config, Letters(), {}).value == 1.0  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(ScorerError, match="take another name"):
        register_reward_manager("naive")(Constant)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ScorerError, match="expected one of batch, constant, dapo, naive, got 'prime'"):
        build_reward(PpoConfig.from_mapping({"reward_manager": {"name": "prime"}}), Letters(), {})


def problems(**values: Any) -> dict[str, str]:
    checked = Checked(PpoConfig.from_mapping(values))
    reward_function(checked)
    return {problem.key: problem.text for problem in checked.problems}


def test_static_check_of_the_manager(tmp_path: Path):
    path = tmp_path / "my_reward.py"
    path.write_text(f"def compute_score({WHOLE}): ...\n")
    own = {"path": str(path)}
    assert problems(reward_manager={"name": "batch"}, custom_reward_function=own) == {}
    assert "data_source" in problems(custom_reward_function=own)["custom_reward_function.path"]
    assert "calls your own function" in problems(reward_manager={"name": "batch"})["custom_reward_function.path"]
    assert "did you mean naive" in problems(reward_manager={"name": "naiv"})["reward_manager.name"]
    length = "reward_manager.overlong_buffer.len"
    assert "1 to data.max_response_length=512" in problems(reward_manager={"name": "dapo"})[length]
    assert length in problems(reward_manager={"name": "dapo", "overlong_buffer": {"len": 513}})
    assert problems(reward_manager={"name": "dapo", "overlong_buffer": {"len": 128}}) == {}
