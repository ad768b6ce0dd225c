"""What lies in a run folder: which checkpoints are whole, and whose they are. Read without torch."""

from __future__ import annotations

import hashlib
import json
import logging
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

MARKER = "COMPLETE"
DRIVER_STATE = "driver.pt"
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


def step_of(checkpoint: Path) -> int:
    """The step that a checkpoint's folder is named after; -1 where it is named otherwise."""
    match = _STEP.fullmatch(checkpoint.name)
    return -1 if match is None else int(match[1])


def complete_steps(folder: Path, *, roles: Sequence[str] = (), warn: bool = True) -> list[int]:
    """Steps with a whole checkpoint under `folder`, ascending.

    Args:
        folder: a run folder; it need not exist.
        roles: those that a checkpoint must have a part of.
        warn: name each one that was cut off in a warning.
    """
    steps = []
    for path in folder.glob("global_step_*"):
        step = step_of(path.with_name(path.name.removesuffix(".partial")))
        if step < 0:
            continue
        if (path / MARKER).exists() and not path.name.endswith(".partial"):
            if all((path / role).is_dir() for role in roles):
                steps.append(step)
        elif warn:
            logger.warning("%s was cut off while it was written and is passed over", path)
    return sorted(steps)


def newest_for(folder: Path, roles: Sequence[str], *, warn: bool = True) -> Path | None:
    """The checkpoint that `resume_mode=auto` takes: the newest with a part of each role, else the newest whole one.

    Args:
        folder: a run folder; it need not exist.
        roles: those whose weights will be read.
        warn: as for `complete_steps`.
    """
    steps = complete_steps(folder, roles=roles, warn=warn) or complete_steps(folder, warn=False)
    return folder / f"global_step_{steps[-1]}" if steps else None
