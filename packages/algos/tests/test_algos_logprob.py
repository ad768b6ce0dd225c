"""Token log-probabilities and entropies, from logits and from hidden states."""

from __future__ import annotations

import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ostinato.algos import (
    ArgumentError,
    SecondOrderError,
    ShapeError,
    full_kl,
    token_entropy,
    token_log_probs,
    token_log_probs_and_entropy,
    token_log_probs_and_entropy_from_hidden,
    token_log_probs_from_hidden,
    token_sum_pi_squared,
)

F64 = torch.float64


def plain(logits, labels, temperature=1.0):
    """The oracle: everything at once, in float64 or as given."""
    log_p = (logits / temperature).log_softmax(-1)
    p = log_p.exp()
    entropy = -torch.where(p > 0, p * log_p, 0).sum(-1)
    return log_p.gather(-1, labels[:, None])[:, 0], entropy


def problem(num=13, vocab=29, dtype=F64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    logits = (3 * torch.randn(num, vocab, generator=generator, dtype=F64)).to(dtype)
    return logits, torch.randint(vocab, (num,), generator=generator)


@pytest.mark.parametrize("temperature", [1.0, 0.3, 2.0])
@pytest.mark.parametrize("chunk_size", [None, 1, 4, 100])
def test_log_probs_and_entropy_equal_the_plain_form(temperature, chunk_size):
    logits, labels = problem()
    leaf, oracle = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    got = token_log_probs_and_entropy(leaf, labels, temperature, chunk_size=chunk_size)
    expected = plain(oracle, labels, temperature)
    weights = torch.randn(2, 13, dtype=F64)
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b)
    (a,) = torch.autograd.grad((torch.stack(got) * weights).sum(), leaf)
    (b,) = torch.autograd.grad((torch.stack(expected) * weights).sum(), oracle)
    torch.testing.assert_close(a, b)
    torch.testing.assert_close(token_log_probs(logits, labels, temperature, chunk_size=chunk_size), expected[0])
    torch.testing.assert_close(token_entropy(logits, temperature, chunk_size=chunk_size), expected[1])


def test_gradients_equal_finite_differences():
    logits, labels = problem(5, 7)
    assert torch.autograd.gradcheck(lambda x: token_log_probs(x, labels, 0.7, chunk_size=2), logits.requires_grad_())
    assert torch.autograd.gradcheck(lambda x: token_entropy(x, 0.7, chunk_size=2), logits)
    hidden = torch.randn(5, 4, dtype=F64, requires_grad=True)
    weight = torch.randn(7, 4, dtype=F64, requires_grad=True)
    assert torch.autograd.gradcheck(
        lambda h, w: token_log_probs_and_entropy_from_hidden(h, w, labels, 0.7, chunk_size=2), (hidden, weight)
    )


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("chunk_size", [None, 1, 5])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_from_hidden_equals_the_plain_form(dtype, chunk_size, temperature):
    torch.manual_seed(0)
    hidden = torch.randn(13, 8).to(dtype)
    weight = torch.randn(29, 8).to(dtype)
    labels = torch.randint(29, (13,))
    leaves = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    oracles = [hidden.clone().requires_grad_(), weight.clone().requires_grad_()]
    got = token_log_probs_and_entropy_from_hidden(leaves[0], leaves[1], labels, temperature, chunk_size=chunk_size)
    wide = oracles[0] @ oracles[1].T
    expected = plain(wide.to(torch.promote_types(dtype, torch.float32)), labels, temperature)
    mix = torch.randn(2, 13).to(expected[0].dtype)
    tight = {torch.float64: 1e-10, torch.float32: 2e-5, torch.bfloat16: 2e-5}[dtype]
    for a, b in zip(got, expected, strict=True):
        assert a.dtype == b.dtype
        torch.testing.assert_close(a, b, rtol=tight, atol=tight)
    grads = torch.autograd.grad((torch.stack(got) * mix).sum(), leaves)
    references = torch.autograd.grad((torch.stack(expected) * mix).sum(), oracles)
    loose = 5e-2 if dtype == torch.bfloat16 else tight
    for a, b in zip(grads, references, strict=True):
        assert a.dtype == dtype
        torch.testing.assert_close(a, b, rtol=loose, atol=loose)
    alone = token_log_probs_from_hidden(hidden, weight, labels, temperature, chunk_size=chunk_size)
    torch.testing.assert_close(alone, got[0].detach())


@pytest.mark.parametrize("frozen", [0, 1])
def test_from_hidden_makes_only_the_gradients_asked_for(frozen):
    torch.manual_seed(0)
    tensors = [torch.randn(6, 4), torch.randn(9, 4)]
    tensors[1 - frozen].requires_grad_()
    token_log_probs_from_hidden(tensors[0], tensors[1], torch.arange(6), chunk_size=4).sum().backward()
    assert tensors[frozen].grad is None
    reference = [x.detach().clone() for x in tensors]
    reference[1 - frozen].requires_grad_()
    plain(reference[0] @ reference[1].T, torch.arange(6))[0].sum().backward()
    torch.testing.assert_close(tensors[1 - frozen].grad, reference[1 - frozen].grad)


def test_from_hidden_follows_autocast():
    torch.manual_seed(0)
    hidden, weight = torch.randn(6, 16, requires_grad=True), torch.randn(9, 16, requires_grad=True)
    labels = torch.arange(6)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = token_log_probs_from_hidden(hidden, weight, labels, chunk_size=4)
        expected = plain((hidden @ weight.T).float(), labels)[0]
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
    grads = torch.autograd.grad(got.sum(), (hidden, weight))
    for a, b in zip(grads, torch.autograd.grad(expected.sum(), (hidden, weight)), strict=True):
        assert a.dtype == torch.float32
        torch.testing.assert_close(a, b, rtol=5e-2, atol=5e-2)


class Largest(TorchDispatchMode):
    """Records the largest tensor that any operation makes, and the largest in float32 or wider."""

    def __init__(self):
        super().__init__()
        self.any, self.wide = 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor) and leaf.is_floating_point():
                self.any = max(self.any, leaf.numel())
                if leaf.dtype.itemsize >= 4:
                    self.wide = max(self.wide, leaf.numel())
        return out


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_no_full_float32_copy_of_the_logits_exists(temperature):
    logits, labels = problem(64, 100, torch.bfloat16)
    logits.requires_grad_()
    with Largest() as largest:
        log_probs, entropy = token_log_probs_and_entropy(logits, labels, temperature, chunk_size=4)
        (log_probs.sum() + entropy.sum()).backward()
        token_sum_pi_squared(logits, temperature, chunk_size=4)
    assert largest.wide <= 4 * 100
    assert largest.any == 64 * 100, "the gradient itself, in the logits' dtype"


def test_the_logits_never_exist_from_hidden_states():
    torch.manual_seed(0)
    hidden = torch.randn(64, 8, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(100, 8, dtype=torch.bfloat16, requires_grad=True)
    with Largest() as largest:
        token_log_probs_from_hidden(hidden, weight, torch.randint(100, (64,)), chunk_size=4).sum().backward()
    assert largest.any <= max(4 * 100, 64 * 8, 100 * 8)


def test_default_chunks_are_bounded():
    logits, labels = torch.zeros(5, 1 << 22, dtype=torch.bfloat16), torch.arange(5)
    with Largest() as largest:
        log_probs = token_log_probs(logits, labels)
    assert largest.wide <= 1 << 24
    torch.testing.assert_close(log_probs, torch.full((5,), -22 * math.log(2)))


@pytest.mark.parametrize("shift", [1e4, -1e4, 3e38])
def test_large_logits(shift):
    """A-140."""
    logits = torch.tensor([[shift, shift - 1.0 if abs(shift) < 1e30 else shift / 2]], requires_grad=True)
    got = token_log_probs(logits, torch.tensor([0]))
    expected = -math.log1p(math.exp(-1)) if abs(shift) < 1e30 else 0.0
    assert got.item() == pytest.approx(expected, abs=1e-6)
    (gradient,) = torch.autograd.grad(got.sum() + token_entropy(logits).sum(), logits)
    assert torch.isfinite(gradient).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_logits_are_read_in_float32(dtype):
    """A-141: within 2e-3 of float64 on the same logits (in fact within rounding of float32)."""
    logits, labels = problem(50, 1000, dtype)
    got = token_log_probs_and_entropy(logits, labels)
    for a, b in zip(got, plain(logits.double(), labels), strict=True):
        assert a.dtype == torch.float32
        torch.testing.assert_close(a.double(), b, rtol=0, atol=2e-5)
    gradient = torch.autograd.grad(token_log_probs(logits.requires_grad_(), labels).sum(), logits)[0]
    assert gradient.dtype == dtype


def test_a_masked_vocabulary_counts_for_nothing():
    """A-143: 1 2 −inf has the entropy of two entries, and finite gradients."""
    two = torch.tensor([[1.0, 2.0]])
    logits = torch.tensor([[1.0, 2.0, -math.inf]], requires_grad=True)
    labels = torch.tensor([1])
    log_probs, entropy = token_log_probs_and_entropy(logits, labels)
    expected = plain(two, labels)
    torch.testing.assert_close(log_probs, expected[0])
    torch.testing.assert_close(entropy, expected[1])
    torch.testing.assert_close(token_sum_pi_squared(logits), two.softmax(-1).square().sum(-1))
    (gradient,) = torch.autograd.grad(log_probs.sum() + entropy.sum(), logits)
    assert torch.isfinite(gradient).all()
    assert gradient[0, 2] == 0
    assert token_log_probs(logits, torch.tensor([2])).item() == -math.inf


def test_the_temperature_is_on_the_logits():
    """H-47: logits 1 0 −1, T .5, token 1 is −2.1429, not the T = 1 value divided by T."""
    got = token_log_probs(torch.tensor([[1.0, 0.0, -1.0]]), torch.tensor([1]), 0.5)
    assert got.item() == pytest.approx(-2.1429, abs=5e-5)


def test_uniform_and_certain_distributions():
    assert token_entropy(torch.zeros(1, 8)).item() == pytest.approx(math.log(8))
    assert token_sum_pi_squared(torch.zeros(1, 8)).item() == pytest.approx(1 / 8)
    certain = torch.tensor([[100.0, -100.0, -100.0]])
    assert token_entropy(certain).item() == pytest.approx(0.0, abs=1e-6)
    assert token_sum_pi_squared(certain).item() == pytest.approx(1.0)


def test_no_positions_give_nothing_with_a_gradient():
    logits = torch.zeros(0, 5, requires_grad=True)
    labels = torch.zeros(0, dtype=torch.int64)
    out = token_log_probs(logits, labels)
    assert out.shape == (0,)
    (gradient,) = torch.autograd.grad(out.sum(), logits)
    assert gradient.shape == (0, 5)
    hidden, weight = torch.zeros(0, 3, requires_grad=True), torch.ones(5, 3, requires_grad=True)
    grads = torch.autograd.grad(token_log_probs_from_hidden(hidden, weight, labels).sum(), (hidden, weight))
    assert grads[0].shape == (0, 3)
    assert not grads[1].any()


def test_entropy_with_a_gradient_on_one_output_alone():
    logits, labels = problem()
    for index in (0, 1):
        leaf, oracle = logits.clone().requires_grad_(), logits.clone().requires_grad_()
        (a,) = torch.autograd.grad(token_log_probs_and_entropy(leaf, labels, chunk_size=5)[index].sum(), leaf)
        (b,) = torch.autograd.grad(plain(oracle, labels)[index].sum(), oracle)
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("graph", ["of a sum", "of a square"], ids=str)
@pytest.mark.parametrize(
    "read",
    [
        lambda h, w, labels: token_log_probs_from_hidden(h, w, labels),
        lambda h, w, labels: token_log_probs_and_entropy_from_hidden(h, w, labels)[1],
        lambda h, w, labels: token_log_probs(h @ w.T, labels),
        lambda h, w, labels: token_entropy(h @ w.T),
        lambda h, w, labels: full_kl(h @ w.T, (h @ w.T).detach().flip(0)),
    ],
)
def test_a_gradient_of_a_gradient_is_refused(read, graph):
    """A penalty on the gradient was left out of the loss's gradient without a word, in part or as a whole."""
    draw = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(n, 4, generator=draw).requires_grad_() for n in (5, 7))
    out = read(hidden, weight, torch.arange(5))
    loss = out.sum() if graph == "of a sum" else out.square().sum()
    with pytest.raises(SecondOrderError, match="create_graph=True"):
        torch.autograd.grad(loss, (hidden, weight), create_graph=True)
    with pytest.raises(SecondOrderError, match="create_graph=True"):
        loss.backward(create_graph=True)
    loss.backward()
    assert hidden.grad is not None


def test_what_does_not_fit_is_refused():
    logits, labels = problem()
    with pytest.raises(ShapeError, match="labels must be"):
        token_log_probs(logits, labels[:3])
    with pytest.raises(ShapeError, match="positions"):
        token_log_probs(logits[0], labels)
    with pytest.raises(ShapeError, match="weight must be"):
        token_log_probs_from_hidden(torch.zeros(13, 4), torch.zeros(29, 5), labels)
    for bad in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(ArgumentError, match="temperature"):
            token_entropy(logits, bad)
    with pytest.raises(ArgumentError, match="chunk_size"):
        token_log_probs(logits, labels, chunk_size=0)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_log_probs_on_a_gpu_equal_those_in_float64(dtype):
    logits, labels = problem(512, 4096, dtype)
    got = token_log_probs_and_entropy(logits.cuda(), labels.cuda(), 0.8, chunk_size=100)
    for a, b in zip(got, plain(logits.double(), labels, 0.8), strict=True):
        torch.testing.assert_close(a.cpu().double(), b, rtol=0, atol=2e-5)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_log_probs_from_half_hidden_states_on_a_gpu_do_not_round_the_logits():
    """Within float32's rounding of the exact products of the halves, where logits rounded to bf16 are .1 off."""
    draw = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(n, 256, generator=draw).bfloat16() for n in (300, 4096))
    labels = torch.randint(4096, (300,), generator=draw)
    got = token_log_probs_from_hidden(hidden.cuda(), weight.cuda(), labels.cuda(), chunk_size=100)
    exact = (hidden.double() @ weight.double().T).log_softmax(-1).gather(1, labels[:, None])[:, 0]
    torch.testing.assert_close(got.cpu().double(), exact, rtol=0, atol=1e-3)
