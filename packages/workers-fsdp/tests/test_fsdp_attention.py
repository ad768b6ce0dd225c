from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from ostinato.workers.core.config import ModelConfig
from ostinato.workers.core.testing.conformance import assert_near
from ostinato.workers.core.testing.oracle import STILL, make_rows, start
from ostinato.workers.fsdp import FsdpEngine, attention
from ostinato.workers.fsdp.attention import choose_attention, varlen_attention
from ostinato.workers.fsdp.errors import ModelLoadError
from ostinato.workers.fsdp.testing import fsdp

group = pytest.mark.usefixtures("process_group")


@group
def test_varlen_equals_sdpa(workspace):
    rows = make_rows(6, seed=1)
    for name, head in (("lm", "lm"), ("tied", "lm"), ("value", "value")):
        plain = start(fsdp(), workspace / name, head=head, optim=STILL, override_config={"attn_implementation": "sdpa"})
        varlen = start(
            fsdp(), workspace / name, head=head, optim=STILL, override_config={"attn_implementation": "varlen"}
        )
        expected, got = plain.train(rows, 6), varlen.train(rows, 6)
        assert_near("loss", got[0], expected[0])
        assert_near("gradient norm", got[1].grad_norm, expected[1].grad_norm)
        assert varlen.train(make_rows(0), 1)[1].grad_norm == 0.0


@pytest.mark.parametrize("lengths", [[1], [3, 3, 3], [9, 1, 4, 0, 4, 8, 2], [0, 5, 0]])
def test_varlen_of_any_lengths_equals_a_block_mask(lengths):
    generator = torch.Generator().manual_seed(0)
    total = sum(lengths)
    leaves = [torch.randn(1, heads, total, 4, generator=generator, requires_grad=True) for heads in (4, 2, 2)]
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    out, _ = varlen_attention(torch.nn.Identity(), *leaves, None, cu_seq_lens_q=cu_seqlens, max_length_q=max(lengths))
    row = torch.repeat_interleave(torch.tensor(lengths))
    place = torch.arange(total)
    mask = (row[:, None] == row) & (place[:, None] >= place)
    query, key, value = leaves
    keys, values = key.repeat_interleave(2, 1), value.repeat_interleave(2, 1)
    expected = torch.nn.functional.scaled_dot_product_attention(query, keys, values, attn_mask=mask).transpose(1, 2)
    torch.testing.assert_close(out, expected)
    weight = torch.randn(expected.shape, generator=generator)
    for got, want in zip(
        torch.autograd.grad((out * weight).sum(), leaves),
        torch.autograd.grad((expected * weight).sum(), leaves),
        strict=True,
    ):
        torch.testing.assert_close(got, want)


def test_varlen_sliding_window_sees_so_many_tokens():
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(1, heads, 9, 4, generator=generator) for heads in (4, 2, 2))
    cu_seqlens = torch.tensor([0, 5, 5, 9], dtype=torch.int32)
    out, _ = varlen_attention(
        torch.nn.Identity(), query, key, value, None, sliding_window=2, cu_seq_lens_q=cu_seqlens, max_length_q=5
    )
    row = torch.tensor([0] * 5 + [2] * 4)
    gap = torch.arange(9)[:, None] - torch.arange(9)
    mask = (row[:, None] == row) & (gap >= 0) & (gap < 2)
    keys, values = key.repeat_interleave(2, 1), value.repeat_interleave(2, 1)
    expected = torch.nn.functional.scaled_dot_product_attention(query, keys, values, attn_mask=mask).transpose(1, 2)
    torch.testing.assert_close(out, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_varlen_in_half_precision_on_a_gpu_runs_the_kernel_of_all_engines(monkeypatch, dtype):
    def kernel(query, key, value, cu_seqlens, longest, *, scale, window):
        asked.append(([x.shape for x in (query, key, value)], cu_seqlens, longest, scale, window))
        return query

    asked, cu_seqlens = [], torch.tensor([0, 5, 9], dtype=torch.int32)
    monkeypatch.setattr(attention, "attend_within_rows", kernel)
    with FakeTensorMode():
        rows = [torch.empty(1, heads, 9, 64, device="cuda", dtype=dtype) for heads in (4, 2, 2)]
        out, _ = varlen_attention(
            torch.nn.Identity(), *rows, None, 0.3, sliding_window=2, cu_seq_lens_q=cu_seqlens, max_length_q=5
        )
    assert out.shape == (1, 9, 4, 64)
    assert asked == [([(9, 4, 64), (9, 2, 64), (9, 2, 64)], cu_seqlens, 5, 0.3, 2)]


def test_varlen_refuses_what_it_would_get_wrong():
    x = torch.zeros(1, 1, 2, 4)
    cu_seqlens = torch.tensor([0, 2], dtype=torch.int32)
    for wrong in ({"softcap": 30.0}, {"s_aux": torch.zeros(1)}, {"cu_seq_lens_q": None}):
        arguments = {"cu_seq_lens_q": cu_seqlens, "max_length_q": 2, **wrong}
        with pytest.raises(ModelLoadError, match="sdpa"):
            varlen_attention(torch.nn.Identity(), x, x, x, None, **arguments)


def test_varlen_is_chosen_where_it_fits():
    from transformers import Gemma2Config, Gemma2ForCausalLM, LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    with torch.device("meta"):
        llama = LlamaForCausalLM(LlamaConfig(**sizes))
        softcapped = Gemma2ForCausalLM(Gemma2Config(**sizes, num_key_value_heads=2, head_dim=8))
    assert choose_attention(llama, None) == "ostinato_varlen"
    assert choose_attention(llama, "eager") == "eager"
    assert choose_attention(softcapped, None) == "sdpa"


@group
def test_varlen_without_packing_is_refused(workspace):
    model = ModelConfig(
        path=str(workspace / "lm"), use_remove_padding=False, override_config={"attn_implementation": "varlen"}
    )
    with pytest.raises(ModelLoadError, match="use_remove_padding"):
        FsdpEngine(head="lm", model=model).build()
