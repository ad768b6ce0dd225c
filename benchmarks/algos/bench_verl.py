"""Estimators and validation statistics against verl 0.9.1's functions and a memory copy, in one run: prints ratios.

    python benchmarks/algos/bench_verl.py [--shapes 1024x8192 8192x2048] [--repeat 5] [--scratch DIR]

verl and the two small packages that its functions import are put into DIR (kept between runs), without their
dependencies: the functions need torch, numpy and what this environment has. Calls take turns, medians are compared.
`copy` is how many times as long as one copy of the advantages a call takes: nothing that writes them can be below 1.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch

from ostinato.algos import get_adv_estimator, place_outcome

NEEDED = ("verl==0.9.1", "codetiming", "orjson")
GOALS = {"gae": 10.0, "grpo": 2.0, "rloo": 2.0, "opo": 2.0, "reinforce_plus_plus_baseline": 2.0, "statistics": 1000.0}


def fetch(scratch: Path) -> None:
    """Put what is compared against into a folder of its own and make it importable."""
    if not (scratch / "verl").is_dir():
        where = ["--no-deps", "--target", str(scratch), *NEEDED]
        uv = shutil.which("uv")
        pip = (
            [uv, "pip", "install", "--quiet", "--python", sys.executable]
            if uv
            else [sys.executable, "-m", "pip", "install"]
        )
        subprocess.run([*pip, *where], check=True)
    sys.path.append(str(scratch))


def seconds(calls: Sequence[Callable[[], object]], repeat: int) -> list[float]:
    """Median CPU seconds of each call, taking turns; the first turn does not count."""
    times: list[list[float]] = [[] for _ in calls]
    for turn in range(repeat + 1):
        for number, call in enumerate(calls):
            start = time.process_time()  # of all threads: what else runs on the machine does not count
            call()
            if turn:
                times[number].append(time.process_time() - start)
    return [statistics.median(each) for each in times]


def line(name: str, ours: float, theirs: float, goal: float | None, copy: float | None = None, gap: str = "") -> None:
    told = f"{ours / copy:6.1f} ×copy" if copy else " " * 12
    verdict = "" if goal is None else f"  goal {goal:g}: {'met' if theirs / ours >= goal else 'MISSED'}"
    times = f"ours {ours * 1e3:9.2f} ms  verl {theirs * 1e3:11.1f} ms"
    print(f"{name:30s} ratio {theirs / ours:8.1f}   {times} {told}{verdict}{gap}", flush=True)


def estimators(rows: int, tokens: int, group: int, repeat: int) -> None:
    from verl.trainer.ppo import core_algos as verl

    torch.manual_seed(0)
    lengths = torch.randint(tokens // 8, tokens + 1, (rows,))
    mask = (torch.arange(tokens) < lengths[:, None]).long()  # as the column `response_mask` is, in both systems
    values = torch.randn(rows, tokens) * mask
    rewards = place_outcome(torch.randint(2, (rows,)).float(), mask)
    labels = np.repeat([f"uid-{number}" for number in range(rows // group)], group)
    names = labels.tolist()
    baselines = torch.rand(rows)
    config = SimpleNamespace(gamma=0.99, get=lambda key, default=None: default)
    grouped = {"grpo", "rloo", "opo", "reinforce_plus_plus_baseline", "gpg", "grpo_passk"}
    theirs = {
        "gae": lambda: verl.compute_gae_advantage_return(rewards, values, mask, 0.99, 0.95),
        "grpo": lambda: verl.compute_grpo_outcome_advantage(rewards, mask, labels),
        "grpo (verl's vectorised)": lambda: verl.compute_grpo_vectorized_outcome_advantage(rewards, mask, labels),
        "rloo": lambda: verl.compute_rloo_outcome_advantage(rewards, mask, labels),
        "rloo (verl's vectorised)": lambda: verl.compute_rloo_vectorized_outcome_advantage(rewards, mask, labels),
        "opo": lambda: verl.compute_opo_outcome_advantage(rewards, mask, labels),
        "grpo_passk": lambda: verl.compute_grpo_passk_outcome_advantage(rewards, mask, labels, config=config),
        "reinforce_plus_plus_baseline": lambda: verl.compute_reinforce_plus_plus_baseline_outcome_advantage(
            rewards, mask, labels
        ),
        "reinforce_plus_plus": lambda: verl.compute_reinforce_plus_plus_outcome_advantage(rewards, mask, config),
        "remax": lambda: verl.compute_remax_outcome_advantage(rewards, baselines, mask),
    }
    options = {
        "gae": {"values": values, "gamma": 0.99, "lam": 0.95},
        "reinforce_plus_plus": {"gamma": 0.99},
        "remax": {"reward_baselines": baselines},
    }
    print(f"\n{rows} rows × {tokens} tokens, groups of {group}, float32, {torch.get_num_threads()} thread(s)")
    for name, their in theirs.items():
        key = name.partition(" ")[0]
        given = options.get(key, {"groups": names} if key in grouped else {})

        def mine(key: str = key, given: dict = given) -> tuple[torch.Tensor, torch.Tensor]:
            return get_adv_estimator(key)(rewards, mask, **given)

        own, other, copy = seconds([mine, their, lambda: values.clone()], repeat)
        gap = f"  max diff {float((mine()[0] - their()[0])[mask.bool()].abs().max()):.1e}"
        line(name, own, other, GOALS.get(name), copy, gap)


def validation(prompts: int, samples: int, few: int) -> None:
    """verl's bootstrap is timed on a few prompts and scaled: it is a loop over them."""
    from verl.trainer.ppo.metric_utils import process_validation_metrics

    from ostinato.ppo.validate import validation_metrics

    draw = np.random.default_rng(0)
    scores = (draw.random((prompts, samples)) < draw.random((prompts, 1))).astype(float)
    answers = np.where(scores == 1, 7, draw.integers(0, 5, scores.shape)).astype(str)
    uids = np.repeat(np.arange(prompts), samples).tolist()
    flat, said = scores.reshape(-1), answers.reshape(-1).tolist()
    sources = ["s"] * len(uids)
    part = few * samples

    def mine() -> object:
        return validation_metrics(sources, uids, {"reward": flat}, said)

    def theirs() -> object:
        infos = {"reward": flat[:part].tolist(), "pred": said[:part]}
        return process_validation_metrics(sources[:part], uids[:part], infos)

    (own,) = seconds([mine], 5)
    (other,) = seconds([theirs], 1)
    print(f"\nvalidation statistics, {prompts} prompts × {samples} answers (verl: {few} prompts, scaled)")
    line("statistics", own, other * prompts / few, GOALS["statistics"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", nargs="+", default=["1024x8192", "8192x2048"])
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--prompts", type=int, default=1319)
    parser.add_argument("--few", type=int, default=8, help="prompts of verl's bootstrap that are timed")
    parser.add_argument("--scratch", type=Path, default=Path(tempfile.gettempdir()) / "ostinato-bench-verl")
    options = parser.parse_args()
    torch.set_num_threads(1)
    fetch(options.scratch)
    for shape in options.shapes:
        rows, tokens = map(int, shape.split("x"))
        estimators(rows, tokens, options.group, options.repeat)
    validation(options.prompts, 16, options.few)


if __name__ == "__main__":
    main()
