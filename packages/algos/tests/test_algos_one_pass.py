"""What a GPU runs compiled equals what is written, and a host that cannot compile still answers."""

from __future__ import annotations

import itertools
import logging

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from ostinato.algos import (
    ArgumentError,
    token_entropy,
    token_log_probs,
    token_log_probs_and_entropy_from_hidden,
    token_log_probs_from_hidden,
    token_sum_pi_squared,
    token_sum_pi_squared_from_hidden,
)
from ostinato.algos._one_pass import in_one_pass
from ostinato.algos.logprob import chunk_gradient, chunk_statistics, chunk_sum_pi_squared

gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")


class OnAGpu(torch.Tensor):
    """A tensor of the host that says it lies on a GPU."""

    is_cuda = True  # pyright: ignore[reportAssignmentType, reportIncompatibleMethodOverride]


def chunk(rows=5, vocabulary=37, dtype=torch.float32):
    draw = torch.Generator().manual_seed(0)
    logits = torch.randn(rows, vocabulary, generator=draw).to(dtype)
    logits[0, 3] = float("-inf")
    labels = torch.randint(4, vocabulary, (rows,), generator=draw)
    return logits, labels, torch.randn(rows, generator=draw), torch.randn(rows, generator=draw)


def traced(function):
    torch.compiler.reset()
    return torch.compile(function.__wrapped__, backend="aot_eager", fullgraph=True)


def test_chunk_functions_say_the_same_compiled():
    logits, labels, grad, grad_entropies = chunk()
    statistics, gradient, squares = (traced(f) for f in (chunk_statistics, chunk_gradient, chunk_sum_pi_squared))
    for temperature, entropy in itertools.product((1.0, 0.7), (False, True)):
        got, want = (f(logits, labels, temperature, entropy) for f in (statistics, chunk_statistics))
        torch.testing.assert_close(got, want)
        entropies, given = (want[1], grad_entropies) if entropy else (None, None)
        arguments = (logits, labels, temperature, grad, entropies, given, torch.float32)
        torch.testing.assert_close(gradient(*arguments), chunk_gradient(*arguments))
        torch.testing.assert_close(squares(logits, temperature), chunk_sum_pi_squared(logits, temperature))


@pytest.mark.parametrize("given", ["log-probabilities", "entropies", "both"])
def test_a_gradient_is_that_of_autograd(given):
    logits, labels, grad, grad_entropies = chunk(dtype=torch.float64)
    logits.requires_grad_()
    log_p = (logits / 0.7).log_softmax(-1)
    chosen = log_p.gather(1, labels[:, None])[:, 0]
    entropies = -torch.where(log_p > -torch.inf, log_p.exp() * log_p.clamp(min=-1e9), 0.0).sum(1)
    one, other = (
        g if given in (name, "both") else None
        for g, name in ((grad, "log-probabilities"), (grad_entropies, "entropies"))
    )
    total = logits.new_zeros(())
    if one is not None:
        total = total + (chosen * one).sum()
    if other is not None:
        total = total + (entropies * other).sum()
    (want,) = torch.autograd.grad(total, logits)
    got = chunk_gradient(logits.detach(), labels, 0.7, one, entropies.detach(), other, torch.float64)
    torch.testing.assert_close(got, want.nan_to_num())


def test_a_function_is_compiled_on_a_gpu_only(monkeypatch):
    calls = []

    def compile(function, **_):
        calls.append("compiled")
        return lambda *arguments: ("compiled", function(*arguments))

    monkeypatch.setattr(torch, "compile", compile)
    double = in_one_pass(lambda x, factor: x * factor)
    assert double(torch.tensor(3), 2) == 6
    assert calls == []
    assert double(torch.tensor(3).as_subclass(OnAGpu), 2) == ("compiled", 6)
    assert double(torch.tensor(4).as_subclass(OnAGpu), 2) == ("compiled", 8)
    assert calls == ["compiled"]


def test_a_host_that_cannot_compile_is_told_once_and_computes(monkeypatch, caplog):
    tries = []

    def compile(function, **_):
        def run(*_):
            tries.append(function)
            raise RuntimeError("Failed to find C compiler\nand more")

        return run

    monkeypatch.setattr(torch, "compile", compile)
    double = in_one_pass(lambda x, factor: x * factor)
    with caplog.at_level(logging.WARNING):
        assert [double(torch.tensor(n).as_subclass(OnAGpu), 2) for n in (1, 2, 3)] == [2, 4, 6]
    assert len(tries) == 1
    assert len(caplog.messages) == 1
    assert "runs uncompiled and slower (RuntimeError: Failed to find C compiler)" in caplog.text


def test_a_function_is_compiled_for_more_kinds_of_arguments_than_pytorch_allows_at_once(monkeypatch, caplog):
    """Two temperatures with and without entropy, a last chunk of one position: more than 8, and none runs slower."""
    torch.compiler.reset()
    made, compile = [], torch.compile

    def backend(graph, _):
        made.append(graph)
        return graph

    monkeypatch.setattr(torch, "compile", lambda function, **options: compile(function, backend=backend, **options))

    @in_one_pass
    def scaled(x, factor, plus):
        return x * factor + plus

    for dtype, factor, plus, rows in itertools.product((torch.float32, torch.float64), (1.0, 0.7), (0, 1), (3, 4, 1)):
        x = torch.ones(rows, 2, dtype=dtype)
        torch.testing.assert_close(
            scaled(x.as_subclass(OnAGpu), factor, plus).as_subclass(torch.Tensor), x * factor + plus
        )
    assert len(made) > 8
    assert "uncompiled" not in caplog.text


def test_a_caller_that_is_compiled_takes_the_chunks_in():
    """As on a GPU, with tensors that hold nothing, and without a break in the caller's graph."""
    torch.compiler.reset()
    caller = torch.compile(token_log_probs_and_entropy_from_hidden, backend="eager", fullgraph=True)
    with FakeTensorMode():
        hidden, weight = (torch.empty(n, 6, device="cuda", requires_grad=True) for n in (7, 5))
        labels = torch.empty(7, dtype=torch.long, device="cuda")
        assert [x.shape for x in caller(hidden, weight, labels, 0.7, chunk_size=3)] == [(7,), (7,)]


def test_a_caller_that_is_compiled_for_any_temperature_has_it_checked():
    torch.compiler.reset()
    logits, labels, *_ = chunk()
    compiled = torch.compile(token_log_probs, backend="aot_eager", fullgraph=True, dynamic=True)
    for temperature in (0.7, 1.3, 1.0):
        torch.testing.assert_close(compiled(logits, labels, temperature), token_log_probs(logits, labels, temperature))
    for temperature in (0.0, -1.0, float("inf"), float("nan")):
        with pytest.raises(ArgumentError, match="finite number above 0"):
            token_log_probs(logits, labels, temperature)


def test_an_entropy_of_what_is_no_number_is_none():
    """It was 0: a comparison with nan is false. A token out of the vocabulary still adds 0."""
    logits, *_ = chunk()
    logits[1, 2], logits[2, 5] = float("nan"), float("inf")
    assert token_entropy(logits).isnan().tolist() == [False, True, True, False, False]


def test_autocast_leaves_float64_hidden_states_alone():
    draw = torch.Generator().manual_seed(1)
    hidden, weight = (torch.randn(n, 8, generator=draw, dtype=torch.float64) for n in (7, 19))
    labels = torch.randint(19, (7,), generator=draw)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = token_log_probs_from_hidden(hidden, weight, labels)
        torch.testing.assert_close(got, token_log_probs(hidden @ weight.T, labels))


def test_memory_that_runs_out_is_no_fault_of_the_compiler(monkeypatch):
    def compile(function, **_):
        def run(*_):
            raise torch.OutOfMemoryError("CUDA out of memory")

        return run

    monkeypatch.setattr(torch, "compile", compile)
    with pytest.raises(torch.OutOfMemoryError):
        in_one_pass(lambda x: x)(torch.tensor(1).as_subclass(OnAGpu))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_sum_pi_squared_from_hidden_is_that_of_the_logits(dtype):
    draw = torch.Generator().manual_seed(1)
    hidden, weight = (torch.randn(n, 8, generator=draw).to(dtype) for n in (7, 19))
    got = token_sum_pi_squared_from_hidden(hidden, weight, 0.9, chunk_size=3)
    torch.testing.assert_close(got, token_sum_pi_squared(hidden @ weight.T, 0.9))
    assert token_sum_pi_squared_from_hidden(hidden[:0], weight).shape == (0,)


@pytest.mark.gpu
@gpu
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_heads_of_halves_on_a_gpu_are_those_of_their_exact_products(temperature, caplog):
    """Compiled, with a last chunk that is smaller: answers and both gradients against float64 on the host."""
    draw = torch.Generator().manual_seed(0)
    hidden, weight = ((torch.randn(n, 256, generator=draw) * 0.3).bfloat16() for n in (1000, 4096))
    labels = torch.randint(4096, (1000,), generator=draw)
    given = torch.randn(2, 1000, generator=draw)
    found = []
    for device, dtype in (("cuda", torch.bfloat16), ("cpu", torch.float64)):
        h, w = (x.to(device, dtype).requires_grad_() for x in (hidden, weight))
        with caplog.at_level(logging.WARNING):
            answers = token_log_probs_and_entropy_from_hidden(h, w, labels.to(device), temperature, chunk_size=300)
            total = sum((a * g.to(a)).sum() for a, g in zip(answers, given, strict=True))
            grads = torch.autograd.grad(total, (h, w))
        found.append([x.detach().double().cpu() for x in (*answers, *grads)])
    assert "torch.compile failed" not in caplog.text
    got, want = found
    for name, a, b, bound in zip(
        ("log p", "H", "dhidden", "dweight"), got, want, (1e-5, 1e-5, 8e-3, 8e-3), strict=True
    ):
        assert (a - b).norm() <= bound * b.norm(), name
