from __future__ import annotations

from unittest.mock import Mock

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from ostinato.workers.core.microbatch import pack
from ostinato.workers.core.testing import conformance
from ostinato.workers.core.testing.oracle import two_rows
from ostinato.workers.megatron import MegatronConfig, MegatronEngine, attention, build
from ostinato.workers.megatron.errors import MegatronConfigError
from ostinato.workers.megatron.packing import Layout, model_inputs
from ostinato.workers.megatron.testing.runs import megatron

ROWS = two_rows([3, 4, 5], [6, 7, 8, 9, 10])


def layout(rows, *, tp=1, cp=1) -> Layout:
    return Layout(head="lm", vocab_size=11, rows=rows, tp=tp, cp=cp, sequence_parallel=tp > 1)


def test_megatron_thd_without_padding_says_so():
    """H-57 before the attention. Without padded boundaries TransformerEngine may take any of its attentions."""
    packed = pack(ROWS)
    inputs = model_inputs(packed, layout("thd"))
    params = inputs.arguments["packed_seq_params"]
    assert params.qkv_format == "thd"
    assert params.cu_seqlens_q.tolist() == params.cu_seqlens_kv.tolist() == [0, 3, 8]
    assert params.cu_seqlens_q.dtype == torch.int32
    assert params.cu_seqlens_q_padded is params.cu_seqlens_kv_padded is None
    assert (params.max_seqlen_q, params.max_seqlen_kv) == (5, 5)
    assert inputs.arguments["input_ids"].tolist() == [[3, 4, 5, 6, 7, 8, 9, 10]]
    assert inputs.predict.tolist() == packed.predict.tolist()


def test_megatron_thd_pads_each_row_for_ranks_that_share_it():
    packed = pack(ROWS)
    inputs = model_inputs(packed, layout("thd", tp=2))
    params = inputs.arguments["packed_seq_params"]
    # Padding is the end of its row: between rows, what a backward pass leaves there would be undefined.
    assert params.cu_seqlens_q.tolist() == params.cu_seqlens_kv.tolist() == [0, 4, 10]
    assert params.cu_seqlens_q_padded is None
    assert params.max_seqlen_q == 6
    assert inputs.arguments["input_ids"].tolist() == [[3, 4, 5, 0, 6, 7, 8, 9, 10, 0]]
    assert inputs.arguments["input_ids"][0, inputs.predict].tolist() == packed.input_ids[packed.predict].tolist()


def test_megatron_padded_batch_fits_sequence_parallel_ranks():
    packed = pack(ROWS)
    inputs = model_inputs(packed, layout("padded", tp=2))
    ids = inputs.arguments["input_ids"]
    assert ids.tolist() == [[3, 4, 5, 0, 0, 0], [6, 7, 8, 9, 10, 0]]
    assert ids.T.flatten()[inputs.predict].tolist() == packed.input_ids[packed.predict].tolist()


@pytest.mark.parametrize("rows", ["thd", "kernel", "mask", "padded"])
def test_megatron_micro_batch_without_rows_runs_one_token(rows):
    packed = pack(ROWS[:0])
    inputs = model_inputs(packed, layout(rows))
    assert inputs.arguments["input_ids"].numel() == 1
    assert inputs.predict.numel() == 0
    params = inputs.arguments.get("packed_seq_params")
    assert params is None or (params.cu_seqlens_q.tolist(), params.max_seqlen_q) == ([0, 1], 1)


def row_by_row(query, key, value, cu_seqlens, longest, scale):
    """What `attend_within_rows` computes, on any device."""
    assert cu_seqlens.dtype == torch.int32
    assert longest == int(cu_seqlens.diff().max())
    parts = []
    for begin, end in zip(cu_seqlens[:-1].tolist(), cu_seqlens[1:].tolist(), strict=True):
        q, k, v = (x[begin:end].transpose(0, 1)[None] for x in (query, key, value))
        out = scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)
        parts.append(out[0].transpose(0, 1))
    return torch.cat(parts)


@pytest.mark.usefixtures("megatron_on_cpu")
def test_megatron_rows_that_run_through_a_kernel_are_the_oracles(megatron_workspace, monkeypatch):
    """The boundaries that the kernel gets, in recomputed layers too; the kernel itself is replaced here."""
    monkeypatch.setattr(build, "runs_kernel", lambda *_: True)
    kernel = Mock(side_effect=row_by_row)
    monkeypatch.setattr(attention, "attend_within_rows", kernel)
    for check in (conformance.check_log_probs, conformance.check_empty_micro_batches):
        kernel.reset_mock()
        check(megatron(), megatron_workspace)
        assert kernel.called


@pytest.mark.parametrize(
    ("changes", "runs"),
    [
        ({}, True),
        ({"bf16": False}, False),
        ({"attention_backend": "local"}, False),
        ({"kv_channels": 288}, False),
        ({"kv_channels": 60}, False),
        ({"attention_dropout": 0.1}, False),
    ],
)
@pytest.mark.usefixtures("megatron_on_cpu")
def test_megatron_kernel_runs_where_it_computes_the_same(changes, runs):
    from megatron.core.transformer.enums import AttnBackend
    from megatron.core.transformer.transformer_config import TransformerConfig

    entries = {"num_layers": 1, "hidden_size": 64, "num_attention_heads": 1, "bf16": True, "attention_dropout": 0.0}
    entries |= changes
    if "attention_backend" in entries:
        entries["attention_backend"] = AttnBackend[entries["attention_backend"]]
    config = TransformerConfig(**entries)
    assert attention.runs_kernel(config, torch.device("cuda")) == runs
    assert not attention.runs_kernel(config, torch.device("cpu"))


def test_megatron_context_parallel_ranks_take_packed_rows(megatron_workspace):
    from ostinato.workers.core.config import ModelConfig

    model = ModelConfig(path=str(megatron_workspace / "lm"), use_remove_padding=False)
    engine = MegatronEngine(head="lm", model=model, engine=MegatronConfig(context_parallel_size=2), trainable=False)
    with pytest.raises(MegatronConfigError, match=r"model\.use_remove_padding: False, but context-parallel"):
        engine.build()
