"""Importing has no effects, and the README's example runs."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import ostinato.controller
from ostinato.controller import LocalBackend

CHECK = """
import logging, os, sys
before = dict(os.environ)
import ostinato.controller, ostinato.controller.ray, ostinato.controller.ray.driver, ostinato.controller.testing
assert "ray" not in sys.modules, "ray was imported"
assert "transformers" not in sys.modules, "transformers was imported"
assert dict(os.environ) == before, set(os.environ.items()) ^ set(before.items())
assert not logging.getLogger("ostinato").handlers
"""


def test_importing_imports_no_ray_and_changes_no_environment():
    # torch writes to the environment itself; it is imported first so that only our own doing shows.
    done = subprocess.run([sys.executable, "-c", "import torch, tensordict" + CHECK], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_public_names_exist():
    assert sorted(ostinato.controller.__all__) == list(ostinato.controller.__all__)
    assert all(hasattr(ostinato.controller, name) for name in ostinato.controller.__all__)


def test_readme_example_runs_in_this_process(capsys):
    readme = Path(__file__).parents[1] / "README.md"
    block = re.search(r"```python\n(.*?)```", readme.read_text(), re.DOTALL)
    assert block is not None
    names: dict[str, object] = {"__name__": "readme"}
    exec(compile(block.group(1), str(readme), "exec"), names)
    names["main"](LocalBackend())  # pyright: ignore[reportCallIssue]
    assert capsys.readouterr().out.startswith("[0.0, 2.0, 4.0")
