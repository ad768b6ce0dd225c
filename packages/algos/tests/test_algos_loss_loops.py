"""Every policy loss and the value loss against a slow reference in plain Python loops."""

from __future__ import annotations

import math

import pytest
import torch

from ostinato.algos import get_policy_loss, keywords, policy_losses, value_loss


def clip(x, low, high):
    return min(max(x, low), high)


def ragged_batch(seed):
    generator = torch.Generator().manual_seed(seed)
    num_rows, width = 2 + seed % 5, 1 + seed % 13
    mask = torch.rand(num_rows, width, generator=generator) < 0.7

    def floats(scale=1.0):
        x = scale * torch.randn(num_rows, width, generator=generator, dtype=torch.float64)
        return torch.where(mask, x, math.nan)

    old = -floats(2.0).abs()
    return {
        "log_probs": (old + floats(0.5)).clamp(max=0.0),
        "old": old,
        "advantages": torch.where(floats() > 1.0, 0.0, floats()),
        "mask": mask,
        "weights": floats().exp(),
        "selected": torch.rand(num_rows, width, generator=generator) < 0.3,
    }


def row_mean(numbers):
    return math.fsum(numbers) / len(numbers)


def vanilla(d, a, lp, chosen, low=0.2, high=0.28, c=3.0):
    r = math.exp(d)
    loss = max(-a * r, -a * clip(r, 1 - low, 1 + high))
    return min(loss, -a * c) if a < 0 else loss


def sapo(d, a, lp, chosen):
    tau = 1.0 if a > 0 else 1.05
    return -a * 4 / tau / (1 + math.exp(-tau * (math.exp(d) - 1)))


def gpg(d, a, lp, chosen):
    return -a * lp


def cispo(d, a, lp, chosen, low=0.2, high=0.28):
    return -clip(math.exp(d), 1 - low, 1 + high) * a * lp


def clip_cov(d, a, lp, chosen, low=0.2, high=0.28):
    r = math.exp(d)
    return 0.0 if chosen else max(-a * r, -a * clip(r, 1 - low, 1 + high))


def kl_cov(d, a, lp, chosen):
    return -a * math.exp(d) + (abs(d) if chosen else 0.0)


def dro(d, a, lp, chosen):
    return -a * lp + 0.5 * 0.05 * d * d


def dppo_tv(d, a, lp, chosen, low=0.2, high=0.28):
    rise = math.exp(lp) - math.exp(lp - d)
    inside = rise <= high if a > 0 else rise >= -low
    return -min(math.exp(d), 20.0) * a * lp if inside else 0.0


def dppo_kl(d, a, lp, chosen, low=0.2, high=0.28):
    p, q = math.exp(lp), math.exp(lp - d)
    kl = q * -d + (1 - q) * math.log((1 - q + 1e-8) / (1 - p + 1e-8))
    inside = (kl <= high or p <= q) if a > 0 else (kl <= low or p >= q)
    return -min(math.exp(d), 20.0) * a * lp if inside else 0.0


def gspo_row(ds, advantages, low=0.2, high=0.28):
    s = math.exp(min(row_mean(ds), 10.0))
    return [max(-a * s, -a * clip(s, 1 - low, 1 + high)) for a in advantages]


def geo_mean_row(ds, advantages, low=0.2, high=0.28):
    kept = []
    for d, a in zip(ds, advantages, strict=True):
        sign = (a > 0) - (a < 0)
        kept.append(sign * min(sign * d, sign * clip(d, -low, high)) if sign else d)
    return [-row_mean(advantages) * math.exp(row_mean(kept))] * len(ds)


PER_TOKEN = {
    "vanilla": vanilla,
    "sapo": sapo,
    "gpg": gpg,
    "cispo": cispo,
    "clip_cov": clip_cov,
    "kl_cov": kl_cov,
    "dro": dro,
    "dppo_tv": dppo_tv,
    "dppo_kl": dppo_kl,
}
PER_ROW = {"gspo": gspo_row, "geo_mean": geo_mean_row}


def slow_loss(name, batch, weighted):
    lists = {key: value.tolist() for key, value in batch.items()}
    out = [[0.0] * len(row) for row in lists["mask"]]
    for i, row in enumerate(lists["mask"]):
        places = [t for t, on in enumerate(row) if on]
        if not places:
            continue
        ds = [lists["log_probs"][i][t] - lists["old"][i][t] for t in places]
        advantages = [lists["advantages"][i][t] for t in places]
        weights = [lists["weights"][i][t] if weighted else 1.0 for t in places]
        if name in PER_ROW:
            losses = PER_ROW[name](ds, advantages)
        else:
            losses = [
                PER_TOKEN[name](d, a, lists["log_probs"][i][t], lists["selected"][i][t])
                for d, a, t in zip(ds, advantages, places, strict=True)
            ]
        if name == "geo_mean":
            weights = [math.exp(row_mean([math.log(w) for w in weights]))] * len(places)
        for t, loss, weight in zip(places, losses, weights, strict=True):
            out[i][t] = loss * weight
    return torch.tensor(out, dtype=torch.float64).view_as(batch["mask"].double())


def test_every_loss_has_a_slow_reference():
    assert set(PER_TOKEN) | set(PER_ROW) == set(policy_losses())


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("name", policy_losses())
def test_loss_equals_its_loop(name, weighted, seed):
    batch = ragged_batch(seed)
    fn = get_policy_loss(name)
    options = {"selected": batch["selected"], "clip_ratio_high": 0.28}
    given = {key: value for key, value in options.items() if key in keywords(fn)}
    weights = batch["weights"] if weighted else None
    got = fn(batch["log_probs"], batch["old"], batch["advantages"], batch["mask"], weights=weights, **given)
    torch.testing.assert_close(got.loss, slow_loss(name, batch, weighted), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("cliprange", [None, 0.0, 0.2, 10.0])
def test_value_loss_equals_its_loop(cliprange, seed):
    batch = ragged_batch(seed)
    values, targets, old = batch["log_probs"], batch["advantages"], batch["old"]
    loss, clipped = value_loss(values, targets, old, batch["mask"], cliprange)
    for i, row in enumerate(batch["mask"].tolist()):
        for t, on in enumerate(row):
            if not on:
                assert loss[i, t] == 0
                assert clipped[i, t] == 0
                continue
            v, target, before = values[i, t].item(), targets[i, t].item(), old[i, t].item()
            plain = (v - target) ** 2
            bounded = plain if cliprange is None else (clip(v, before - cliprange, before + cliprange) - target) ** 2
            assert loss[i, t].item() == pytest.approx(0.5 * max(plain, bounded), rel=1e-12)
            assert clipped[i, t].item() == (bounded > plain)
