"""What an engine that trains low-rank adapters must do, against PEFT itself in one plain process."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ostinato.workers.core.config import ModelConfig
from ostinato.workers.core.engine import TokenOutputs, TrainEngine
from ostinato.workers.core.microbatch import PackedRows
from ostinato.workers.core.optim import OptimConfig
from ostinato.workers.core.testing.oracle import (
    STILL,
    Driver,
    MakeEngine,
    Oracle,
    assert_near,
    assert_same_weights,
    make_rows,
    start,
)

ADAPTER = {"lora_rank": 4, "lora_alpha": 8}


def _with_model(
    make_engine: MakeEngine, entries: dict[str, Any], *, model: ModelConfig, **arguments: Any
) -> TrainEngine:
    return make_engine(model=replace(model, **entries), **arguments)


def with_model(make_engine: MakeEngine, **entries: Any) -> MakeEngine:
    """The same engines with entries of their `ModelConfig` changed; picklable where `make_engine` is."""
    return partial(_with_model, make_engine, entries)


def check_lora(make_engine: MakeEngine, workspace: Path) -> None:
    """Adapters train as PEFT's do, for both heads: losses, norms, merged weights; the base is the folder's.

    The adapter that the engine saves is what PEFT begins from and what it is compared with at the end (H-52: names
    resolve on both sides, wrapped modules and others).
    """
    optim = OptimConfig(lr=5e-3, eps=1e-4, weight_decay=0.1, grad_clip=0.05)
    for name, head in (("lm", "lm"), ("tied", "lm"), ("value", "value")):
        driver = start(make_engine, workspace / name, head=head, optim=optim, exclude_modules=["up_proj"], **ADAPTER)
        before = driver.state()
        place = driver.engine.coordinates
        path = workspace / "checkpoints" / f"lora-{name}-{place.dp_size}"
        driver.engine.save(path)
        oracle = adapted_oracle(workspace / name, head, optim, driver.engine.device, path)
        assert_same_weights(before, Oracle(workspace / name, head, optim, driver.engine.device).state(), rtol=0)
        for step in range(3):
            rows = make_rows(8, seed=10 + step)
            loss, stats = driver.train(rows, size=1 + step)
            assert_near(f"{name} loss of step {step}", loss, oracle.loss(rows))
            assert_near(f"{name} gradient norm of step {step}", stats.grad_norm, oracle.step().grad_norm)
        check_base(driver, workspace / name)
        trained = workspace / "checkpoints" / f"lora-{name}-{place.dp_size}-trained"
        driver.engine.save(trained)
        saved = adapted_oracle(workspace / name, head, optim, driver.engine.device, trained)
        for reference in (oracle, saved):
            merged: Any = reference.peft.merge_and_unload()
            assert_same_weights(driver.state(), dict(merged.named_parameters()))


def adapted_oracle(folder: Path, head: str, optim: OptimConfig, device: torch.device, checkpoint: Path) -> Any:
    """PEFT's own training of an adapter that an engine has saved; `peft` is the model with the adapter."""
    from peft import PeftModel

    oracle: Any = Oracle(folder, head, optim, device)
    oracle.peft = PeftModel.from_pretrained(oracle.module, str(checkpoint / "lora_adapter"), is_trainable=True)
    oracle.peft.eval()
    trained = [parameter for parameter in oracle.peft.parameters() if parameter.requires_grad]
    oracle.optimizer = torch.optim.AdamW(
        trained, lr=optim.lr, betas=optim.betas, eps=optim.eps, weight_decay=optim.weight_decay, foreach=False
    )
    return oracle


def check_base(driver: Driver, folder: Path) -> None:
    """With the adapter off the trained model says what the folder's says; on again, it does not."""
    if driver.head != "lm":
        return

    def collect(outputs: TokenOutputs, packed: PackedRows) -> torch.Tensor:
        assert outputs.log_probs is not None
        return packed.to_response(outputs.log_probs)

    mine = driver.mine(make_rows(4, seed=1))
    expected, _ = Oracle(folder, driver.head, STILL, driver.engine.device).all_outputs(mine)
    packed = driver.packed(mine, 4)
    for adapter in (False, True):
        got = driver.engine.forward(packed, collect, adapter=adapter)
        if got is not None:
            assert torch.allclose(got[0], expected, rtol=1e-5, atol=5e-6) is not adapter
