"""The registry of scorers, a user's own function, and the reward of a batch."""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from ostinato.ppo.errors import RewardError
from ostinato.ppo.rewards import RewardFunction, build_reward, known_data_sources, register_scorer
from ostinato.ppo.rewards.custom import check_source, load_function
from ostinato.ppo.rewards.errors import RowFailedError, ScorerError, UnknownDataSourceError
from ostinato.ppo.rewards.recipe import Recipe, Resolver, Row, read_result
from ostinato.protocol import DataProto

# --- registry and recipe ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("row", "score"),
    [(Row("lighteval/MATH", r"\boxed{5}", "5"), 1.0), (Row("openai/gsm8k", "#### 5", "5"), 1.0),
     (Row("openai/gsm8k", r"\boxed{5}", "5"), 0.0), (Row("math", "#### 5", "5"), 0.0)],
)  # fmt: skip
def test_dispatch_gives_each_data_source_its_scorer(row: Row, score: float):
    """H-32, R-309: through the dispatcher, a finite number in [0, 1]."""
    found, _ = Resolver(Recipe()).score(row)
    assert type(found) is float
    assert found == score


def test_dispatch_reports_what_was_answered_for_the_vote():
    assert Resolver(Recipe()).score(Row("gsm8k", "#### 5.0", "5"))[1] == {"pred": "5"}
    assert Resolver(Recipe()).score(Row("math", r"\boxed{x}", "5"))[1] == {"pred": "x"}
    assert Resolver(Recipe()).score(Row("math", "x", "5"))[1] == {"pred": ""}


def test_unknown_data_source_lists_the_known_ones():
    with pytest.raises(UnknownDataSourceError, match=r"no scorer for data_source 'mine'; known: .*openai/gsm8k"):
        Recipe().check_data_source("mine")
    assert isinstance(UnknownDataSourceError(""), RewardError)


def test_register_scorer_refuses_what_another_process_cannot_import():
    with pytest.raises(ScorerError, match=r"custom_reward_function\.path"):
        register_scorer("mine")(lambda **kwargs: 1.0)
    assert "mine" not in known_data_sources()


def test_registered_scorer_is_used_in_the_scoring_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "my_scorers.py").write_text(
        "def score(data_source, solution_str, ground_truth, extra_info=None, scale=1.0):\n"
        "    return scale * (solution_str == ground_truth)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    from ostinato.ppo.rewards import registry

    monkeypatch.setattr(registry, "_references", registry.references())
    import my_scorers  # pyright: ignore[reportMissingImports]

    assert register_scorer("mine", "mine/too")(my_scorers.score) is my_scorers.score
    with reward_function(reward_kwargs={"scale": 2.0}) as reward:
        scored = reward(batch_of(["a", "b"], ["a", "a"], source="mine/too"))
    assert scored.non_tensor_batch["reward/score"].tolist() == [2.0, 0.0]


def test_reward_kwargs_reach_the_registered_scorers_that_name_them():
    """H-33: from the command line, `custom_reward_function.reward_kwargs.method=flexible`."""
    recipe = Recipe(kwargs={"method": "flexible"})
    recipe.check()
    resolver = Resolver(recipe)
    assert resolver.score(Row("gsm8k", "the answer is 18", "18"))[0] == 1.0
    assert resolver.score(Row("math", r"\boxed{18}", "18"))[0] == 1.0  # takes no `method`
    with pytest.raises(ScorerError, match=r"reward_kwargs: no registered scorer takes methud; known: method"):
        Recipe(kwargs={"methud": "flexible"}).check()


@pytest.mark.parametrize(
    "result",
    [1, 1.0, True, np.float32(1), np.int64(1), np.bool_(True), np.asarray(1.0), torch.tensor(1.0), torch.tensor([1])],
)
def test_scores_of_any_number_type_are_taken(result: Any):
    """R-317."""
    for returned in (result, {"score": result}):
        score, extra = read_result(returned)
        assert type(score) is float
        assert (score, extra) == (1.0, {})


def test_further_keys_of_a_result_are_kept():
    result = {
        "score": 0.5,
        "acc": np.bool_(True),
        "pred": "7",
        "steps": 3,
        "what": [1],
        "none": None,
        "loss": float("nan"),
    }
    score, extra = read_result(result)
    assert score == 0.5
    assert extra.pop("loss") != extra.get("acc")
    assert extra == {"acc": 1.0, "pred": "7", "steps": 3.0}


@pytest.mark.parametrize(
    ("result", "error"),
    [(None, "got NoneType"), ("1.0", "got str"), ([1.0], "got list"), ({"acc": 1}, "without 'score'"),
     ({"score": None}, "NoneType"), (float("nan"), "must be finite"), (float("inf"), "must be finite"),
     (np.ones(2), "got ndarray"), (torch.ones(2), "got Tensor")],
)  # fmt: skip
def test_what_is_no_score_is_refused(result: Any, error: str):
    with pytest.raises((TypeError, ValueError), match=error):
        read_result(result)


# --- a user's own function -------------------------------------------------------------------------------------------


def write(tmp_path: Path, source: str) -> str:
    path = tmp_path / "my_reward.py"
    path.write_text(source)
    return str(path)


SIGNATURE = "compute_score(data_source, solution_str, ground_truth, extra_info=None)"


def test_check_source_finds_a_function_without_running_the_file(tmp_path: Path):
    path = write(
        tmp_path,
        f"raise SystemExit\ntry:\n  from x import a as b\nexcept ImportError:\n  c = 1\ndef {SIGNATURE}: ...\n",
    )
    for name in ("compute_score", "b", "c"):
        check_source(path, name)
    with pytest.raises(
        ScorerError, match=r"custom_reward_function.name: .*defines no 'compute'; its functions: compute_score"
    ):
        check_source(path, "compute")
    with pytest.raises(ScorerError, match=r"custom_reward_function\.path: there is no file"):
        check_source(str(tmp_path / "none.py"), "compute_score")
    with pytest.raises(ScorerError, match="is not Python"):
        check_source(write(tmp_path, "def ("), "compute_score")


@pytest.mark.parametrize(
    ("source", "error"),
    [("compute_score = 3", "is not a function"), (f"async def {SIGNATURE}: ...", "is async"),
     ("def compute_score(solution): ...", r"cannot be called.*expected compute_score\(data_source"),
     (f"def {SIGNATURE}: ...", "with reward_kwargs")],
)  # fmt: skip
def test_load_function_refuses_what_it_cannot_call(tmp_path: Path, source: str, error: str):
    kwargs = {"extra": 1} if "reward_kwargs" in error else {}
    with pytest.raises(ScorerError, match=error):
        load_function(write(tmp_path, source), "compute_score", kwargs)


def test_custom_function_may_import_what_lies_beside_it(tmp_path: Path):
    (tmp_path / "beside_my_reward.py").write_text("VALUE = 0.25\n")
    path = write(tmp_path, f"from beside_my_reward import VALUE\ndef {SIGNATURE}: return VALUE\n")
    with reward_function(path=path) as reward:
        assert reward(batch_of(["x"], ["y"])).non_tensor_batch["reward/score"].tolist() == [0.25]


# --- the reward of a batch -------------------------------------------------------------------------------------------


class Words:
    """A tokenizer whose token i is the i-th word."""

    def __init__(self) -> None:
        self.words: list[str] = ["<pad>"]

    def encode(self, text: str) -> list[int]:
        for word in text.split():
            if word not in self.words:
                self.words.append(word)
        return [self.words.index(word) for word in text.split()]

    def batch_decode(self, rows: list[list[int]], skip_special_tokens: bool) -> list[str]:
        assert skip_special_tokens
        return [" ".join(self.words[token] for token in row) for row in rows]


TOKENIZER = Words()


def reward_function(**section: Any) -> RewardFunction:
    defaults = {"path": None, "name": "compute_score", "reward_kwargs": {}, "timeout_seconds": 30.0, "num_processes": 2}
    return RewardFunction(SimpleNamespace(custom_reward_function=SimpleNamespace(**(defaults | section))), TOKENIZER)


def batch_of(texts: list[str], truths: list[Any], source: str = "openai/gsm8k", **columns: Any) -> DataProto:
    rows = [TOKENIZER.encode(text) for text in texts]
    width = max(map(len, rows)) + 2
    responses, mask = torch.zeros(len(rows), width, dtype=torch.int64), torch.zeros(len(rows), width, dtype=torch.int64)
    for number, row in enumerate(rows):
        responses[number, : len(row)], mask[number, : len(row)] = torch.tensor(row), 1
    models = [{"style": "rule", "ground_truth": truth} for truth in truths]
    return DataProto.from_dict(
        tensors={"responses": responses, "response_mask": mask},
        non_tensors={"data_source": [source] * len(rows), "reward_model": models, **columns},
    )


def test_reward_lies_on_the_last_policy_token():
    """H-38, H-19: response length 4, valid 2 -> 0 1 0 0; tool output at the end carries no reward."""
    batch = batch_of(["#### 5", "#### 5", "#### 6"], ["5", "5", "5"])
    batch.batch["response_mask"][1] = torch.tensor([1, 1, 0, 0])
    batch.batch["responses"][1, 2] = 1
    with reward_function() as reward:
        scored = reward(batch)
    assert scored.batch["token_level_scores"].tolist() == [[0, 1, 0, 0], [0, 1, 0, 0], [0, 0, 0, 0]]
    assert scored.batch["token_level_scores"].dtype == torch.float32


def test_reward_reads_only_what_the_policy_sampled(tmp_path: Path):
    path = write(tmp_path, f"def {SIGNATURE}: return {{'score': 1, 'text': solution_str}}\n")
    batch = batch_of(["a tool b", "c"], ["", ""])
    batch.batch["response_mask"][0, 1] = 0
    with reward_function(path=path) as reward:
        assert reward(batch).non_tensor_batch["reward/text"].tolist() == ["a b", "c"]


def test_reward_needs_no_extra_info_and_no_extra_keys(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    """H-36, R-322: a function that returns 1.0 alone; extra_info missing from the data."""
    path = write(tmp_path, f"def {SIGNATURE}: return 1.0 if extra_info is None else 0.0\n")
    with reward_function(path=path) as reward:
        scored = reward(batch_of(["a"], [""]))
        given = reward(batch_of(["a"], [""], extra_info=[{"index": 3}]))
    assert scored.non_tensor_batch["reward/score"].tolist() == [1.0]
    assert given.non_tensor_batch["reward/score"].tolist() == [0.0]
    assert scored.columns == ("token_level_scores", "reward/score")
    assert caplog.records == []


def test_reward_keys_become_columns_and_metrics(tmp_path: Path):
    path = write(
        tmp_path,
        f"def {SIGNATURE}:\n  a = {{'score': 1, 'acc': 0.5, 'pred': 'p'}}\n"
        "  return a if solution_str == 'a' else {'score': 0, 'len': 3}\n",
    )
    with reward_function(path=path) as reward:
        scored = reward(batch_of(["a", "b", "a"], [""] * 3))
    columns = scored.non_tensor_batch
    np.testing.assert_array_equal(columns["reward/acc"], [0.5, np.nan, 0.5])
    np.testing.assert_array_equal(columns["reward/len"], [np.nan, 3, np.nan])
    assert columns["reward/pred"].tolist() == ["p", None, "p"]
    metric = scored.metrics["reward/acc/mean"]
    assert (metric.value, metric.weight) == (0.5, 2)
    assert scored.metrics["reward/errors"].value == 0


def test_reward_keeps_a_bounded_number_of_keys_and_says_so_once(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    """A key for each row, or thousands in one, would be as many columns and metrics."""
    path = write(
        tmp_path,
        f"def {SIGNATURE}:\n  return {{'score': 1, **{{f'{{solution_str}}{{n:05d}}': n for n in range(5000)}}}}\n",
    )
    with reward_function(path=path) as reward:
        scored = [reward(batch_of(["a", "b"], ["", ""])) for _ in range(2)]
    assert len(scored[0].columns) == 2 + 256
    assert scored[0].non_tensor_batch["reward/a00255"][0] == 255
    assert scored[0].non_tensor_batch["reward/score"].tolist() == [1, 1]
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "10000 different keys" in caplog.text


def test_reward_of_an_aborted_generation_is_the_default(tmp_path: Path):
    """H-46: never rewarded as complete, counted."""
    path = write(tmp_path, f"def {SIGNATURE}: return 1.0\n")
    batch = batch_of(["a", "b", "c"], [""] * 3, finish_reason=["stop", "abort", "length"])
    with reward_function(path=path, default_score=-0.5) as reward:
        scored = reward(batch)
    assert scored.non_tensor_batch["reward/score"].tolist() == [1.0, -0.5, 1.0]
    assert scored.metrics["reward/aborted"].value == 1
    assert scored.metrics["reward/errors"].value == 0


def test_reward_of_an_empty_batch_or_response():
    with reward_function() as reward:
        batch = batch_of(["#### 5", "#### 5"], ["5", "5"])
        batch.batch["response_mask"][1] = 0
        scored = reward(batch)
        assert scored.batch["token_level_scores"][1].tolist() == [0] * 4
        assert len(reward(batch[[]])) == 0


def test_reward_names_missing_columns():
    with reward_function() as reward:
        with pytest.raises(RewardError, match="missing: data_source, reward_model"):
            reward(batch_of(["a"], [""]).drop(["data_source", "reward_model"]))
        batch = batch_of(["a"], [""]).drop(["reward_model"])
        with pytest.raises(RewardError, match="must hold an object with 'ground_truth'"):
            reward(batch.union(DataProto.from_dict(non_tensors={"reward_model": [{"style": "rule"}]})))


def test_reward_does_not_change_its_batch():
    batch = batch_of(["#### 5"], ["5"])
    before = batch.columns
    with reward_function() as reward:
        reward(batch)
    assert batch.columns == before


def test_raising_rows_get_the_default_and_are_logged_once(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    """R-319: row 2 raises: default score, counted, logged once with the traceback; an option stops the run."""
    source = f"def {SIGNATURE}:\n  if solution_str == 'bad': raise RuntimeError('row is bad')\n  return 1.0\n"
    path = write(tmp_path, source)
    batch = batch_of(["a", "b", "bad", "bad", "c"], [""] * 5)
    with reward_function(path=path, default_score=-1.0) as reward, caplog.at_level(logging.WARNING):
        scored = reward(batch)
        reward(batch)
    assert scored.non_tensor_batch["reward/score"].tolist() == [1, 1, -1, -1, 1]
    assert (scored.metrics["reward/errors"].value, scored.metrics["reward/timeouts"].value) == (2, 0)
    (record,) = caplog.records
    assert "RuntimeError: row is bad" in record.getMessage()
    assert "my_reward.py" in record.getMessage()
    with reward_function(path=path, on_error="raise") as reward:
        with pytest.raises(RowFailedError, match="row is bad"):
            reward(batch)
        assert reward(batch[[0, 1]]).non_tensor_batch["reward/score"].tolist() == [1, 1]


def test_build_reward_takes_the_reward_model_where_it_is_enabled(caplog: pytest.LogCaptureFixture):
    """H-37: a configured reward model is what scores."""
    section = SimpleNamespace(path="x.py", name="compute_score", reward_kwargs={})
    config = SimpleNamespace(reward_model=SimpleNamespace(enable=True), custom_reward_function=section)
    answer = DataProto.from_dict(tensors={"token_level_scores": torch.ones(1, 2)})
    reward = build_reward(config, TOKENIZER, {"reward_model": SimpleNamespace(compute_rm_score=lambda batch: answer)})
    assert reward(answer) is answer
    reward.close()
    assert "custom_reward_function.path is not used" in caplog.text


def test_scoring_processes_import_neither_torch_nor_numpy():
    code = (
        "import sys, ostinato.ppo.rewards.worker; print(sorted({'torch', 'numpy', 'sympy', 'rich'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
