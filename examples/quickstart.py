"""GRPO, then PPO, end to end on this machine: a tiny model learns to name the largest of three digits.

    python examples/quickstart.py [--seeds 0 1 2] [--algorithms grpo ppo] [--out runs/quickstart]

Each run is one `ostinato-ppo` command, printed before it starts, so that it can be copied and changed (in a shell with
`.venv/bin` on its PATH). At the end:
accuracy on 200 unseen prompts before and after, and where the reward curve, the metrics, the checkpoint and the Hugging
Face folder lie.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

from ostinato.ppo.prepare import largest

COMMON = [
    "data.train_batch_size=64",
    "data.max_prompt_length=8",
    "data.max_response_length=4",
    "actor_rollout_ref.model.enable_gradient_checkpointing=False",
    "actor_rollout_ref.rollout.name=hf",
    "actor_rollout_ref.rollout.dtype=float32",
    "actor_rollout_ref.rollout.n=8",
    # A policy that starts from nothing must keep trying: an entropy bonus, and more room above a ratio of 1 than below.
    "actor_rollout_ref.actor.entropy_coeff=0.05",
    "actor_rollout_ref.actor.clip_ratio_high=0.28",
    "actor_rollout_ref.actor.optim.lr_scheduler_type=cosine",
    "actor_rollout_ref.actor.optim.lr_warmup_steps=20",
    "trainer.total_epochs=16",
    "trainer.val_before_train=True",
    "trainer.test_freq=48",
    "trainer.save_freq=96",
    "trainer.save_hf_model=True",
    "trainer.logger=[console,jsonl,tensorboard]",
    "trainer.device=cpu",
    "trainer.resume_mode=disable",
]
ALGORITHMS = {
    "grpo": [
        "algorithm.adv_estimator=grpo",
        "actor_rollout_ref.actor.use_kl_loss=True",
        "actor_rollout_ref.actor.ppo_mini_batch_size=16",
        "actor_rollout_ref.actor.optim.lr=2e-3",
    ],
    "ppo": [
        "algorithm.adv_estimator=gae",
        "actor_rollout_ref.actor.ppo_mini_batch_size=32",
        "actor_rollout_ref.actor.optim.lr=1e-3",
        "critic.optim.lr=2e-3",
        "critic.model.enable_gradient_checkpointing=False",
    ],
}


def command(folder: Path, algorithm: str, seed: int) -> list[str]:
    """The `ostinato-ppo` command of one run."""
    data = folder.parent / f"data-{seed}"
    return [
        *(sys.executable, "-m", "ostinato.ppo"),
        *ALGORITHMS[algorithm],
        *COMMON,
        f"data.train_files={data}/train.parquet",
        f"data.val_files={data}/val.parquet",
        f"actor_rollout_ref.model.path={data}/model",
        f"trainer.seed={seed}",
        f"trainer.default_local_dir={folder}",
    ]


def figures(folder: Path) -> dict[str, float]:
    """Reward and validation accuracy at both ends of a run, from its metrics file."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    rewards = [line["critic/score/mean"] for line in lines if "critic/score/mean" in line]
    accuracy = [
        line[key] for line in lines for key in line if key.startswith("val-core/") and key.endswith("acc/mean@1")
    ]
    return {
        "reward before": rewards[0],
        "reward after": sum(rewards[-10:]) / len(rewards[-10:]),
        "accuracy before": accuracy[0],
        "accuracy after": accuracy[-1],
    }


def main() -> None:
    """Run every algorithm with every seed and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--algorithms", nargs="+", default=list(ALGORITHMS), choices=list(ALGORITHMS))
    parser.add_argument("--out", type=Path, default=Path("runs/quickstart"))
    options = parser.parse_args()
    console, table = Console(), Table("run", "seed", "seconds", title="the largest of three digits")
    rows = []
    for seed in options.seeds:
        largest.prepare(options.out / f"data-{seed}", seed)
        for algorithm in options.algorithms:
            folder = options.out / f"{algorithm}-{seed}"
            words = command(folder, algorithm, seed)
            console.print(f"\n[bold]{algorithm}, seed {seed}[/bold]")
            # As it is, to be copied: brackets are no markup, and no line is broken.
            console.print(f"{shlex.join(['ostinato-ppo', *words[3:]])}\n", style="dim", markup=False, soft_wrap=True)
            start = time.monotonic()
            ctrl_c = signal.signal(signal.SIGINT, lambda number, frame: None)  # the run's, which closes what it started
            done = subprocess.run(words, env={**os.environ, "OMP_NUM_THREADS": "1"})
            signal.signal(signal.SIGINT, ctrl_c)
            if done.returncode:
                sys.exit(done.returncode)
            rows.append((algorithm, str(seed), f"{time.monotonic() - start:.0f}", figures(folder)))
    for name in rows[0][3]:
        table.add_column(name)
    for *head, values in rows:
        table.add_row(*head, *(f"{value:.3f}" for value in values.values()))
    console.print(table)
    console.print("(accuracy: greedy answers to 200 prompts that are not among the training prompts)")
    console.print(f"Each run's reward.png, metrics.jsonl, TensorBoard events, and checkpoint: {options.out}/NAME-SEED")


if __name__ == "__main__":
    main()
