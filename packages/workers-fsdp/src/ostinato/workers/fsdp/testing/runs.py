"""What the spawned ranks of this wheel's tests run; importable, so that fresh processes find it."""

from __future__ import annotations

import math
import os
import signal
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemWriter

from ostinato.workers.core.config import ModelConfig
from ostinato.workers.core.testing import conformance
from ostinato.workers.core.testing.lora import ADAPTER, check_lora, with_model
from ostinato.workers.core.testing.oracle import MakeEngine, assert_same_weights, make_rows, start
from ostinato.workers.fsdp.activations import ActivationOffload
from ostinato.workers.fsdp.config import FsdpConfig
from ostinato.workers.fsdp.engine import FsdpEngine
from ostinato.workers.fsdp.errors import CheckpointError
from ostinato.workers.fsdp.mesh import build_mesh, shard_group
from ostinato.workers.fsdp.optim import gradient_norm, scale_gradients
from ostinato.workers.fsdp.testing.parity import FOUR_RANKS, check_parity_table


def fsdp(**config: object) -> MakeEngine:
    """A picklable engine factory in float32 with entries of `FsdpConfig`."""
    return partial(FsdpEngine, engine=FsdpConfig(**{"dtype": "fp32", **config}))  # pyright: ignore[reportArgumentType]


def check_shard_norms(device: torch.device, fsdp_size: int) -> None:
    """H-54, H-55: shards with norms 3 and 4 have norm 5 on every rank, replicas or not, and are clipped alike.

    Needs `fsdp_size` 2 and a world of 2 (one copy) or 4 (two replicas of two shards).
    """
    mesh = build_mesh(device.type, fsdp_size)
    group = shard_group(mesh)
    mine = 3.0 + dist.get_rank(group)
    parameter = nn.Parameter(torch.zeros(2, device=device))
    parameter.grad = torch.tensor([mine, 0.0], device=device)
    norm = gradient_norm([parameter, nn.Parameter(torch.zeros(1))], group, device)
    assert norm == 5.0, f"expected 5, got {norm}"
    scale_gradients([parameter], 1.0 / norm)
    torch.testing.assert_close(parameter.grad, torch.tensor([mine / 5, 0.0], device=device))


def check_device_memory(make_engine: MakeEngine, workspace: Path) -> None:
    """H-56 on a GPU: offload frees the device, and weights and checkpoints work from host memory."""
    plain, moving = start(make_engine, workspace / "lm"), start(make_engine, workspace / "lm")
    rows = make_rows(4, seed=1)
    assert plain.train(rows) == moving.train(rows)
    module, optimizer = moving.engine._module, moving.engine._optimizer  # pyright: ignore[reportAttributeAccessIssue]
    moving.engine.offload()
    tensors = [*module.parameters(), *(state["exp_avg"] for state in optimizer.state.values())]
    places = {tensor.to_local().device.type for tensor in tensors}
    assert places == {"cpu"}, f"offload left tensors on {places}"
    assert_same_weights(moving.state(), plain.state(), rtol=0)
    path = workspace / "checkpoints" / "offloaded"
    moving.engine.save(path)
    moving.engine.load(path)
    moving.engine.onload()
    assert plain.train(rows) == moving.train(rows)
    assert_same_weights(moving.state(), plain.state(), rtol=0)


def check_background_save(make_engine: MakeEngine, workspace: Path) -> None:
    """A checkpoint that is written while the ranks train is that of the moment at which it was asked for."""
    driver, resumed = start(make_engine, workspace / "lm"), start(make_engine, workspace / "lm")
    driver.train(make_rows(4, seed=80))
    for attempt in range(2):
        path = workspace / "checkpoints" / f"background{attempt}"
        pending = driver.engine.save(path, background=True)
        expected = [driver.train(make_rows(4, seed=81 + step)) for step in range(3)]
        assert pending is not None
        pending.wait()
        resumed.engine.load(path)
        got = [resumed.train(make_rows(4, seed=81 + step)) for step in range(3)]
        assert got == expected, f"expected {expected}, got {got}"


def check_half_precision(workspace: Path) -> None:
    """The default number types of a GPU: bf16 products, float32 outputs, both attentions within bf16's rounding."""
    exact = start(fsdp(), workspace / "lm")
    rows = make_rows(8, seed=2)
    expected = exact.outputs(rows, 8)
    for attention in ("sdpa", "varlen", None):
        half = start(
            partial(FsdpEngine, engine=FsdpConfig()),
            workspace / "lm",
            override_config={} if attention is None else {"attn_implementation": attention},
        )
        assert attention is not None or half.engine._module.config._attn_implementation == "ostinato_varlen"  # pyright: ignore[reportAttributeAccessIssue]
        got = half.outputs(rows, 8)
        assert got is not None
        assert expected is not None
        error = (got[0]["log_probs"] - expected[0]["log_probs"]).abs().max().item()
        assert error < 0.3, f"{attention}: log-probabilities differ by {error}"
        assert half.engine.weight_source().specs()["lm_head.weight"].dtype == torch.bfloat16
        assert half.train(rows)[1].grad_norm > 0


def check_activation_offload(make_engine: MakeEngine, workspace: Path, device: torch.device) -> None:
    """Activations that wait in host memory change no number, with gradient checkpointing and without.

    On a CPU an engine has nowhere to move them to; here its hooks run all the same.
    """
    for checkpointing in (True, False):
        here = with_model(make_engine, enable_gradient_checkpointing=checkpointing)
        plain = start(here, workspace / "lm")
        parking = start(here, workspace / "lm", enable_activation_offload=True)
        assert (parking.engine._activations is None) is (device.type == "cpu")  # pyright: ignore[reportAttributeAccessIssue]
        activations = ActivationOffload(device, min_bytes=0)
        parking.engine._activations = activations  # pyright: ignore[reportAttributeAccessIssue]
        for step in range(2):
            rows = make_rows(4, seed=5 + step)
            expected, got = plain.train(rows), parking.train(rows)
            assert got == expected, f"expected {expected}, got {got}"
        assert_same_weights(parking.state(), plain.state(), rtol=0)
        # A layer's input each where the rest is computed anew, far more where it is not.
        assert (activations.num_parked > 20) is not checkpointing
        assert activations.num_parked >= 2


def one_gpu(workspace: Path) -> list[str]:
    """Everything that one GPU is asked to do."""
    passed = conformance.run_checks(fsdp(), workspace) + check_parity_table(workspace)
    check_lora(fsdp(), workspace)
    check_activation_offload(fsdp(), workspace, torch.device("cuda", torch.cuda.current_device()))
    check_device_memory(fsdp(), workspace)
    check_background_save(fsdp(), workspace)
    check_half_precision(workspace)
    return passed


def one_rank_saves(workspace: Path) -> None:
    """What `two_ranks` resumes from."""
    conformance.save_for_other_world(fsdp(), workspace)


def two_ranks(workspace: Path, device_type: str = "cpu", large: Path | None = None) -> list[str]:
    """Everything that two ranks are asked to do, a resume of what one rank saved included; names of what passed.

    Where there is a folder `large`, loading it comes first, while little memory is free to be used again.
    """
    if large is not None:
        check_peak_of_loading(large, workspace / "lm")
    check_shard_norms(torch.device(device_type), 2)
    passed = conformance.run_checks(fsdp(), workspace)
    passed += check_parity_table(workspace)
    check_device_memory(fsdp(), workspace)
    if device_type == "cuda":
        check_half_precision(workspace)
    check_background_save(fsdp(), workspace)
    two_ranks_share(workspace)
    conformance.load_from_other_world(fsdp(fsdp_size=1), workspace)
    conformance.save_for_other_world(fsdp(), workspace)
    conformance.save_for_other_world(with_model(fsdp(), **ADAPTER), workspace / "adapted")
    return passed


def four_ranks(workspace: Path, device_type: str = "cpu") -> list[str]:
    """Two replicas of two shards, and a resume at twice the number of ranks."""
    check_shard_norms(torch.device(device_type), 2)
    passed = check_parity_table(workspace, FOUR_RANKS)
    passed += conformance.run_checks(fsdp(fsdp_size=2), workspace, (conformance.check_save_load,))
    conformance.load_from_other_world(fsdp(fsdp_size=2), workspace)
    return passed


def two_ranks_share(workspace: Path) -> None:
    """The tokens of each micro-batch, rows that do not divide by two and none at all included."""
    checks = (
        conformance.check_boundaries,
        conformance.check_values,
        conformance.check_rank_without_tokens,
        conformance.check_reduce,
    )
    conformance.run_checks(fsdp(ulysses_sequence_parallel_size=2), workspace, checks)


def two_ranks_lose_one(workspace: Path) -> None:
    """After a whole checkpoint, rank 1 is killed while it writes another in the background; rank 0 notes it."""
    driver = start(fsdp(), workspace / "lm")
    driver.train(make_rows(4, seed=1))
    driver.engine.save(workspace / "whole")

    def killed(*_: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    if dist.get_rank() == 1:
        FileSystemWriter.write_data = killed  # pyright: ignore[reportAttributeAccessIssue]
    pending = driver.engine.save(workspace / "torn", background=True)
    assert pending is not None
    try:
        pending.wait()
    except CheckpointError as error:
        (workspace / "seen.txt").write_text(str(error))


def check_peak_of_loading(folder: Path, small: Path) -> None:
    """No rank holds the whole model while it loads, rank 0 neither, which reads: each needs half and little more.

    A small model comes first: what a process imports when it builds one must not count.
    """

    def resident(entry: str) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return 1024 * int(next(line.split()[1] for line in lines if line.startswith(entry)))

    start(fsdp(), small)
    engine = fsdp()(head="lm", model=ModelConfig(path=str(folder)), trainable=False)
    dist.barrier()
    Path("/proc/self/clear_refs").write_text("5")
    before = resident("VmRSS")
    engine.build()
    peak = resident("VmHWM") - before
    weights = sum(4 * math.prod(spec.shape) for spec in engine.weight_source().specs().values())
    assert peak < 0.85 * weights, f"weights of {weights} bytes raised resident memory by {peak}"
