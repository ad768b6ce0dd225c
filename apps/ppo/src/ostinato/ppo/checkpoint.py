"""Checkpoints of a whole run: each appears whole or not at all.

A run folder looks like this:

    run.json                            whose run it is: the model's fingerprint
    latest_checkpointed_iteration.txt   the number of the checkpoint in force, for people and scripts
    global_step_40/                     actor/  critic/  driver.pt  COMPLETE
    global_step_60.partial/             being written, or left behind by a run that died

The workers write into the `.partial` folder, the driver adds its own state, the marker `COMPLETE` comes last, then the
folder is renamed. A folder without its marker is passed over with a warning; a `.partial` one goes when the next run
takes the run folder.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import pickle
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import torch

from ostinato.ppo.errors import CheckpointError, RunFolderBusy

logger = logging.getLogger(__name__)

MARKER = "COMPLETE"
LATEST = "latest_checkpointed_iteration.txt"
_STEP = re.compile(r"global_step_(\d+)")


def model_fingerprint(model_path: str | Path) -> dict[str, Any]:
    """What makes a checkpoint belong to a model: the architecture and the shape-giving part of its config.

    Args:
        model_path: a Hugging Face folder.

    Returns:
        `{"architectures": [...], "config_sha256": "..."}`; the hash leaves out what does not change a weight's shape.
    """
    config = json.loads((Path(model_path) / "config.json").read_text())
    loose = {"_name_or_path", "transformers_version", "dtype", "torch_dtype", "use_cache"}
    shape = json.dumps({key: config[key] for key in sorted(set(config) - loose)}, sort_keys=True)
    return {
        "architectures": config.get("architectures"),
        "config_sha256": hashlib.sha256(shape.encode()).hexdigest(),
    }


def complete_steps(folder: Path) -> list[int]:
    """Steps with a whole checkpoint under `folder`, ascending; a cut-off one is named in a warning.

    Args:
        folder: a run folder; it need not exist.
    """
    steps = []
    for path in folder.glob("global_step_*"):
        match = _STEP.fullmatch(path.name.removesuffix(".partial"))
        if match is None:
            continue
        if (path / MARKER).exists() and not path.name.endswith(".partial"):
            steps.append(int(match[1]))
        else:
            logger.warning("%s was cut off while it was written and is passed over", path)
    return sorted(steps)


class Checkpoints:
    """The checkpoints of one run folder, held by one run at a time.

    Args:
        folder: the run folder (`trainer.default_local_dir`); made where it is missing.
        keep: how many whole checkpoints stay (`trainer.max_actor_ckpt_to_keep`); None keeps all.

    Raises:
        RunFolderBusy: another run that is still alive writes to this folder.
        CheckpointError: the folder cannot be written to.
    """

    def __init__(self, folder: str | Path, keep: int | None = None) -> None:
        self.folder = Path(folder).absolute()
        self.keep = keep
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

    def to_resume(self, mode: str, path: str | None = None) -> Path | None:
        """The checkpoint that this run continues from, or None for a fresh start.

        Args:
            mode: `auto` (the newest whole one, if any), `disable`, or `resume_path`.
            path: the folder for `resume_path`.

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
        steps = complete_steps(self.folder)
        return self.folder / f"global_step_{steps[-1]}" if steps else None

    def save(self, step: int, write: Callable[[Path], None], driver_state: Mapping[str, Any]) -> Path:
        """Write checkpoint `step` whole, then drop those beyond `keep`.

        Args:
            step: the global step that was just finished.
            write: writes the workers' part into the folder that it is given.
            driver_state: what the loop itself needs to continue (`torch.save`d).

        Returns:
            The finished folder.

        Raises:
            CheckpointError: it could not be written; the older ones stay in force.
        """
        final = self.folder / f"global_step_{step}"
        try:
            self._write(final, step, write, driver_state)
            _write_atomically(self.folder / LATEST, str(step))
            self._drop_old(step)
        except OSError as error:
            raise CheckpointError(
                f"checkpoint {final} could not be written; the older ones stay in force: {error}"
            ) from error
        return final

    def _write(self, final: Path, step: int, write: Callable[[Path], None], driver_state: Mapping[str, Any]) -> None:
        partial = final.with_name(final.name + ".partial")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        write(partial)
        torch.save(dict(driver_state), partial / "driver.pt")
        _write_atomically(partial / MARKER, f"{step}\n")
        replaced = final.with_name(final.name + ".replaced")
        if final.exists():  # a run resumed from an older checkpoint comes past this step again
            final.rename(replaced)
        partial.rename(final)
        shutil.rmtree(replaced, ignore_errors=True)
        _sync_folder(self.folder)

    def _tidy(self) -> None:
        """Finish or remove what a run left behind that died while it wrote a checkpoint, or replaced one by another."""
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

    @staticmethod
    def driver_state(checkpoint: Path, roles: Sequence[str] = ()) -> dict[str, Any]:
        """What `save` was given as `driver_state`.

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
            return torch.load(checkpoint / "driver.pt", weights_only=True)
        except (OSError, RuntimeError, EOFError, ValueError, pickle.UnpicklingError) as error:
            raise CheckpointError(f"{checkpoint / 'driver.pt'} cannot be read: {error}") from error

    def close(self) -> None:
        """Let go of the folder, so that another run may take it."""
        self._lock.close()

    def _drop_old(self, newest: int) -> None:
        if not self.keep:
            return
        older = [step for step in complete_steps(self.folder) if step <= newest]
        for step in older[: -self.keep]:
            folder = self.folder / f"global_step_{step}"
            (folder / MARKER).unlink()  # first, or a run that dies now leaves half a checkpoint that says it is whole
            shutil.rmtree(folder)


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
