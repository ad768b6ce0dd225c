"""The step log and its loggers."""

from __future__ import annotations

import json
import logging
import re
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ostinato.controller.watch import book, current_watch
from ostinato.ppo import loggers
from ostinato.ppo.config import PpoConfig
from ostinato.ppo.errors import PpoError
from ostinato.ppo.install import how_to_install
from ostinato.ppo.loggers import SafeLogger, TrackingError, check_installed, check_names, plain
from ostinato.ppo.tracking import StepLog, Tracker
from ostinato.protocol import DataProto, Metric


def records(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / loggers.JSONL).read_text().splitlines()]


# --- the step log ----------------------------------------------------------------------------------------------------


def test_metrics_of_a_name_are_merged_not_overwritten():
    """H-76: kl_loss 1 then 3, equal tokens: 2. H-77: weighted by what they were taken over."""
    log = StepLog()
    log.add({"actor/kl_loss": Metric.mean(1.0, 10)})
    log.add(DataProto.from_dict(meta_info={"metrics": {"actor/kl_loss": Metric.mean(3.0, 10)}}))
    assert log.metrics["actor/kl_loss"].value == 2
    log.add({"a": Metric.mean(0.8, 100), "n": Metric.sum(1)}, {"a": Metric.mean(0.6, 200), "n": Metric.sum(2)})
    assert log.metrics["a"].value == pytest.approx(2 / 3)
    assert log.metrics["n"].value == 3


@pytest.mark.parametrize("parts", [1, 4])
def test_means_do_not_grow_with_their_parts(parts: int):
    """H-75: pg_loss .5 in 1 and 4 parts: .5 each time."""
    log = StepLog()
    log.add(*[{"actor/pg_loss": Metric.mean(0.5, 7)} for _ in range(parts)])
    assert log.metrics["actor/pg_loss"].value == 0.5


def test_stage_times_add_up():
    log = StepLog()
    for _ in range(2):
        with log.time("gen"):
            time.sleep(0.02)
    assert 0.04 <= log.timings["gen"] < 1


def test_a_wait_counts_for_the_stage_that_sent_the_call():
    log = StepLog()
    with log.time("values"):
        sent_by = current_watch()
    with log.time("adv"):
        time.sleep(0.05)
        book(0.05, sent_by)
    assert log.timings["values"] >= 0.05
    assert log.timings["adv"] < 0.04


def test_step_sends_values_with_the_whole_steps_time(tmp_path: Path):
    config = SimpleNamespace(trainer=SimpleNamespace(project_name="p", experiment_name="e"), world_size=2)
    with Tracker(["jsonl"], tmp_path, config) as tracker, tracker.step(3) as log:
        with log.time("gen"):
            time.sleep(0.05)
        log.add({"perf/total_num_tokens": Metric.sum(1000), "response_length/mean": Metric.mean(50.0, weight=10)})
        time.sleep(0.05)
    (record,) = records(tmp_path)
    assert record["step"] == 3
    assert record["training/global_step"] == 3
    assert record["timing_s/step"] >= 0.1
    assert record["perf/throughput"] == pytest.approx(1000 / (record["timing_s/step"] * 2))
    assert record["timing_per_token_ms/gen"] == pytest.approx(1000 * record["timing_s/gen"] / 500)
    assert record["timing_per_token_ms/step"] == pytest.approx(record["timing_s/step"])


def test_failed_step_sends_nothing(tmp_path: Path):
    def fail(tracker: Tracker) -> None:
        with tracker.step(1) as log:
            log.add({"a": Metric.mean(1)})
            raise RuntimeError("step failed")

    with Tracker(["jsonl"], tmp_path) as tracker, pytest.raises(RuntimeError, match="step failed"):
        fail(tracker)
    assert records(tmp_path) == []


def test_validation_outside_a_step_is_sent_too(tmp_path: Path):
    events: list[dict[str, Any]] = []
    with Tracker(["console", "jsonl"], tmp_path, emit=events.append, total_steps=9) as tracker:
        tracker.report(0, {"val-core/s/reward/mean@1": Metric.mean(0.25)})
        with tracker.step(1) as log:
            log.add({"val-core/s/reward/mean@1": Metric.mean(0.5), "critic/score/mean": Metric.mean(0.1)})
        tracker.note("saved")
    assert [(event["kind"], event.get("step")) for event in events] == [
        ("start", None), ("validation", 0), ("step", 1), ("validation", 1), ("note", None), ("end", None),
    ]  # fmt: skip
    assert events[2]["total_steps"] == 9
    assert [record["step"] for record in records(tmp_path)] == [0, 1]
    assert json.loads(json.dumps(events)) == events  # plain, so that another process can take them


def test_console_is_silent_where_it_is_not_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    events: list[dict[str, Any]] = []
    with Tracker(["jsonl"], tmp_path, emit=events.append) as tracker, tracker.step(1):
        pass
    assert [event["kind"] for event in events] == ["start", "end"]
    with Tracker([], tmp_path) as tracker, tracker.step(1):
        pass
    assert capsys.readouterr().out == ""


def test_close_comes_once(tmp_path: Path):
    events: list[dict[str, Any]] = []
    tracker = Tracker(["console"], tmp_path, emit=events.append)
    tracker.close("done")
    tracker.close()
    assert events[-1] == {"kind": "end", "text": "done"}
    assert len(events) == 2


def test_watcher_that_fails_does_not_end_the_run(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    def broken(event: dict[str, Any]) -> None:
        raise ConnectionError("gone")

    with Tracker(["console", "jsonl"], tmp_path, emit=broken) as tracker:
        for step in (1, 2):
            with tracker.step(step):
                pass
    assert len(records(tmp_path)) == 2
    assert caplog.text.count("cannot be shown") == 1


# --- loggers ---------------------------------------------------------------------------------------------------------


def test_jsonl_keeps_full_precision_and_stays_json(tmp_path: Path):
    with Tracker(["jsonl"], tmp_path) as tracker:
        metrics = {"x": 0.1 + 0.2, "big": 1e300, "nan": float("nan"), "inf": float("-inf")}
        tracker.report(
            1, {**{name: Metric.mean(value) for name, value in metrics.items()}, "all": Metric.list([1, 2.5])}
        )
        line = (tmp_path / loggers.JSONL).read_text()  # there before the end: written out at once
    found = json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert found == {"step": 1, "x": 0.1 + 0.2, "big": 1e300, "nan": "nan", "inf": "-inf", "all": [1.0, 2.5]}


def test_jsonl_of_a_resumed_run_goes_on(tmp_path: Path):
    for step in (1, 2):
        with Tracker(["jsonl"], tmp_path / "run") as tracker:
            tracker.report(step, {"a": Metric.mean(step)})
    assert [record["step"] for record in records(tmp_path / "run")] == [1, 2]


def test_tensorboard_holds_the_values(tmp_path: Path):
    with Tracker(["tensorboard"], tmp_path) as tracker:
        for step in (1, 2):
            tracker.report(step, {"critic/score/mean": Metric.mean(step / 2), "all": Metric.list([1, 3])})
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("critic/score/mean")] == [(1, 0.5), (2, 1.0)]
    assert [event.value for event in events.Scalars("all")] == [2.0, 2.0]


def test_unknown_logger_lists_the_known_ones(tmp_path: Path):
    with pytest.raises(
        TrackingError, match="unknown logger 'jsnol'; known: console, jsonl, tensorboard, wandb, mlflow"
    ):
        check_names(["console", "jsnol"])
    with pytest.raises(PpoError):
        Tracker(["jsnol"], tmp_path)


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_logger_that_is_not_installed_says_how_to_install_it(tmp_path: Path, name: str):
    if find_spec(name) is not None:
        pytest.skip("it is installed")
    check_names([name])
    with pytest.raises(TrackingError, match=re.escape(f"{name!r} is not installed: {how_to_install(name)}")):
        check_installed([name])
    with pytest.raises(TrackingError):
        Tracker([name], tmp_path)


class FakeRun:
    """Takes the calls of either library."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def __getattr__(self, name: str) -> Any:
        def record(*args: Any, **kwargs: Any) -> FakeRun:
            self.calls.append((name, args, kwargs))
            return self

        return record


@pytest.mark.parametrize(
    ("name", "sent"),
    [("wandb", ("log", ({"val@1": 0.5},), {"step": 1})), ("mlflow", ("log_metrics", ({"val_at_1": 0.5}, 1), {}))],
)
def test_optional_loggers_send_the_values(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, sent: tuple[Any, ...]
):
    fake = FakeRun()
    monkeypatch.setitem(sys.modules, name, fake)  # pyright: ignore[reportArgumentType]
    logger = SafeLogger(name, tmp_path, ("project", "run"), PpoConfig())
    logger.log(1, {"val@1": 0.5})
    logger.close()
    assert sent in fake.calls
    assert fake.calls[-1][0] in ("finish", "end_run")
    assert "project" in str(fake.calls[0])


class Broken:
    """A logger that fails where it is told to."""

    fails: tuple[str, ...] = ()
    logged: list[int] = []  # noqa: RUF012

    def __init__(self, *args: Any) -> None:
        if "start" in self.fails:
            raise OSError("no server")

    def log(self, step: int, values: Any) -> None:
        if "log" in self.fails:
            raise OSError("disk full")
        self.logged.append(step)

    def close(self) -> None:
        if "close" in self.fails:
            raise OSError("cannot close")


@pytest.mark.parametrize("fails", [("start",), ("log",), ("close",), ("log", "close")])
def test_failing_logger_is_warned_of_once_and_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, fails: tuple[str, ...]
):
    monkeypatch.setitem(loggers._LOGGERS, "tensorboard", (Broken, "json", ""))
    monkeypatch.setattr(Broken, "fails", fails)
    with Tracker(["tensorboard", "jsonl"], tmp_path) as tracker:
        for step in (1, 2, 3):
            with tracker.step(step):
                pass
    assert [record["step"] for record in records(tmp_path)] == [1, 2, 3]
    warnings = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == 1
    assert "logger 'tensorboard'" in warnings[0].getMessage()


def test_configuration_becomes_plain():
    found = plain(PpoConfig())
    assert found["algorithm"]["kl_ctrl"]["kl_coef"] == 0.001
    json.dumps(found)
