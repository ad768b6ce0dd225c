from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM

from ostinato.algos import token_log_probs_and_entropy, token_sum_pi_squared
from ostinato.workers.core.microbatch import pack
from ostinato.workers.core.testing.oracle import STILL, make_rows, start
from ostinato.workers.fsdp.head import Question, TokenHead, fuse_head, token_head
from ostinato.workers.fsdp.packing import token_outputs
from ostinato.workers.fsdp.testing import fsdp

group = pytest.mark.usefixtures("process_group")
VOCAB = 96


class _Largest(TorchDispatchMode):
    """The most positions of any tensor whose last or first dimension is the vocabulary, forward and backward."""

    def __init__(self):
        super().__init__()
        self.positions = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(tensor, torch.Tensor) and tensor.dim() > 1 and tensor.shape[-1] == VOCAB:
                self.positions = max(self.positions, tensor.shape[-2])
        return out


@group
def test_logits_never_exist_as_a_whole(workspace, monkeypatch):
    """Neither pass makes a tensor of all positions by vocabulary; with logits there is one."""
    monkeypatch.setattr("ostinato.workers.core.head_answers.GPU_CHUNK_ELEMENTS", 8 * 4 * VOCAB)
    rows = make_rows(16, seed=1)
    num_positions = int(rows.batch["response_mask"].sum())
    for fused in (True, False):
        driver = start(fsdp(), workspace / "lm", optim=STILL, use_fused_kernels=fused)
        module = driver.engine._module
        assert (token_head(module) is not None) is fused
        with _Largest() as seen:
            outputs, zero = token_outputs(module, "lm", pack(rows), entropy=True, sum_pi_squared=True)
            (outputs.log_probs.sum() + outputs.entropy.sum() + zero).backward()
        # (hidden size, vocabulary) is the head's own gradient.
        assert seen.positions == (32 if fused else num_positions)
    assert num_positions > 32 > 4


@pytest.mark.parametrize("bias", [False, True])
def test_answers_equal_those_from_logits(bias):
    torch.manual_seed(0)
    head = nn.Linear(8, 50, bias=bias)
    hidden = torch.randn(1, 9, 8, requires_grad=True)
    positions, labels = torch.tensor([0, 3, 3, 8]), torch.tensor([1, 49, 0, 7])
    logits = head(hidden)[0, positions]
    expected = [*token_log_probs_and_entropy(logits, labels, 0.7), token_sum_pi_squared(logits.detach(), 0.7)]
    weight = torch.rand(4, 2)
    leaves = [hidden, *head.parameters()]
    wanted = torch.autograd.grad((torch.stack(expected[:2], 1) * weight).sum(), leaves)
    head.__class__ = TokenHead
    with head.asked(Question(positions, labels, 0.7, entropy=True, sum_pi_squared=True)):
        answers = head(hidden)
    assert answers.shape == (1, 4, 3)
    torch.testing.assert_close(answers[0], torch.stack(expected, 1))
    for got, want in zip(torch.autograd.grad((answers[0, :, :2] * weight).sum(), leaves), wanted, strict=True):
        torch.testing.assert_close(got, want)
    assert head(hidden).shape == (1, 9, 50), "a head that is asked nothing gives logits"


def _head(weight):
    head = nn.Linear(weight.shape[1], weight.shape[0], bias=False, dtype=weight.dtype)
    head.weight.data = weight
    head.__class__ = TokenHead
    return head


def test_answers_to_large_logits_are_finite_and_right():
    """A-140: logits of 1e4."""
    hidden, labels = torch.eye(4)[None], torch.arange(4)
    for sign, log_prob, entropy in ((1e4, 0.0, 0.0), (-1e4, -1e4 - math.log(VOCAB - 1), math.log(VOCAB - 1))):
        head = _head(sign * torch.eye(VOCAB, 4))
        with head.asked(Question(torch.arange(4), labels, 1.0, entropy=True)):
            answers = head(hidden)[0]
        torch.testing.assert_close(answers, torch.tensor([[log_prob, entropy]]).expand(4, 2))


def test_answers_in_half_precision_are_float32():
    """A-141: bf16 over a vocabulary of 1000, within 2e-3 of float64 on the same logits."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(1, 30, 64, generator=generator).to(torch.bfloat16)
    head = _head((0.4 * torch.randn(1000, 64, generator=generator)).to(torch.bfloat16))
    labels = torch.randint(0, 1000, (30,), generator=generator)
    reference = torch.log_softmax(head(hidden)[0].double(), dim=-1)
    with head.asked(Question(torch.arange(30), labels, 1.0, entropy=True)):
        answers = head(hidden)[0]
    assert answers.dtype == torch.float32
    assert (answers[:, 0] - reference.gather(1, labels[:, None])[:, 0]).abs().max() < 2e-3
    assert (answers[:, 1] + (reference.exp() * reference).sum(1)).abs().max() < 2e-3


def test_answers_to_no_position_reach_the_head():
    head = nn.Linear(8, 50)
    head.__class__ = TokenHead
    none = torch.zeros(0, dtype=torch.int64)
    with head.asked(Question(none, none, 1.0, entropy=True, sum_pi_squared=True)):
        answers = head(torch.randn(1, 1, 8))
    answers.sum().backward()
    assert answers.shape == (1, 0, 3)
    assert head.weight.grad.abs().max() == 0


def test_head_is_fused_only_where_its_output_is_the_models():
    """A soft cap or a scale after the head would be applied to log-probabilities."""
    from transformers import Cohere2Config, Gemma2Config, GPT2Config, LlamaConfig, Qwen2Config, Qwen3MoeConfig

    sizes = {
        "vocab_size": VOCAB,
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
    models = {LlamaConfig: True, Qwen2Config: True, Qwen3MoeConfig: True, Gemma2Config: False, Cohere2Config: False}
    for config, expected in models.items():
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config(**sizes))
        assert fuse_head(model) is expected, config.__name__
        assert (token_head(model) is not None) is expected
    with torch.device("meta"):
        gpt2 = AutoModelForCausalLM.from_config(GPT2Config(n_layer=1, n_embd=8, n_head=2, vocab_size=VOCAB))
        model = AutoModelForCausalLM.from_config(LlamaConfig(**sizes))
    assert fuse_head(gpt2)
    model.lm_head = nn.Sequential(model.lm_head)
    assert not fuse_head(model)
