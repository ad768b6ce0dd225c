from __future__ import annotations

import pytest
import torch

from ostinato.algos import token_log_probs_and_entropy, token_sum_pi_squared
from ostinato.workers.core import head_answers as module
from ostinato.workers.core.head_answers import chunk_rows, head_answers, named_answers


def test_chunks_are_bounded():
    assert chunk_rows(torch.empty(151_936, 1)) == 110
    assert chunk_rows(torch.empty(1 << 25, 1, device="meta")) == 1


@pytest.mark.parametrize("num_positions", [0, 1, 7])
@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("sum_pi_squared", [False, True])
def test_answers_are_named_and_those_from_logits(num_positions, entropy, sum_pi_squared, monkeypatch):
    """Chunks of three positions: none, a part of one, several."""
    monkeypatch.setattr(module, "GPU_CHUNK_ELEMENTS", 8 * 3 * 11)
    draw = torch.Generator().manual_seed(num_positions)
    hidden = torch.randn(num_positions, 4, generator=draw, requires_grad=True)
    weight = torch.randn(11, 4, generator=draw)
    labels = torch.randint(11, (num_positions,), generator=draw)
    answers = head_answers(hidden, weight, labels, 0.7, entropy=entropy, sum_pi_squared=sum_pi_squared)
    assert all(answer.dtype == torch.float32 for answer in answers)
    outputs = named_answers(torch.stack(answers, dim=1), entropy=entropy, sum_pi_squared=sum_pi_squared)
    logits = hidden @ weight.T
    log_probs, entropies = token_log_probs_and_entropy(logits, labels, 0.7)
    torch.testing.assert_close(outputs.log_probs, log_probs)
    if entropy:
        torch.testing.assert_close(outputs.entropy, entropies)
    if sum_pi_squared:
        torch.testing.assert_close(outputs.sum_pi_squared, token_sum_pi_squared(logits.detach(), 0.7))
        assert not answers[-1].requires_grad
    assert (outputs.entropy is not None, outputs.sum_pi_squared is not None) == (entropy, sum_pi_squared)
