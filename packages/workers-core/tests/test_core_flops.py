"""Operations against hand counts and against torch's own counter."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig

from ostinato.controller import Coordinates
from ostinato.protocol import DataProto
from ostinato.workers.core.config import ModelConfig
from ostinato.workers.core.flops import GATED, PEAK_VARIABLE, Mfu, model_flops, peak_flops
from ostinato.workers.core.testing import tiny_causal_lm

DENSE = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 64,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2}
SPECIAL = {
    "qwen2_moe": {"moe_intermediate_size": 24, "shared_expert_intermediate_size": 40},
    "qwen3_moe": {"moe_intermediate_size": 24, "mlp_only_layers": [1]},
    "olmoe": {"hidden_size": 64},
}
QWEN_05B = SimpleNamespace(
    model_type="qwen2",
    hidden_size=896,
    intermediate_size=4864,
    num_hidden_layers=24,
    num_attention_heads=14,
    num_key_value_heads=2,
    vocab_size=151936,
)


def counted(config, length):
    """What torch counts of one row, without the rotary angles, which are no product that a token needs."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")
    counter = FlopCounterMode(display=False)
    with torch.no_grad(), counter:
        model(input_ids=torch.arange(1, length + 1)[None], use_cache=False)
    counts = counter.get_flop_counts()
    total = sum(counts["Global"].values())
    return total - sum(sum(ops.values()) for name, ops in counts.items() if name.endswith("rotary_emb"))


@pytest.mark.parametrize("model_type", sorted(GATED))
def test_flops_equal_what_torch_counts(model_type):
    """Eager attention multiplies masked pairs too; the difference is known."""
    moe = "moe" in model_type or model_type == "mixtral"
    entries = DENSE | (EXPERTS if moe else {}) | SPECIAL.get(model_type, {})
    config = AutoConfig.for_model(model_type, **entries)
    flops = model_flops(config, head="lm")
    length = 12
    masked = length * length - length * (length + 1) // 2
    expected = flops.forward(torch.tensor([length]), length) + 4 * flops.head_width * masked * len(flops.layers)
    assert counted(config, length) == expected


def test_flops_by_hand_of_a_small_model():
    """Qwen2.5-0.5B: 357.9M weights in layers, 136.1M in the head; 24 layers of 896 wide attention."""
    flops = model_flops(QWEN_05B, head="lm")
    weights = 24 * (896 * 896 * 2 + 896 * 128 * 2 + 3 * 896 * 4864)
    pairs = 3 * 4 // 2 + 5 * 6 // 2
    assert sum(layer.weights for layer in flops.layers) == weights == 357_826_560
    assert flops.forward(torch.tensor([3, 5]), 4) == 2 * weights * 8 + 4 * 896 * pairs * 24 + 2 * 896 * 151936 * 4
    value = model_flops(QWEN_05B, head="value")
    assert flops.forward(torch.tensor([3]), 0) == value.forward(torch.tensor([3]), 0)
    assert value.forward(torch.tensor([3]), 3) - value.forward(torch.tensor([3]), 0) == 2 * 896 * 3


def test_flops_of_a_window_count_the_pairs_that_see_each_other():
    """5 tokens, window 2: 1 + 2 + 2 + 2 + 2 pairs."""
    sliding = SimpleNamespace(**{**vars(QWEN_05B), "layer_types": ["sliding_attention", "full_attention"] * 12})
    sliding.sliding_window = 2
    difference = model_flops(QWEN_05B, head="lm").forward(torch.tensor([5]), 0)
    difference -= model_flops(sliding, head="lm").forward(torch.tensor([5]), 0)
    assert difference == 12 * 4 * 896 * (15 - 9)


def test_flops_of_an_unknown_architecture_are_not_guessed():
    assert model_flops(SimpleNamespace(model_type="deepseek_v3"), head="lm") is None


def test_peak_comes_from_the_name_or_the_environment(monkeypatch):
    monkeypatch.delenv(PEAK_VARIABLE, raising=False)
    assert peak_flops(torch.device("cpu")) is None
    names = {
        "NVIDIA H200": 989.5,
        "NVIDIA H100 80GB HBM3": 989.5,
        "NVIDIA H100 PCIe": 756,
        "NVIDIA A100-SXM4-80GB": 312,
        "NVIDIA A10G": None,
        "NVIDIA RTX A4000": None,
        "NVIDIA GeForce RTX 4090": 165.2,
    }
    for name, tflops in names.items():
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device, name=name: name)
        assert peak_flops(torch.device("cuda", 0)) == (tflops and tflops * 1e12), name
    monkeypatch.setenv(PEAK_VARIABLE, "2.5")
    assert peak_flops(torch.device("cpu")) == 2.5e12
    monkeypatch.setenv(PEAK_VARIABLE, "fast")
    with pytest.raises(ValueError, match=r"OSTINATO_DEVICE_TFLOPS: expected .* got 'fast'"):
        peak_flops(torch.device("cpu"))


def test_mfu_is_the_share_of_the_peak(tmp_path, monkeypatch):
    """2 of 4 ranks share a data-parallel rank's rows; training is worth 3 forward passes an epoch."""
    model = ModelConfig(path=str(tiny_causal_lm(tmp_path)))
    engine = SimpleNamespace(device=torch.device("cpu"), coordinates=Coordinates(dp_rank=0, dp_size=2))
    batch = DataProto.from_dict({"attention_mask": torch.ones(2, 6).long(), "response_mask": torch.ones(2, 2).long()})
    monkeypatch.delenv(PEAK_VARIABLE, raising=False)
    assert Mfu(model, "lm", engine, 4).metrics("actor", batch, 1) == {}
    monkeypatch.setenv(PEAK_VARIABLE, "1e-6")
    mfu = Mfu(model, "lm", engine, 4)
    assert mfu.metrics("actor", batch, 1) == {}
    clock = iter([10.0, 12.0])
    monkeypatch.setattr("time.perf_counter", lambda: next(clock))
    with mfu.measured():
        pass
    once = model_flops(AutoConfig.from_pretrained(tmp_path), head="lm").forward(torch.tensor([6, 6]), 4)
    share = once / 2.0 / 2e6
    assert mfu.metrics("actor_infer", batch)["perf/mfu/actor_infer"].value == pytest.approx(share)
    assert mfu.metrics("actor", batch, 2)["perf/mfu/actor"].value == pytest.approx(6 * share)
    assert mfu.metrics("actor", batch[[]], 2) == {}
