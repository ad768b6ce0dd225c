"""Run a wheel's own tests with that wheel alone: built, installed into a fresh environment, tests copied beside it.

python tools/suites_alone.py [protocol] [controller]

Versions come from uv.lock. `tools/isolated.py` imports every wheel alone; this runs the suites of the two wheels that
other projects may depend on by themselves.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from isolated import ROOT, find_uv

INSTALL = {"protocol": "ostinato-protocol", "controller": "ostinato-controller[ray]"}
TOOLS = ("pytest", "pytest-timeout", "hypothesis")


def pins(uv: str, path: Path) -> Path:
    """The locked versions as constraints."""
    export = [uv, "export", "--quiet", "--locked", "--all-packages", "--no-hashes", "--no-emit-workspace"]
    lines = subprocess.run([*export, "--no-annotate"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    path.write_text(
        "\n".join(line.split(";")[0].strip() for line in lines.splitlines() if not line.startswith(("#", "-")))
    )
    return path


def main() -> None:
    """Install and test each wheel that was named, or both."""
    uv = find_uv()
    with tempfile.TemporaryDirectory(prefix="ostinato-alone-") as scratch:
        here = Path(scratch)
        locked = pins(uv, here / "locked.txt")
        for name in sys.argv[1:] or list(INSTALL):
            start = time.monotonic()
            for wheel in {"protocol", name}:
                build = [uv, "build", "--quiet", "--package", f"ostinato-{wheel}", "--wheel"]
                subprocess.run([*build, "--out-dir", here / "dist"], cwd=ROOT, check=True)
            subprocess.run([uv, "venv", "--quiet", "--clear", "--python", sys.executable, here / "venv"], check=True)
            python = here / "venv/bin/python"
            install = [uv, "pip", "install", "--quiet", "--python", python, "--find-links", here / "dist"]
            subprocess.run([*install, "--constraint", locked, INSTALL[name], *TOOLS], check=True, cwd=here)
            package = ROOT / "packages" / name
            tests = here / name / "tests"
            shutil.copytree(package / "tests", tests, ignore=shutil.ignore_patterns("__pycache__"))
            shutil.copy(package / "README.md", here / name)  # its examples are tests
            (here / "pytest.ini").write_text("[pytest]\nmarkers =\n    gpu\n    slow\ntimeout = 600\n")
            run = [python, "-m", "pytest", "-q", "-m", "not gpu", "--import-mode=importlib", "-p", "no:cacheprovider"]
            environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
            done = subprocess.run([*run, tests], cwd=here, env=environment | {"OMP_NUM_THREADS": "1"})
            if done.returncode:
                sys.exit(f"suites_alone: {name} fails alone")
            print(f"suites_alone: {name} passes alone, {time.monotonic() - start:.0f} s")


if __name__ == "__main__":
    main()
