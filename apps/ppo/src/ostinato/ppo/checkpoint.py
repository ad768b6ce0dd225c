"""Checkpoints of a whole run: each appears whole or not at all.

A run folder looks like this:

    run.json                            whose run it is: the model's fingerprint
    latest_checkpointed_iteration.txt   the number of the checkpoint in force, for people and scripts
    global_step_40/                     actor/  critic/  driver.pt  COMPLETE
    global_step_60.partial/             being written, or left behind by a run that died

The workers write into the `.partial` folder and the driver adds its own state (`begin`); once all of it is there, and
the step's metrics are written too, the marker `COMPLETE` comes last and the folder is renamed (`settle`). A folder
without its marker is passed over with a warning; a `.partial` one goes when the next run takes the run folder, and so
does a `.dropped` one, which is one too many.

A checkpoint that cannot be written, because the disk is full for example, costs a warning and the space that it took:
the older ones stay in force and the run goes on. Only where it was the last one does the run end with an error.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import pickle
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch

from ostinato.controller import ControllerError, WorkerDied, WorkerFailed
from ostinato.ppo.errors import CheckpointError, RunFolderBusy
from ostinato.ppo.run_folder import DRIVER_STATE, LATEST, MARKER, complete_steps, newest_for

logger = logging.getLogger(__name__)


class Checkpoints:
    """The checkpoints of one run folder, held by one run at a time.

    Args:
        folder: the run folder (`trainer.default_local_dir`); made where it is missing.
        keep: how many checkpoints hold each role's part (`trainer.max_actor_ckpt_to_keep`, `max_critic_ckpt_to_keep`);
            a number counts for all roles, None keeps all.

    Attributes:
        num_failed: checkpoints that could not be written.
        failure: why the last one could not be; None: it could.

    Raises:
        RunFolderBusy: another run that is still alive writes to this folder.
        CheckpointError: the folder cannot be written to.
    """

    def __init__(self, folder: str | Path, keep: int | Mapping[str, int | None] | None = None) -> None:
        self.folder = Path(folder).absolute()
        self.keep = dict(keep) if isinstance(keep, Mapping) else {"actor": keep}
        self.num_failed = 0
        self.failure: CheckpointError | None = None
        self._pending: _Pending | None = None
        with self._writable():
            self.folder.mkdir(parents=True, exist_ok=True)
            self._lock = _hold(self.folder / ".lock")
            self._tidy()

    @contextmanager
    def _writable(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise CheckpointError(f"trainer.default_local_dir={self.folder} cannot be written to: {error}") from error

    def claim(self, fingerprint: Mapping[str, Any]) -> None:
        """Write `run.json`, or refuse the folder where it belongs to another model.

        Raises:
            CheckpointError: the folder holds checkpoints of a model of another shape.
        """
        path = self.folder / "run.json"
        if path.exists() and complete_steps(self.folder):
            known = json.loads(path.read_text())["model"]
            if known != fingerprint:
                raise CheckpointError(
                    f"trainer.default_local_dir={self.folder} holds checkpoints of another model: "
                    f"{known['architectures']} (config {known['config_sha256'][:12]}), this run's is "
                    f"{fingerprint['architectures']} (config {fingerprint['config_sha256'][:12]}). "
                    "Give this run a folder of its own (trainer.experiment_name or trainer.default_local_dir)."
                )
        with self._writable():
            _write_atomically(path, json.dumps({"format": 1, "model": fingerprint}, indent=1))

    def to_resume(self, mode: str, path: str | None = None, roles: Sequence[str] = ()) -> Path | None:
        """The checkpoint that this run continues from, or None for a fresh start.

        Args:
            mode: `auto` (the newest whole one, if any), `disable`, or `resume_path`.
            path: the folder for `resume_path`.
            roles: those whose weights will be read; of the whole ones `auto` takes the newest that has them.

        Raises:
            CheckpointError: `resume_path` names something that is no whole checkpoint.
        """
        if mode == "disable":
            return None
        if mode == "resume_path":
            chosen = Path(str(path)).absolute()
            if not (chosen / MARKER).exists():
                raise CheckpointError(
                    f"trainer.resume_from_path={path} is no whole checkpoint: expected a global_step_N folder with "
                    f"a file {MARKER} in it"
                )
            return chosen
        return newest_for(self.folder, roles)

    def begin(
        self,
        step: int,
        write: Callable[[Path], None],
        driver_state: Mapping[str, Any],
        written: Callable[[bool], bool] = lambda wait: True,
    ) -> None:
        """Write checkpoint `step`, all but what puts it in force; one that is still under way is waited for.

        Args:
            step: the global step that was just finished.
            write: writes the workers' part into the folder that it is given, or begins to.
            driver_state: what the loop itself needs to continue (`torch.save`d).
            written: whether the workers' part is whole; with True it waits until it is.
        """
        self.settle(wait=True)
        partial = self.folder / f"global_step_{step}.partial"
        self._pending = _Pending(step, partial, written)
        with self._surviving(self._pending):
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
            write(partial)
            _save_driver_state(driver_state, partial / DRIVER_STATE)

    def settle(self, *, wait: bool = False) -> None:
        """Put the checkpoint that was begun in force once all of it is written, and drop those beyond `keep`.

        Args:
            wait: wait until it is written; else nothing happens where it is not.
        """
        pending = self._pending
        if pending is None:
            return
        with self._surviving(pending):
            if not pending.written(wait):
                return
            self._put_in_force(pending)
            self._pending, self.failure = None, None

    def finish(self) -> None:
        """Settle what is under way, at the run's end.

        Raises:
            CheckpointError: the last checkpoint could not be written.
        """
        self.settle(wait=True)
        if self.failure is not None:
            raise self.failure

    def _put_in_force(self, pending: _Pending) -> None:
        partial, final = pending.partial, pending.partial.with_suffix("")
        _write_atomically(partial / MARKER, f"{pending.step}\n")
        replaced = final.with_name(final.name + ".replaced")
        if final.exists():  # a run resumed from an older checkpoint comes past this step again
            final.rename(replaced)
        partial.rename(final)
        logger.info("checkpoint %s is whole and in force", final)
        shutil.rmtree(replaced, ignore_errors=True)
        try:
            _sync_folder(self.folder)
            _write_atomically(self.folder / LATEST, str(pending.step))
            self._drop_old(pending.step)
        except OSError as error:
            logger.warning("%s is in force, but the folder around it could not be brought up to date: %s", final, error)

    @contextmanager
    def _surviving(self, pending: _Pending) -> Iterator[None]:
        """Give a checkpoint up where its disk fails: a warning, a count, and the space is free again."""
        try:
            yield
        except (OSError, WorkerFailed) as error:
            if not _of_the_disk(error):
                raise
            self._pending = None
            self.num_failed += 1
            final = pending.partial.with_suffix("")
            reason = str(error.reason if isinstance(error, WorkerFailed) else error)
            reason = reason.replace(str(pending.partial), str(final))  # a folder that nobody will find
            self.failure = CheckpointError(f"checkpoint {final} could not be written; {self._in_force()}: {reason}")
            self.failure.__cause__ = error
            logger.warning("%s. The run goes on; the next checkpoint tries anew", str(self.failure).rstrip("."))
            with suppress(OSError, WorkerFailed):  # those that still write must not find their folder gone
                pending.written(True)
            shutil.rmtree(pending.partial, ignore_errors=True)

    def _in_force(self) -> str:
        steps = complete_steps(self.folder, warn=False)
        return f"global_step_{steps[-1]} stays in force" if steps else "there is none yet"

    def _tidy(self) -> None:
        """Finish or remove what a run left behind that died while it wrote, replaced or dropped a checkpoint."""
        for partial in self.folder.glob("global_step_*.partial"):
            final = partial.with_suffix("")
            if (partial / MARKER).exists() and not final.exists():
                partial.rename(final)
            else:
                logger.warning("%s was cut off while it was written and is removed", partial)
                shutil.rmtree(partial)
        for replaced in self.folder.glob("global_step_*.replaced"):
            if replaced.with_suffix("").exists():
                shutil.rmtree(replaced)
        for places in ("global_step_*/*.dropped", "global_step_*.dropped"):  # the one may lie in the other
            for dropped in [*self.folder.glob(places)]:
                shutil.rmtree(dropped)

    def resume(self, mode: str, path: str | None, roles: Sequence[str]) -> Resumed | None:
        """What this run continues from, the driver's part of it read; arguments and errors are those of `to_resume`.

        Raises:
            CheckpointError: as `to_resume` and `driver_state`.
        """
        found = self.to_resume(mode, path, roles)
        return None if found is None else Resumed(found, self.driver_state(found, roles))

    @staticmethod
    def driver_state(checkpoint: Path, roles: Sequence[str] = ()) -> dict[str, Any]:
        """What `begin` was given as `driver_state`.

        Args:
            checkpoint: a whole checkpoint.
            roles: those whose weights will be read from it.

        Raises:
            CheckpointError: the file is missing or cannot be read, or a role has no part in the checkpoint.
        """
        missing = [role for role in roles if not (checkpoint / role).is_dir()]
        if missing:
            raise CheckpointError(
                f"{checkpoint} holds no {' and no '.join(missing)}: it was written by a run without one, and this run "
                "needs it (algorithm.adv_estimator). Go on as that run did, or start anew: trainer.resume_mode=disable"
            )
        try:
            return torch.load(checkpoint / DRIVER_STATE, weights_only=True)
        except (OSError, RuntimeError, EOFError, ValueError, pickle.UnpicklingError) as error:
            raise CheckpointError(f"{checkpoint / DRIVER_STATE} cannot be read: {error!r}") from error

    def close(self) -> None:
        """Let go of the folder, so that another run may take it."""
        self._lock.close()

    def _drop_old(self, newest: int) -> None:
        """Remove what is beyond `keep`: a role's part, or the whole checkpoint where no role's part is kept."""
        older = [step for step in complete_steps(self.folder, warn=False) if step <= newest]
        dropped = {role: older[:-keep] for role, keep in self.keep.items() if keep}
        for step in older:
            folder = self.folder / f"global_step_{step}"
            present = [role for role in self.keep if (folder / role).exists()] or list(self.keep)
            if all(step in dropped.get(role, ()) for role in present):
                _drop(folder)
                continue
            for role in dropped:
                if step in dropped[role] and (folder / role).exists():
                    _drop(folder / role)


@dataclass(frozen=True)
class Resumed:
    """What a run continues from.

    Attributes:
        folder: a whole checkpoint.
        state: the loop's own state, as `begin` was given it.
    """

    folder: Path
    state: Mapping[str, Any]


@dataclass(frozen=True)
class _Pending:
    """A checkpoint that is not in force yet."""

    step: int
    partial: Path
    written: Callable[[bool], bool]


def _drop(folder: Path) -> None:
    """Remove a folder whose name must not stand for half of it, should the run die now; `_tidy` finishes it."""
    dropped = folder.with_name(folder.name + ".dropped")
    folder.rename(dropped)
    shutil.rmtree(dropped)


def _of_the_disk(error: BaseException) -> bool:
    """Whether writing failed, here or in a worker that lives on; not a worker that died or hung."""
    if isinstance(error, WorkerFailed):
        cause = error.__cause__
        return not isinstance(error, WorkerDied) and isinstance(cause, OSError) and _of_the_disk(cause)
    return isinstance(error, OSError) and not isinstance(error, ControllerError)


def _save_driver_state(state: Mapping[str, Any], path: Path) -> None:
    try:
        with path.open("wb") as handle:
            torch.save(dict(state), handle)
            handle.flush()
            os.fsync(handle.fileno())
    except RuntimeError as error:  # torch's own text for a full disk
        raise OSError(f"{path}: {error}") from error


def _hold(path: Path) -> IO[str]:
    handle = path.open("a+")
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        handle.seek(0)
        holder = handle.read().strip() or "unknown process"
        handle.close()
        raise RunFolderBusy(
            f"trainer.default_local_dir={path.parent} is in use by another run ({holder}). Wait for it, stop it, or "
            "give this run a folder of its own (trainer.experiment_name or trainer.default_local_dir)."
        ) from error
    handle.truncate(0)
    handle.write(f"pid {os.getpid()} on {os.uname().nodename}")
    handle.flush()
    return handle


def _write_atomically(path: Path, text: str) -> None:
    beside = path.with_name(path.name + ".tmp")
    with beside.open("w") as handle:
        handle.write(text)
        handle.flush()
        os.fsync(handle.fileno())
    beside.rename(path)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
