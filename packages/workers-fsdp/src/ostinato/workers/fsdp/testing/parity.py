"""Every setting that says how the engine computes, against one plain process: what it computes is the same.

Settings are crossed pairwise: each level of each axis meets each level of every other axis in some line of `TABLE`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist

from ostinato.protocol import DataProto
from ostinato.workers.core.engine import StepStats
from ostinato.workers.core.optim import OptimConfig
from ostinato.workers.core.testing.lora import ADAPTER, adapted_oracle, check_base
from ostinato.workers.core.testing.oracle import (
    Driver,
    Oracle,
    assert_near,
    assert_same_weights,
    make_rows,
    start,
)
from ostinato.workers.fsdp.activations import ActivationOffload
from ostinato.workers.fsdp.config import FsdpConfig
from ostinato.workers.fsdp.engine import FsdpEngine
from ostinato.workers.fsdp.head import token_head
from ostinato.workers.fsdp.lora import is_adapter
from ostinato.workers.fsdp.mesh import shard_group
from ostinato.workers.fsdp.offload import Mover

OPTIM = OptimConfig(lr=2e-3, eps=1e-4, weight_decay=0.1, grad_clip=0.05, lr_warmup_steps=2)
NUM_ROWS = (8, 1, 7)
"""Rows of the three steps; one row leaves every other data-parallel rank without any."""

Model = Literal["lm", "tied", "value"]


@dataclass(frozen=True)
class Setting:
    """One line of the table.

    Attributes:
        model: which of the suite's folders; `value` has a scalar head.
        sharding: over all ranks, gathered weights freed or kept after the forward pass; or one copy on so many ranks.
        reduced: gradients once a mini-batch, or after each micro-batch.
        rows: packed with either attention, or padded.
        split: rows of a micro-batch.
        sequence: ranks that share the tokens of a micro-batch.
        state: parameters and optimizer stay on the device, are moved away and back around every phase, or are kept in
            host memory by FSDP.
        recompute: gradient checkpointing.
        parked: activations wait in host memory.
        adapter: low-rank adapters are trained, not the weights.
        fused: log-probabilities without logits.
    """

    model: Model
    sharding: Literal["full", "kept", 1, 2]
    reduced: Literal["once", "each"]
    rows: Literal["varlen", "sdpa", "padded"]
    split: int
    sequence: int
    state: Literal["here", "moved", "host"]
    recompute: bool
    parked: bool
    adapter: bool
    fused: bool


TABLE = (
    Setting("lm", "full", "once", "padded", 8, 1, "moved", False, False, False, False),
    Setting("lm", "full", "each", "sdpa", 3, 1, "here", False, True, False, False),
    Setting("lm", "kept", "each", "varlen", 3, 2, "host", True, False, True, False),
    Setting("lm", 1, "each", "sdpa", 1, 1, "moved", True, False, False, True),
    Setting("tied", "full", "once", "varlen", 8, 2, "host", False, True, False, False),
    Setting("tied", "kept", "each", "sdpa", 1, 1, "moved", False, False, True, False),
    Setting("tied", 1, "once", "padded", 1, 1, "host", False, True, False, True),
    Setting("tied", 1, "each", "varlen", 3, 1, "moved", False, True, True, True),
    Setting("tied", 1, "each", "padded", 8, 1, "here", True, False, True, False),
    Setting("value", "full", "once", "varlen", 1, 2, "moved", True, True, True, True),
    Setting("value", "kept", "once", "sdpa", 8, 1, "host", False, False, False, True),
    Setting("value", "kept", "once", "padded", 3, 1, "here", False, True, True, True),
    Setting("value", 1, "each", "varlen", 1, 2, "here", True, False, True, True),
)
"""For two ranks. On one rank the same lines, without replicas and shared sequences."""

FOUR_RANKS = (
    Setting("lm", 2, "each", "varlen", 3, 4, "moved", True, False, False, True),
    Setting("tied", 2, "once", "varlen", 1, 2, "here", False, True, False, True),
    Setting("value", 2, "once", "padded", 8, 1, "here", True, False, False, True),
)
"""Two replicas of two shards; more ranks than key/value heads share a sequence, two pairs have one each, or none do."""


def excluded(setting: dict[str, Any]) -> bool:
    """Whether some of a setting's entries cannot be, or mean nothing, together."""
    shared = setting.get("sequence", 1) > 1 and setting.get("rows", "varlen") != "varlen"
    return shared or (setting.get("model") == "value" and not setting.get("fused", True))


def check_parity_table(workspace: Path, table: Sequence[Setting] = TABLE) -> list[str]:
    """Losses, gradient norms, learning rates, weights and outputs of three steps of every line; names of what passed.

    Collective, at any number of ranks.

    Raises:
        AssertionError: A number differs; the line is named.
    """

    @cache
    def expected(model: Model, adapter: bool) -> Expected:
        return _expected(workspace, model, adapter=adapter)

    passed: list[str] = []
    for setting in table:
        if dist.get_world_size() == 1:
            sharding = "full" if isinstance(setting.sharding, int) else setting.sharding
            setting = replace(setting, sharding=sharding, sequence=1)
        try:
            _check(_start(workspace, setting), setting, expected(setting.model, setting.adapter), workspace)
        except BaseException as error:
            error.add_note(f"with {setting} on rank {dist.get_rank()} of {dist.get_world_size()}")
            raise
        passed.append(str(setting))
    return passed


@dataclass(frozen=True)
class Expected:
    """What one plain process does in the three steps, and says and weighs after them.

    Attributes:
        steps: of each, its rows, its loss, and what the optimizer did.
        outputs: of the last step's rows, (b, R) each, by the engine's names.
        weights: in full, adapters merged.
    """

    steps: tuple[tuple[DataProto, float, StepStats], ...]
    outputs: dict[str, torch.Tensor]
    weights: dict[str, torch.Tensor]


def _expected(workspace: Path, model: Model, *, adapter: bool) -> Expected:
    """The plain process; where adapters are trained it begins with the one that the engine saves."""
    plain = Setting(model, "full", "once", "varlen", 8, 1, "here", False, False, adapter, True)
    driver = _start(workspace, plain)
    path = workspace / "checkpoints" / f"parity-{model}-{dist.get_world_size()}"
    if adapter:
        driver.engine.save(path)
    oracle: Any = (
        adapted_oracle(workspace / model, driver.head, OPTIM, driver.engine.device, path)
        if adapter
        else Oracle(workspace / model, driver.head, OPTIM, driver.engine.device)
    )
    steps: list[tuple[DataProto, float, StepStats]] = []
    for step, num_rows in enumerate(NUM_ROWS):
        rows = make_rows(num_rows, seed=10 + step)
        steps.append((rows, oracle.loss(rows), oracle.step()))
        assert steps[-1][2].grad_norm > OPTIM.grad_clip, "gradients must be clipped to test clipping"
    rows = steps[-1][0]
    first, second = oracle.all_outputs(rows)
    outputs = {"values": first}
    if driver.head == "lm":
        outputs = {"log_probs": first, "entropy": second, "sum_pi_squared": oracle.sum_pi_squared(rows)}
    whole = oracle.peft.merge_and_unload() if adapter else oracle.module
    return Expected(tuple(steps), outputs, {name: tensor.detach() for name, tensor in whole.named_parameters()})


def _start(workspace: Path, setting: Setting) -> Driver:
    config = FsdpConfig(
        dtype="fp32",
        fsdp_size=setting.sharding if isinstance(setting.sharding, int) else -1,
        reshard_after_forward=setting.sharding != "kept",
        forward_prefetch=setting.sharding == "kept",
        defer_gradient_sync=setting.reduced == "once",
        offload_policy=setting.state == "host",
        ulysses_sequence_parallel_size=setting.sequence,
    )

    def make(**arguments: Any) -> FsdpEngine:
        return FsdpEngine(engine=config, **arguments)

    padded = setting.rows == "padded"
    driver = start(
        make,
        workspace / setting.model,
        head="value" if setting.model == "value" else "lm",
        optim=OPTIM,
        use_remove_padding=not padded,
        override_config={} if padded else {"attn_implementation": setting.rows},
        enable_gradient_checkpointing=setting.recompute,
        use_fused_kernels=setting.fused,
        **(ADAPTER if setting.adapter else {}),
    )
    _assert_in_effect(driver, setting)
    if setting.parked:
        # On a CPU an engine has nowhere to move them to; here its hooks run all the same.
        activations = ActivationOffload(driver.engine.device, min_bytes=0)
        driver.engine._activations = activations  # pyright: ignore[reportAttributeAccessIssue]
    return driver


def _assert_in_effect(driver: Driver, setting: Setting) -> None:
    """A switch that does nothing would agree with everything."""
    module: Any = driver.engine._module  # pyright: ignore[reportAttributeAccessIssue]
    assert module.is_gradient_checkpointing is setting.recompute
    assert module.config._attn_implementation == ("ostinato_varlen" if setting.rows == "varlen" else "sdpa")
    assert driver.head == "value" or (token_head(module) is not None) is setting.fused
    parameters = dict(module.named_parameters())
    assert any(is_adapter(name) for name in parameters) is setting.adapter
    assert driver.engine.coordinates.dp_size == dist.get_world_size() // setting.sequence
    shards = setting.sharding if isinstance(setting.sharding, int) else dist.get_world_size()
    for name, parameter in parameters.items():
        assert dist.get_world_size(shard_group(parameter.device_mesh)) == shards, name
        assert setting.state != "host" or parameter.device.type == "cpu", name


def _check(driver: Driver, setting: Setting, expected: Expected, workspace: Path) -> None:
    move = _Moves(driver, really=setting.state == "moved")
    for step, (rows, loss, stats) in enumerate(expected.steps):
        move.there_and_back()
        if step == 1:
            assert driver.accumulate(make_rows(0), setting.split, extra=2) == 0.0, "no rows at all have no loss"
        got = driver.accumulate(rows, setting.split, extra=step)
        # Gradients go along.
        move.there_and_back()
        done = driver.engine.optimizer_step()
        assert_near(f"loss of step {step}", got, loss)
        assert_near(f"gradient norm of step {step}", done.grad_norm, stats.grad_norm)
        assert_near(f"learning rate of step {step}", done.lr, stats.lr)
        assert not done.skipped
    collected = driver.outputs(expected.steps[-1][0], setting.split)
    place = driver.engine.coordinates
    for name, whole in expected.outputs.items():
        mine = torch.tensor_split(whole, place.dp_size)[place.dp_rank]
        parts = [entry[name] for entry in collected or []]
        torch.testing.assert_close(torch.cat(parts), mine, rtol=1e-5, atol=1e-5)
    # A forward without a backward leaves the root with gathered weights; they are read from the shards all the same.
    assert_same_weights(driver.state(), expected.weights)
    if setting.adapter:
        check_base(driver, workspace / setting.model)
    activations: Any = driver.engine._activations  # pyright: ignore[reportAttributeAccessIssue]
    assert (activations is not None and activations.num_parked > 0) is setting.parked


class _Moves:
    """Takes an engine's state from its device and back; on a CPU into other host memory, by the same code."""

    def __init__(self, driver: Driver, *, really: bool) -> None:
        self._engine: Any = driver.engine
        self._really = really
        self._mover = Mover(self._engine.device) if self._engine.device.type == "cpu" else None

    def there_and_back(self) -> None:
        if not self._really:
            return
        self._engine.offload()
        if self._mover is not None:
            module, optimizer = self._engine._module, self._engine._optimizer
            self._mover.parameters_to_host(module)
            self._mover.optimizer_to_host(optimizer)
            self._mover.parameters_to_device(module)
            self._mover.optimizer_to_device(optimizer)
            self._mover.wait()
        self._engine.onload()
