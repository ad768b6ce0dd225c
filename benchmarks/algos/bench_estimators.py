"""Advantage estimators against plain Python loops over rows and time, in the same run: prints the ratio.

python benchmarks/algos/bench_estimators.py [--rows 512] [--tokens 1024] [--group 8] [--repeat 5]
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch

from ostinato.algos import gae, grpo, masked_whiten, rloo


def loop_gae(rewards, mask, values, gamma, lam):
    advantages = torch.zeros_like(rewards)
    for i in range(rewards.shape[0]):
        next_value = running = 0.0
        for t in range(rewards.shape[1] - 1, -1, -1):
            if mask[i, t]:
                running = rewards[i, t] + gamma * next_value - values[i, t] + gamma * lam * running
                next_value = values[i, t]
                advantages[i, t] = running
    return masked_whiten(advantages, mask)


def column_gae(rewards, mask, values, gamma, lam):
    """The usual form: rows at once, a loop over time."""
    advantages = torch.zeros_like(rewards)
    next_value = running = rewards.new_zeros(rewards.shape[0])
    for t in range(rewards.shape[1] - 1, -1, -1):
        on = mask[:, t]
        stepped = rewards[:, t] + gamma * next_value - values[:, t] + gamma * lam * running
        running = torch.where(on, stepped, running)
        next_value = torch.where(on, values[:, t], next_value)
        advantages[:, t] = torch.where(on, running, 0)
    return masked_whiten(advantages, mask)


def loop_groups(rewards, mask, labels, by_std):
    scores, members = (rewards * mask).sum(-1), {}
    for i, label in enumerate(labels):
        members.setdefault(label, []).append(i)
    out = torch.zeros_like(rewards)
    for rows in members.values():
        own = scores[rows]
        for i in rows:
            if by_std:
                row = (scores[i] - own.mean()) / (own.std() + 1e-6)
            else:
                row = scores[i] - (own.sum() - scores[i]) / (len(rows) - 1)
            out[i] = row * mask[i]
    return out


def seconds(fn: Callable[[], torch.Tensor], repeat: int) -> float:
    fn()
    times = []
    for _ in range(repeat):
        start = time.perf_counter()
        fn()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--repeat", type=int, default=5)
    options = parser.parse_args()
    torch.manual_seed(0)
    shape = (options.rows, options.tokens)
    mask = torch.rand(shape) < 0.8
    rewards, values = torch.randn(shape) * mask, torch.randn(shape) * mask
    labels = [i // options.group for i in range(options.rows)]
    # The loop over rows and time is timed on a few rows and scaled: it is linear in them.
    few = max(options.rows // 64, 1)
    part = slice(0, few)
    cases = {
        "gae, loop over rows and time": (
            lambda: gae(rewards, mask, values=values, gamma=0.99, lam=0.95)[0],
            lambda: loop_gae(rewards[part], mask[part], values[part], 0.99, 0.95),
            options.rows / few,
        ),
        "gae, loop over time": (
            lambda: gae(rewards, mask, values=values, gamma=0.99, lam=0.95)[0],
            lambda: column_gae(rewards, mask, values, 0.99, 0.95),
            1.0,
        ),
        "grpo, loop over groups and rows": (
            lambda: grpo(rewards, mask, groups=labels)[0],
            lambda: loop_groups(rewards, mask, labels, True),
            1.0,
        ),
        "rloo, loop over groups and rows": (
            lambda: rloo(rewards, mask, groups=labels)[0],
            lambda: loop_groups(rewards, mask, labels, False),
            1.0,
        ),
    }
    print(f"{options.rows} rows, {options.tokens} tokens, groups of {options.group}, {torch.get_num_threads()} threads")
    for name, (vectorised, loop, scale) in cases.items():
        ours, theirs = seconds(vectorised, options.repeat), seconds(loop, 1 if scale > 1 else options.repeat) * scale
        print(f"{name:36s} ratio {theirs / ours:9.1f}   ({theirs * 1e3:.1f} ms / {ours * 1e3:.1f} ms)")


if __name__ == "__main__":
    main()
