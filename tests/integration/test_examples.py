"""The scripts under examples/ run as they are given to people, only shorter."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"

RUN = """
import runpy, sys
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
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
def test_quickstart_runs_and_prints_its_table(tmp_path, monkeypatch, capsys):
    """Two steps of each algorithm in place of all of them."""
    script = runpy.run_path(str(EXAMPLES / "quickstart.py"))
    script["COMMON"] += ["trainer.total_training_steps=2", "trainer.backend=local", "data.train_batch_size=16"]
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(sys, "argv", ["quickstart.py", "--out", str(tmp_path / "out")])
    script["main"]()
    printed = capsys.readouterr().out
    assert "accuracy after" in printed
    for algorithm in ("grpo", "ppo"):
        assert (tmp_path / "out" / f"{algorithm}-0" / "metrics.jsonl").exists()
