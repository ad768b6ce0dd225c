"""`python -m ostinato.ppo` and `ostinato-ppo`: one command line."""

from __future__ import annotations

import sys

from ostinato.ppo.cli import main

__all__ = ["main"]

if __name__ == "__main__":
    sys.exit(main())
