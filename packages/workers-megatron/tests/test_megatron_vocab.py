from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from ostinato.algos import token_log_probs_and_entropy, token_sum_pi_squared
from ostinato.workers.megatron import vocab
from ostinato.workers.megatron.vocab import vocab_parallel_outputs


@pytest.mark.parametrize(("padding", "chunk"), [(0, 1 << 26), (3, 1 << 26), (3, 28), (0, 1)])
@pytest.mark.usefixtures("megatron_on_cpu")
def test_megatron_vocab_parallel_is_the_plain_softmax(padding, chunk, monkeypatch):
    """One rank's columns are the whole vocabulary: values and gradients equal the plain ones, padding has no part."""
    monkeypatch.setattr(vocab, "CHUNK_ELEMENTS", chunk)
    torch.manual_seed(0)
    logits = torch.randn(5, 11, dtype=torch.float32) * 5
    labels = torch.tensor([0, 10, 3, 3, 7])
    wide = torch.cat([logits, torch.full((5, padding), 50.0)], dim=1).requires_grad_()
    plain = logits.clone().requires_grad_()
    got = vocab_parallel_outputs(
        wide, labels, 0.7, first=0, vocab_size=11, group=dist.group.WORLD, entropy=True, sum_pi_squared=True
    )
    log_probs, entropies = token_log_probs_and_entropy(plain, labels, 0.7)
    for ours, theirs in zip(got, (log_probs, entropies, token_sum_pi_squared(logits, 0.7)), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    weights = torch.randn(2, 5)
    (got[0] * weights[0] + got[1] * weights[1]).sum().backward()
    (log_probs * weights[0] + entropies * weights[1]).sum().backward()
    torch.testing.assert_close(wide.grad[:, :11], plain.grad, rtol=1e-5, atol=1e-6)
    assert (wide.grad[:, 11:] == 0).all()


@pytest.mark.usefixtures("megatron_on_cpu")
def test_megatron_vocab_parallel_without_positions():
    logits = torch.zeros(0, 4, requires_grad=True)
    log_probs, entropy, squares = vocab_parallel_outputs(
        logits, torch.zeros(0, dtype=torch.int64), 1.0, first=0, vocab_size=4, group=dist.group.WORLD
    )
    assert (log_probs.shape, entropy, squares) == ((0,), None, None)
    log_probs.sum().backward()
