"""What a run looks like in a terminal, and where its output goes elsewhere."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from contextlib import nullcontext

import pytest

from ostinato.controller.ray import driver, env
from ostinato.ppo import run as run_module
from ostinato.ppo.config import PpoConfig
from ostinato.ppo.console import ConsoleView, coloured, shown_values

METRICS = {
    "critic/score/mean": 0.41234,
    "actor/kl_loss": 0.00123,
    "actor/entropy": float("nan"),
    "response_length/mean": 213.4,
    "response_length/clip_ratio": 0.03,
    "perf/throughput": 12345.6,
    "timing_s/step": 12.34,
    "reward/errors": 0.0,
}
EVENTS = [
    {"kind": "start", "run": "p/e", "total_steps": 100},
    {"kind": "step", "step": 3, "total_steps": 100, "metrics": METRICS},
    {"kind": "validation", "step": 3, "metrics": {"val-core/s/reward/mean@1": 0.25, "val-aux/s/reward/std@1": 0.1}},
    {"kind": "note", "text": "saved [bold]here[/bold]"},
    {"kind": "something new"},
    {"kind": "end", "text": "done"},
]


def test_plain_stream_gets_lines():
    stream = io.StringIO()
    with ConsoleView(stream) as view:
        for event in EVENTS:
            view(event)
    assert stream.getvalue().splitlines() == [
        "p/e: 100 steps",
        "step 3/100  reward 0.4123  kl 0.00123  entropy nan  length 213  cut 3.0%  tokens/s 12,346  s 12.3",
        "step 3  val-core/s/reward/mean@1 0.25",
        "saved [bold]here[/bold]",
        "done",
    ]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("environment", "on_terminal", "elsewhere"),
    [
        ({}, True, False),
        ({"NO_COLOR": "", "FORCE_COLOR": ""}, True, False),
        ({"NO_COLOR": "1"}, False, False),
        ({"FORCE_COLOR": "1"}, True, True),
        ({"NO_COLOR": "1", "FORCE_COLOR": "1"}, False, False),
    ],
)
def test_colours_are_a_terminals(environment, on_terminal, elsewhere, monkeypatch):
    for name in ("NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert coloured(Terminal()) == on_terminal
    assert coloured(io.StringIO()) == elsewhere
    assert coloured(Terminal(), io.StringIO()) == elsewhere


@pytest.mark.parametrize("to_terminal", [True, False])
def test_a_file_gets_no_escape_codes(to_terminal, monkeypatch):
    """Nor a bar, whatever the environment says of colours."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    stream = Terminal() if to_terminal else io.StringIO()
    with ConsoleView(stream) as view:
        for event in EVENTS:
            view(event)
    assert ("\x1b" in stream.getvalue()) == to_terminal


@pytest.mark.parametrize("terminal", [True, False])
def test_rays_lines_in_a_file_are_plain(terminal, monkeypatch):
    """Ray colours its prefixes unless it is told not to, before it is imported."""
    seen = {}
    names = ("RAY_COLOR_PREFIX", "RAY_DEDUP_LOGS")
    for name in (*names, "NO_COLOR", "FORCE_COLOR"):
        monkeypatch.setenv(name, "")  # so that what the run sets is taken back
        monkeypatch.delenv(name)
    monkeypatch.setattr("ostinato.ppo.preflight_launch.check_launch", lambda config: None)
    monkeypatch.setattr(env, "ray_session", lambda **_: nullcontext())
    monkeypatch.setattr(driver, "run_on_cluster", lambda *_, **__: seen.update({n: os.environ.get(n) for n in names}))
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, Terminal() if terminal else io.StringIO())
    run_module.run(PpoConfig.from_mapping({"trainer": {"device": "cpu"}}), on_event=lambda event: None)
    assert seen == dict.fromkeys(names, None if terminal else "0")


def test_one_step_is_one():
    stream = io.StringIO()
    ConsoleView(stream)({"kind": "start", "run": "p/e", "total_steps": 1})
    assert stream.getvalue() == "p/e: 1 step\n"


def test_long_lines_are_not_broken():
    stream = io.StringIO()
    ConsoleView(stream)({"kind": "note", "text": "x" * 500})
    assert stream.getvalue() == "x" * 500 + "\n"


def test_terminal_gets_a_bar_with_the_numbers_that_matter():
    stream = io.StringIO()
    with ConsoleView(stream, live=True) as view:
        for event in EVENTS[:2]:
            view(event)
    text = stream.getvalue()
    assert "3/100" in text
    assert "reward 0.4123  kl 0.00123  length 213" in text
    assert "\x1b[?25h" in text  # the cursor is back


def test_kl_to_the_sampling_policy_is_not_shown_as_the_kl_to_a_reference():
    assert shown_values({"actor/ppo_kl": -2e-06}) == {"ppo_kl": "-2e-06"}
    assert shown_values({"actor/ppo_kl": -2e-06, "actor/reward_kl_penalty": 0.1}) == {"kl": "0.1"}


def test_reward_errors_show_only_where_there_are_some():
    assert "reward_errors" not in shown_values(METRICS)
    assert shown_values(METRICS | {"reward/errors": 2.0})["reward_errors"] == "2"


def test_console_needs_no_torch():
    code = "import sys, ostinato.ppo.console; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
