"""`ostinato-ppo export`: a Hugging Face folder from a checkpoint, in one process, without a GPU and without Ray."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ostinato.ppo.errors import CheckpointError
from ostinato.ppo.install import how_to_install

if TYPE_CHECKING:
    from ostinato.workers.core.checkpoint import SavedRole

PROGRAM = "ostinato-ppo export"

READERS = {
    "fsdp": "ostinato.workers.fsdp.saved:SavedWeights",
    "megatron": "ostinato.workers.megatron.saved:SavedWeights",
}
"""Strategy -> what reads its checkpoints: a WeightSource of the role's folder, its model and its head."""

DTYPES = {"auto": None, "fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}

DESCRIPTION = """\
Writes the weights of a checkpoint as a Hugging Face folder: safetensors, config, tokenizer, generation config. Such a
folder is read by from_pretrained and by inference servers. Runs in one process, on the CPU, with memory for one weight
file; the run may have had any number of GPUs.
"""

EPILOG = """\
example:
  ostinato-ppo export checkpoints/ostinato/ppo/global_step_100 --to exported --dtype bf16
"""


def main(argv: Sequence[str]) -> int:
    """Run the command.

    Args:
        argv: arguments after `export`.

    Returns:
        Exit code: 0 done, 1 the checkpoint cannot be read or the folder not written, 2 the command is faulty.
    """
    from ostinato.workers.core.errors import WorkersError

    parser = _parser()
    try:
        options = parser.parse_args(argv)
    except SystemExit as stop:
        return int(stop.code or 0)
    try:
        export(
            options.checkpoint,
            options.to,
            role=options.role,
            dtype=options.dtype,
            shard_gigabytes=options.shard_gigabytes,
            overwrite=options.overwrite,
            progress=_Progress(),
        )
    except (CheckpointError, WorkersError, OSError, ValueError) as error:
        sys.stderr.write(f"{PROGRAM}: {error}\n")
        return 1
    sys.stdout.write(f"exported to {options.to}\n")
    return 0


def export(
    checkpoint: str | Path,
    to: str | Path,
    *,
    role: str = "actor",
    dtype: str = "auto",
    shard_gigabytes: float = 5.0,
    overwrite: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> None:
    """Write a role of a checkpoint as a Hugging Face folder, which appears whole or not at all.

    Args:
        checkpoint: a `global_step_N` folder, a run folder (its newest whole checkpoint is taken), or a role's folder.
        to: the folder to make.
        role: `actor` or `critic`.
        dtype: of the weights: `fp32`, `bf16`, `fp16`, or `auto`, that of the model that the run started from.
        shard_gigabytes: largest size of one weight file, in 10⁹ bytes.
        overwrite: replace a folder that is there already.
        progress: told bytes written and bytes in all after each file.

    Raises:
        CheckpointError: there is no whole checkpoint, or the target is in the way or cannot be replaced.
        OSError: the checkpoint cannot be read, or the folder not written.
    """
    import torch

    from ostinato.workers.core.checkpoint import read_saved_role
    from ostinato.workers.core.export import export_hf
    from ostinato.workers.core.factory import prepare_model

    target = Path(to).resolve()
    if target.exists() and (not target.is_dir() or any(target.iterdir())) and not overwrite:
        raise CheckpointError(f"{to} is there already; give another folder, or --overwrite")
    folder = find_role(Path(checkpoint), role)
    if target.is_relative_to(folder) or folder.is_relative_to(target):
        raise CheckpointError(f"{to} holds the checkpoint {folder}, or lies in it; give another folder")
    if target.is_mount():
        raise CheckpointError(f"{to} is where a disk is mounted, which cannot be replaced; give a folder in it")
    saved = read_saved_role(folder)
    prepare_model(saved.model, role)
    name = DTYPES[dtype]
    export_hf(
        _source(folder, saved),
        saved.model,
        target,
        head=saved.head,
        writes=True,
        dtype=None if name is None else getattr(torch, name),
        shard_bytes=max(int(shard_gigabytes * 10**9), 1),
        progress=progress,
    )


def find_role(path: Path, role: str) -> Path:
    """The folder of a role's weights.

    Args:
        path: as `checkpoint` of `export`.
        role: `actor` or `critic`; not looked at where `path` is a role's folder itself.

    Raises:
        CheckpointError: there is no whole checkpoint, or the role has no part in it.
    """
    from ostinato.ppo.run_folder import MARKER, complete_steps
    from ostinato.workers.core.checkpoint import ROLE_FILE

    if not path.is_dir():
        raise CheckpointError(f"{path}: expected a checkpoint's folder (global_step_N), found none")
    path = path.resolve()  # "." has no name of its own
    if (path / ROLE_FILE).is_file():
        path, role = path.parent, path.name
    elif not path.name.startswith("global_step_"):
        steps = complete_steps(path, roles=[role])
        if not steps:
            raise CheckpointError(
                f"{path}: expected a checkpoint (global_step_N), or a run folder with a whole checkpoint of "
                f"{'an' if role == 'actor' else 'a'} {role}; found neither"
            )
        path = path / f"global_step_{steps[-1]}"
    if path.name.endswith(".partial") or not (path / MARKER).exists():
        raise CheckpointError(
            f"{path} was cut off while it was written: it has no file {MARKER}, which comes last. Take an earlier one"
        )
    if not (path / role).is_dir():
        there = sorted(each.parent.name for each in path.glob(f"*/{ROLE_FILE}"))
        raise CheckpointError(f"{path} holds no {role}; it holds {', '.join(there) or 'no role'} (--role)")
    return path / role


def _source(folder: Path, saved: SavedRole) -> Any:
    if saved.strategy not in READERS:
        raise CheckpointError(
            f"{folder}: was written with strategy {saved.strategy!r}; this command reads {', '.join(READERS)}. Set "
            "trainer.save_hf_model=True in the run instead"
        )
    module, name = READERS[saved.strategy].split(":")
    try:
        reader = getattr(import_module(module), name)
    except ModuleNotFoundError as error:
        raise CheckpointError(
            f"{folder}: was written with strategy {saved.strategy!r}, whose wheel is not installed ({error}): "
            + how_to_install("megatron")  # the other one comes with the app
        ) from error
    return reader(folder, saved.model, saved.head)


class _Progress:
    """Shows how far an export is, on standard error; one line that changes on a terminal."""

    def __call__(self, written: int, total: int) -> None:
        on_terminal = sys.stderr.isatty()
        end = "\n" if written == total or not on_terminal else ""
        start = "\r" if on_terminal else ""
        unit, name = (1e6, "MB") if total >= 1e7 else (1e3, "kB")
        sys.stderr.write(f"{start}{written / unit:,.0f} of {total / unit:,.0f} {name} written{end}")
        sys.stderr.flush()


def _gigabytes(text: str) -> float:
    size = float(text)
    if not 0 < size < math.inf:
        raise argparse.ArgumentTypeError(f"expected a size above 0, got {text}")
    return size


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        PROGRAM, description=DESCRIPTION, epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "checkpoint", metavar="CHECKPOINT", help="a global_step_N folder, or a run folder: its newest whole checkpoint"
    )
    parser.add_argument("--to", metavar="DIR", required=True, help="the folder to make")
    parser.add_argument("--role", choices=["actor", "critic"], default="actor", help="whose weights (default: actor)")
    parser.add_argument(
        "--dtype", choices=list(DTYPES), default="auto", help="type of the weights (default: as the run's model had it)"
    )
    parser.add_argument(
        "--shard-gigabytes", type=_gigabytes, default=5.0, metavar="GB", help="largest weight file (default: 5)"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace DIR where it is there already")
    return parser
