"""Importing the wheel is cheap and has no effects."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

PROGRAM = """
import json, logging, os, sys, time, warnings
start = time.process_time()
import torch, tensordict
middle = time.process_time()
before = dict(os.environ), list(logging.root.handlers), list(warnings.filters), torch.get_default_dtype()
loaded = set(sys.modules)
import ostinato.protocol, ostinato.protocol.columns, ostinato.protocol.partition, ostinato.protocol.padding
import ostinato.protocol.testing
after = dict(os.environ), list(logging.root.handlers), list(warnings.filters), torch.get_default_dtype()
end = time.process_time()
ratio, new = (end - start) / (middle - start), sorted(set(sys.modules) - loaded)
print(json.dumps({"ratio": ratio, "new": new, "clean": before == after}))
"""


def _report():
    done = subprocess.run([sys.executable, "-c", PROGRAM], check=True, capture_output=True, text=True)
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def report():
    return _report()


def test_import_costs_little_more_than_torch_and_tensordict(report):
    """At most 1.2 times its CPU time; once more if a busy machine says otherwise."""
    assert report["ratio"] <= 1.2 or _report()["ratio"] <= 1.2


def test_import_has_no_effects_and_loads_nothing_heavy(report):
    assert report["clean"]
    heavy = {
        "ray",
        "transformers",
        "vllm",
        "sglang",
        "hydra",
        "omegaconf",
        "hypothesis",
        "safetensors",
        "pandas",
        "megatron",
    }
    assert not heavy & {name.split(".")[0] for name in report["new"]}
    ours = {name for name in report["new"] if name.startswith("ostinato")}
    assert all(name == "ostinato" or name.startswith("ostinato.protocol") for name in ours)
