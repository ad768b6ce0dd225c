"""Run a wheel's own tests with that wheel alone: built, installed into a fresh environment, tests copied beside it.

python tools/suites_alone.py [protocol] [controller] [algos]

`protocol` and `algos` are also tried on Python 3.11 and 3.13 where those run on this machine; a version that is absent
is named and left out. Versions come from uv.lock. `tools/isolated.py` imports every wheel alone; this runs the suites
of the wheels that other projects may depend on by themselves.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from isolated import ROOT, find_uv, pythons

INSTALL = {
    "protocol": ("ostinato-protocol",),
    "controller": ("ostinato-controller[ray]",),
    "algos": ("ostinato-algos", "numpy", "jaxtyping", "beartype", "polgrad"),
}
"""The wheel, and what its tests want beside `TOOLS`."""

ALSO_ELSEWHERE = ("protocol", "algos")
"""Wheels that are tried on other versions of Python too."""

PINNED_ELSEWHERE = ("torch==", "tensordict==", "polgrad==")
"""The lock is for 3.12: what goes with these on other versions of Python may have to be another version."""

TOOLS = ("pytest", "pytest-timeout", "hypothesis")


def pins(uv: str) -> list[str]:
    """The locked versions as constraints."""
    export = [uv, "export", "--quiet", "--locked", "--all-packages", "--no-hashes", "--no-emit-workspace"]
    lines = subprocess.run([*export, "--no-annotate"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    return [line.split(";")[0].strip() for line in lines.splitlines() if not line.startswith(("#", "-"))]


def run_suite(uv: str, here: Path, name: str, python: str, constraints: Path) -> int:
    """Install one wheel into a fresh environment of this interpreter and run its tests; returns the exit code."""
    subprocess.run([uv, "venv", "--quiet", "--clear", "--python", python, here / "venv"], check=True)
    inside = here / "venv/bin/python"
    install = [uv, "pip", "install", "--quiet", "--python", inside, "--find-links", here / "dist"]
    subprocess.run([*install, "--constraint", constraints, *INSTALL[name], *TOOLS], check=True, cwd=here)
    package, copied = ROOT / "packages" / name, here / name
    shutil.rmtree(copied, ignore_errors=True)
    shutil.copytree(package / "tests", copied / "tests", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(package / "README.md", copied)  # its examples are tests
    run = [inside, "-m", "pytest", "-q", "-m", "not gpu", "--import-mode=importlib", "-p", "no:cacheprovider"]
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    return subprocess.run([*run, copied / "tests"], cwd=here, env=environment | {"OMP_NUM_THREADS": "1"}).returncode


def main() -> None:
    """Install and test each wheel that was named, or all."""
    uv, others = find_uv(), pythons()
    with tempfile.TemporaryDirectory(prefix="ostinato-alone-") as scratch:
        here = Path(scratch)
        (here / "pytest.ini").write_text("[pytest]\nmarkers =\n    gpu\n    slow\ntimeout = 600\n")
        locked = pins(uv)
        for name in sys.argv[1:] or list(INSTALL):
            for wheel in {"protocol", name}:
                build = [uv, "build", "--quiet", "--package", f"ostinato-{wheel}", "--wheel"]
                subprocess.run([*build, "--out-dir", here / "dist"], cwd=ROOT, check=True)
            interpreters = {"3.12": sys.executable}
            if name in ALSO_ELSEWHERE:
                interpreters |= others
                for version in {"3.11", "3.13"} - others.keys():
                    print(f"suites_alone: no Python {version} on this machine; {name} not tried on it")
            for version, python in interpreters.items():
                start = time.monotonic()
                wanted = [pin for pin in locked if version == "3.12" or pin.startswith(PINNED_ELSEWHERE)]
                (here / "pins.txt").write_text("\n".join(wanted))
                if run_suite(uv, here, name, python, here / "pins.txt"):
                    sys.exit(f"suites_alone: {name} fails alone on Python {version}")
                print(f"suites_alone: {name} passes alone on {version}, {time.monotonic() - start:.0f} s", flush=True)


if __name__ == "__main__":
    main()
