"""The same small GRPO step with verl 0.9.1, where it is installed: the peer of `bench_step.py small` in one session.

    python benchmarks/ppo/verl_step.py MODEL [--steps 4] [key=value ...]
    python benchmarks/ppo/verl_step.py --read LOG           # the table of a run that was logged

The questions, the reward, the sizes and the settings are those of `bench_step.py small`; `settings` below holds all
that differ from verl's defaults. FSDP2, sdpa attention, vLLM in eager mode, one GPU; without flash-attn verl cannot
remove padding, so it does not, and a ratio contains that. `bench_step.py small MODEL --verl SECONDS` takes the
seconds of a step that this prints.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

from bench_step import REWARD, write_data

PHASES = ("gen", "update_weights", "old_log_prob", "adv", "update_actor", "step")


def settings(model: str, work: Path, steps: int) -> list[str]:
    """What verl is told, over its defaults."""
    actor, rollout = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
    return [
        "algorithm.adv_estimator=grpo",
        f"data.train_files={work}/data.parquet",
        f"data.val_files={work}/data.parquet",
        "data.train_batch_size=64",
        "data.max_prompt_length=128",
        "data.max_response_length=128",
        "data.dataloader_num_workers=0",
        f"actor_rollout_ref.model.path={model}",
        "+actor_rollout_ref.model.override_config.attn_implementation=sdpa",
        "actor_rollout_ref.model.use_remove_padding=False",
        f"{actor}.strategy=fsdp2",
        f"{actor}.ppo_mini_batch_size=64",
        f"{actor}.ppo_micro_batch_size_per_gpu=64",
        f"{actor}.use_kl_loss=False",
        f"{actor}.optim.lr=1e-5",
        f"{rollout}.name=vllm",
        f"{rollout}.tensor_model_parallel_size=1",
        f"{rollout}.n=8",
        f"{rollout}.gpu_memory_utilization=0.3",
        f"{rollout}.enforce_eager=True",
        f"{rollout}.log_prob_micro_batch_size_per_gpu=128",
        f"{rollout}.agent.num_workers=2",
        f"reward.custom_reward_function.path={work}/reward.py",
        "reward.num_workers=2",
        "trainer.logger=console",
        "trainer.n_gpus_per_node=1",
        "trainer.nnodes=1",
        "trainer.val_before_train=False",
        "trainer.save_freq=-1",
        "trainer.test_freq=-1",
        f"trainer.total_training_steps={steps}",
        "trainer.total_epochs=5",
        "+ray_kwargs.ray_init.include_dashboard=False",
        "ray_kwargs.ray_init.num_cpus=16",
    ]


def read_steps(lines: Iterable[str]) -> list[dict[str, float]]:
    """The metrics of each step, from the lines that verl's console logger writes (`step:1 - name:value - ...`)."""
    steps = []
    for line in lines:
        if found := re.search(r"\bstep:\d+ - .*", line):
            pairs = (word.rpartition(":") for word in found[0].strip().split(" - "))
            steps.append({name: float(re.sub(r"np\.\w+\((.*)\)", r"\1", value)) for name, _, value in pairs})
    return steps


def report(steps: list[dict[str, float]]) -> dict[str, object]:
    """Seconds by phase, medians without the first step, which pays for what is built once."""
    later = steps[1:] or steps
    return {
        "seconds": {name: round(statistics.median(step[f"timing_s/{name}"] for step in later), 3) for name in PHASES},
        "steps": [round(step["timing_s/step"], 2) for step in steps],
        "tokens_per_s": round(statistics.median(step["perf/throughput"] for step in later)),
        "mean_response": round(statistics.mean(step["response_length/mean"] for step in later), 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--read", type=Path, help="a log of such a run")
    options, extra = parser.parse_known_args()
    if options.read:
        print(json.dumps(report(read_steps(options.read.read_text(errors="replace").splitlines()))))
        return
    if options.model is None:
        parser.error("a model folder is needed (or --read LOG)")
    with tempfile.TemporaryDirectory() as folder:
        work, lines = Path(folder), []
        write_data(work / "data.parquet", "small")
        (work / "reward.py").write_text(REWARD)
        keys = settings(str(Path(options.model).resolve()), work, options.steps)
        command = [sys.executable, "-m", "verl.trainer.main_ppo", *keys, *extra]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
            assert process.stdout is not None
            for line in process.stdout:
                sys.stdout.write(line)
                lines.append(line)
        if process.returncode:
            sys.exit(process.returncode)
    print(json.dumps(report(read_steps(lines))))


if __name__ == "__main__":
    main()
