"""FsdpEngine: the training engine on PyTorch FSDP2."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from ostinato.controller.topology import Coordinates
from ostinato.workers.core.engine import ConfiguredEngine, LossFn, OutputFn, PendingSave, StepStats, TokenOutputs
from ostinato.workers.core.limits import engine_config
from ostinato.workers.core.microbatch import PackedRows
from ostinato.workers.core.optim import OptimConfig, lr_factor
from ostinato.workers.fsdp import checkpoint
from ostinato.workers.fsdp.activations import ActivationOffload
from ostinato.workers.fsdp.apart import check_apart, known_apart
from ostinato.workers.fsdp.build import build_module
from ostinato.workers.fsdp.config import FsdpConfig
from ostinato.workers.fsdp.errors import EngineStateError, FsdpConfigError
from ostinato.workers.fsdp.lora import without_adapter
from ostinato.workers.fsdp.mesh import Rows, build_mesh, divide_rows, shard_group, training_device
from ostinato.workers.fsdp.offload import Mover, free_device_cache
from ostinato.workers.fsdp.optim import build_optimizer, gradient_norm, scale_gradients, set_lr
from ostinato.workers.fsdp.packing import token_outputs
from ostinato.workers.fsdp.scaling import LossScale, first_scale
from ostinato.workers.fsdp.weights import FsdpWeightSource, reshard_all, save_adapter

T = TypeVar("T")


def as_fsdp_config(value: FsdpConfig | Mapping[str, Any] | None) -> FsdpConfig:
    """The engine's config from what a role worker passes on.

    Raises:
        FsdpConfigError: A key is unknown; the text names the nearest one.
    """
    return engine_config(FsdpConfig, value, "fsdp_config", FsdpConfigError)


class FsdpEngine(ConfiguredEngine[FsdpConfig]):
    """One model on FSDP2, implementing `ostinato.workers.core.engine.TrainEngine`.

    The default process group must exist before `build`. Gradients are sums over ranks and micro-batches.
    """

    _read_config = staticmethod(as_fsdp_config)

    _module: nn.Module | None = None
    _units: Sequence[FSDPModule] = ()
    _mesh: DeviceMesh | None = None
    _rows: Rows | None = None
    _optimizer: torch.optim.Optimizer | None = None
    _activations: ActivationOffload | None = None
    _params_here = True
    _optimizer_here = True
    _writer: checkpoint.BackgroundWriter | None = None

    def build(self) -> None:
        """Load the model, shard it and make the optimizer; collective over all ranks.

        Raises:
            ProcessGroupMissingError: There is no default process group.
            ModelLoadError: The folder does not hold such a model, or its packed rows would see each other.
            FsdpConfigError: The mesh does not fit the number of ranks.
        """
        if self._module is not None:
            raise EngineStateError("FsdpEngine.build: expected to be called once, this engine is built already.")
        if self._optim_config is not None:
            self._optim_config.check_resolved()
        self._device = training_device()
        self._mover = Mover(self._device)
        self._mesh = build_mesh(self._device.type, self._config.fsdp_size)
        self._rows = divide_rows(self._device.type, self._config.ulysses_sequence_parallel_size)
        self._module, self._units = build_module(
            self._model_config, self._head, self._mesh, self._device, self._config, trainable=self._trainable
        )
        if self._model_config.use_remove_padding and not known_apart(self._module):
            check_apart(self._module, self._answers, self._device, self._config.compute_dtype(self._device))
        if self._optim_config is not None:
            fused = self._device.type == "cuda" and not self._config.offload_policy
            trained = [parameter for parameter in self._module.parameters() if parameter.requires_grad]
            self._optimizer = build_optimizer(trained, self._optim_config, fused=fused)
            self._counters |= first_scale(self._config.compute_dtype(self._device)).counters
            if self._model_config.enable_activation_offload and self._device.type != "cpu":
                self._activations = ActivationOffload(self._device)

    @property
    def coordinates(self) -> Coordinates:
        """This rank's place; ranks that share the tokens of a micro-batch are one data-parallel rank."""
        if self._rows is None:
            raise EngineStateError("FsdpEngine.coordinates: the engine is not built; call build() on every rank first.")
        return self._rows.coordinates

    def forward(
        self,
        micro_batches: Sequence[PackedRows],
        fn: OutputFn[T],
        *,
        entropy: bool = False,
        sum_pi_squared: bool = False,
        adapter: bool = True,
    ) -> list[T]:
        """Run micro-batches without gradients; every rank passes the same number of them."""
        module = self._module_here("forward")
        module.eval()
        try:
            with torch.no_grad(), nullcontext() if adapter else without_adapter(module):
                return [
                    fn(self._outputs(module, packed, entropy, sum_pi_squared)[0], packed) for packed in micro_batches
                ]
        finally:
            reshard_all(self._units)

    def forward_backward(self, micro_batches: Sequence[PackedRows], fn: LossFn[T], *, entropy: bool = False) -> list[T]:
        """Run micro-batches with gradients; the gradient is the sum over all of them and over all ranks."""
        module = self._module_here("forward_backward")
        self._optimizer_or_raise("forward_backward")
        module.train()
        results: list[T] = []
        try:
            for index, packed in enumerate(micro_batches):
                self._set_gradient_sync(last=index == len(micro_batches) - 1)
                with self._activations.parking() if self._activations is not None else nullcontext():
                    outputs, zero = self._outputs(module, packed, entropy)
                loss, result = fn(outputs, packed)
                (loss * self._loss_scale.factor + zero).backward()
                results.append(result)
        finally:
            reshard_all(self._units)
        return results

    def optimizer_step(self) -> StepStats:
        """Clip by the global norm, step, advance the schedule, zero the gradients.

        A gradient norm that is not finite leaves weights and optimizer state as they are; the schedule advances, so
        that it ends with the run. In float16 such a step is also how the loss scale finds its size.

        Raises:
            EngineStateError: The engine is frozen, or its state lies in host memory.
        """
        module = self._module_here("optimizer_step")
        optimizer = self._optimizer_or_raise("optimizer_step")
        optim = cast(OptimConfig, self._optim_config)
        if not self._optimizer_here:
            raise EngineStateError(
                "FsdpEngine.optimizer_step: the optimizer state lies in host memory; call onload(optimizer=True) first."
            )
        parameters = list(module.parameters())
        scale = self._loss_scale
        norm = gradient_norm(parameters, shard_group(cast(DeviceMesh, self._mesh)), self._device) / scale.factor
        lr = optim.lr * lr_factor(self._counters["steps"], optim)
        skipped = not math.isfinite(norm)
        if not skipped:
            factor = (optim.grad_clip / norm if norm > optim.grad_clip else 1.0) / scale.factor
            if factor != 1.0:
                scale_gradients(parameters, factor)
            self._mover.wait()
            set_lr(optimizer, lr)
            optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        self._counters["steps"] += 1
        self._counters["skipped"] += skipped
        self._counters |= scale.after(finite=not skipped).counters
        return StepStats(grad_norm=norm, lr=lr, skipped=skipped)

    def reduce(self, values: torch.Tensor) -> torch.Tensor:
        """Sum a small tensor over the data-parallel ranks; the result has the operand's type and device."""
        self._module_or_raise("reduce")
        total = values.detach().to(self._device, copy=True)
        dist.all_reduce(total, group=cast(Rows, self._rows).data)
        return total.to(values.device)

    def onload(self, *, params: bool = True, optimizer: bool = True) -> None:
        """Bring parameters and optimizer state to the device; what is there already stays."""
        module = self._module_or_raise("onload")
        if params and not self._params_here:
            self._move(lambda: self._mover.parameters_to_device(module))
            self._params_here = True
        if optimizer and not self._optimizer_here:
            self._move_optimizer(self._mover.optimizer_to_device)
            self._optimizer_here = True

    def offload(self, *, params: bool = True, optimizer: bool = True) -> None:
        """Move parameters and optimizer state to host memory and free the device's."""
        module = self._module_or_raise("offload")
        if params and self._params_here:
            reshard_all(self._units)
            self._move(lambda: self._mover.parameters_to_host(module))
            self._params_here = False
        if optimizer and self._optimizer_here:
            self._move_optimizer(self._mover.optimizer_to_host)
            self._optimizer_here = False
        free_device_cache(self._device)

    def weight_source(self, dtype: torch.dtype | None = None) -> FsdpWeightSource:
        """The weights under their Hugging Face names, from the device or from host memory.

        Args:
            dtype: Type that is gathered and given; None is the type of the forward pass.
        """
        module = self._module_or_raise("weight_source")
        return FsdpWeightSource(module, self._units, self._device, dtype or self._config.compute_dtype(self._device))

    def save(self, path: Path, *, background: bool = False) -> PendingSave | None:
        """Write model, optimizer, schedule and random state under `path`; collective.

        Args:
            path: The folder.
            background: Copy everything to host memory, and write from there while training goes on.

        Raises:
            CheckpointError: It cannot be written.
        """
        module = self._module_or_raise("save")
        reshard_all(self._units)
        self._mover.wait()
        if self._trainable and self._model_config.lora_rank > 0:
            save_adapter(Path(path), module, self._model_config, self._device)
        state = checkpoint.state_to_save(module, self._optimizer, self._counters, self._device)
        if not background:
            return checkpoint.save(Path(path), state)
        self._writer = self._writer or checkpoint.BackgroundWriter(self._device)
        return self._writer.start(Path(path), state)

    def load(self, path: Path) -> None:
        """Read what `save` wrote, at any number of ranks; collective.

        Raises:
            CheckpointError: There is no whole checkpoint, or it belongs to another model.
        """
        module = self._module_or_raise("load")
        reshard_all(self._units)
        self._mover.wait()
        self._counters = checkpoint.load(Path(path), module, self._optimizer, self._counters, self._device)
        if not self._optimizer_here:
            self._move_optimizer(self._mover.optimizer_to_host)

    def _outputs(
        self, module: nn.Module, packed: PackedRows, entropy: bool, sum_pi_squared: bool = False
    ) -> tuple[TokenOutputs, torch.Tensor]:
        return token_outputs(
            module,
            self._head,
            packed,
            entropy=entropy,
            sum_pi_squared=sum_pi_squared,
            padded=not self._model_config.use_remove_padding,
            group=cast(Rows, self._rows).sequence,
        )

    def _answers(self, packed: PackedRows) -> torch.Tensor:
        """What the model says of the tokens of a micro-batch, (b, R)."""

        def read(outputs: TokenOutputs, packed: PackedRows) -> torch.Tensor:
            said = outputs.log_probs if self._head == "lm" else outputs.values
            return packed.to_response(cast(torch.Tensor, said))

        return self.forward([packed], read)[0]

    @property
    def _loss_scale(self) -> LossScale:
        return LossScale.of(self._counters)

    def _set_gradient_sync(self, *, last: bool) -> None:
        root = self._units[-1]
        if self._config.defer_gradient_sync:
            root.set_requires_gradient_sync(last)
        else:
            root.set_requires_all_reduce(last)

    def _move(self, move: Callable[[], None]) -> None:
        """Run a move, unless there is nowhere to move to: on the CPU, or where FSDP keeps everything in host memory."""
        if self._device.type != "cpu" and not self._config.offload_policy:
            move()

    def _move_optimizer(self, move: Callable[[torch.optim.Optimizer], None]) -> None:
        if self._optimizer is not None:
            optimizer = self._optimizer
            self._move(lambda: move(optimizer))

    def _module_or_raise(self, method: str) -> nn.Module:
        if self._module is None:
            raise EngineStateError(f"FsdpEngine.{method}: the engine is not built; call build() on every rank first.")
        return self._module

    def _module_here(self, method: str) -> nn.Module:
        module = self._module_or_raise(method)
        if not self._params_here:
            raise EngineStateError(
                f"FsdpEngine.{method}: the parameters lie in host memory; call onload(params=True) first."
            )
        return module

    def _optimizer_or_raise(self, method: str) -> torch.optim.Optimizer:
        if self._optimizer is None:
            raise EngineStateError(
                f"FsdpEngine.{method}: this engine is frozen (trainable=False); build one with trainable=True to train."
            )
        return self._optimizer
