"""The scripts under examples/ run as they are given to people, only shorter."""

from __future__ import annotations

import json
import os
import runpy
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from toy_runs import metrics_of, nested, toy_overrides

from ostinato.ppo import run as run_module
from ostinato.ppo.config import PpoConfig
from ostinato.ppo.preflight import check

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"

RUN = """
import runpy, sys
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return {"score": sum(map(ord, solution_str)) % 11 / 10, "length": len(solution_str), "pred": solution_str}
"""
ALONE = """
ours = {".".join(name.split(".")[:2]) for name in sys.modules if name.startswith("ostinato.")}
assert ours == {"ostinato.algos"}, ours
loaded = {name.partition(".")[0] for name in sys.modules}
assert not loaded & {"transformers", "ray", "tensordict", "hydra", "omegaconf", "pyarrow", "pandas"}, loaded
"""


def run(code: str, folder: Path, *words: str) -> str:
    """Run an example with arguments in a folder; returns what it printed."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code, *words], cwd=folder, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_offline_analysis_needs_algos_and_a_plotting_library_alone(tmp_path):
    """Every estimator on the sample that it makes; neither another wheel nor pyarrow is imported."""
    from ostinato.algos import adv_estimators

    printed = run(RUN + ALONE, tmp_path, str(EXAMPLES / "offline_analysis.py"))
    assert all(any(line.startswith(f"{name} ") for line in printed.splitlines()) for name in adv_estimators())
    assert "192 responses to 24 prompts" in printed
    assert "training/rollout_probs_diff_mean" in printed
    assert (tmp_path / "offline_analysis.png").stat().st_size > 10_000


def test_offline_analysis_reads_parquet_and_says_what_a_dump_lacks(tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = [
        {"uid": f"p{row // 4}", "score": float(row % 3 == 0), "response_mask": [1] * (row + 1),
         "old_log_probs": [-0.5] * (row + 1)}
        for row in range(8)
    ]  # fmt: skip
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "dump.parquet")
    (tmp_path / "dump.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    words = ("--estimators", "rloo", "gae", "opo", "--out", "plot.png")
    script = str(EXAMPLES / "offline_analysis.py")
    printed = run(RUN, tmp_path, script, "dump.parquet", *words)
    assert "gae: left out, the dump has no values" in printed
    assert "r(rloo)" in printed
    assert printed == run(RUN, tmp_path, script, "dump.jsonl", *words)
    assert (tmp_path / "plot.png").exists()


def test_offline_analysis_refuses_rows_without_scores(tmp_path):
    (tmp_path / "dump.jsonl").write_text('{"uid": "a", "response_mask": [1]}\n')
    with pytest.raises(AssertionError, match="its rows lack old_log_probs, score"):
        run(RUN, tmp_path, str(EXAMPLES / "offline_analysis.py"), "dump.jsonl")


@pytest.mark.e2e
def test_offline_analysis_reads_what_a_run_dumps(toy, tmp_path):
    """Two steps and a validation in this process; the advantages that the script recomputes are those of the run."""
    (tmp_path / "reward.py").write_text(REWARD)
    options = {
        "trainer.backend": "local",
        "trainer.rollout_data_dir": str(tmp_path / "rollouts"),
        "trainer.validation_data_dir": str(tmp_path / "validation"),
        "trainer.test_freq": 2,
        "custom_reward_function.path": str(tmp_path / "reward.py"),
        "custom_reward_function.num_processes": 1,
        "algorithm.adv_estimator": "gae",
    }
    checked = check(PpoConfig.from_mapping(nested(toy_overrides(toy, tmp_path / "run", **options))))
    run_module.train(checked.config, emit=lambda event: None)
    assert sorted(path.name for path in (tmp_path / "rollouts").iterdir()) == ["1.jsonl", "2.jsonl"]
    rows = [json.loads(line) for line in (tmp_path / "rollouts" / "2.jsonl").read_text().splitlines()]
    metrics = metrics_of(tmp_path / "run")[1]
    assert len(rows) == 32
    assert {row["step"] for row in rows} == {2}
    assert sum(row["score"] for row in rows) / 32 == pytest.approx(metrics["critic/score/mean"], abs=1e-5)
    assert "timing_s/dump_rollout_generations" in metrics
    validated = [json.loads(line) for line in (tmp_path / "validation" / "2.jsonl").read_text().splitlines()]
    assert len(validated) == 16
    assert all({"input", "output", "gts", "score", "length"} <= row.keys() for row in validated)

    script = str(EXAMPLES / "offline_analysis.py")
    printed = run(RUN + ALONE, tmp_path, script, "rollouts/2.jsonl", "--reward-keys", "score", "length")
    assert "32 responses to 8 prompts" in printed
    for name in ("grpo", "gae", "rloo", "gdpo"):
        assert any(line.startswith(f"{name} ") for line in printed.splitlines())
    (gae,) = (line.split() for line in printed.splitlines() if line.startswith("gae "))
    assert float(gae[3]) == pytest.approx(metrics["critic/advantages/min"], abs=2e-4)
    assert float(gae[4]) == pytest.approx(metrics["critic/advantages/max"], abs=2e-4)
    assert "training/rollout_probs_diff_mean" in printed


@pytest.mark.e2e
def test_quickstart_runs_and_prints_its_table(tmp_path, monkeypatch, capsys):
    """Two steps of each algorithm in place of all of them; the printed commands are those that ran.

    The first as it is, in a process of its own; the second in this one, which has all imported.
    """
    from ostinato.ppo import cli

    ran, run = [], subprocess.run

    def here(words, **options):
        ran.append(words)
        if len(ran) == 1:
            return run(words, **options)
        assert words[:3] == [sys.executable, "-m", "ostinato.ppo"]
        return subprocess.CompletedProcess(words, cli.main(words[3:]))

    script = runpy.run_path(str(EXAMPLES / "quickstart.py"))
    script["COMMON"] += ["trainer.total_training_steps=2", "trainer.backend=local", "data.train_batch_size=16"]
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setattr(sys, "argv", ["quickstart.py", "--out", str(tmp_path / "out")])
    monkeypatch.setattr(subprocess, "run", here)
    script["main"]()
    printed = capsys.readouterr().out
    assert len(ran) == 2
    assert "accuracy after" in printed
    commands = [shlex.split(line) for line in printed.splitlines() if line.startswith("ostinato-ppo ")]
    for algorithm, words in zip(("grpo", "ppo"), commands, strict=True):
        assert words[1:] == script["command"](tmp_path / "out" / f"{algorithm}-0", algorithm, 0)[3:]
        assert (tmp_path / "out" / f"{algorithm}-0" / "metrics.jsonl").exists()
