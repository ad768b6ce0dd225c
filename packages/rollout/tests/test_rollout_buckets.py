from __future__ import annotations

import pytest
import torch

from ostinato.rollout.buckets import aligned_bytes, buckets, checksum


def stream(*sizes: int, dtype=torch.float32):
    """Through one buffer that each next tensor overwrites."""
    buffer = torch.empty(max(sizes, default=0), dtype=dtype)
    for i, size in enumerate(sizes):
        view = buffer[:size]
        view.fill_(i)
        yield f"t{i}", view
        view.fill_(-1)


QUARTER = (1 << 20) * 7 // 8 // 4 // 4  # floats: a quarter of what a bucket of 1 MiB takes


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ((), []),
        ((0,), [1]),
        ((QUARTER,) * 4, [4]),
        ((QUARTER,) * 5, [4, 1]),
        ((QUARTER * 3, QUARTER * 2, QUARTER), [1, 2]),
        ((QUARTER, QUARTER * 5, QUARTER, QUARTER), [1, 1, 2]),
        ((QUARTER * 9, QUARTER * 9), [1, 1]),
    ],
)
def test_buckets_never_exceed_their_size_and_keep_order(sizes, expected):
    got = [[(name, tensor.clone()) for name, tensor in bucket] for bucket in buckets(stream(*sizes), 1)]
    assert [len(bucket) for bucket in got] == expected
    flat = [item for bucket in got for item in bucket]
    assert [name for name, _ in flat] == [f"t{i}" for i in range(len(sizes))]
    for i, (_, tensor) in enumerate(flat):
        assert tensor.numel() == sizes[i]
        assert bool((tensor == i).all())


def test_buckets_stay_intact_until_the_second_next():
    previous = None
    for bucket in buckets(stream(*[QUARTER] * 13), 1):
        held = [(tensor, float(tensor[0])) for _, tensor in bucket]
        if previous is not None:
            assert all(bool((tensor == value).all()) for tensor, value in previous)
        previous = held


def test_buckets_use_two_buffers_and_no_more():
    pointers = {bucket[0][1].untyped_storage().data_ptr() for bucket in buckets(stream(*[QUARTER] * 20), 1)}
    assert len(pointers) == 2


def test_buckets_cast_and_mix_dtypes():
    def mixed():
        yield "a", torch.tensor([1.5, 2.5])
        yield "b", torch.tensor([[1, 2]])
        yield "c", torch.tensor(3.0, dtype=torch.float64)
        yield "d", torch.tensor([True])

    (bucket,) = buckets(mixed(), 1, {"a": torch.bfloat16, "c": torch.float32})
    got = dict(bucket)
    assert [t.dtype for t in got.values()] == [torch.bfloat16, torch.int64, torch.float32, torch.bool]
    assert [tuple(t.shape) for t in got.values()] == [(2,), (1, 2), (), (1,)]
    assert got["a"].tolist() == [1.5, 2.5]
    assert got["b"].tolist() == [[1, 2]]


def test_buckets_of_a_small_model_stay_small():
    total = aligned_bytes(400) + aligned_bytes(40)
    (bucket,) = buckets(stream(100, 10), 512, total_bytes=total)
    assert bucket[0][1].untyped_storage().nbytes() == total


def test_buckets_take_a_parameter_that_is_not_contiguous():
    source = torch.nn.Parameter(torch.arange(6.0).reshape(2, 3).t())
    (bucket,) = buckets([("w", source)], 1)
    assert torch.equal(bucket[0][1], source.detach())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.bool, torch.uint8])
def test_checksum_sees_every_bit_and_its_place(dtype):
    x = (torch.arange(24).reshape(4, 6) % 2).to(dtype)
    assert checksum(x) == checksum(x.clone())
    flipped = x.clone()
    flipped[3, 5] = 1 - int(flipped[3, 5])
    assert checksum(flipped) != checksum(x)
    assert checksum(x.roll(1, -1)) != checksum(x)
    assert checksum(x[:, :5]) != checksum(x)


def test_checksum_of_any_layout_and_of_nothing():
    x = torch.arange(6.0).reshape(2, 3)
    assert checksum(x.t()) == checksum(x.t().contiguous())
    assert checksum(torch.empty(0)) == 0
    assert checksum(torch.zeros(3)) != checksum(torch.zeros(4))


@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2]
)
def test_checksum_takes_zeros_of_either_sign_for_one(dtype):
    zeros = torch.tensor([0.0, -0.0, 1.0]).to(dtype)
    assert checksum(zeros) == checksum(zeros.abs() if dtype.itemsize > 1 else torch.tensor([0.0, 0.0, 1.0]).to(dtype))
    assert checksum(zeros) != checksum(torch.tensor([0.0, -0.0, -1.0]).to(dtype))
    assert bool(zeros.float().signbit()[1]), "the tensor itself stays as it is"
    lowest = torch.tensor([torch.iinfo(torch.int16).min], dtype=torch.int16)
    assert checksum(lowest) != checksum(lowest * 0), "an integer has no second zero"
