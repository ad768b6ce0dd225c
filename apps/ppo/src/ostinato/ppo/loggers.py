"""Where the values of a step go: a JSON file, TensorBoard, Weights & Biases, MLflow."""

from __future__ import annotations

import dataclasses
import json
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from ostinato.ppo.errors import PpoError
from ostinato.ppo.install import how_to_install

logger = logging.getLogger(__name__)

JSONL = "metrics.jsonl"
CONSOLE = "console"

Value = float | Sequence[float]


class TrackingError(PpoError, ValueError):
    """A logger is unknown or not installed."""


class Logger(Protocol):
    """One place that values go to. What it raises is the run's to survive."""

    def log(self, step: int, values: Mapping[str, Value]) -> None:
        """Take the values of one step."""
        ...

    def close(self) -> None:
        """Write out what is still held."""
        ...


def json_number(value: Value) -> Any:
    """A value as strict JSON: floats in full, lists as lists, what is not finite as `"nan"`, `"inf"`, `"-inf"`."""
    if isinstance(value, int | float):
        return value if math.isfinite(value) else str(float(value))
    return [json_number(entry) for entry in value]


def scalars(values: Mapping[str, Value]) -> dict[str, float]:
    """The values as one number each: a list's mean."""
    return {
        name: float(value) if isinstance(value, int | float) else sum(value) / len(value)
        for name, value in values.items()
        if isinstance(value, int | float) or len(value)
    }


def plain(config: Any) -> Any:
    """A configuration as nested dicts, lists and plain values, for loggers that keep it."""
    if dataclasses.is_dataclass(config) and not isinstance(config, type):
        return {field.name: plain(getattr(config, field.name)) for field in dataclasses.fields(config)}
    if isinstance(config, Mapping):
        return {str(key): plain(value) for key, value in config.items()}
    if isinstance(config, list | tuple):
        return [plain(value) for value in config]
    return config if isinstance(config, str | int | float | bool | None) else str(config)


class JsonlLogger:
    """`metrics.jsonl`: one object a step, `{"step": …, name: value, …}`, written out at once.

    A run that goes on after a checkpoint appends; of two lines with the same step the later one counts.
    """

    def __init__(self, run_dir: Path, names: tuple[str, str], config: Any) -> None:
        run_dir.mkdir(parents=True, exist_ok=True)
        self._file = (run_dir / JSONL).open("a", encoding="utf-8")

    def log(self, step: int, values: Mapping[str, Value]) -> None:
        """Write one line."""
        record = {"step": step, **{name: json_number(value) for name, value in values.items()}}
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class TensorboardLogger:
    """Event files in `tensorboard/` of the run's folder."""

    def __init__(self, run_dir: Path, names: tuple[str, str], config: Any) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(run_dir / "tensorboard"))

    def log(self, step: int, values: Mapping[str, Value]) -> None:
        """Write the values and flush, so that a run that is looked at shows its last step."""
        for name, value in scalars(values).items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        """Close the files."""
        self._writer.close()


class WandbLogger:
    """A Weights & Biases run with the project's and the experiment's name."""

    def __init__(self, run_dir: Path, names: tuple[str, str], config: Any) -> None:
        import wandb  # pyright: ignore[reportMissingImports]  # an optional package

        run_dir.mkdir(parents=True, exist_ok=True)
        self._run: Any = wandb.init(project=names[0], name=names[1], dir=str(run_dir), config=plain(config))

    def log(self, step: int, values: Mapping[str, Value]) -> None:
        """Send the values."""
        self._run.log(scalars(values), step=step)

    def close(self) -> None:
        """End the run."""
        self._run.finish()


class MlflowLogger:
    """An MLflow run; experiment and run have the project's and the experiment's name."""

    def __init__(self, run_dir: Path, names: tuple[str, str], config: Any) -> None:
        import mlflow  # pyright: ignore[reportMissingImports]  # an optional package

        self._mlflow: Any = mlflow
        mlflow.set_experiment(names[0])
        mlflow.start_run(run_name=names[1])
        mlflow.log_dict(plain(config), "config.json")

    def log(self, step: int, values: Mapping[str, Value]) -> None:
        """Send the values; MLflow takes no `@` in a name."""
        self._mlflow.log_metrics({name.replace("@", "_at_"): value for name, value in scalars(values).items()}, step)

    def close(self) -> None:
        """End the run."""
        self._mlflow.end_run()


_LOGGERS: dict[str, tuple[Callable[[Path, tuple[str, str], Any], Logger], str, str]] = {
    "jsonl": (JsonlLogger, "json", ""),
    "tensorboard": (TensorboardLogger, "tensorboard", ""),
    "wandb": (WandbLogger, "wandb", "wandb"),
    "mlflow": (MlflowLogger, "mlflow", "mlflow"),
}

LOGGERS = (CONSOLE, *_LOGGERS)
"""The names that `trainer.logger` may hold."""


def check_names(names: Sequence[str]) -> None:
    """Check the names of loggers, without looking at what is installed.

    Raises:
        TrackingError: an unknown name; the text lists the known ones.
    """
    for name in names:
        if name not in LOGGERS:
            raise TrackingError(f"trainer.logger: unknown logger {name!r}; known: {', '.join(LOGGERS)}")


def check_installed(names: Sequence[str]) -> None:
    """Check that what the loggers need is installed.

    Raises:
        TrackingError: a package is missing; the text says how to install it.
    """
    for name in names:
        _, module, extra = _LOGGERS.get(name, (None, None, None))
        if module and find_spec(module) is None:
            how = how_to_install(extra) if extra else f"pip install {module}"
            raise TrackingError(f"trainer.logger: {name!r} is not installed: {how}")


class SafeLogger:
    """A logger whose failures end nothing: the first is a warning, further ones are silent, each step is tried anew.

    Args:
        name: the logger's name.
        run_dir: the run's folder.
        names: project and experiment.
        config: the run's configuration.
    """

    def __init__(self, name: str, run_dir: Path, names: tuple[str, str], config: Any) -> None:
        self.name, self._warned = name, False
        self._logger: Logger | None = None
        try:
            self._logger = _LOGGERS[name][0](run_dir, names, config)
        except Exception as error:
            self._warn("could not start", error)

    def log(self, step: int, values: Mapping[str, Value]) -> None:
        """Hand on the values of a step."""
        if self._logger is None:
            return
        try:
            self._logger.log(step, values)
        except Exception as error:
            self._warn(f"lost step {step}", error)

    def close(self) -> None:
        """Close the logger."""
        if self._logger is None:
            return
        try:
            self._logger.close()
        except Exception as error:
            self._warn("could not be closed", error)

    def _warn(self, what: str, error: Exception) -> None:
        if not self._warned:
            self._warned = True
            logger.warning("logger %r %s; the run goes on: %r", self.name, what, error, exc_info=error)
