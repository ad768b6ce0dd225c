from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch

from ostinato.rollout.copy_plan import CopyPlan


class Fused(torch.nn.Module):
    """A model as engines build it: fused projections, a padded vocabulary, a shard of rank 1 of 2, a transposed one."""

    def __init__(self):
        super().__init__()
        self.qkv = torch.nn.Parameter(torch.full((6, 4), -1.0), requires_grad=False)
        self.embed = torch.nn.Parameter(torch.full((8, 4), -1.0), requires_grad=False)
        self.down = torch.nn.Parameter(torch.full((4, 3), -1.0), requires_grad=False)
        self.turned = torch.nn.Parameter(torch.full((4, 5), -1.0), requires_grad=False)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            if name in ("q", "k", "v"):
                start = 2 * "qkv".index(name)
                self.qkv.data.narrow(0, start, 2).copy_(tensor)
            elif name == "embed":
                self.embed.data[:7].copy_(tensor)
                self.embed.data[7:].fill_(0)
            elif name == "down":
                self.down.data.copy_(tensor.narrow(1, 3, 3))
            else:
                self.turned.data.copy_(tensor.t())


SHAPES = {"q": (2, 4), "k": (2, 4), "v": (2, 4), "embed": (7, 4), "down": (4, 6), "turned": (5, 4)}


def bucket(seed: int) -> list[tuple[str, torch.Tensor]]:
    """Views of one flat buffer, as buckets hold them."""
    total = sum(torch.Size(shape).numel() for shape in SHAPES.values())
    flat = torch.randn(total, generator=torch.Generator().manual_seed(seed))
    parts, used = [], 0
    for name, shape in SHAPES.items():
        size = torch.Size(shape).numel()
        parts.append((name, flat[used : used + size].view(shape)))
        used += size
    return parts


def recorded(model: Fused) -> CopyPlan:
    plan = CopyPlan(model)
    first = bucket(0)
    plan.record(first[:2], model.load_weights)
    plan.record(first[2:], model.load_weights)
    assert plan.complete(SHAPES)
    return plan


def test_copy_plan_repeats_what_the_loader_does():
    model, expected = Fused(), Fused()
    plan = recorded(model)
    for parameter in model.parameters():
        parameter.fill_(torch.nan)  # what a sleeping engine's memory holds is undefined
    plan.begin()
    second = bucket(1)
    plan.repeat(second[:3])
    plan.repeat(second[3:])
    expected.load_weights(second)
    for (name, have), want in zip(model.named_parameters(), expected.parameters(), strict=True):
        assert torch.equal(have, want), name


def test_copy_plan_repeats_into_the_live_memory():
    model = Fused()
    addresses = [parameter.data_ptr() for parameter in model.parameters()]
    recorded(model).repeat(bucket(1))
    assert addresses == [parameter.data_ptr() for parameter in model.parameters()]


def test_copy_plan_reads_weights_back():
    model = Fused()
    plan = recorded(model)
    sent = dict(bucket(0))
    for name, shape in SHAPES.items():
        full, held = plan.gathered(name, shape, torch.float32)
        assert torch.equal(full[held], sent[name][held]), name
        assert bool(held.all()) == (name != "down"), name
    assert plan.gathered("down", SHAPES["down"], torch.float32)[1].sum() == 12


class Scales(Fused):
    def load_weights(self, weights):
        super().load_weights((name, tensor * 2 if name == "q" else tensor) for name, tensor in weights)


class Adds(Fused):
    def load_weights(self, weights):
        super().load_weights(weights)
        self.down.data.add_(1)


class Replaces(Fused):
    def load_weights(self, weights):
        super().load_weights(weights)
        self.down.data = self.down.data.clone()


class Skips(Fused):
    def load_weights(self, weights):
        super().load_weights((name, tensor) for name, tensor in weights if name != "v")


@pytest.mark.parametrize(
    ("kind", "reason"),
    [(Scales, "no part of a sent"), (Adds, "no part of a sent"), (Replaces, "replaced"), (Skips, "left no copy.* v")],
)
def test_copy_plan_refuses_loaders_that_do_more_than_copy(kind, reason):
    model = kind()
    plan = CopyPlan(model)
    plan.record(bucket(0), model.load_weights)
    assert not plan.complete(SHAPES)
    with pytest.raises(AssertionError, match=reason):
        raise AssertionError(plan.reason)
