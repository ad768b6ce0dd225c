from __future__ import annotations

import json
import pickle

import pytest

from ostinato.workers.core.errors import ModelFolderError
from ostinato.workers.core.weight_index import find_index, read_index

INDEX = "model.safetensors.index.json"
NO_MAP = f"{INDEX}: expected a `weight_map` that names the file of each weight"


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("", f"{INDEX} cannot be read .JSONDecodeError"),
        ("{", f"{INDEX} cannot be read .JSONDecodeError"),
        ("[" * 100_000, f"{INDEX} cannot be read .RecursionError"),
        ("\udcff", f"{INDEX} cannot be read .UnicodeDecodeError"),
        ("{}", NO_MAP),
        ("[]", NO_MAP),
        ("null", NO_MAP),
        ('{"weight_map": null}', NO_MAP),
        ('{"weight_map": {}}', NO_MAP),
        ('{"weight_map": ["one.safetensors"]}', NO_MAP),
        ('{"weight_map": {"a": null}}', NO_MAP),
        ('{"weight_map": {"a": ["one.safetensors"]}}', NO_MAP),
        (
            '{"weight_map": {"a": "one.safetensors", "b": "two", "c": "three"}}',
            "names .*/three, which is not there .missing: 2",
        ),
        ('{"weight_map": {"a": ""}}', "which is not there .missing: 1"),
        ('{"weight_map": {"a": "\\u0000"}}', "which is not there .missing: 1"),
    ],
)
def test_core_weight_index_that_is_none_is_named(content, text, tmp_path):
    (tmp_path / "one.safetensors").touch()
    (tmp_path / INDEX).write_text(content, encoding="utf-8", errors="surrogateescape")
    with pytest.raises(ModelFolderError, match=text) as caught:
        read_index(tmp_path / INDEX)
    assert str(tmp_path / INDEX) in str(caught.value)
    assert "copy the folder again" in str(caught.value)
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_core_weight_index_is_the_one_that_transformers_goes_by(tmp_path):
    """From the last in its order to the first; each hides those before it."""
    assert find_index(tmp_path) is None
    for name, found in (
        ("pytorch_model.bin.index.json", "pytorch_model.bin.index.json"),
        ("pytorch_model.bin", None),
        (INDEX, INDEX),
        ("model.safetensors", None),
    ):
        (tmp_path / name).write_text(json.dumps({"weight_map": {"a": "one"}}))
        assert find_index(tmp_path) == (found and tmp_path / found)
    (tmp_path / "one").touch()
    assert read_index(tmp_path / INDEX) == {"a": tmp_path / "one"}
