"""Shapes and dtypes of the signatures, as names.

With jaxtyping installed the names are jaxtyping annotations, and a run-time type checker can check them (the tests do).
Without it they are plain `torch.Tensor`: nothing in this wheel needs jaxtyping to run.

Letters: B rows, R response length, N positions, V vocabulary, D hidden size, P prompt length.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable
from typing import TYPE_CHECKING, Any, TypeAlias

from torch import Tensor

if TYPE_CHECKING:
    from typing import Annotated as Float
    from typing import Annotated as Int
    from typing import Annotated as Shaped
else:
    try:
        from jaxtyping import Float, Int, Shaped
    except ImportError:

        class _AnyTensor:
            """Stands in for a jaxtyping dtype: any subscript is a plain tensor."""

            def __class_getitem__(cls, item: Any) -> Any:
                return Tensor

        Float = Int = Shaped = _AnyTensor

TokenFloats: TypeAlias = Float[Tensor, "B R"]  # noqa: F722
TokenMask: TypeAlias = Shaped[Tensor, "B R"]  # noqa: F722
TokenBools: TypeAlias = Shaped[Tensor, "B R"]  # noqa: F722
RowFloats: TypeAlias = Float[Tensor, "B"]  # noqa: F821
RowIndex: TypeAlias = Int[Tensor, "B"]  # noqa: F821
Scalar: TypeAlias = Float[Tensor, ""]  # noqa: F722
IntScalar: TypeAlias = Int[Tensor, ""]  # noqa: F722
AnyFloats: TypeAlias = Float[Tensor, "*S"]  # noqa: F722
AnyMask: TypeAlias = Shaped[Tensor, "*S"]  # noqa: F722
Reduced: TypeAlias = Shaped[Tensor, "..."]
Logits: TypeAlias = Float[Tensor, "N V"]  # noqa: F722
Hidden: TypeAlias = Float[Tensor, "N D"]  # noqa: F722
HeadWeight: TypeAlias = Float[Tensor, "V D"]  # noqa: F722
PositionFloats: TypeAlias = Float[Tensor, "N"]  # noqa: F821
PositionLabels: TypeAlias = Int[Tensor, "N"]  # noqa: F821

Labels: TypeAlias = Collection[Hashable]
"""One hashable label a row: a list, a tuple or a numpy array (object or not)."""
