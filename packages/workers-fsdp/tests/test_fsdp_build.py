from __future__ import annotations

import pickle

import pytest
import torch
import torch.distributed as dist
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    LlamaForTokenClassification,
)

from ostinato.rollout.errors import ConfigError
from ostinato.workers.core.config import ModelConfig
from ostinato.workers.core.testing.oracle import Driver, make_rows, start
from ostinato.workers.fsdp import FsdpConfig, FsdpEngine, FsdpError
from ostinato.workers.fsdp.errors import EngineStateError, FsdpConfigError, ModelLoadError, ProcessGroupMissingError
from ostinato.workers.fsdp.testing import fsdp

group = pytest.mark.usefixtures("process_group")
SMALL = {
    "vocab_size": 96,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
}


def _state(engine):
    return {name: tensor.clone() for name, tensor in engine.weight_source().weights()}


def _build(head="lm", trainable=True, engine=None, **model):
    built = FsdpEngine(head=head, model=ModelConfig(**model), engine=engine, trainable=trainable)
    built.build()
    return built


def test_build_without_process_group_is_a_clear_error(monkeypatch):
    monkeypatch.setattr(dist, "is_initialized", lambda: False)
    with pytest.raises(ProcessGroupMissingError, match="init_process_group"):
        FsdpEngine(head="lm", model=ModelConfig(path="x")).build()


@group
def test_value_head_of_a_language_model_is_fresh_small_and_the_same_each_time(workspace):
    first, second = (_state(_build("value", path=str(workspace / "lm"))) for _ in range(2))
    plain = AutoModelForCausalLM.from_pretrained(workspace / "lm").state_dict()
    assert "score.bias" not in first
    assert "lm_head.weight" not in first
    torch.testing.assert_close(first["score.weight"], second["score.weight"], rtol=0, atol=0)
    assert 0 < first["score.weight"].abs().max() < 0.01
    for name in first.keys() - {"score.weight"}:
        torch.testing.assert_close(first[name], plain[name], rtol=0, atol=0)


@group
def test_value_head_of_a_classifier_is_the_folders(workspace):
    from safetensors.torch import load_file

    folder = load_file(workspace / "value" / "model.safetensors")
    for trainable in (True, False):
        state = _state(_build("value", trainable, path=str(workspace / "value")))
        assert state.keys() == folder.keys()
        for name, tensor in state.items():
            torch.testing.assert_close(tensor, folder[name], rtol=0, atol=0)


@group
def test_value_head_is_required_of_a_reward_model(workspace):
    with pytest.raises(ModelLoadError, match=r"score\.weight"):
        _build("value", trainable=False, path=str(workspace / "lm"))


@group
def test_value_head_with_more_labels_is_refused(tmp_path):
    LlamaForSequenceClassification(LlamaConfig(**SMALL, num_labels=3)).save_pretrained(tmp_path)
    with pytest.raises(ModelLoadError, match="3"):
        _build("value", path=str(tmp_path))


@group
def test_value_head_bias_of_a_token_classifier_is_kept(tmp_path):
    model = LlamaForTokenClassification(LlamaConfig(**SMALL, num_labels=1))
    torch.nn.init.constant_(model.score.bias, 0.25)
    model.save_pretrained(tmp_path)
    engine = _build("value", trainable=False, path=str(tmp_path))
    assert _state(engine)["score.bias"].tolist() == [0.25]


@group
def test_build_override_config_changes_the_model(workspace):
    engine = _build(path=str(workspace / "lm"), override_config={"rms_norm_eps": 0.5, "attn_implementation": "eager"})
    config = engine._module.config
    assert config.rms_norm_eps == 0.5
    assert config._attn_implementation == "eager"
    assert _build(path=str(workspace / "lm"))._module.config._attn_implementation == "ostinato_varlen"


@group
def test_build_refuses_an_override_that_would_have_no_effect(workspace):
    with pytest.raises(ConfigError, match=r"override_config\.rms_norm_epsilon: .*no such entry"):
        _build(path=str(workspace / "lm"), override_config={"rms_norm_epsilon": 0.5})


@group
def test_build_missing_weights_are_an_error(tmp_path):
    model = LlamaForCausalLM(LlamaConfig(**SMALL))
    state = {name: value for name, value in model.state_dict().items() if "q_proj" not in name}
    model.save_pretrained(tmp_path, state_dict=state)
    with pytest.raises(ModelLoadError, match="q_proj"):
        _build(path=str(tmp_path))


@group
@pytest.mark.parametrize("content", ["{}", '{"weight_map": {}}', '{"weight_map": {"a": "absent.safetensors"}}', "no"])
def test_build_names_an_index_that_leads_nowhere(tmp_path, content):
    LlamaConfig(**SMALL, architectures=["LlamaForCausalLM"]).save_pretrained(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text(content)
    with pytest.raises(ModelLoadError, match=r"ModelFolderError: .*model\.safetensors\.index\.json"):
        _build(path=str(tmp_path))


@group
def test_build_damaged_folder_is_an_error(tmp_path):
    LlamaForCausalLM(LlamaConfig(**SMALL)).save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"cut off")
    with pytest.raises(ModelLoadError, match=str(tmp_path)):
        _build(path=str(tmp_path))
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin").write_bytes(b"")
    # An error without a text still has a name.
    with pytest.raises(ModelLoadError, match=r"EOFError: .*copy the folder again"):
        _build(path=str(tmp_path))
    with pytest.raises(ModelLoadError, match=r"model\.path"):
        _build()


@group
def test_build_rotary_buffers_are_the_models(workspace):
    """Buffers that no checkpoint holds must not come out of uninitialised memory."""
    engine = _build(path=str(workspace / "lm"))
    plain = dict(AutoModelForCausalLM.from_pretrained(workspace / "lm").named_buffers())
    mine = dict(engine._module.named_buffers())
    assert mine.keys() == plain.keys()
    assert mine
    for name, buffer in mine.items():
        torch.testing.assert_close(buffer, plain[name], rtol=0, atol=0)


@group
def test_build_each_layer_is_sharded_alone_and_tied_embeddings_stay_with_the_root(workspace):
    for name, expected in (("lm", ["LlamaDecoderLayer"] * 2 + ["Embedding"]), ("tied", ["Qwen2DecoderLayer"] * 2)):
        engine = _build(path=str(workspace / name))
        names = [type(unit).__bases__[-1].__name__ for unit in engine._units[:-1]]
        assert names == expected, names


@group
def test_build_unknown_layer_names_are_an_error(workspace):
    config = FsdpConfig(wrap_policy={"transformer_layer_cls_to_wrap": ["NoSuchLayer"]})
    with pytest.raises(ModelLoadError, match="NoSuchLayer"):
        _build(path=str(workspace / "lm"), engine=config)


@group
def test_gradient_checkpointing_changes_no_number(workspace):
    rows = make_rows(4, seed=5)
    results = []
    for checkpointing in (True, False):
        driver = start(fsdp(), workspace / "lm", enable_gradient_checkpointing=checkpointing)
        assert driver.engine._module.is_gradient_checkpointing is checkpointing
        results.append(driver.train(rows))
    assert results[0][0] == results[1][0]
    assert results[0][1].grad_norm == pytest.approx(results[1][1].grad_norm, rel=1e-6)


@group
@pytest.mark.parametrize(("deferred", "times"), [(True, 1), (False, 3)])
def test_gradients_are_reduced_after_the_last_micro_batch(workspace, monkeypatch, deferred, times):
    from torch.distributed.fsdp._fully_shard import _fsdp_param_group

    driver = start(fsdp(defer_gradient_sync=deferred), workspace / "lm")
    reduced = []
    original = _fsdp_param_group.foreach_reduce

    def counted(*args, **kwargs):
        reduced.append(1)
        return original(*args, **kwargs)

    monkeypatch.setattr(_fsdp_param_group, "foreach_reduce", counted)
    driver.accumulate(make_rows(6, seed=1), 2)
    assert len(reduced) == times * len(driver.engine._units)


@group
def test_engine_says_what_is_missing(workspace):
    model = ModelConfig(path=str(workspace / "lm"))
    unbuilt = FsdpEngine(head="lm", model=model)
    for call in (unbuilt.offload, unbuilt.onload, unbuilt.weight_source, unbuilt.optimizer_step):
        with pytest.raises(EngineStateError, match="build"):
            call()
    frozen = _build(trainable=False, path=str(workspace / "lm"))
    with pytest.raises(EngineStateError, match="trainable"):
        frozen.forward_backward([], lambda outputs, packed: (torch.zeros(()), None))
    with pytest.raises(EngineStateError, match="once"):
        frozen.build()
    driver = start(fsdp(), workspace / "lm")
    driver.engine.offload(params=True, optimizer=False)
    with pytest.raises(EngineStateError, match="onload"):
        driver.outputs(make_rows(1), 1)
    assert driver.state().keys()
    driver.engine.onload()
    driver.accumulate(make_rows(1), 1)
    driver.engine.offload(params=False, optimizer=True)
    with pytest.raises(EngineStateError, match="onload"):
        driver.engine.optimizer_step()


@group
def test_engine_survives_a_loss_that_raises(workspace):
    driver = start(fsdp(), workspace / "lm")
    expected = start(fsdp(), workspace / "lm").train(make_rows(2, seed=6))
    before = driver.state()

    def loss(outputs, packed):
        raise ArithmeticError("from the loss")

    with pytest.raises(ArithmeticError):
        driver.engine.forward_backward(driver.packed(make_rows(2, seed=6), 1), loss)
    assert all(torch.equal(tensor, before[name]) for name, tensor in driver.state().items())
    assert driver.train(make_rows(2, seed=6)) == expected


def test_config_refuses_what_cannot_work():
    with pytest.raises(FsdpConfigError, match="param_offload"):
        FsdpEngine(head="lm", model=ModelConfig(), engine={"param_ofload": True})
    with pytest.raises(FsdpConfigError, match=r"fsdp_config\.dtype"):
        FsdpConfig(dtype="int8")
    with pytest.raises(FsdpConfigError, match=r"fsdp_config\.fsdp_size"):
        FsdpConfig(fsdp_size=0)
    with pytest.raises(FsdpConfigError, match="min_num_params"):
        FsdpConfig(wrap_policy={"min_num_params": 3})
    assert FsdpConfig().compute_dtype(torch.device("cpu")) == torch.float32
    assert FsdpConfig().compute_dtype(torch.device("cuda")) == torch.bfloat16


def test_errors_survive_pickling():
    for kind in (FsdpConfigError, ProcessGroupMissingError, ModelLoadError, EngineStateError):
        error = pickle.loads(pickle.dumps(kind("text")))
        assert (type(error), str(error)) == (kind, "text")
        assert isinstance(error, FsdpError)


@group
def test_driver_is_a_train_engine(workspace):
    from ostinato.rollout.base import WeightSource
    from ostinato.workers.core.engine import TrainEngine

    driver = start(fsdp(), workspace / "lm")
    assert isinstance(driver, Driver)
    assert isinstance(driver.engine, TrainEngine)
    assert isinstance(driver.engine.weight_source(), WeightSource)
