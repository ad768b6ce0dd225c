"""What a role worker writes for a checkpoint: the engine's state, and what an export needs beside it.

`WriteUnderWay`, `named_failure` and `not_in_force` are for the engines.
"""

from __future__ import annotations

import json
import logging
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING

from ostinato.workers.core.errors import CheckpointError
from ostinato.workers.core.limits import require

if TYPE_CHECKING:
    from ostinato.workers.core.config import ModelConfig
    from ostinato.workers.core.engine import Head, PendingSave
    from ostinato.workers.core.residency import Residency

logger = logging.getLogger(__name__)

RESUMABLE = ("model", "optimizer", "extra")
HF_MODEL = "hf_model"
ROLE_FILE = "role.json"
MODEL_FOLDER = "model"
_FORMAT = 1
_IN_MODEL_FOLDER = ("path", "tokenizer_path", "override_config")


@dataclass(frozen=True)
class CheckpointConfig:
    """How a trained role is saved.

    Attributes:
        save_contents: `model`, `optimizer` and `extra` (schedule and random state) always go together, so that every
            checkpoint resumes exactly; `hf_model` adds the weights as a Hugging Face folder.
        async_save: copy the state to host memory and write it while training goes on. Costs host memory for one more
            copy of what each rank holds.
    """

    save_contents: list[str] = field(default_factory=lambda: list(RESUMABLE))
    async_save: bool = False

    def __post_init__(self) -> None:
        """Check the contents."""
        contents = set(self.save_contents)
        require(
            set(RESUMABLE) <= contents <= {*RESUMABLE, HF_MODEL},
            "checkpoint.save_contents",
            "[model,optimizer,extra], and hf_model where an export is wanted",
            self.save_contents,
        )

    @property
    def exports(self) -> bool:
        """Whether a Hugging Face folder is written into each checkpoint."""
        return HF_MODEL in self.save_contents


class RoleCheckpoint:
    """Saves and loads one role.

    Beside the engine's files the folder gets `role.json` (which engine wrote it, and the model's head) and `model/`
    (config, tokenizer, generation config): an export needs nothing else.

    Args:
        residency: the engine, and where its state lies.
        model: the role's model.
        head: `lm` or `value`.
        config: how it is saved.
    """

    def __init__(self, residency: Residency, model: ModelConfig, head: Head, config: CheckpointConfig) -> None:
        self._residency = residency
        self._model = model
        self._head: Head = head
        self._config = config
        self._pending: PendingSave | None = None

    def save(self, path: Path, *, writes: bool) -> None:
        """Write the role under `path`, or begin to; collective.

        Args:
            path: a folder that does not hold another checkpoint.
            writes: whether this rank writes what all ranks share; exactly one does.

        Raises:
            OSError: it cannot be written.
        """
        engine = self._residency.engine
        with self._residency.training():
            if self._config.async_save:
                self._pending = engine.save(path, background=True)
            else:
                engine.save(path)
        if writes:
            # With the engine's files under way, these may be the first to meet a full disk.
            with named_failure(f"checkpoint {path} cannot be written", CheckpointError):
                self._write_shared(path)

    def _write_shared(self, path: Path) -> None:
        from ostinato.workers.core.export import write_model_files

        path.mkdir(parents=True, exist_ok=True)
        write_model_files(self._model, path / MODEL_FOLDER, self._head)
        model = {name: value for name, value in asdict(self._model).items() if name not in _IN_MODEL_FOLDER}
        entries = {
            "format": _FORMAT,
            "strategy": self._residency.choice.strategy,
            "head": self._head,
            "model": model,
        }
        (path / ROLE_FILE).write_text(json.dumps(entries, default=list))
        for file in (*(path / MODEL_FOLDER).rglob("*"), path / ROLE_FILE):
            if file.is_file():  # a tokenizer with several chat templates keeps them in a folder
                with file.open("rb") as handle:
                    os.fsync(handle.fileno())

    def saved(self, wait: bool) -> bool:
        """Whether the last `save` is whole.

        Args:
            wait: wait until it is.

        Raises:
            OSError: it could not be written.
        """
        if self._pending is None:
            return True
        if not wait and not self._pending.done():
            return False
        pending, self._pending = self._pending, None
        pending.wait()
        return True

    def load(self, path: Path) -> None:
        """Read what `save` wrote, at any number of ranks; collective.

        Raises:
            OSError: there is no whole checkpoint, or it belongs to another model.
        """
        saved, model = read_saved_role(path).model, self._model
        if min(saved.lora_rank, model.lora_rank) > 0 and saved.lora_alpha != model.lora_alpha:
            raise CheckpointError(
                f"checkpoint {path}: its adapter counts with model.lora_alpha={saved.lora_alpha}, this run's with "
                f"{model.lora_alpha}, which makes another policy of the same weights. Set it as it was"
            )
        with self._residency.training():
            self._residency.engine.load(path)


class WriteUnderWay:
    """A checkpoint that a thread writes; for engines, as their `PendingSave`.

    Args:
        write: writes it, and raises the engine's error where it cannot.
    """

    def __init__(self, write: Callable[[], None]) -> None:
        self._written: Future[None] = Future()
        # A daemon: a process that ends does not wait for a checkpoint that nobody will declare whole.
        threading.Thread(target=self._run, args=(write,), name="checkpoint", daemon=True).start()

    def done(self) -> bool:
        """Whether this rank has nothing more to write, be it that it has failed."""
        return self._written.done()

    def end(self) -> None:
        """Return once this rank has nothing more to write."""
        wait([self._written])

    def wait(self) -> None:
        """Return once the checkpoint is whole.

        Raises:
            OSError: it could not be written, on whichever rank.
        """
        self._written.result()

    def _run(self, write: Callable[[], None]) -> None:
        try:
            write()
        except BaseException as error:  # it is raised where the checkpoint is waited for
            self._written.set_exception(error)
        else:
            self._written.set_result(None)


def not_in_force(mark: str) -> str:
    """How things stand after a save that failed, and what to do.

    Args:
        mark: the file that a checkpoint gets last.
    """
    return (
        f"Nothing resumes from a folder without `{mark}`, which is written last: the checkpoint before this one stays "
        "in force. Where the connection to a rank was lost, that rank has ended, and its own log says why. Put right "
        "what failed and start the run again; it resumes from that earlier checkpoint."
    )


@contextmanager
def named_failure(what: str, kind: type[OSError], *others: type[Exception], advice: str = "") -> Iterator[None]:
    """Give a failure to write or read a checkpoint its name. For engines.

    torch's own is no `Exception`: it would pass every handler up to the driver. A rank that has died is seen by the
    others as an error of the process group.

    Args:
        what: which checkpoint, and what could not be done with it.
        kind: the engine's error.
        others: what else can come, beside errors of files, of torch and of the process group.
        advice: how things stand now, and what to do.

    Raises:
        OSError: a `kind`, from the failure.
    """
    import torch.distributed as dist
    from torch.distributed.checkpoint.api import CheckpointException

    end = f". {advice}" if advice else ""
    try:
        yield
    except CheckpointException as error:
        for cause, _ in error.failures.values():
            if isinstance(cause, KeyboardInterrupt):  # torch wraps this too; it is no failure of the checkpoint
                raise cause from None
        failures = [f"rank {rank}: {_said(cause)}" for rank, (cause, _) in error.failures.items()]
        raise kind(f"{what}: {'; '.join(failures)}{end}") from error
    except (OSError, RuntimeError, *others) as error:
        where = f"rank {dist.get_rank()}: " if dist.is_initialized() else ""
        raise kind(f"{what}: {where}{_said(error)}{end}") from error


def _said(error: BaseException) -> str:
    """An error's type and text; torch's writer hides the system's own error where the disk takes only a part."""
    text = f"{type(error).__name__}: {error}".rstrip(".")
    short = "inline_container" in text and "unexpected pos" in text
    return f"{text} (a file was cut short: the disk is full, or files may not be that large)" if short else text


@dataclass(frozen=True)
class SavedRole:
    """What a role's folder in a checkpoint says about itself.

    Attributes:
        strategy: the engine that wrote it.
        head: `lm` or `value`.
        model: the model; its path is the checkpoint's own folder with config and tokenizer, without weights.
    """

    strategy: str
    head: Head
    model: ModelConfig


def read_saved_role(path: Path) -> SavedRole:
    """Read what `RoleCheckpoint.save` wrote beside the engine's files.

    Args:
        path: the role's folder.

    Raises:
        CheckpointError: it is no such folder, or one of a newer version.
    """
    from ostinato.workers.core.config import ModelConfig

    file = path / ROLE_FILE
    try:
        entries = json.loads(file.read_text())
        known = {entry.name for entry in fields(ModelConfig)}
        version, model = entries["format"], {name: entries["model"][name] for name in entries["model"] if name in known}
        strategy, head = entries["strategy"], entries["head"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{path}: expected the folder of a saved role with a file {ROLE_FILE}, which is written last; {error!r}"
        ) from error
    if version != _FORMAT:
        raise CheckpointError(f"{file}: expected format {_FORMAT}, got {version!r}; a newer ostinato wrote it")
    return SavedRole(strategy, head, ModelConfig(path=str(path / MODEL_FOLDER), **model))
