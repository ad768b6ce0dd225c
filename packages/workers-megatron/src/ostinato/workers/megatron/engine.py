"""MegatronEngine: the training engine on Megatron-Core."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
import torch.distributed as dist

from ostinato.controller.topology import Coordinates
from ostinato.workers.core.engine import ConfiguredEngine, LossFn, OutputFn, PendingSave, StepStats
from ostinato.workers.core.microbatch import PackedRows
from ostinato.workers.core.optim import OptimConfig, lr_factor
from ostinato.workers.megatron import parallel
from ostinato.workers.megatron.config import MegatronConfig, as_megatron_config, foreign_settings
from ostinato.workers.megatron.errors import EngineStateError, MegatronConfigError

if TYPE_CHECKING:
    from ostinato.workers.megatron.build import Built
    from ostinato.workers.megatron.weights import MegatronWeightSource
    from ostinato.workers.megatron.writing import Writer

T = TypeVar("T")


class MegatronEngine(ConfiguredEngine[MegatronConfig]):
    """One model on Megatron-Core, implementing `ostinato.workers.core.engine.TrainEngine`.

    The default process group must exist before `build`. Gradients are sums over ranks and micro-batches; they are
    reduced over the ranks once, in `optimizer_step`.
    """

    _read_config = staticmethod(as_megatron_config)

    _built: Built | None = None
    _optimizer: Any = None
    _pending = False
    _writer: Writer | None = None

    def build(self) -> None:
        """Build the model, read its weights and make the optimizer; collective over all ranks.

        Raises:
            EngineStateError: It is built already.
            MegatronMissingError: Megatron-Core is not installed.
            TransformerEngineMissingError: Something is asked for that only TransformerEngine has, or it does not fit.
            ProcessGroupMissingError: There is no default process group.
            DeviceError: The ranks are on a CPU.
            LayoutConflictError: Another engine of this process has other parallel sizes.
            MegatronConfigError: The layout does not fit the ranks or the model, or a setting is of the FSDP engine.
            ModelLoadError: The folder does not hold such a model.
        """
        if self._built is not None:
            raise EngineStateError("MegatronEngine.build: expected to be called once, this engine is built already.")
        if self._optim_config is not None:
            self._optim_config.check_resolved()
        for key, text in foreign_settings(self._model_config, self._optim_config):
            raise MegatronConfigError(f"{key}: {text}")
        if self._config.context_parallel_size > 1 and not self._model_config.use_remove_padding:
            raise MegatronConfigError(
                "model.use_remove_padding: False, but context-parallel ranks share packed rows; set it to True, or "
                "megatron.context_parallel_size to 1"
            )
        from ostinato.workers.megatron import build, training
        from ostinato.workers.megatron.architecture import read_architecture
        from ostinato.workers.megatron.offload import GradientBuffers, HostCopies
        from ostinato.workers.megatron.packing import Layout
        from ostinato.workers.megatron.transformer import compute_dtype
        from ostinato.workers.megatron.weights import stages_of

        self._device = parallel.training_device()
        self._counters["updates"] = 0
        config, model = self._config, self._model_config
        parallel.initialize(config, self._device)
        a = read_architecture(model, self._head)
        built = build.build_model(a, model, self._head, config, self._device, trainable=self._trainable)
        self._built = built
        self._dtype = compute_dtype(config, self._device)
        self._stages = stages_of(built)
        self._layout = Layout(
            head=self._head,
            vocab_size=a.vocab_size,
            rows=built.rows if model.use_remove_padding else "padded",
            tp=config.tensor_model_parallel_size,
            cp=config.context_parallel_size,
            sequence_parallel=config.sequence_parallel,
            fused=self._head == "lm" and model.use_fused_kernels and config.tensor_model_parallel_size == 1,
        )
        self._params_away, self._optimizer_away = HostCopies(), HostCopies()
        self._gradients: GradientBuffers | None = None
        if self._optim_config is not None:
            self._optimizer = training.build_optimizer(built.chunks, self._optim_config, config, self._dtype)
            self._gradients = GradientBuffers(built.chunks)

    @property
    def coordinates(self) -> Coordinates:
        """This rank's place in Megatron's mesh; the last pipeline stage's first rank answers."""
        self._built_or_raise("coordinates")
        return parallel.coordinates()

    def forward(
        self,
        micro_batches: Sequence[PackedRows],
        fn: OutputFn[T],
        *,
        entropy: bool = False,
        sum_pi_squared: bool = False,
        adapter: bool = True,
    ) -> list[T] | None:
        """Run micro-batches without gradients; every rank passes the same number of them. There are no adapters."""
        from ostinato.workers.megatron import schedule

        built = self._built_here("forward")
        _set_mode(built, training=False)
        with torch.no_grad():
            return schedule.run(
                built,
                micro_batches,
                self._layout,
                fn,
                backward=False,
                entropy=entropy,
                sum_pi_squared=sum_pi_squared,
            )

    def forward_backward(
        self, micro_batches: Sequence[PackedRows], fn: LossFn[T], *, entropy: bool = False
    ) -> list[T] | None:
        """Run micro-batches with gradients; they are summed here and reduced over the ranks in `optimizer_step`."""
        from ostinato.workers.megatron import schedule

        built = self._built_here("forward_backward")
        self._optimizer_or_raise("forward_backward")
        _set_mode(built, training=True)
        if self._gradients is not None:
            self._gradients.ensure()
        self._pending = True
        return schedule.run(built, micro_batches, self._layout, fn, backward=True, entropy=entropy)

    def optimizer_step(self) -> StepStats:
        """Reduce the gradients, clip by the global norm, step, advance the schedule, zero the gradients.

        A gradient norm that is not finite leaves weights and optimizer state as they are; the schedule advances, so
        that it ends with the run.

        Raises:
            EngineStateError: The engine is frozen, or its state lies in host memory.
        """
        from ostinato.workers.megatron.optim import gradient_norm, scale_gradients

        built = self._built_here("optimizer_step")
        optimizer = self._optimizer_or_raise("optimizer_step")
        optim = cast(OptimConfig, self._optim_config)
        if self._optimizer_away:
            raise EngineStateError(
                "MegatronEngine.optimizer_step: the optimizer state lies in host memory; "
                "call onload(optimizer=True) first."
            )
        if self._gradients is not None:
            self._gradients.ensure()
        parallel.import_megatron("distributed.finalize_model_grads").finalize_model_grads(built.chunks, None)
        optimizer.prepare_grads()
        norm = gradient_norm(optimizer, self._device)
        lr = optim.lr * lr_factor(self._counters["steps"], optim)
        skipped = not math.isfinite(norm)
        if not skipped:
            if norm > optim.grad_clip:
                scale_gradients(optimizer, optim.grad_clip / norm)
            for group in optimizer.param_groups:
                group["lr"] = lr
            optimizer.step_with_ready_grads()
        for chunk in built.chunks:
            chunk.zero_grad_buffer()
        optimizer.zero_grad()
        self._pending = False
        self._counters["steps"] += 1
        self._counters["updates" if not skipped else "skipped"] += 1
        return StepStats(grad_norm=norm, lr=lr, skipped=skipped)

    def reduce(self, values: torch.Tensor) -> torch.Tensor:
        """Sum a small tensor over the data-parallel ranks; the result has the operand's type and device."""
        self._built_or_raise("reduce")
        total = values.detach().to(self._device, copy=True)
        dist.all_reduce(total, group=parallel.import_megatron("parallel_state").get_data_parallel_group())
        return total.to(values.device)

    def onload(self, *, params: bool = True, optimizer: bool = True) -> None:
        """Bring parameters and optimizer state to the device; what is there already stays."""
        self._built_or_raise("onload")
        if params:
            self._params_away.bring_back()
        if optimizer:
            self._optimizer_away.bring_back()

    def offload(self, *, params: bool = True, optimizer: bool = True) -> None:
        """Move parameters and optimizer state to host memory and free the device's.

        Gradient buffers are freed with the parameters, and with the optimizer where `grad_offload` says so; a gradient
        that has not been stepped with stays.
        """
        from ostinato.workers.megatron.offload import optimizer_tensors, parameter_tensors

        built = self._built_or_raise("offload")
        if optimizer and self._optimizer is not None:
            self._optimizer_away.take(optimizer_tensors(self._optimizer, built.chunks))
        if params:
            self._params_away.take(parameter_tensors(built.chunks))
        if self._gradients is not None and not self._pending and (params or self._config.grad_offload):
            self._gradients.free()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def weight_source(self, dtype: torch.dtype | None = None) -> MegatronWeightSource:
        """The weights under their Hugging Face names, from the device or from host memory.

        Args:
            dtype: Type that is gathered and given; None is the type of the forward pass.
        """
        from ostinato.workers.megatron.weights import MegatronWeightSource

        built = self._built_or_raise("weight_source")
        return MegatronWeightSource(built, self._stages, self._params_away, self._device, dtype or self._dtype)

    def save(self, path: Path, *, background: bool = False) -> PendingSave | None:
        """Write model, optimizer, schedule and random state under `path`; collective.

        Args:
            path: The folder.
            background: Copy everything to host memory, and write from there while training goes on.

        Raises:
            CheckpointError: It cannot be written, on whichever rank.
        """
        from ostinato.workers.megatron import checkpoint

        built = self._built_or_raise("save")
        if self._writer is None:
            from ostinato.workers.megatron.writing import Writer

            self._writer = Writer(self._device)
        with self._all_here():
            return checkpoint.save(
                Path(path), built, self._optimizer, self._counters, self._device, self._writer, background=background
            )

    def load(self, path: Path) -> None:
        """Read what `save` wrote, at any parallel sizes; collective.

        Raises:
            CheckpointError: There is no whole checkpoint, or it belongs to another model.
        """
        from ostinato.workers.megatron import checkpoint

        built = self._built_or_raise("load")
        with self._all_here():
            self._counters = checkpoint.load(Path(path), built, self._optimizer, self._optim_config, self._device)

    @contextmanager
    def _all_here(self) -> Iterator[None]:
        """Everything is on the device inside, and where it was afterwards."""
        params, optimizer = bool(self._params_away), bool(self._optimizer_away)
        self.onload()
        try:
            yield
        finally:
            if params or optimizer:
                self.offload(params=params, optimizer=optimizer)

    def _built_or_raise(self, method: str) -> Built:
        if self._built is None:
            raise EngineStateError(
                f"MegatronEngine.{method}: the engine is not built; call build() on every rank first."
            )
        return self._built

    def _built_here(self, method: str) -> Built:
        built = self._built_or_raise(method)
        if self._params_away:
            raise EngineStateError(
                f"MegatronEngine.{method}: the parameters lie in host memory; call onload(params=True) first."
            )
        return built

    def _optimizer_or_raise(self, method: str) -> Any:
        if self._optimizer is None:
            raise EngineStateError(
                f"MegatronEngine.{method}: this engine is frozen (trainable=False); build one with trainable=True."
            )
        return self._optimizer


def _set_mode(built: Built, *, training: bool) -> None:
    for chunk in built.chunks:
        chunk.train(training)
