from __future__ import annotations

import logging
import sys
from functools import partial
from importlib.metadata import version
from types import ModuleType

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

from ostinato.workers.core import row_attention
from ostinato.workers.core.row_attention import attend_within_rows, row_kernel

HOPPER, BLACKWELL, AMPERE = (9, 0), (10, 0), (8, 0)
GPU = torch.device("cuda", 0)
NEW = row_attention._FLASH_4_SINCE
TORCH, FLASH = f"PyTorch {torch.__version__}", f"flash-attn-4 {NEW}"


def boundaries(lengths, device="cpu"):
    return torch.tensor([0, *lengths], device=device).cumsum(0).to(torch.int32)


def by_mask(query, key, value, lengths, *, scale=None, window=None):
    """What attention inside rows is, with a T × T mask."""
    row = torch.repeat_interleave(torch.tensor(lengths, device=query.device))
    place = torch.arange(len(row), device=query.device)
    gap = place[:, None] - place
    mask = (row[:, None] == row) & (gap >= 0) & (gap < (len(row) if window is None else window))
    groups = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(groups, 1) for x in (key, value))
    q, k, v = (x.transpose(0, 1) for x in (query, key, value))
    return scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale).transpose(0, 1)


def flash_attn_varlen_func(
    q,
    k,
    v,
    cu_seqlens_q=None,
    cu_seqlens_k=None,
    max_seqlen_q=None,
    max_seqlen_k=None,
    softmax_scale=None,
    causal=False,
    window_size=(None, None),
):
    """FlashAttention-4's arguments: None is no bound, the log-sum comes second."""
    assert cu_seqlens_q.dtype == cu_seqlens_k.dtype == torch.int32
    assert torch.equal(cu_seqlens_q, cu_seqlens_k)
    assert causal
    back, ahead = window_size
    assert (back is None) == (ahead is None)
    lengths = cu_seqlens_q.diff().tolist()
    assert max_seqlen_q == max_seqlen_k == max(lengths)
    window = None if back is None else back + ahead + 1
    return by_mask(q, k, v, lengths, scale=softmax_scale, window=window), None


def varlen_attn(query, key, value, cu_q, cu_k, max_q, max_k, *, scale=None, window_size=(-1, -1), enable_gqa=False):
    """PyTorch's arguments: -1 is no bound, grouped heads are asked for."""
    back, ahead = window_size
    assert ahead == 0
    assert enable_gqa == (query.shape[1] != key.shape[1])
    lengths = cu_q.diff().tolist()
    assert (cu_q.dtype, cu_k.tolist(), max_q, max_k) == (torch.int32, cu_q.tolist(), max(lengths), max(lengths))
    return by_mask(query, key, value, lengths, scale=scale, window=None if back < 0 else back + 1)


def varlen_attn_before(query, key, value, cu_q, cu_k, max_q, max_k, *, scale=None, window_size=(-1, -1)):
    """PyTorch's before it knew grouped heads."""
    return varlen_attn(query, key, value, cu_q, cu_k, max_q, max_k, scale=scale, window_size=window_size)


@pytest.fixture
def gpu(monkeypatch):
    """Make a machine whose GPU, FlashAttention-4 and PyTorch are told; nothing chosen before is remembered."""

    def make(capability=HOPPER, release=NEW, flash=flash_attn_varlen_func, torch_kernel=varlen_attn):
        def version(name):
            assert name == "flash-attn-4"
            if release is None:
                raise row_attention.PackageNotFoundError(name)
            return release

        def import_module(name):
            assert name == "flash_attn.cute"
            if isinstance(flash, Exception):
                raise flash
            module.__dict__["flash_attn_varlen_func"] = flash
            return module

        module, varlen = ModuleType("flash_attn.cute"), ModuleType("torch.nn.attention.varlen")
        varlen.__dict__["varlen_attn"] = torch_kernel
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        monkeypatch.setattr(row_attention, "version", version)
        monkeypatch.setattr(row_attention, "import_module", import_module)
        monkeypatch.setitem(sys.modules, "torch.nn.attention.varlen", varlen)
        forget()

    yield make
    forget()


def forget():
    row_attention._flash_4_kernel.cache_clear()
    row_attention._flash_4.cache_clear()


@pytest.mark.parametrize("capability", [HOPPER, BLACKWELL, (10, 3)])
def test_row_attention_is_flash_4_where_the_gpu_has_it(gpu, capability):
    gpu(capability)
    assert [row_kernel(GPU, width) for width in (64, 96, 128)] == [FLASH] * 3


@pytest.mark.parametrize(
    ("capability", "width"),
    [(AMPERE, 128), ((8, 9), 64), ((12, 0), 128), (HOPPER, 80), (HOPPER, 16), (HOPPER, 288), (BLACKWELL, 256)],
)
def test_row_attention_is_pytorchs_where_flash_4_does_not_fit(gpu, capability, width):
    gpu(capability)
    assert row_kernel(GPU, width) == TORCH


def test_row_attention_without_flash_4_says_nothing_but_what_runs(gpu, caplog):
    gpu(release=None)
    with caplog.at_level(logging.INFO):
        assert row_kernel(GPU, 128) == row_kernel(GPU, 128) == TORCH
    assert [(record.levelname, record.message) for record in caplog.records] == [
        ("INFO", f"attention of packed rows, heads of 128 on cuda:0: {TORCH}")
    ]


def test_row_attention_names_its_kernel_once_a_device_and_width(gpu, caplog):
    gpu()
    with caplog.at_level(logging.INFO):
        names = [row_kernel(GPU, width) for width in (128, 64, 128, 80)]
    assert names == [FLASH, FLASH, FLASH, TORCH]
    assert [record.message.partition("heads of ")[2] for record in caplog.records] == [
        f"128 on cuda:0: {FLASH}",
        f"64 on cuda:0: {FLASH}",
        f"80 on cuda:0: {TORCH}",
    ]


@pytest.mark.parametrize(
    ("machine", "why"),
    [
        (
            {"flash": ModuleNotFoundError("No module named 'cutlass'")},
            r"ModuleNotFoundError: No module named 'cutlass'",
        ),
        ({"flash": ImportError("undefined symbol: x")}, r"ImportError: undefined symbol: x"),
        ({"flash": OSError("libcudart.so.13: cannot open")}, r"OSError: libcudart.so.13: cannot open"),
        ({"flash": RuntimeError("None of the installed flavors")}, r"RuntimeError: None of the installed flavors"),
        ({"release": "4.0.0b9"}, f"4.0.0b9 is older than {NEW}"),
    ],
)
def test_row_attention_warns_of_a_flash_4_that_is_of_no_use(gpu, caplog, machine, why):
    gpu(**machine)
    assert row_kernel(GPU, 128) == row_kernel(GPU, 64) == TORCH
    [warning] = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert why in warning
    assert "pip install -U 'flash-attn-4[cu13]>=" in warning


def test_row_attention_warns_of_a_flash_4_whose_installation_was_broken_off(gpu, caplog, tmp_path, monkeypatch):
    """What pip leaves behind: metadata without a version."""
    gpu()
    monkeypatch.setattr(row_attention, "version", version)
    (tmp_path / f"flash_attn_4-{NEW}.dist-info").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    assert row_kernel(GPU, 128) == TORCH
    assert "flash-attn-4 None cannot be used" in caplog.text


@pytest.mark.parametrize("release", ["4.0.0b37", "4.0.0", "4.0.0b36+local", "5.1"])
def test_row_attention_takes_later_versions_of_flash_4(gpu, release):
    gpu(release=release)
    assert row_kernel(GPU, 128) == f"flash-attn-4 {release}"


def test_row_attention_keeps_an_order_where_one_is_asked_for(gpu, caplog):
    def unordered(*_, **__):
        raise AssertionError("FlashAttention-4's gradients have no fixed order")

    gpu(flash=unordered)
    rows = [torch.randn(5, 1, 64) for _ in range(3)]
    caplog.set_level(logging.INFO)
    torch.use_deterministic_algorithms(True)
    try:
        name, out = row_kernel(GPU, 64), attend_within_rows(*rows, boundaries([5]), 5)
    finally:
        torch.use_deterministic_algorithms(False)
    torch.testing.assert_close(out, by_mask(*rows, [5]))
    assert (name, row_kernel(GPU, 64)) == (TORCH, FLASH)
    logged = [record.message.partition("64 on ")[2] for record in caplog.records]
    assert logged == [f"cuda:0: {TORCH}", f"cpu: {TORCH}", f"cuda:0: {FLASH}"]


@pytest.mark.parametrize(
    "machine",
    [{}, {"release": None}, {"release": None, "torch_kernel": varlen_attn_before}],
    ids=["flash", "torch", "old"],
)
@pytest.mark.parametrize("lengths", [[1], [7], [3, 1, 4, 1], [0, 5, 0, 2]])
@pytest.mark.parametrize(("scale", "window"), [(None, None), (0.3, None), (0.3, 1), (None, 2), (None, 7), (None, 50)])
def test_row_attention_of_every_kernel_is_that_of_a_mask(gpu, machine, lengths, scale, window):
    gpu(**machine)
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randn(sum(lengths), heads, 64, generator=generator, requires_grad=True) for heads in (4, 2, 2)]
    out = attend_within_rows(*rows, boundaries(lengths), max(lengths), scale=scale, window=window)
    expected = by_mask(*rows, lengths, scale=scale, window=window)
    torch.testing.assert_close(out, expected)
    weight = torch.randn(out.shape, generator=generator)
    got, want = (torch.autograd.grad(x, rows, weight, retain_graph=True) for x in (out, expected))
    torch.testing.assert_close(got, want)


LONG = [1, 700, 1, 257, 128, 64]
PACKS = [([1], None), ([2, 1], None), ([900], None), ([900], 100), ([0, 130, 0, 5], None), (LONG, 1)]
"""Rows and windows. The pack of one token comes first: what is compiled for it runs others."""


def half_rows(lengths, heads, kv_heads, width, heads_first=True):
    """bf16 queries, keys and values, laid out as FSDP (heads first) or Megatron has them, and output gradients."""
    generator = torch.Generator("cuda").manual_seed(sum(lengths))
    tensors = []
    for count in (heads, kv_heads, kv_heads, heads):
        shape = (count, sum(lengths), width) if heads_first else (sum(lengths), count, width)
        x = torch.randn(shape, generator=generator, device="cuda", dtype=torch.bfloat16)
        tensors.append(x.transpose(0, 1) if heads_first else x)
    return [x.requires_grad_() for x in tensors[:3]], tensors[3]


def worst(attend, rows, weight, lengths, window):
    """Largest error of the output and the three gradients against float32, as a share of what is allowed, or nan."""
    exact = [x.detach().float().requires_grad_() for x in rows]
    expected = by_mask(*exact, lengths, window=window)
    out = attend(*rows, boundaries(lengths, "cuda"), max(lengths), window=window)
    assert (out.shape, out.dtype) == (rows[0].shape, torch.bfloat16)
    got = [out, *torch.autograd.grad(out, rows, weight)]
    want = [expected, *torch.autograd.grad(expected, exact, weight.float())]
    pairs = zip(got, want, strict=True)
    errors = [(a.float() - b).norm() / (1e-2 * b.norm() + 1e-4 * b.numel() ** 0.5) for a, b in pairs]
    return torch.stack(errors).max().item()  # Python's own max would lose a nan


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("kernel", ["flash-attn-4", "PyTorch"])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "width", "packs"),
    [(12, 2, 128, PACKS), (14, 2, 64, PACKS), (4, 4, 96, []), (4, 2, 192, []), (4, 1, 256, []), (4, 2, 80, [])],
)
def test_row_attention_on_a_gpu_is_float32_attention(monkeypatch, kernel, heads, kv_heads, width, packs):
    """Ragged rows, rows of one token and of none, windows, both layouts, recomputed activations, no gradients."""
    if kernel == "PyTorch":
        monkeypatch.setattr(row_attention, "_flash_4_kernel", lambda *_: None)
    runs = row_kernel(torch.device("cuda", torch.cuda.current_device()), width)
    if not runs.startswith(kernel):
        pytest.skip(f"heads of {width} run on {runs}")
    for lengths, window in [*packs, (LONG, None), (LONG, 100)]:
        for heads_first in (True, False):
            rows, weight = half_rows(lengths, heads, kv_heads, width, heads_first)
            error = worst(attend_within_rows, rows, weight, lengths, window)
            assert error < 1, f"rows of {lengths}, window {window}, heads first {heads_first}: {error}"
    rows, weight = half_rows(LONG, heads, kv_heads, width)
    assert worst(partial(checkpoint, attend_within_rows, use_reentrant=False), rows, weight, LONG, None) < 1
    still = [x.detach() for x in rows]
    out = attend_within_rows(*still, boundaries(LONG, "cuda"), max(LONG))
    expected = by_mask(*(x.float() for x in still), LONG)
    assert (out.float() - expected).norm() < 1e-2 * expected.norm()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_row_attention_on_a_gpu_of_many_rows():
    """FlashAttention-4 finds a block's row in another way above 256 rows."""
    lengths = [1 + 37 * i % 13 for i in range(300)]
    rows, weight = half_rows(lengths, 14, 2, 64)
    error = worst(attend_within_rows, rows, weight, lengths, None)
    assert error < 1, error
