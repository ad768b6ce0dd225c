"""The pool of scoring processes: limits, order, failures, clean ends."""

from __future__ import annotations

import logging
import os
import random
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from ostinato.ppo.rewards.errors import RowFailedError, ScorerError, UnknownDataSourceError
from ostinato.ppo.rewards.pool import ScorerPool
from ostinato.ppo.rewards.recipe import Recipe, Row

BAD = """
import os, re, signal, subprocess, sys, time

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    what, _, argument = solution_str.partition(" ")
    if what == "loop":
        while True: pass
    if what == "sleep": time.sleep(float(argument))
    if what == "regex": re.match("(a+)+$", "a" * 60 + "b")  # never gives up the interpreter
    if what == "stubborn":
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGALRM): signal.signal(number, signal.SIG_IGN)
        while True:
            try: time.sleep(100)
            except BaseException: pass
    if what == "child": subprocess.run([sys.executable, "-c", "import time; time.sleep(" + argument + ")"])
    if what == "raise": raise ValueError("no good")
    if what == "exit": sys.exit(3)
    if what == "die": os._exit(3)
    if what == "kill": os.kill(os.getpid(), signal.SIGKILL)
    if what == "abort": os.abort()
    if what == "none": return None
    if what == "memory":
        kept = []
        while True: kept.append(bytearray(10**7))
    if what == "recurse":
        def down(): return down() + 1
        down()
    if what == "fork" and os.fork() == 0 and argument == "raise": raise ValueError("in the fork")
    if what == "close": os.closerange(3, 1 << 16)
    if what == "garble":
        for number in range(3, 1 << 12):  # the caller of the pool may have had many files open
            try: os.write(number, bytes.fromhex(argument))
            except OSError: pass
    if what == "print": print("printed by the scorer"); sys.stdout.flush()
    if what == "pid": return {"score": 1, "pid": os.getpid()}
    return float(ground_truth)
"""


@pytest.fixture(scope="module")
def bad(tmp_path_factory: pytest.TempPathFactory) -> Recipe:
    path = tmp_path_factory.mktemp("rewards") / "bad.py"
    path.write_text(BAD)
    return Recipe(path=str(path))


def rows_of(*texts: str) -> list[Row]:
    return [Row("x", text, number) for number, text in enumerate(texts)]


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"
    except FileNotFoundError:
        return False


def pids_of(pool: ScorerPool, rows: int = 8) -> list[int]:
    return sorted({int(outcome.extra["pid"]) for outcome in pool.score(rows_of(*["pid"] * rows))})


@pytest.mark.parametrize("what", ["loop", "regex", "stubborn", "child 60", "sleep 60"])
def test_stuck_row_costs_its_limit_and_no_more(bad: Recipe, what: str):
    """H-35, R-321: limit 1 s; others scored, one timeout, soon; the pool stays usable."""
    with ScorerPool(bad, num_workers=2, timeout=1.0, default=-1.0) as pool:
        pids_of(pool)
        start = time.monotonic()
        outcomes = pool.score(rows_of("a", what, "b", "c", "d"))
        assert 1.0 <= time.monotonic() - start < 10
        assert [outcome.score for outcome in outcomes] == [0, -1, 2, 3, 4]
        assert [outcome.failure for outcome in outcomes] == [None, "timeout", None, None, None]
        assert pool.score(rows_of("a", "b"))[1].score == 1


def test_stuck_row_is_ended_off_the_main_thread(bad: Recipe):
    """H-35: no signal handler, no joined thread."""
    found: list[Any] = []

    def call() -> None:
        with ScorerPool(bad, num_workers=1, timeout=1.0) as pool:
            found.extend(pool.score(rows_of("loop", "b")))

    thread = threading.Thread(target=call)
    thread.start()
    thread.join(timeout=20)
    assert [outcome.score for outcome in found] == [0, 1]


def test_what_a_stuck_row_has_started_ends_with_it(bad: Recipe):
    with ScorerPool(bad, num_workers=1, timeout=1.0) as pool:
        (pid,) = pids_of(pool)
        seconds = 10**6 + os.getpid()  # no other run's child
        pool.score(rows_of(f"child {seconds}"))
        listing = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
        assert f"time.sleep({seconds})" not in listing
        assert not is_alive(pid)


@pytest.mark.parametrize("what", ["raise", "exit", "die", "kill", "abort", "none", "memory", "recurse"])
def test_failing_row_gets_the_default_and_costs_no_other(bad: Recipe, what: str, caplog: pytest.LogCaptureFixture):
    """R-319: default score, counted, logged once."""
    with ScorerPool(bad, num_workers=1, timeout=60, default=-1.0, memory_limit_mb=400) as pool:
        outcomes = pool.score(rows_of("a", what, "b", what, "c"))
    assert [outcome.score for outcome in outcomes] == [0, -1, 2, -1, 4]
    assert [outcome.failure for outcome in outcomes] == [None, "error", None, "error", None]
    assert len(caplog.records) == 1
    expected = {
        "raise": "ValueError: no good",
        "exit": "SystemExit: 3",
        "die": "exited with code 3",
        "kill": "SIGKILL",
        "abort": "SIGABRT",
        "none": "NoneType",
        "memory": "MemoryError",
        "recurse": "RecursionError",
    }
    assert expected[what] in caplog.text


@pytest.mark.parametrize("what", ["fork", "fork raise"])
def test_fork_of_a_scoring_process_answers_nothing(bad: Recipe, what: str):
    """A scorer that forks and lets the child return, or raise, has two processes at one socket."""
    with ScorerPool(bad, num_workers=1, timeout=60) as pool:
        outcomes = pool.score(rows_of("a", what, "b", what, "c"))
        assert [(outcome.score, outcome.failure) for outcome in outcomes] == [(n, None) for n in range(5)]
        assert [outcome.score for outcome in pool.score(rows_of("a", "b"))] == [0, 1]


@pytest.mark.parametrize("what", ["close", "garble 000000046a756e6b", "garble 00000005800495022e", "garble 7fffffff"])
def test_scorer_that_meddles_with_its_socket_costs_its_row(bad: Recipe, what: str):
    """Closed, or written to: a message of no sense, one of another kind, one of an impossible length."""
    with ScorerPool(bad, num_workers=1, timeout=60, default=-1.0) as pool:
        outcomes = pool.score(rows_of("a", what, "b"))
        assert [outcome.score for outcome in outcomes] == [0, -1, 2]
        assert [outcome.failure for outcome in outcomes] == [None, "error", None]


def test_option_ends_the_call_at_the_first_failure(bad: Recipe):
    with ScorerPool(bad, num_workers=2, timeout=1.0, on_error="raise") as pool:
        for what, text in (("raise", "no good"), ("die", "exited with code 3"), ("loop", "no result within 1 s")):
            with pytest.raises(RowFailedError, match=text):
                pool.score(rows_of("a", what, "b"))
            assert [outcome.score for outcome in pool.score(rows_of("a", "b"))] == [0, 1]


def test_rows_keep_their_order(bad: Recipe):
    """R-316: slow first rows; row i has score i."""
    texts = ["sleep 0.3", "sleep 0.2", "sleep 0.1", *["a"] * 40]
    with ScorerPool(bad, num_workers=3) as pool:
        assert [outcome.score for outcome in pool.score(rows_of(*texts))] == list(range(43))


def test_rows_keep_their_order_whatever_fails(bad: Recipe):
    random.seed(0)
    texts = [random.choice(["a", "a", "a", "raise", "none", "die", "sleep 0.001"]) for _ in range(200)]
    with ScorerPool(bad, num_workers=3, default=-1.0) as pool:
        scores = [outcome.score for outcome in pool.score(rows_of(*texts))]
    failing = ("raise", "none", "die")
    assert scores == [-1 if text in failing else number for number, text in enumerate(texts)]


def test_slow_rows_are_shared_out(bad: Recipe):
    with ScorerPool(bad, num_workers=4) as pool:
        pids_of(pool)
        start = time.monotonic()
        pool.score(rows_of(*["sleep 0.25"] * 16))
        assert time.monotonic() - start < 3.9  # 4.0 one after the other, 1.0 at best


def test_ten_thousand_gsm8k_rows_take_seconds():
    text = "She has 3 apples and buys 4 more, so 3 + 4 = 7. " * 20
    rows = [Row("openai/gsm8k", f"{text}\n#### {number}", str(number - number % 2)) for number in range(10_000)]
    with ScorerPool(Recipe(), num_workers=2) as pool:
        start = time.monotonic()
        outcomes = pool.score(rows)
        assert time.monotonic() - start < 60  # .2 s on an idle core; a round trip a row would take minutes
    assert [outcome.score for outcome in outcomes] == [1.0, 0.0] * 5000


def test_first_row_waits_for_a_start_of_little():
    start = time.monotonic()
    with ScorerPool(Recipe(), num_workers=1) as pool:
        pool.score([Row("gsm8k", "#### 1", "1")])
    assert time.monotonic() - start < 30


def test_slow_imports_do_not_count_against_the_limit(tmp_path: Path):
    path = tmp_path / "slow.py"
    path.write_text("import time\ntime.sleep(1.0)\ndef compute_score(**kwargs): return 1.0\n")
    with ScorerPool(Recipe(path=str(path)), num_workers=1, timeout=0.5) as pool:
        assert pool.score(rows_of("a"))[0].failure is None
    with ScorerPool(Recipe(), num_workers=1, timeout=0.5) as pool:
        assert pool.score([Row("math", r"\boxed{\frac12}", "0.5")])[0].score == 1.0


@pytest.mark.parametrize(
    ("source", "error"),
    [("import nothing_like_this\ndef compute_score(**kwargs): ...", "No module named 'nothing_like_this'"),
     ("def compute_score(one): ...", "cannot be called"),
     ("import os\nos._exit(7)\ndef compute_score(**kwargs): ...", "code 7"),
     ("import time\ntime.sleep(60)\ndef compute_score(**kwargs): ...", "did not load within 1 s")],
)  # fmt: skip
def test_function_that_cannot_be_loaded_is_an_error_not_a_score(tmp_path: Path, source: str, error: str):
    path = tmp_path / "broken.py"
    path.write_text(source)
    start = time.monotonic()
    limit = 1.0 if "within" in error else 60.0
    with ScorerPool(Recipe(path=str(path)), start_timeout=limit) as pool, pytest.raises(ScorerError, match=error):
        pool.score(rows_of("a", "b"))
    assert time.monotonic() - start < 20


def test_unknown_data_source_scores_nothing():
    with ScorerPool(Recipe()) as pool, pytest.raises(UnknownDataSourceError, match="'x'"):
        pool.score([Row("gsm8k", "#### 1", "1"), Row("x", "1", "1")])


@pytest.mark.parametrize(("option", "error"), [({"on_error": "stop"}, "on_error"), ({"timeout": 0}, "time limit")])
def test_options_are_checked(option: dict[str, Any], error: str):
    with pytest.raises(ScorerError, match=error):
        ScorerPool(Recipe(), **option)


def test_no_rows_start_no_process(bad: Recipe):
    with ScorerPool(bad) as pool:
        assert pool.score([]) == []
        assert pool.processes(0) == []


def test_close_ends_the_processes(bad: Recipe):
    pool = ScorerPool(bad, num_workers=2)
    pids = pids_of(pool)
    assert all(map(is_alive, pids))
    pool.close()
    assert not any(map(is_alive, pids))
    assert pool.score(rows_of("a", "b"))[1].score == 1  # a closed pool starts anew
    pool.close()


def test_processes_end_with_a_pool_that_was_never_closed(bad: Recipe):
    pool = ScorerPool(bad, num_workers=1)
    (pid,) = pids_of(pool)
    del pool
    assert not is_alive(pid)


@pytest.mark.parametrize("what", ["a", "loop", "sleep 60"])
def test_processes_end_with_a_parent_that_was_killed(bad: Recipe, what: str):
    code = (
        "import sys, threading, time\n"
        "from ostinato.ppo.rewards.pool import ScorerPool\nfrom ostinato.ppo.rewards.recipe import Recipe, Row\n"
        f"pool = ScorerPool(Recipe(path={bad.path!r}), num_workers=1, timeout=100)\n"
        "print(int(pool.score([Row('x', 'pid', 0)])[0].extra['pid']), flush=True)\n"
        f"pool.score([Row('x', {what!r}, 0)])\ntime.sleep(60)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        time.sleep(0.3)
        assert is_alive(pid)
        parent.kill()
    deadline = time.monotonic() + 10
    while is_alive(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not is_alive(pid)


def test_pool_survives_the_death_of_idle_processes(bad: Recipe):
    with ScorerPool(bad, num_workers=2) as pool:
        for pid in pids_of(pool):
            os.kill(pid, 9)
        time.sleep(0.2)
        outcomes = pool.score(rows_of(*["a"] * 10))
        assert [outcome.score for outcome in outcomes] == list(range(10))
        assert {outcome.failure for outcome in outcomes} == {None}


def test_main_script_is_not_run_again(tmp_path: Path, bad: Recipe):
    """A script without a `__main__` guard works: the scoring processes are not `multiprocessing` children."""
    script = tmp_path / "script.py"
    script.write_text(
        "print('started')\n"
        "from ostinato.ppo.rewards.pool import ScorerPool\nfrom ostinato.ppo.rewards.recipe import Recipe, Row\n"
        f"with ScorerPool(Recipe(path={bad.path!r}), num_workers=2) as pool:\n"
        "    print(sum(outcome.score for outcome in pool.score([Row('x', 'print', 1)] * 3)))\n"
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=True)
    assert done.stdout == "started\n3.0\n"  # and what the scorer prints goes to the error output
    assert done.stderr.count("printed by the scorer") == 3


def test_calls_from_several_threads_do_not_mix(bad: Recipe):
    with ScorerPool(bad, num_workers=2) as pool:
        found: dict[int, list[float]] = {}

        def call(base: int) -> None:
            rows = [Row("x", "sleep 0.002", base + number) for number in range(50)]
            found[base] = [outcome.score for outcome in pool.score(rows)]

        threads = [threading.Thread(target=call, args=(base,)) for base in (0, 1000, 2000)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert found == {base: [float(base + number) for number in range(50)] for base in (0, 1000, 2000)}


def test_rows_logged_are_not_logged_again(bad: Recipe, caplog: pytest.LogCaptureFixture):
    with ScorerPool(bad, num_workers=1, timeout=0.5) as pool, caplog.at_level(logging.DEBUG):
        pool.score(rows_of("raise", "loop", "raise", "loop"))
        pool.score(rows_of("raise", "loop"))
    kinds = [record.getMessage().partition(";")[0] for record in caplog.records]
    assert kinds == ["a reward call failed (error", "a reward call failed (timeout"]
