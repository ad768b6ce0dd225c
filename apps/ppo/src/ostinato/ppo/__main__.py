"""`python -m ostinato.ppo` and `ostinato-ppo`: one command line."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from ostinato.ppo import cli

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command, as the last thing that this process does; see `cli.main`."""
    return cli.main(argv, exits=True)


if __name__ == "__main__":
    sys.exit(main())
