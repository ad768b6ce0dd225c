"""Padded, packed and jagged are three forms of the same tokens."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ostinato.protocol import padding
from ostinato.protocol.errors import ArgumentError

DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.uint16, torch.float8_e5m2)


@st.composite
def _masks(draw):
    b, length = draw(st.integers(0, 5)), draw(st.integers(0, 6))
    cells = draw(st.lists(st.booleans(), min_size=b * length, max_size=b * length))
    return torch.tensor(cells, dtype=torch.bool).reshape(b, length)


@given(_masks(), st.sampled_from([(), (3,)]), st.sampled_from(DTYPES))
def test_unpack_undoes_pack(mask, trailing, dtype):
    padded = (
        torch.arange(1, mask.numel() + 1)
        .reshape(*mask.shape, *[1] * len(trailing))
        .expand(*mask.shape, *trailing)
        .to(dtype)
    )
    packed, ends = padding.pack(padded, mask)
    rows = [padded[i][mask[i]] for i in range(len(mask))]
    assert packed.dtype == dtype
    assert ends.dtype == torch.int32
    assert ends.tolist() == [0, *torch.tensor([len(r) for r in rows]).cumsum(0).tolist()]
    for i, row in enumerate(rows):
        assert torch.equal(packed[ends[i] : ends[i + 1]], row)
    back = padding.unpack(packed, mask)
    wide = mask.reshape(*mask.shape, *[1] * len(trailing))
    assert torch.equal(back, torch.where(wide, padded, torch.zeros((), dtype=dtype)))
    assert back.shape == padded.shape


@given(_masks(), st.sampled_from(["left", "right"]), st.integers(0, 2))
def test_jagged_and_padded_are_inverse(mask, side, more):
    padded = torch.arange(1.0, mask.numel() + 1).reshape(mask.shape)
    jagged = padding.to_jagged(padded, mask)
    assert [row.tolist() for row in jagged.unbind()] == [padded[i][mask[i]].tolist() for i in range(len(mask))]
    length = mask.shape[1] + more
    dense, there = padding.to_padded(jagged, length, fill=-1, side=side)
    assert dense.shape == there.shape == (len(mask), length)
    for row, keep, source in zip(dense, there, jagged.unbind(), strict=True):
        assert row[keep].tolist() == source.tolist()
        assert (row[~keep] == -1).all()
        places = torch.arange(length)
        n = len(source)
        assert torch.equal(keep, places < n if side == "right" else places >= length - n)
    again = padding.to_jagged(dense, there)
    assert torch.equal(again.values(), jagged.values())
    assert torch.equal(again.offsets(), jagged.offsets())


def test_padding_by_hand():
    mask = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 0]])
    assert padding.position_ids(mask).tolist() == [[0, 0, 0, 1], [0, 1, 2, 2]]
    assert padding.cu_seqlens(mask).tolist() == [0, 2, 5]
    dense, _ = padding.to_padded(
        torch.nested.nested_tensor([torch.tensor([1, 2]), torch.tensor([3])], layout=torch.jagged)
    )
    assert dense.tolist() == [[1, 2], [3, 0]]


def test_gradients_pass_and_masked_places_get_none():
    padded = torch.ones(2, 3, requires_grad=True)
    mask = torch.tensor([[1, 1, 0], [0, 1, 0]])
    packed, _ = padding.pack(padded, mask)
    padding.unpack(packed * 2, mask).sum().backward()
    assert padded.grad.tolist() == [[2, 2, 0], [0, 2, 0]]


def test_shapes_that_do_not_fit_are_refused():
    mask = torch.ones(2, 3)
    with pytest.raises(ArgumentError, match=r"\(2, 4\).*\(2, 3\)"):
        padding.pack(torch.ones(2, 4), mask)
    with pytest.raises(ArgumentError, match=r"6 tokens, packed has shape \(5,\)"):
        padding.unpack(torch.ones(5), mask)
    with pytest.raises(ArgumentError, match=r"\(B, L\)"):
        padding.cu_seqlens(torch.ones(3))
    ragged = torch.nested.nested_tensor([torch.ones(3), torch.ones(1)], layout=torch.jagged)
    with pytest.raises(ArgumentError, match="3 tokens, length is 2"):
        padding.to_padded(ragged, 2)
    with pytest.raises(ArgumentError, match="'up'"):
        padding.to_padded(ragged, side="up")
    with pytest.raises(ArgumentError, match="jagged"):
        padding.to_padded(torch.ones(2, 3))
