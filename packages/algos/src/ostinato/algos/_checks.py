"""Shape and range checks that read no tensor value (a value would have to come back from the device)."""

from __future__ import annotations

import math
from collections.abc import Sized

from torch import Tensor

from ostinato.algos.errors import ArgumentError, ShapeError


def check_same_shape(where: str, **tensors: Tensor | None) -> None:
    """Refuse tensors of unlike shape; the first one is the measure. None stands for an argument that is not there."""
    present = [(name, tensor) for name, tensor in tensors.items() if tensor is not None]
    first_name, first = present[0]
    for name, tensor in present[1:]:
        if tensor.shape != first.shape:
            raise ShapeError(
                f"{where}: {name} has shape {tuple(tensor.shape)}, but {first_name} has {tuple(first.shape)}; "
                "pass tensors of one shape (one entry a response token)"
            )


def check_token_floats(where: str, name: str, tensor: Tensor) -> None:
    """Refuse anything that is not (rows, response tokens) of a floating dtype.

    Results have the dtype of what they are computed from: of whole numbers they would be cut off to whole numbers.
    """
    if tensor.dim() != 2:
        raise ShapeError(f"{where}: {name} must be (B, R), rows by response tokens; it has shape {tuple(tensor.shape)}")
    if not tensor.is_floating_point():
        raise ArgumentError(f"{where}: {name} must be floating, but it is {tensor.dtype}; convert it with .float()")


def check_rows(where: str, name: str, labels: Sized, num_rows: int) -> None:
    """Refuse a label list, or a per-row tensor, whose length is not the number of rows."""
    if len(labels) != num_rows:
        raise ShapeError(f"{where}: {name} has {len(labels)} entries, but there are {num_rows} rows; give one a row")


def check_positive(where: str, **numbers: float) -> None:
    """Refuse numbers that are not finite and above 0."""
    for name, number in numbers.items():
        if not 0 < number < math.inf:  # as a compiler can read it, where the number is one that it does not fix
            raise ArgumentError(f"{where}: {name} must be a finite number above 0, got {number}")


def check_not_negative(where: str, **numbers: float) -> None:
    """Refuse numbers that are not finite or are below 0."""
    for name, number in numbers.items():
        if not 0 <= number < math.inf:
            raise ArgumentError(f"{where}: {name} must be a finite number, 0 or more, got {number}")
