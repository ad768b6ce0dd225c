"""One GRPO step of the app, split by phase, beside what verl 0.9.1 printed for the same work on an H200.

    python benchmarks/ppo/bench_step.py small MODEL [--steps 5] [key=value ...]
    python benchmarks/ppo/bench_step.py long FOLDER_WITH_CONFIG [--steps 3] [key=value ...]

`small`: 64 prompts x 8, 128 + 128 tokens, sums as questions, eager. `long`: 64 x 8, 434 + 1024 tokens, ignore_eos,
graphs, micro-batches of 16 rows, random weights. The settings are those of the verl runs: FSDP2, vLLM, one GPU, sdpa
attention, no KL; in `small` verl trained micro-batches of 64 rows and scored 128, this app packs under its default
token budget. verl ran without flash-attn and therefore without padding removal; this app packs rows without it, and a
ratio contains that. The reference is a printed figure, not a run beside this one, unless `--verl` gives another one's
seconds (`verl_step.py` runs verl).
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

PHASES = ("gen", "update_weights", "reward", "old_log_prob", "adv", "update_actor", "step")

# Seconds that verl 0.9.1 printed on one H200 (vLLM 0.24, FSDP2, sdpa, no padding removal); `step` is the whole step.
VERL = {
    "small": {"gen": 6.08, "old_log_prob": 4.2, "update_actor": 11.0, "update_weights": 0.25, "step": 21.9},
    "long": {"gen": 28.2, "old_log_prob": 44.2, "update_actor": 140.0, "update_weights": 0.64, "step": 235.0},
}
VERL_START_SECONDS = 170.0

REWARD = """import re


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return 1.0 if ground_truth in re.findall(r"\\d+", solution_str) else 0.0
"""


def write_data(path: Path, case: str) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    draw = random.Random(0)
    rows = []
    for i in range(512):
        a, b = draw.randint(1, 50), draw.randint(1, 50)
        text = f"What is {a} plus {b}? Answer with a number."
        if case == "long":
            text += " Numbers that do not matter: " + " ".join(str(draw.randint(10, 99)) for _ in range(130))
        rows.append(
            {
                "data_source": "sum",
                "prompt": [{"role": "user", "content": text}],
                "ability": "math",
                "reward_model": {"style": "rule", "ground_truth": str(a + b)},
                "extra_info": {"index": i},
            }
        )
    pq.write_table(pa.Table.from_pylist(rows), path)


def with_weights(folder: str, target: Path) -> str:
    """A folder of random weights for a configuration that comes without."""
    import shutil

    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    if list(Path(folder).glob("*.safetensors")):
        return folder
    shutil.copytree(folder, target)
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.bfloat16)
    model.save_pretrained(target)
    return str(target)


def overrides(case: str, model: str, work: Path, steps: int) -> list[str]:
    long = case == "long"
    actor, rollout = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
    fixed = [
        f"{actor}.ppo_micro_batch_size_per_gpu=16",
        f"{rollout}.log_prob_micro_batch_size_per_gpu=16",
    ]
    return [
        *(fixed if long else []),
        "algorithm.adv_estimator=grpo",
        f"data.train_files={work}/data.parquet",
        f"data.val_files={work}/data.parquet",
        "data.train_batch_size=64",
        f"data.max_prompt_length={512 if long else 128}",
        f"data.max_response_length={1024 if long else 128}",
        f"actor_rollout_ref.model.path={model}",
        f"{actor}.ppo_mini_batch_size=64",
        f"{actor}.optim.lr=1e-5",
        f"{rollout}.name=vllm",
        f"{rollout}.n=8",
        f"{rollout}.gpu_memory_utilization={0.5 if long else 0.3}",
        f"{rollout}.enforce_eager={not long}",
        f"{rollout}.ignore_eos={long}",
        f"custom_reward_function.path={work}/reward.py",
        "custom_reward_function.name=compute_score",
        "trainer.n_gpus_per_node=1",
        "trainer.nnodes=1",
        f"trainer.total_training_steps={steps}",
        "trainer.total_epochs=5",
        "trainer.logger=[console,jsonl]",
        "trainer.resume_mode=disable",
        f"trainer.default_local_dir={work}/run",
    ]


def read_steps(work: Path) -> list[dict[str, float]]:
    rows = []
    for path in sorted((work / "run").rglob("*.jsonl")):
        for line in path.read_text().splitlines():
            entry = json.loads(line)
            metrics = entry.get("metrics", entry)
            if "timing_s/step" in metrics:
                rows.append(metrics)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("case", choices=VERL)
    parser.add_argument("model")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--verl", type=float, help="seconds of a verl step measured beside this run")
    options, extra = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        write_data(work / "data.parquet", options.case)
        (work / "reward.py").write_text(REWARD)
        model = with_weights(options.model, work / "model")
        command = [sys.executable, "-m", "ostinato.ppo", *overrides(options.case, model, work, options.steps), *extra]
        began = time.perf_counter()
        first = None
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ}) as process:
            assert process.stdout is not None
            for line in process.stdout:
                sys.stdout.write(line)
                if first is None and line.startswith("step 1"):
                    first = time.perf_counter() - began
        if process.returncode:
            sys.exit(process.returncode)
        steps = read_steps(work)
    # The first step pays for what is built once.
    later = steps[1:] or steps
    median = {
        name: statistics.median(row[f"timing_s/{name}"] for row in later)
        for name in PHASES
        if f"timing_s/{name}" in later[0]
    }
    reference = dict(VERL[options.case])
    reference["step"] = options.verl or reference["step"]
    report = {
        "case": options.case,
        "seconds": {name: round(value, 3) for name, value in median.items()},
        "verl_seconds": reference,
        "times_faster": {name: round(reference[name] / median[name], 2) for name in reference if median.get(name)},
        "first_step_seconds": round(steps[0]["timing_s/step"], 2),
        "tokens_per_s": round(statistics.median(row["perf/throughput"] for row in later)),
        "mean_response": round(statistics.mean(row["response_length/mean"] for row in later), 1),
        "rollout_probs_diff_mean": [
            round(row.get("training/rollout_probs_diff_mean", float("nan")), 5) for row in steps
        ],
        "command_to_end_of_first_step_s": round(first or 0, 1),
        "verl_command_to_first_step_s": VERL_START_SECONDS,
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
