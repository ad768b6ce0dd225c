"""How SGLang's schedulers draw tokens; it needs no SGLang."""

from __future__ import annotations

import pytest
import torch

from ostinato.rollout.backends import sglang_scheduler


def test_sglang_draws_follow_splitmix64():
    """Numbers 0 to 4 of the generator that starts at 1234567."""
    expected = [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]
    numbers = sglang_scheduler.uniforms(torch.full((5,), 1234567), torch.arange(5))
    assert numbers.tolist() == [((word >> 12) + 0.5) / 2**52 for word in expected]


@pytest.mark.parametrize("size", [3, 511, 512, 513, 2000])
def test_sglang_draws_invert_the_cumulative_distribution(size: int):
    """Against one sum in float64; tokens of weight 0 at both ends and in between are never drawn."""
    generator = torch.Generator().manual_seed(size)
    weights = torch.rand(64, size, generator=generator) * (torch.rand(64, size, generator=generator) > 0.7)
    weights[:, 0] = weights[:, -1] = 0
    weights[:, size // 2] = 1.0
    numbers = torch.rand(64, generator=generator, dtype=torch.float64)
    numbers[0], numbers[1] = 2.0**-53, 1 - 2.0**-53
    tokens = sglang_scheduler.invert(weights, numbers)
    exact = weights.double().cumsum(-1)
    expected = torch.searchsorted(exact, numbers[:, None] * exact[:, -1:], right=True).squeeze(-1)
    assert (tokens != expected).sum() == 0
    assert bool((weights.gather(1, tokens[:, None]) > 0).all())


def test_sglang_draws_keep_to_the_restrictions():
    probabilities = torch.tensor([[0.1, 0.4, 0.2, 0.3]]).repeat(400, 1)
    seeds, positions = torch.arange(400), torch.full((400,), 7)

    def seen(top_k: int, top_p: float, min_p: float) -> set[int]:
        restrict = (torch.full((400,), top_k), torch.full((400,), top_p), torch.full((400,), min_p))
        return set(sglang_scheduler.draw(probabilities, seeds, positions, restrict).tolist())

    assert (
        seen(1 << 30, 1.0, 0.0) == {0, 1, 2, 3} == set(sglang_scheduler.draw(probabilities, seeds, positions).tolist())
    )
    assert seen(2, 1.0, 0.0) == {1, 3}
    assert seen(1 << 30, 0.6, 0.0) == {1, 3}
    assert seen(1 << 30, 1.0, 0.45) == {1, 2, 3}
    assert seen(1 << 30, 1e-9, 0.0) == {1}
