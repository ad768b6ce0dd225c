"""`python -m ostinato.ppo` and `ostinato-ppo`: one command line."""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence

from ostinato.ppo import cli
from ostinato.ppo.ending import INTERRUPTED

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command as a whole process; see `cli.main`."""
    code = cli.main(argv)
    if code == INTERRUPTED:  # nothing is left to stop: one more Ctrl-C would only break off the interpreter's exit
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    return code


if __name__ == "__main__":
    sys.exit(main())
