from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM, MixtralConfig, OPTConfig

from ostinato.workers.core.config import ModelConfig
from ostinato.workers.core.microbatch import pack
from ostinato.workers.core.testing.oracle import make_rows, start
from ostinato.workers.fsdp.packing import selects_logits, token_outputs
from ostinato.workers.fsdp.testing import fsdp

pytestmark = pytest.mark.usefixtures("process_group")


class _Logits(torch.nn.Module):
    """A stand-in model whose logits are given, with and without `logits_to_keep`."""

    def __init__(self, logits):
        super().__init__()
        self.logits = logits

    def forward(self, input_ids, position_ids=None, attention_mask=None, use_cache=None, **boundaries):
        assert attention_mask is None
        assert use_cache is False
        return type("Output", (), {"logits": self.logits[None, : input_ids.shape[1]]})


@pytest.fixture(scope="module")
def packed():
    return pack(make_rows(3, seed=1))


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_packed_rows_equal_rows_alone(workspace, implementation):
    """Also rows of one token, and a row alone, which take other paths through the mask."""
    model = AutoModelForCausalLM.from_pretrained(workspace / "lm", attn_implementation=implementation).eval()
    for lengths in ([3, 1, 1, 5], [4], [1, 1]):
        rows = [torch.arange(1, length + 1) * 7 % 96 for length in lengths]
        ids, positions = torch.cat(rows), torch.cat([torch.arange(length) for length in lengths])
        with torch.no_grad():
            together = model(input_ids=ids[None], position_ids=positions[None], use_cache=False).logits[0]
            alone = torch.cat([model(input_ids=row[None], use_cache=False).logits[0] for row in rows])
        torch.testing.assert_close(together, alone, rtol=1e-5, atol=2e-5)


def test_head_runs_only_where_asked(workspace):
    driver = start(fsdp(), workspace / "lm", use_fused_kernels=False)
    module = driver.engine._module
    shapes = []
    hook = module.lm_head.register_forward_hook(lambda _, args, out: shapes.append(tuple(out.shape)))
    driver.outputs(make_rows(3, seed=1), 3)
    hook.remove()
    assert selects_logits(module)
    assert shapes == [(1, int(make_rows(3, seed=1).batch["response_mask"].sum()), 96)]


def test_large_logits_are_finite_and_right(packed):
    """A-140: logits of 1e4."""
    logits = torch.zeros(packed.input_ids.numel(), 96)
    logits[packed.predict, packed.labels] = 1e4
    outputs, _ = token_outputs(_Logits(logits), "lm", packed, entropy=True)
    torch.testing.assert_close(outputs.log_probs, torch.zeros(len(packed.labels)))
    torch.testing.assert_close(outputs.entropy, torch.zeros(len(packed.labels)))
    outputs, _ = token_outputs(_Logits(-logits), "lm", packed, entropy=True)
    expected = torch.full((len(packed.labels),), -1e4 - torch.log(torch.tensor(95.0)).item())
    torch.testing.assert_close(outputs.log_probs, expected)


def test_half_precision_logits_give_float32_log_probs(packed):
    """A-141: bf16 logits over a vocabulary of 1000, within 2e-3 of float64 on the same logits."""
    generator = torch.Generator().manual_seed(0)
    logits = (3 * torch.randn(packed.input_ids.numel(), 1000, generator=generator)).to(torch.bfloat16)
    outputs, _ = token_outputs(_Logits(logits), "lm", packed, entropy=True)
    reference = torch.log_softmax(logits.double()[packed.predict], dim=-1)
    expected = reference.gather(1, packed.labels[:, None])[:, 0]
    assert outputs.log_probs.dtype == torch.float32
    assert (outputs.log_probs - expected).abs().max() < 2e-3
    assert (outputs.entropy + (reference.exp() * reference).sum(1)).abs().max() < 2e-3


def test_mixed_precision_outputs_are_float32(workspace):
    driver = start(fsdp(dtype="bf16"), workspace / "lm")
    exact = start(fsdp(), workspace / "lm")
    rows = make_rows(4, seed=2)
    got, expected = driver.outputs(rows, 4)[0], exact.outputs(rows, 4)[0]
    assert got["log_probs"].dtype == torch.float32
    assert (got["log_probs"] - expected["log_probs"]).abs().max() < 0.2
    assert driver.engine.weight_source().specs()["lm_head.weight"].dtype == torch.bfloat16
    driver.train(rows)
    assert {parameter.dtype for parameter in driver.engine._module.parameters()} == {torch.float32}


def test_temperature_divides_logits(workspace):
    rows = make_rows(3, seed=3)
    driver = start(fsdp(), workspace / "lm")
    module = driver.engine._module
    with torch.no_grad():
        cold, _ = token_outputs(module, "lm", pack(rows, temperature=0.5), entropy=False)
        module.lm_head.weight.mul_(2.0)
        warm, _ = token_outputs(module, "lm", pack(rows), entropy=False)
    torch.testing.assert_close(cold.log_probs, warm.log_probs, rtol=1e-5, atol=1e-5)


SIZES = {"vocab_size": 96, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
RANDOM = {
    "opt": OPTConfig(**SIZES, ffn_dim=24, word_embed_proj_dim=16, dropout=0.5, layerdrop=0.5),
    "mixtral": MixtralConfig(
        **SIZES, intermediate_size=24, num_key_value_heads=1, num_local_experts=2, router_jitter_noise=0.5
    ),
}
"""Models that are random in training, and not by a module of their own that could be switched off."""


@pytest.mark.parametrize("name", ["lm", *RANDOM])
def test_nothing_is_random_in_training(workspace, tmp_path, name):
    """A pass with gradients gives the numbers of one without: an unchanged policy has a ratio of exactly 1."""
    model = ModelConfig(path=str(workspace / name), override_config={"attention_dropout": 0.5})
    if name in RANDOM:
        AutoModelForCausalLM.from_config(RANDOM[name]).save_pretrained(tmp_path)
        model = ModelConfig(path=str(tmp_path))
    engine = fsdp()(head="value" if name == "lm" else "lm", model=model, optim=None, trainable=True)
    engine.build()
    packed, seen = [pack(make_rows(2, seed=4))], []

    def loss(outputs, rows):
        answers = outputs.log_probs if outputs.values is None else outputs.values
        seen.append(answers.detach().clone())
        return answers.sum(), None

    engine.forward(packed, loss)
    engine.forward_backward(packed, loss)
    assert torch.equal(seen[0], seen[1])
