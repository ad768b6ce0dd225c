from __future__ import annotations

import re
from pathlib import Path

import pytest


def test_readme_example_runs(capsys: pytest.CaptureFixture[str]):
    text = (Path(__file__).parents[1] / "README.md").read_text()
    [example] = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    exec(compile(example, "README.md", "exec"), {})
    assert "actor/grad_norm" in capsys.readouterr().out
