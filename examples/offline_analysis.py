"""Recompute the advantages of a rollout dump under several estimators, print a comparison, draw a plot.

    pip install ostinato-algos matplotlib        # and pyarrow for parquet
    python examples/offline_analysis.py [DUMP.jsonl | DUMP.parquet] [--estimators grpo rloo opo] [--out analysis.png]

Without a dump it makes a small one, `offline_sample.jsonl`, and analyses that. A training run writes one a step with
`trainer.rollout_data_dir=FOLDER`. A dump has one row a response:

    uid              label of the prompt; its responses are a group
    score            what the reward gave
    response_mask    list, 1 where the policy sampled the token, 0 for tool output
    old_log_probs    list, log-probability of each token under the policy

and, where estimators want them, `rollout_id`, `values` and `sum_pi_squared` (lists), `reward_baseline` (ReMax),
`reward_scores` (a mapping, for GDPO; or `--reward-keys acc format` names keys of the rows); `rollout_log_probs` (a
list, the sampler's own) for the gap between both engines.
Nothing of the rest of ostinato is needed.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
import warnings
from pathlib import Path
from typing import Any

import torch

from ostinato.algos import (
    adv_estimators,
    get_adv_estimator,
    group_index,
    keywords,
    masked_mean,
    place_outcome,
    rollout_probs_diff,
)

TOKEN_LISTS = ("old_log_probs", "values", "sum_pi_squared", "rollout_log_probs")


def make_sample(path: Path, prompts: int = 24, responses: int = 8, seed: int = 0) -> None:
    """Write a dump of made-up rollouts: prompts from hopeless to easy, right answers shorter, a quarter use a tool."""
    draw = random.Random(seed)
    with path.open("w", encoding="utf-8") as file:
        for prompt in range(prompts):
            difficulty = prompt / (prompts - 1)
            for answer in range(responses):
                right = draw.random() < difficulty
                length = draw.randint(8, 24) if right else draw.randint(16, 48)
                mask = [1] * length
                if draw.random() < 0.25:
                    start = draw.randint(2, length // 2)
                    mask[start : start + 4] = [0] * 4
                log_probs = [-draw.expovariate(2.0) * on for on in mask]
                row = {
                    "uid": f"prompt-{prompt}",
                    "rollout_id": prompt * responses + answer,
                    "score": float(right),
                    "response_mask": mask,
                    "old_log_probs": [round(value, 4) for value in log_probs],
                    "rollout_log_probs": [round(value + draw.gauss(0, 0.01) * bool(value), 4) for value in log_probs],
                    # A token of probability p among others of about equal probability.
                    "sum_pi_squared": [
                        round(math.exp(2 * value) + (1 - math.exp(value)) ** 2 / 50, 4) for value in log_probs
                    ],
                    "values": [round(0.8 * difficulty + 0.2 * right * t / length, 4) for t in range(length)],
                    "reward_baseline": float(difficulty > 0.5),
                    "reward_scores": {"right": float(right), "short": 1 - length / 48},
                }
                file.write(json.dumps(row) + "\n")


def read_dump(path: Path) -> list[dict[str, Any]]:
    """The rows of a JSONL or parquet file."""
    if path.is_dir():
        found = sorted(path.glob("*.jsonl"), key=lambda file: (len(file.name), file.name))
        last = f", the last of them {found[-1]}" if found else ""
        sys.exit(f"{path}: expected a file of one step, got a folder with {len(found)} of them{last}")
    if path.suffix == ".parquet":
        try:
            from pyarrow.parquet import read_table
        except ImportError:
            sys.exit(f"{path}: reading parquet needs pyarrow (pip install pyarrow); or give a .jsonl file")
        rows = read_table(path).to_pylist()
    else:
        with path.open(encoding="utf-8") as lines:
            rows = [json.loads(line) for line in lines if line.strip()]
    if not rows:
        sys.exit(f"{path}: it holds no rows")
    missing = {"uid", "score", "response_mask", "old_log_probs"} - set(rows[0])
    if missing:
        sys.exit(f"{path}: its rows lack {', '.join(sorted(missing))}")
    return rows


def padded(lists: list[list[float]]) -> torch.Tensor:
    """Ragged lists as (B, R), 0 behind the end of each."""
    out = torch.zeros(len(lists), max(map(len, lists)), dtype=torch.float64)
    for row, values in enumerate(lists):
        out[row, : len(values)] = torch.tensor(values, dtype=torch.float64)
    return out


def inputs_of(rows: list[dict[str, Any]], reward_keys: list[str]) -> dict[str, Any]:
    """What estimators may name in their signatures, as far as the dump has it."""
    there: dict[str, Any] = {"groups": [row["uid"] for row in rows]}
    if "rollout_id" in rows[0]:
        there["rollouts"] = [row["rollout_id"] for row in rows]
    there |= {name: padded([row[name] for row in rows]) for name in TOKEN_LISTS if name in rows[0]}
    there["log_probs"] = there.pop("old_log_probs")
    if "reward_baseline" in rows[0]:
        there["reward_baselines"] = torch.tensor([row["reward_baseline"] for row in rows], dtype=torch.float64)
    scores = [{key: row[key] for key in reward_keys} if reward_keys else row.get("reward_scores", {}) for row in rows]
    if scores[0]:
        # A call that failed has no such score; it counts as 0, as in training.
        there["reward_scores"] = {
            key: torch.tensor([row[key] or 0.0 for row in scores], dtype=torch.float64) for key in scores[0]
        }
    return there


def advantages_of(
    names: list[str], scores: torch.Tensor, mask: torch.Tensor, there: dict[str, Any]
) -> tuple[dict[str, torch.Tensor], dict[str, list[str]]]:
    """Advantages (B, R) by estimator, and of those that cannot run what the dump lacks."""
    found, lacking = {}, {}
    for name in names:
        estimator = get_adv_estimator(name)
        wanted = keywords(estimator)
        missing = [word for word, needed in wanted.items() if needed and word not in there]
        if missing:
            lacking[name] = missing
            continue
        given = {word: there[word] for word in wanted if word in there}
        found[name], _ = estimator(place_outcome(scores, mask), mask, **given)
    return found, lacking


def correlation(x: torch.Tensor, y: torch.Tensor) -> float:
    """Pearson's, 0 where one does not vary."""
    x, y = x - x.mean(), y - y.mean()
    norm = float(x.norm() * y.norm())
    return float(x @ y) / norm if norm else 0.0


def print_table(found: dict[str, torch.Tensor], mask: torch.Tensor, groups: list[str]) -> None:
    """One line an estimator; the last column compares row means with those of the first."""
    valid, index = mask.bool(), group_index(groups)
    rows = {name: masked_mean(advantages, mask, dim=-1) for name, advantages in found.items()}
    first = next(iter(rows))
    head = ("mean |A|", "std", "min", "max", "A ≠ 0", "groups", f"r({first})")
    print(f"{'estimator':28s}" + "".join(f"{word:>12s}" for word in head))
    for name, advantages in found.items():
        tokens = advantages[valid]
        heard = torch.zeros(int(index.max()) + 1).index_add(0, index, (rows[name].abs() > 1e-6).float()) > 0
        numbers = (tokens.abs().mean(), tokens.std(), tokens.min(), tokens.max())
        line = "".join(f"{float(number):12.4f}" for number in numbers)
        line += f"{float((tokens.abs() > 1e-6).double().mean()):12.1%}{float(heard.double().mean()):12.1%}"
        print(f"{name:28s}{line}{correlation(rows[first], rows[name]):12.4f}")
    print("A ≠ 0: tokens with a gradient; groups: groups with any; r: correlation of row means with the first line's")


def draw(path: Path, found: dict[str, torch.Tensor], scores: torch.Tensor, mask: torch.Tensor) -> None:
    """Left: each row's advantage against its score; right: mean |A| by position."""
    from matplotlib import colormaps
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    colours = colormaps["tab20"].colors[::2] + colormaps["tab20"].colors[1::2]
    figure = Figure(figsize=(12, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    tokens = mask.sum(0).clamp(min=1)
    width = float(scores.max() - scores.min()) or 1.0
    for number, (name, advantages) in enumerate(found.items()):
        style = {"color": colours[number % len(colours)]}
        shift = width * (number / max(len(found) - 1, 1) - 0.5) / 6
        left.plot((scores + shift).tolist(), masked_mean(advantages, mask, dim=-1).tolist(), ".", alpha=0.5, **style)
        right.plot((advantages.abs().sum(0) / tokens).tolist(), label=name, **style)
    left.set(xlabel="score (estimators side by side)", ylabel="mean advantage of the row")
    right.set(xlabel="position in the response", ylabel="mean |advantage|")
    figure.legend(*right.get_legend_handles_labels(), loc="outside right center", fontsize="small")
    figure.savefig(path, dpi=120)


def main() -> None:
    """Read, compare, draw."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("dump", type=Path, nargs="?", help="JSONL or parquet; left out: a made-up sample")
    parser.add_argument("--estimators", nargs="+", choices=adv_estimators(), default=None, metavar="NAME")
    parser.add_argument("--reward-keys", nargs="+", default=[], metavar="KEY", help="the rewards of gdpo")
    parser.add_argument("--out", type=Path, default=Path("offline_analysis.png"))
    options = parser.parse_args()
    path = options.dump
    if path is None:
        path = options.out.parent / "offline_sample.jsonl"
        make_sample(path)
        print(f"no dump given: made a sample, {path}")
    rows = read_dump(path)
    mask = padded([row["response_mask"] for row in rows])
    scores = torch.tensor([row["score"] for row in rows], dtype=torch.float64)
    unknown = [key for key in options.reward_keys if any(key not in row for row in rows)]
    if unknown:
        sys.exit(f"{path}: its rows lack {', '.join(unknown)}")
    there = inputs_of(rows, options.reward_keys)
    print(f"{len(rows)} responses to {len(set(there['groups']))} prompts, {int(mask.sum())} policy tokens, ", end="")
    print(f"mean score {float(scores.mean()):.3f}\n")
    names = options.estimators or ["grpo", *(name for name in adv_estimators() if name != "grpo")]
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        found, lacking = advantages_of(names, scores, mask, there)
    if not found:
        sys.exit(f"no estimator can run: {lacking}")
    print_table(found, mask, there["groups"])
    for name, missing in lacking.items():
        print(f"{name}: left out, the dump has no {', '.join(missing)}")
    if "rollout_log_probs" in there:
        gap = rollout_probs_diff(there["log_probs"], there["rollout_log_probs"], mask)
        print("\nsampler against trainer: " + ", ".join(f"{name} {float(value):.4f}" for name, value in gap.items()))
    draw(options.out, found, scores, mask)
    print(f"\nplot: {options.out}")


if __name__ == "__main__":
    main()
