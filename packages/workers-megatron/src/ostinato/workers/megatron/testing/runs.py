"""What the spawned ranks of this wheel's tests run; importable, so that fresh processes find it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional

from ostinato.algos import token_log_probs
from ostinato.protocol import DataProto
from ostinato.rollout import RolloutConfig, SamplingParams
from ostinato.rollout.base import Rollout
from ostinato.rollout.reshard import reshard
from ostinato.workers.core.config import ModelConfig
from ostinato.workers.core.engine import TokenOutputs
from ostinato.workers.core.microbatch import PackedRows, pack
from ostinato.workers.core.testing import conformance
from ostinato.workers.core.testing.oracle import (
    OPTIM,
    TEMPERATURE,
    VOCAB,
    Driver,
    MakeEngine,
    Oracle,
    assert_near,
    assert_same_weights,
    batch_of,
    make_rows,
    start,
)
from ostinato.workers.megatron import parallel
from ostinato.workers.megatron.config import MegatronConfig
from ostinato.workers.megatron.engine import MegatronEngine
from ostinato.workers.megatron.errors import CheckpointError
from ostinato.workers.megatron.packing import Layout, OutputReader, model_inputs, token_outputs
from ostinato.workers.megatron.saved import METADATA, SavedWeights
from ostinato.workers.megatron.testing.comparisons import Comparisons, all_compared
from ostinato.workers.megatron.testing.models import tiny_mixture, tiny_qwen3

FEW = (conformance.check_parity, conformance.check_empty_micro_batches, conformance.check_weight_source)

TP: dict[str, Any] = {"tensor_model_parallel_size": 2}
PP: dict[str, Any] = {"pipeline_model_parallel_size": 2}
VPP: dict[str, Any] = {"pipeline_model_parallel_size": 3, "virtual_pipeline_model_parallel_size": 2}
EP: dict[str, Any] = {"expert_model_parallel_size": 2}
LOCAL: dict[str, Any] = {"override_transformer_config": {"transformer_impl": "local"}}
PLAIN: dict[str, Any] = {"use_distributed_optimizer": False}
ROUTER: dict[str, Any] = {"moe_router_dtype": "fp64"}
"""Keeps Megatron's own layers from TransformerEngine's product in the router, which is TF32 where all is float32."""

ROLLOUT = RolloutConfig(dtype="float32", prompt_length=4, response_length=4)


def megatron(**config: Any) -> MakeEngine:
    """A picklable engine factory in float32 with entries of `MegatronConfig`; its groups are made anew."""
    entries = {"dtype": "fp32", **config}
    if entries["dtype"] == "fp32":
        # TransformerEngine's attention knows no float32; the exact comparisons are with Megatron's own layers.
        exact = LOCAL["override_transformer_config"] | (ROUTER if find_spec("transformer_engine") is not None else {})
        entries["override_transformer_config"] = exact | entries.get("override_transformer_config", {})
    return partial(_fresh, MegatronConfig(**entries))


def _fresh(config: MegatronConfig, **arguments: Any) -> MegatronEngine:
    if parallel.made_for() not in (None, config.sizes):
        parallel.shutdown()
    return MegatronEngine(engine=config, **arguments)


def prepare(workspace: Path) -> None:
    """Write this wheel's own model folders beside those of the suite: `qwen3`, `untied3`, `mixture`, `deep`."""
    tiny_qwen3(workspace / "qwen3")
    tiny_qwen3(workspace / "untied3", tied=False, seed=5)
    tiny_mixture(workspace / "mixture")
    tiny_qwen3(workspace / "deep", num_layers=6, seed=6)


def check_family(make_engine: MakeEngine, folder: Path, compared: Comparisons) -> None:
    """Log-probabilities, loss, gradient norm and weights of a family equal one plain Hugging Face model's.

    Its names and weights are the folder's at first, and a rollout engine holds them before the steps and after. A
    checkpoint gives them as the engine does.
    """
    from safetensors.torch import load_file
    from transformers.core_model_loading import revert_weight_conversion

    from ostinato.rollout.backends.hf import HfRollout

    driver = start(make_engine, folder)
    state = driver.state()
    with compared.of("weights from the folder"):
        assert_same_weights(state, load_file(folder / "model.safetensors"), rtol=0)
    rollout = HfRollout(ROLLOUT, model_path=folder, device=driver.engine.device)
    check_reshard(driver, rollout, compared)
    oracle = Oracle(folder, "lm", OPTIM, driver.engine.device)
    rows = make_rows(6, seed=21)
    collected = driver.outputs(rows, 3)
    if collected is not None:
        log_probs, entropy = oracle.all_outputs(driver.mine(rows))
        for name, expected in (("log_probs", log_probs), ("entropy", entropy)):
            with compared.of(name):
                torch.testing.assert_close(torch.cat([c[name] for c in collected]), expected, rtol=1e-5, atol=1e-5)
    for step in range(2):
        rows = make_rows(6, seed=22 + step)
        loss, stats = driver.train(rows, 2)
        for name, got, expected in (
            ("loss", loss, oracle.loss(rows)),
            ("gradient norm", stats.grad_norm, oracle.step().grad_norm),
        ):
            with compared.of(f"step {step}"):
                assert_near(name, got, expected, rtol=1e-5)
    # transformers keeps all experts of a layer in one tensor; the folder has them one by one.
    module: Any = oracle.module
    state = driver.state()
    with compared.of("weights of 2 steps"):
        assert_same_weights(state, revert_weight_conversion(module, oracle.state()), rtol=1e-5)
    check_reshard(driver, rollout, compared)
    path = folder.parent / "checkpoints" / folder.name
    driver.engine.save(path)
    dist.barrier()
    with compared.of("checkpoint"):
        assert_same_weights(dict(SavedWeights(path, ModelConfig(path=str(folder)), "lm").weights()), state, rtol=0)
    with compared.within("checkpoint in the background"):
        check_background(driver, folder, path.with_name(f"{folder.name}-later"), compared)
    check_failed_save(driver, path.with_name(f"{folder.name}-failed"), compared)


def check_background(driver: Driver, folder: Path, path: Path, compared: Comparisons) -> None:
    """A checkpoint is of the moment at which it was asked for, though each rank looks for it in its own time."""
    state, rows = driver.state(), make_rows(6, seed=31)
    pending = driver.engine.save(path, background=True)
    assert pending is not None
    expected = driver.train(rows, 2)
    while dist.get_rank() == 0 and not pending.done():
        time.sleep(0.01)
    pending.wait()
    dist.barrier()
    with compared.of("written"):
        assert_same_weights(dict(SavedWeights(path, ModelConfig(path=str(folder)), "lm").weights()), state, rtol=0)
    driver.engine.load(path)
    loaded = driver.state()
    with compared.of("loaded"):
        assert_same_weights(loaded, state, rtol=0)
    got = driver.train(rows, 2)
    with compared.of("the step after it"):
        assert got == expected, f"expected {expected}, got {got}"


def check_failed_save(driver: Driver, path: Path, compared: Comparisons) -> None:
    """What rank 0 alone does before and after the others write fails on every rank, under its name."""
    file, marked = path / "file", path / "marked"
    if dist.get_rank() == 0:
        (marked / ".mark" / METADATA).mkdir(parents=True, exist_ok=True)
        file.write_text("not a folder")
    for folder, reason in ((file / "1", "NotADirectoryError"), (marked, "IsADirectoryError")):
        try:
            driver.engine.save(folder)
            told = "nothing"
        except CheckpointError as error:
            told = str(error)
        with compared.of(f"a save that ends in {reason}"):
            assert f"checkpoint {folder} cannot be written: rank 0: {reason}" in told, told


def check_reshard(driver: Driver, rollout: Rollout, compared: Comparisons) -> None:
    """`reshard` hands every weight on bit by bit; the rollout's log-probabilities of its tokens are training's."""
    ids = torch.arange(8).reshape(2, 4) + 5
    prompts = DataProto.from_dict(
        {"input_ids": ids, "attention_mask": torch.ones_like(ids), "position_ids": torch.arange(4).repeat(2, 1)},
        {"uid": ["a", "b"], "rollout_id": [0, 1]},
    )
    sampling = SamplingParams(temperature=TEMPERATURE, seed=1, ignore_eos=True)
    engine = driver.engine
    with reshard(engine.weight_source(), rollout, park=engine.offload, restore=engine.onload, check=True):
        rows = rollout.generate(prompts, sampling)
    rows = rows.select(["input_ids", "attention_mask", "response_mask", "rollout_log_probs"])

    def log_probs(outputs: TokenOutputs, packed: PackedRows) -> torch.Tensor:
        assert outputs.log_probs is not None
        return packed.to_response(outputs.log_probs)

    collected = engine.forward(driver.packed(rows, 2), log_probs)
    if collected is not None:
        expected = batch_of(rows)["rollout_log_probs"].to(engine.device)
        with compared.of("log-probabilities of a rollout"):
            torch.testing.assert_close(collected[0], expected, rtol=0, atol=2e-4)


def check_context() -> None:
    """Context-parallel ranks put the pack together, and their gradients add up to those of one rank.

    Without TransformerEngine no layer runs there: the model is an embedding and an output layer.
    """
    config = MegatronConfig(context_parallel_size=dist.get_world_size())
    parallel.shutdown()
    parallel.initialize(config, torch.device("cpu"))
    packed = pack(make_rows(5, seed=51), temperature=TEMPERATURE)
    generator = torch.Generator().manual_seed(1)
    embedding, output = (torch.randn(VOCAB, 8, generator=generator).requires_grad_() for _ in range(2))

    def linear(hidden: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, None]:
        return functional.linear(hidden, weight), None

    hidden = functional.embedding(packed.input_ids, embedding)[packed.predict]
    whole = token_log_probs(hidden @ output.T, packed.labels, TEMPERATURE).square().sum()
    expected = torch.autograd.grad(whole, (embedding, output))
    for fused in (False, True):
        size = dist.get_world_size()
        layout = Layout("lm", VOCAB, "thd", tp=1, cp=size, sequence_parallel=False, fused=fused)
        inputs = model_inputs(packed, layout)
        local = functional.embedding(inputs.arguments["input_ids"][0], embedding)[:, None]
        read = OutputReader(layout, inputs, packed)
        out = read(hidden_states=local, output_layer=linear, output_weight=output)
        log_probs = token_outputs(out, packed, layout, entropy=False, sum_pi_squared=False).log_probs
        assert log_probs is not None
        shared = log_probs.square().sum()
        torch.testing.assert_close(shared, whole)
        for mine, alone in zip(torch.autograd.grad(shared, (embedding, output)), expected, strict=True):
            dist.all_reduce(mine)
            torch.testing.assert_close(mine, alone)
    parallel.shutdown()


def run(workspace: Path, layouts: Sequence[tuple[str, dict[str, Any], Sequence[conformance.Check]]]) -> list[str]:
    """Run checks of the suite for several layouts; names of what passed."""
    passed: list[str] = []
    for name, config, checks in layouts:
        passed += [f"{check}[{name}]" for check in conformance.run_checks(megatron(**config), workspace, checks)]
    return passed


def families(workspace: Path, name: str, config: dict[str, Any], compared: Comparisons, *folders: str) -> list[str]:
    """`check_family` for some folders; names of what ran."""
    passed = [f"{folder}[{name}]" for folder in folders]
    for folder, title in zip(folders, passed, strict=True):
        with compared.within(title):
            check_family(megatron(**config), workspace / folder, compared)
    return passed


def two_ranks(workspace: Path, device_type: str = "cpu") -> list[str]:
    """Everything that two ranks are asked to do; names of what passed."""
    with all_compared() as compared:
        return _two_ranks(workspace, device_type, compared)


def _ready(device_type: str) -> None:
    """Give Megatron a CPU where the ranks are on one."""
    if device_type == "cpu":
        from ostinato.workers.megatron.testing.cpu import install

        install()


def _two_ranks(workspace: Path, device_type: str, compared: Comparisons) -> list[str]:
    _ready(device_type)
    # One layout after another: Megatron makes two dozen process groups for each.
    passed = run(workspace, [("tp", TP, conformance.CHECKS)])
    conformance.save_for_other_world(megatron(**TP), workspace)
    passed += families(workspace, "tp", TP, compared, "qwen3", "untied3")
    passed += run(workspace, [("pp", PP | PLAIN, conformance.CHECKS)])
    conformance.load_from_other_world(megatron(**PP), workspace)
    passed.append("tp -> pp")
    passed += families(workspace, "pp", PP, compared, "qwen3", "mixture")
    passed += run(workspace, [("dp", PLAIN, FEW[:1]), ("dp-distributed", {}, (*FEW, conformance.check_save_load))])
    passed += families(workspace, "ep", EP, compared, "mixture")
    passed += families(workspace, "ep-plain", EP | PLAIN, compared, "mixture")
    if device_type == "cpu":
        check_context()
    return passed


def three_ranks(workspace: Path, device_type: str = "cpu") -> list[str]:
    """The interleaved schedule, which takes three stages or more."""
    _ready(device_type)
    with all_compared() as compared:
        return families(workspace, "vpp", VPP, compared, "deep")


def four_ranks(workspace: Path, device_type: str = "cpu") -> list[str]:
    """Two kinds of parallelism at once."""
    _ready(device_type)
    passed = run(workspace, [("tp-dp", TP, FEW), ("tp-pp", TP | PP, FEW), ("pp-dp", PP, FEW)])
    with all_compared() as compared:
        return passed + families(workspace, "pp-dp", PP, compared, "qwen3")


def one_gpu(workspace: Path) -> list[str]:
    """The suite with Megatron's own layers, where float32 is exact; bf16 and TransformerEngine within their rounding.

    In bf16 Megatron's own layers run `RowAttention`, or a mask where that is asked for.
    """
    passed = run(workspace, [("local", {}, conformance.CHECKS)])
    masked = {"override_transformer_config": {"transformer_impl": "local", "attention_backend": "local"}}
    kinds = [("kernel", LOCAL), ("mask", masked)]
    if find_spec("transformer_engine") is not None:
        kinds.append(("te", {}))
    with all_compared() as compared:
        for name, config in kinds:
            passed += layers(workspace, name, config, compared)
    return passed


def layers(workspace: Path, name: str, config: dict[str, Any], compared: Comparisons) -> list[str]:
    """`check_layers` for every family, and what a half-precision engine keeps; names of what ran."""
    for folder in ("lm", "tied", "qwen3", "mixture"):
        with compared.within(f"{folder}[{name}]"):
            check_layers(workspace / folder, config, compared)
    with compared.within(f"lm[{name}], padded"):
        check_layers(workspace / "lm", config, compared, use_remove_padding=False)
    # These compare an engine with itself, so that rounding does not matter.
    checks = (conformance.check_boundaries, conformance.check_offload, conformance.check_save_load)
    return [f"layers[{name}]", *run(workspace, [(name, {"dtype": "bf16", **config}, checks)])]


def two_gpus(workspace: Path) -> list[str]:
    """As `two_ranks`, and what needs TransformerEngine."""
    with all_compared() as compared:
        passed = _two_ranks(workspace, "cuda", compared)
        for name, config in (
            ("tp-sp", TP | {"sequence_parallel": True}),
            ("cp", {"context_parallel_size": 2}),
            ("pp", PP),
        ):
            if find_spec("transformer_engine") is not None:
                passed.append(f"lm[te-{name}]")
                with compared.within(passed[-1]):
                    check_layers(workspace / "lm", config, compared)
        return passed


def check_layers(
    folder: Path, config: dict[str, Any], compared: Comparisons, bound: float = 2e-2, **model: Any
) -> None:
    """An engine in bf16 against a plain float32 model: log-probabilities, loss and gradient norm.

    On a CPU they lie 0.3 %, 0.1 % and 0.5 % apart.
    """
    rows = make_rows(6, seed=41)
    driver = start(megatron(**{"dtype": "bf16", **config}), folder, **model)
    oracle = Oracle(folder, "lm", OPTIM, driver.engine.device)
    collected = driver.outputs(rows, 3)
    if collected is not None:
        log_probs, _ = oracle.all_outputs(driver.mine(rows))
        mask = batch_of(driver.mine(rows))["response_mask"].bool().to(log_probs.device)
        got = torch.cat([c["log_probs"] for c in collected])
        difference = (got - log_probs)[mask].abs().mean().item()
        allowed = bound * log_probs[mask].abs().mean().item()
        with compared.of("log-probabilities"):
            assert difference <= allowed, f"differ by {difference:.3e} in the mean, allowed {allowed:.3e}"
    loss, stats = driver.train(rows, 2)
    for name, value, expected, rtol in (
        ("loss", loss, oracle.loss(rows), bound),
        ("gradient norm", stats.grad_norm, oracle.step().grad_norm, 2 * bound),
    ):
        with compared.of(name):
            assert_near(name, value, expected, rtol=rtol)
