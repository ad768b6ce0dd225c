"""Random numbers without state: each row has its own stream, keyed by (seed, step, rollout_id).

Samples therefore depend neither on how rows are split over ranks and micro-batches nor on what was drawn before, and
a resumed run needs no saved generator.
"""

from __future__ import annotations

import numpy as np

_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_WEYL = (0x9E3779B9, 0xBB67AE85)
_LOW = np.uint64(0xFFFFFFFF)
_SHIFT = np.uint64(32)
_ROUNDS = 10


def philox4x32(counter: tuple[np.ndarray, ...], key: tuple[int, int]) -> tuple[np.ndarray, ...]:
    """Philox4x32-10: four 32-bit counters and a 64-bit key give four independent 32-bit words.

    Args:
        counter: four uint64 arrays of one shape, or of shapes that broadcast, each below 2**32.
        key: two numbers below 2**32.

    Returns:
        Four uint64 arrays, each below 2**32.

    Source: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011, section 3.3.
    """
    c0, c1, c2, c3 = np.broadcast_arrays(*counter)
    k0, k1 = key
    for _ in range(_ROUNDS):
        left, right = _MULTIPLIERS[0] * c0, _MULTIPLIERS[1] * c2
        c0 = (right >> _SHIFT) ^ c1 ^ np.uint64(k0)
        c2 = (left >> _SHIFT) ^ c3 ^ np.uint64(k1)
        c1, c3 = right & _LOW, left & _LOW
        k0, k1 = (k0 + _WEYL[0]) & 0xFFFFFFFF, (k1 + _WEYL[1]) & 0xFFFFFFFF
    return c0, c1, c2, c3


def row_uniforms(seed: int, step: int, rollout_ids: np.ndarray, start: int, count: int) -> np.ndarray:
    """Uniform numbers of each row's stream.

    Args:
        seed: below 2**64.
        step: below 2**32.
        rollout_ids: (B,) int64, one a row; equal ids give equal streams.
        start: first token position, even.
        count: number of positions.

    Returns:
        (B, count) float64, in (0, 1) with both ends excluded; column j belongs to response token start + j.
    """
    assert start % 2 == 0, "one Philox block makes the numbers of two token positions"
    ids = np.asarray(rollout_ids).astype(np.int64).view(np.uint64)[:, None]
    blocks = np.arange(start // 2, (start + count + 1) // 2, dtype=np.uint64)[None, :]
    words = philox4x32(
        (blocks, ids & _LOW, ids >> _SHIFT, np.full((1, 1), step & 0xFFFFFFFF, dtype=np.uint64)),
        (seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF),
    )
    pairs = [(words[i] << _SHIFT | words[i + 1]) >> np.uint64(12) for i in (0, 2)]
    uniforms = (np.stack(pairs, axis=-1).astype(np.float64) + 0.5) / 2.0**52
    return uniforms.reshape(len(ids), 2 * blocks.shape[1])[:, :count]


def row_seeds(seed: int, step: int, rollout_ids: np.ndarray) -> np.ndarray:
    """One seed a row, for engines that keep a generator for each request.

    Returns:
        (B,) int64 in [0, 2**63).
    """
    ids = np.asarray(rollout_ids).astype(np.int64).view(np.uint64)
    # The last block of a stream, which no response is long enough to reach.
    last = np.full(1, 0xFFFFFFFF, dtype=np.uint64)
    words = philox4x32(
        (last, ids & _LOW, ids >> _SHIFT, np.full(1, step & 0xFFFFFFFF, dtype=np.uint64)),
        (seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF),
    )
    return ((words[0] << _SHIFT | words[1]) >> np.uint64(1)).astype(np.int64)


def engine_seed(seed: int, step: int, dp_rank: int) -> int:
    """The seed of a whole engine, for those that can take no other: differs between data-parallel ranks and steps.

    All ranks of one tensor-parallel group share `dp_rank`, so they draw the same numbers.

    Returns:
        A number in [0, 2**31).
    """
    return int(row_seeds(seed, step, np.asarray([dp_rank]))[0] & 0x7FFFFFFF)
