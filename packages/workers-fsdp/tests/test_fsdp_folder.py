from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from ostinato.workers.core.config import ModelConfig
from ostinato.workers.fsdp import FsdpEngine, build
from ostinato.workers.fsdp.folder import open_folder

group = pytest.mark.usefixtures("process_group")


def _state(path, head="lm", **arguments):
    engine = FsdpEngine(head=head, model=ModelConfig(path=str(path)), **arguments)
    engine.build()
    return {name: tensor.clone() for name, tensor in engine.weight_source().weights()}


@pytest.fixture
def never_whole(monkeypatch):
    def refuse(*_, **__):
        raise AssertionError("the whole model was made")

    monkeypatch.setattr(build, "load_full_module", refuse)


@group
@pytest.mark.usefixtures("never_whole")
def test_folder_is_read_one_tensor_at_a_time(workspace, tmp_path):
    """Tied and untied, one file and many, a critic's fresh head and a reward model's own."""
    for name in ("lm", "tied"):
        folder = workspace / name
        expected = load_file(folder / "model.safetensors")
        state = _state(folder)
        assert state.keys() == expected.keys()
        assert all(torch.equal(state[key], expected[key]) for key in expected)
        AutoModelForCausalLM.from_pretrained(folder).save_pretrained(tmp_path / name, max_shard_size="20KB")
        assert len(list((tmp_path / name).glob("*.safetensors"))) > 1
        many = _state(tmp_path / name)
        assert all(torch.equal(many[key], expected[key]) for key in expected)
    assert 0 < _state(workspace / "lm", "value")["score.weight"].abs().max() < 0.01
    reward = _state(workspace / "value", "value", trainable=False)
    assert torch.equal(reward["score.weight"], load_file(workspace / "value" / "model.safetensors")["score.weight"])


@group
@pytest.mark.usefixtures("never_whole")
def test_folder_in_half_precision_gives_full_masters(workspace, tmp_path):
    AutoModelForCausalLM.from_pretrained(workspace / "lm", dtype=torch.bfloat16).save_pretrained(tmp_path)
    expected = load_file(tmp_path / "model.safetensors")
    state = _state(tmp_path)
    assert {tensor.dtype for tensor in state.values()} == {torch.float32}
    assert all(torch.equal(state[name], tensor.float()) for name, tensor in expected.items())


def test_folder_with_buffers_of_its_own_is_not_read_by_tensor(workspace):
    """What a folder holds for a buffer (a router's correction) is no number that the module itself can make."""
    model = ModelConfig(path=str(workspace / "lm"))
    module = build.make_meta_module(model, build.read_config(model, "lm"), "lm", torch.float32)
    assert open_folder(model.path, module) is not None
    module.model.rotary_emb.register_buffer("inv_freq", torch.zeros(8, device="meta"))
    assert open_folder(model.path, module) is None


@group
@pytest.mark.usefixtures("never_whole")
def test_folder_with_weights_in_one_file_is_read_whatever_index_was_left(workspace, tmp_path):
    """As transformers does, and the checks before the start: its files may be gone, or older ones."""
    shutil.copytree(workspace / "lm", tmp_path, dirs_exist_ok=True)
    expected = load_file(tmp_path / "model.safetensors")
    left = {"weight_map": dict.fromkeys(expected, "model-00001-of-00002.safetensors")}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(left))
    state = _state(tmp_path)
    assert all(torch.equal(state[name], tensor) for name, tensor in expected.items())
