"""Peaks of memory: each phase's own, and that of the whole process beside them."""

from __future__ import annotations

import pytest
import torch

from ostinato.rollout import RolloutConfig
from ostinato.workers.core import (
    ActorRolloutRefConfig,
    ActorRolloutRefWorker,
    CriticConfig,
    CriticWorker,
    ModelConfig,
    memory,
)
from ostinato.workers.core.memory import PeakMemory, memory_metrics

GIB = 1024**3
GPU = torch.device("cuda", 0)
ENGINE = "ostinato.workers.core.testing:PlainEngine"
PEAK = "perf/max_memory_allocated_gb"


class Allocator:
    """PyTorch's counters of a GPU, in GiB; 1 of them is always held."""

    def __init__(self):
        self.peak = 1.0

    def use(self, gib):
        self.peak = max(self.peak, 1.0 + gib)

    def begin_anew(self, device):
        self.peak = 1.0


@pytest.fixture
def gpu(monkeypatch):
    counters = Allocator()
    monkeypatch.setattr(memory, "_HIGHEST", {})
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: int(counters.peak * GIB))
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda device: int(2 * counters.peak * GIB))
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", counters.begin_anew)
    return counters


def test_peak_of_a_phase_is_its_own_and_the_process_keeps_the_highest(gpu):
    gpu.use(9)  # the model's loading, say
    peaks = PeakMemory(GPU)
    for gib in (3, 2):
        with peaks.during("old_log_prob"):
            gpu.use(gib)
    with peaks.during("update_actor"):
        gpu.use(5)
    found = {name: metric.value for name, metric in peaks.metrics().items()}
    assert found == {f"{PEAK}/old_log_prob": 4.0, f"{PEAK}/update_actor": 6.0}
    assert peaks.metrics() == {}, "a phase that did not come again is not told again"
    whole = memory_metrics(GPU)
    assert (whole[PEAK].value, whole["perf/max_memory_reserved_gb"].value) == (10.0, 20.0)
    gpu.use(11)
    assert memory_metrics(GPU)[PEAK].value == 12.0


def test_peak_is_not_told_of_a_cpu():
    peaks = PeakMemory(torch.device("cpu"))
    with peaks.during("update_actor"):
        pass
    assert peaks.metrics() == {}


def test_peaks_of_every_phase_of_a_role_come_with_its_update(gpu, lm_path, make_rows):
    """The reference has an engine and peaks of its own; those of a phase without an update are not lost."""
    model, rows = ModelConfig(path=str(lm_path)), make_rows(2)
    actor = ActorRolloutRefWorker(
        ActorRolloutRefConfig(model=model, rollout=RolloutConfig(name="hf")), "actor_rollout_ref", ENGINE
    )
    critic = CriticWorker(CriticConfig(model=model), ENGINE)
    for worker in (actor, critic):
        worker.init_model()
    for part in (actor._actor, actor._ref, critic._residency):
        part.peaks = PeakMemory(GPU)
    actor.compute_log_prob(rows)
    actor.compute_ref_log_prob(rows)
    critic.compute_values(rows)
    for found, phases in (
        (actor.update_actor(rows).metrics, {"old_log_prob", "ref", "update_actor"}),
        (critic.update_critic(rows).metrics, {"values", "update_critic"}),
    ):
        assert {name for name in found if name.startswith(f"{PEAK}/")} == {f"{PEAK}/{phase}" for phase in phases}
