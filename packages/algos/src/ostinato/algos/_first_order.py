"""Backward passes written by hand, whose own derivative does not exist."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from ostinato.algos.errors import SecondOrderError


def first_order(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Refuse to run a Function's `backward` where a derivative of what it gives is wanted.

    PyTorch's `once_differentiable` hangs its refusal on the gradients alone, from where no way leads back to the
    inputs: a gradient of the gradient with respect to them passes it by, and lacks what flows through here.

    Args:
        backward: `backward(ctx, *grad_outputs)`.

    Raises:
        SecondOrderError: Gradients are taken with `create_graph=True`.
    """

    @functools.wraps(backward)
    def run(ctx: Any, *grad_outputs: Any) -> Any:
        # Traced into what a caller compiles, it is PyTorch's to refuse, as for anything compiled.
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            raise SecondOrderError(
                "ostinato.algos: log-probabilities, entropies and KL that are computed in chunks have a first "
                "derivative only, and create_graph=True asks for a second one. Leave it out, or write the loss with "
                "`logits.log_softmax(-1)`."
            )
        return backward(ctx, *grad_outputs)

    return run
