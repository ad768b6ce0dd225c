from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from ostinato.rollout.base import TensorSpec
from ostinato.workers.core.config import ModelConfig, OptimConfig
from ostinato.workers.core.export import export_hf, share
from ostinato.workers.core.testing import PlainEngine, tiny_causal_lm


class Weights:
    def __init__(self, weights: dict[str, torch.Tensor]) -> None:
        self.kept = weights
        self.streamed = 0

    def specs(self):
        return {name: TensorSpec(tuple(weight.shape), weight.dtype) for name, weight in self.kept.items()}

    def weights(self):
        for item in self.kept.items():
            self.streamed += 1
            yield item


@pytest.mark.parametrize("tied", [True, False])
def test_export_is_a_folder_that_transformers_reads(tmp_path, tied):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = ModelConfig(path=str(tiny_causal_lm(tmp_path / "base", tie_word_embeddings=tied)))
    engine = PlainEngine("lm", model, OptimConfig(lr=1e-2))
    engine.build()
    with torch.no_grad():
        for parameter in engine.model.parameters():
            parameter.add_(0.01)
    export_hf(engine.weight_source(), model, tmp_path / "out", head="lm", writes=True)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    ids = torch.arange(10)[None]
    with torch.no_grad():
        torch.testing.assert_close(loaded(ids).logits, engine.model(ids).logits, rtol=1e-5, atol=1e-5)
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert {"config.json", "model.safetensors", "generation_config.json"} <= names
    assert AutoTokenizer.from_pretrained(tmp_path / "out").eos_token == "<eos>"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["base", "out"]


def test_export_takes_the_overrides_but_the_engine_s_own_attention(tmp_path):
    from transformers import AutoConfig

    base, own = str(tiny_causal_lm(tmp_path / "base")), {"rms_norm_eps": 0.5, "attn_implementation": "varlen"}
    engine = PlainEngine("lm", ModelConfig(path=base), OptimConfig())
    engine.build()
    (tmp_path / ".out.replaced" / "left").mkdir(parents=True)  # by a run that died
    for _ in range(2):
        model = ModelConfig(path=base, override_config=own)
        export_hf(engine.weight_source(), model, tmp_path / "out", head="lm", writes=True)
    assert AutoConfig.from_pretrained(tmp_path / "out").rms_norm_eps == 0.5
    assert sorted(path.name for path in tmp_path.iterdir()) == ["base", "out"]


def test_export_keeps_the_dtype_of_the_folder(tmp_path):
    from transformers import AutoModelForCausalLM

    base = tiny_causal_lm(tmp_path / "base")
    AutoModelForCausalLM.from_pretrained(base).to(torch.bfloat16).save_pretrained(base)
    model = ModelConfig(path=str(base))
    engine = PlainEngine("lm", model, OptimConfig())
    engine.build()
    export_hf(engine.weight_source(), model, tmp_path / "out", head="lm", writes=True)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert loaded.dtype == torch.bfloat16
    for (name, weight), (_, own) in zip(loaded.named_parameters(), engine.model.named_parameters(), strict=True):
        assert torch.equal(weight.float(), own), name


def test_export_keeps_the_type_of_buffers_that_the_folder_calls_otherwise(tmp_path):
    """A router's corrections differ in what bfloat16 rounds away."""
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM, MiniMaxM2Config

    sizes = {"num_attention_heads": 2, "num_key_value_heads": 1, "num_hidden_layers": 1, "num_local_experts": 4}
    tokens = {"vocab_size": 32, "bos_token_id": 1, "eos_token_id": 2}
    config = MiniMaxM2Config(**tokens, **sizes, hidden_size=16, intermediate_size=8, head_dim=8)
    model = AutoModelForCausalLM.from_config(config)
    model.model.layers[0].mlp.e_score_correction_bias.copy_(7 + torch.arange(4) / 1000)
    model.save_pretrained(tmp_path / "base")
    held = load_file(tmp_path / "base" / "model.safetensors")
    folder = ModelConfig(path=str(tmp_path / "base"))
    export_hf(Weights(held), folder, tmp_path / "out", head="lm", writes=True, dtype=torch.bfloat16)
    found = load_file(tmp_path / "out" / "model.safetensors")
    [name] = [name for name in held if name.endswith("e_score_correction_bias")]
    assert torch.equal(found.pop(name), held[name])
    assert {tensor.dtype for tensor in found.values()} == {torch.bfloat16}


def test_export_streams_on_every_rank_and_writes_on_one(tmp_path, lm_path):
    source = Weights({"a": torch.zeros(1), "b": torch.zeros(1)})
    export_hf(source, ModelConfig(path=str(lm_path)), tmp_path / "out", head="lm", writes=False)
    assert source.streamed == 2
    assert list(tmp_path.iterdir()) == []


def test_export_refuses_weights_of_another_model_and_leaves_the_old_folder(tmp_path, lm_path):
    model = ModelConfig(path=str(lm_path))
    engine = PlainEngine("lm", model, OptimConfig())
    engine.build()
    export_hf(engine.weight_source(), model, tmp_path / "out", head="lm", writes=True)
    before = (tmp_path / "out" / "model.safetensors").read_bytes()
    weights = dict(engine.weight_source().weights())
    weights["stranger"] = weights.pop("model.norm.weight")
    source = Weights(weights)
    with pytest.raises(ValueError, match=r"model\.norm\.weight.*stranger"):
        export_hf(source, model, tmp_path / "out", head="lm", writes=True)
    assert source.streamed == len(weights), "other ranks wait in the collective calls of each weight"
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == before


def test_export_replaces_an_older_folder(tmp_path, lm_path):
    model = ModelConfig(path=str(lm_path))
    engine = PlainEngine("lm", model, OptimConfig())
    engine.build()
    for _ in range(2):
        export_hf(engine.weight_source(), model, tmp_path / "out", head="lm", writes=True)
        (tmp_path / "out" / "stale").touch()
    export_hf(engine.weight_source(), replace(model), tmp_path / "out", head="lm", writes=True)
    assert not (tmp_path / "out" / "stale").exists()
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path / "out")
    for name in ("file", "link"):
        export_hf(engine.weight_source(), model, tmp_path / name, head="lm", writes=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "link", "out"], "nothing hidden is left"


def test_export_files_may_be_read_by_others(tmp_path):
    secret = tmp_path / "model.safetensors"
    secret.touch(mode=0o600)
    plain = tmp_path / "plain"
    plain.touch()
    share(tmp_path)
    assert secret.stat().st_mode == plain.stat().st_mode
