"""A file or folder that appears whole or not at all."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ostinato.workers.core.export import share


@contextmanager
def write_whole(path: Path) -> Iterator[Path]:
    """Give a place beside `path` to write to, and rename it to `path` when the block ends without an error.

    Args:
        path: the file or folder to make. An existing file, or an empty folder, is replaced.

    Yields:
        The temporary path; nothing is there yet. It is removed when the block fails.
    """
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        yield part
        if part.is_dir():
            share(part)
        os.replace(part, path)
    finally:
        if part.is_dir():
            shutil.rmtree(part)
        else:
            part.unlink(missing_ok=True)
