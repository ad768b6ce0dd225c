"""Functions over a chunk of logits that a GPU runs as one kernel or two, through torch.compile."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

logger = logging.getLogger(__name__)

P = ParamSpec("P")
R = TypeVar("R")

VARIANTS = 64
"""How often one function is compiled; PyTorch's own limit of 8 is met by a second temperature or number type."""


def in_one_pass(function: Callable[P, R]) -> Callable[P, R]:
    """Run a function of tensors as it is written, but compiled where its first argument lies on a GPU.

    Written out, each operation reads and writes the whole chunk; compiled, they share a pass. The first call on a GPU
    takes seconds. A host that cannot compile (no C compiler, say) is told once a function, and runs it as it is written
    from then on; so does `TORCH_COMPILE_DISABLE=1`.

    Args:
        function: Of tensors and plain values, the first a tensor; it returns tensors or None.
    """
    compiled: Callable[P, R] | None = None
    compiles = True

    @functools.wraps(function)
    def run(*arguments: P.args, **named: P.kwargs) -> R:
        nonlocal compiled, compiles
        chunk: Any = arguments[0]
        # What a caller compiles takes the function in as it is written.
        if torch.compiler.is_compiling() or not (compiles and isinstance(chunk, Tensor) and chunk.is_cuda):
            return function(*arguments, **named)
        if compiled is None:
            compiled = torch.compile(function, fullgraph=True)
        try:
            with torch._dynamo.config.patch(recompile_limit=VARIANTS):
                return compiled(*arguments, **named)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # whatever a compiler may raise; an error of the function's own comes again below
            compiles = False
            logger.warning(
                "%s: torch.compile failed, it runs uncompiled and slower (%s: %s)",
                function.__qualname__,
                type(error).__name__,
                str(error).partition("\n")[0],
            )
            return function(*arguments, **named)

    return run
