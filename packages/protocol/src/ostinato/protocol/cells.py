"""Numpy columns and the cells of object columns: making, comparing and copying them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import is_dataclass
from typing import Any

import numpy as np
import torch

from ostinato.protocol.errors import ColumnTypeError


def object_array(cells: Any) -> np.ndarray:
    """Put cells into a 1-D object array, whatever they are.

    `np.array([[1, 2], [3, 4]], dtype=object)` would be 2-D and fail to join ragged cells later.

    Args:
        cells: sized iterable of anything.

    Returns:
        (len(cells),) object.
    """
    return np.fromiter(cells, dtype=object, count=len(cells))


def as_array(name: str, value: Any) -> np.ndarray:
    """Make a numpy column.

    Args:
        name: the column's name, for errors.
        value: list or tuple (becomes a 1-D object array, always) or array. Text arrays become object arrays, since
            their dtype holds the longest text; object arrays of more dimensions become 1-D with lists as cells; numeric
            arrays (bool, integer, float, complex) are shared as they are, in native byte order.

    Returns:
        (B,) object or (B, ...) numeric.

    Raises:
        ColumnTypeError: no rows, a dtype without a place here, or another type.
    """
    if isinstance(value, list | tuple):
        return object_array(value)
    if isinstance(value, torch.Tensor):
        raise ColumnTypeError(f"column {name!r}: a tensor is no numpy column; pass it under `tensors`")
    if not isinstance(value, np.ndarray) or isinstance(value, np.ma.MaskedArray):
        raise ColumnTypeError(
            f"column {name!r}: expected a list or a numpy array with one entry a row, got {type(value).__name__}; "
            "convert it with list(...) or numpy.asarray(...)"
        )
    if value.ndim == 0:
        raise ColumnTypeError(f"column {name!r}: a 0-dimensional array has no rows; repeat the value once a row")
    if value.dtype.kind in "OUS":
        if value.dtype.kind == "O" and value.ndim == 1:
            return value
        return object_array(value.tolist())
    if value.dtype.kind not in "biufc":
        raise ColumnTypeError(
            f"column {name!r}: numpy columns hold objects or numbers, got dtype {value.dtype}; convert it to int64, or "
            "to objects with .astype(object)"
        )
    return value.astype(value.dtype.newbyteorder("="), copy=False)


def same(a: Any, b: Any) -> bool:
    """Compare two cells or meta values; NaN equals NaN, True is not 1, containers are compared item by item.

    Args:
        a: anything.
        b: anything.

    Returns:
        Whether both say the same.
    """
    if a is b:
        return True
    if isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor):
        return isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) and same_tensor(a, b)
    if isinstance(a, np.ndarray) or isinstance(b, np.ndarray):
        return isinstance(a, np.ndarray) and isinstance(b, np.ndarray) and same_array(a, b)
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return a.keys() == b.keys() and all(same(value, b[key]) for key, value in a.items())
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        if isinstance(a, list) != isinstance(b, list) or len(a) != len(b):
            return False
        return all(same(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, bool | np.bool_) != isinstance(b, bool | np.bool_):
        return False
    if is_dataclass(a) and type(a) is type(b):
        return same(vars(a), vars(b))
    if a != a and b != b:
        return True
    return bool(a == b)


def same_array(a: np.ndarray, b: np.ndarray) -> bool:
    """Compare two arrays: shape, dtype and values; NaN equals NaN."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if a.dtype.kind == "O":
        return all(map(same, a.ravel(), b.ravel()))
    return np.array_equal(a, b, equal_nan=a.dtype.kind in "fc")


def same_tensor(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Compare two strided tensors: shape, dtype, device and values; NaN equals NaN."""
    if a.is_nested or b.is_nested:
        return a.is_nested and b.is_nested and same(list(a.unbind()), list(b.unbind()))
    if a.shape != b.shape or a.dtype != b.dtype or a.device != b.device:
        return False
    a, b = a.detach(), b.detach()
    if torch.equal(as_bytes(a), as_bytes(b)):
        return True
    if not (a.is_floating_point() or a.is_complex()):
        return False
    if a.element_size() == 1:  # float8 has no comparison
        a, b = a.float(), b.float()
    return bool(((a == b) | ((a != a) & (b != b))).all())


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """View a strided tensor's values as bytes: (numel * itemsize,) uint8; copies where it is not contiguous."""
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    # Tensors of one element or none may keep any stride, which `view` would refuse.
    return plain.as_strided((plain.numel(),), (1,)).view(torch.uint8)


def copy_containers(value: Any) -> Any:
    """Copy dicts and lists all the way down and share what lies in them."""
    if isinstance(value, dict):
        return {key: copy_containers(item) for key, item in value.items()}
    if isinstance(value, list):
        flat = not any(issubclass(kind, dict | list) for kind in set(map(type, value)))
        return list(value) if flat else [copy_containers(item) for item in value]
    return value
