"""Import each wheel alone: built, installed into a fresh environment with its own dependencies and nothing else.

`protocol` and `algos` are also tried on Python 3.11 and 3.13 where those run on this machine; a version that is absent
is named and left out. Versions come from uv.lock. Run by `make check`.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LIGHT = ("ostinato-protocol", "ostinato-algos")
HEAVY = ("ray", "vllm", "sglang", "transformers", "hydra", "omegaconf", "megatron", "peft")
ALLOWED = {
    "ostinato-rollout": {"transformers"},
    "ostinato-workers-core": {"transformers"},
    "ostinato-workers-fsdp": {"transformers"},
    "ostinato-ppo": {"transformers", "ray", "hydra", "omegaconf"},
}


def find_uv() -> str:
    """The uv that made this environment: on PATH, or in the checkout."""
    found = shutil.which("uv") or str(ROOT / ".uv/bin/uv")
    if not Path(found).exists():
        sys.exit("isolated: no uv; run `make setup` first")
    return found


def pythons() -> dict[str, str]:
    """Interpreters that really run, by version."""
    home = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    found = {}
    for version in ("3.11", "3.13"):
        for candidate in (f"python{version}", *sorted(map(str, home.glob(f"versions/{version}*/bin/python")))):
            code = f"import sys, venv; sys.exit('{version}' != '%d.%d' % sys.version_info[:2])"
            try:
                if subprocess.run([candidate, "-c", code], capture_output=True, timeout=60).returncode == 0:
                    found[version] = candidate
                    break
            except OSError:
                continue
    return found


def probe(module: str, allowed: set[str]) -> str:
    """A program that imports every module of one wheel and says what it must not have brought along."""
    heavy = sorted(set(HEAVY) - allowed)
    return f"""
import importlib, os, pkgutil, sys, torch  # torch and tensordict themselves set a cache folder
before = dict(os.environ)
package = importlib.import_module({module!r})
changed = {{name for name in os.environ if os.environ[name] != before.get(name)}} - {{"TORCHINDUCTOR_CACHE_DIR"}}
assert not changed, f"importing changed {{changed}}"
heavy = [name for name in {heavy!r} if name in sys.modules]
assert not heavy, f"importing {module} imported {{heavy}}"
ostinato = importlib.import_module("ostinato")
assert getattr(ostinato, "__file__", None) is None, "ostinato must stay a namespace"
print(len(list(pkgutil.walk_packages(package.__path__))), "modules")
"""


def main() -> None:
    """Build all wheels, then import each in an environment of its own."""
    uv = find_uv()
    others = pythons()
    for version in ("3.11", "3.13"):
        if version not in others:
            print(f"isolated: no Python {version} on this machine; protocol and algos not tried on it")
    with tempfile.TemporaryDirectory(prefix="ostinato-isolated-") as scratch:
        dist = Path(scratch) / "dist"
        subprocess.run([uv, "build", "--quiet", "--all-packages", "--wheel", "--out-dir", dist], cwd=ROOT, check=True)
        export = [
            uv,
            "export",
            "--quiet",
            "--locked",
            "--all-packages",
            "--no-hashes",
            "--no-emit-workspace",
            "--no-annotate",
        ]
        lines = subprocess.run(export, cwd=ROOT, check=True, capture_output=True, text=True).stdout.splitlines()
        locked = [line.split(";")[0].strip() for line in lines if not line.startswith(("#", "-"))]
        pins = {"3.12": Path(scratch) / "locked.txt", "other": Path(scratch) / "tensors.txt"}
        pins["3.12"].write_text("\n".join(locked))
        # The lock is for 3.12: what goes with these two elsewhere may have to be another version.
        pins["other"].write_text("\n".join(pin for pin in locked if pin.startswith(("torch==", "tensordict=="))))
        for project in sorted([*ROOT.glob("packages/*/pyproject.toml"), *ROOT.glob("apps/*/pyproject.toml")]):
            config = tomllib.loads(project.read_text())
            name, module = config["project"]["name"], config["tool"]["uv"]["build-backend"]["module-name"]
            for version, python in {"3.12": sys.executable, **(others if name in LIGHT else {})}.items():
                start = time.monotonic()
                venv = Path(scratch) / "venv"
                subprocess.run([uv, "venv", "--quiet", "--clear", "--python", python, venv], check=True)
                install = [uv, "pip", "install", "--quiet", "--python", venv / "bin/python", "--find-links", dist]
                subprocess.run(
                    [*install, "--constraint", pins.get(version, pins["other"]), name], check=True, cwd=scratch
                )
                code = probe(module, ALLOWED.get(name, set()))
                run = [venv / "bin/python", "-c", code]
                done = subprocess.run(run, cwd=scratch, capture_output=True, text=True)
                if done.returncode:
                    sys.exit(f"isolated: {name} on {version} fails alone:\n{done.stderr}")
                print(f"isolated: {name} on {version}: {done.stdout.strip()}, {time.monotonic() - start:.0f} s")
        # transformers imports torchao wherever it is, 1.6 s a process: its tests have an environment of their own.
        run = [uv, "run", "--quiet", "--no-sync", "--python", sys.executable, "--with", "torchao==0.18.0"]
        tests = ["python", "-m", "pytest", "-q", "packages/workers-fsdp/tests/test_fsdp_optim.py"]
        subprocess.run([*run, *tests], cwd=ROOT, check=True)


if __name__ == "__main__":
    main()
