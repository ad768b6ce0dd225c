"""The examples that need ostinato-protocol alone run as they stand and import no more than it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"

ALONE = """
import runpy, sys
runpy.run_path(sys.argv[1], run_name="__main__")
ours = {".".join(name.split(".")[:2]) for name in sys.modules if name.startswith("ostinato.")}
assert ours == {"ostinato.protocol"}, ours
assert not {"ray", "transformers"} & set(sys.modules)
"""


def printed(name: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", ALONE, str(EXAMPLES / name)], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_dataproto_by_hand_prints_what_lab_4_says():
    assert printed("dataproto_by_hand.py") == [
        "[torch.Size([2, 4]), torch.Size([2, 4]), torch.Size([2, 4]), torch.Size([2, 4])]",
        "torch.Size([8, 4]) ['0' '1' '2']",
        "['input_ids', 'reward']",
    ]


def test_dataproto_over_http_comes_back_with_the_scores():
    assert printed("dataproto_over_http.py") == ["[3.0, 12.0, 21.0, 30.0]"]
