"""What the tests of DataProto share: a batch with every kind of column, and a column's rows as plain values."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from ostinato.protocol import DataProto


@pytest.fixture
def full() -> Callable[..., DataProto]:
    """Makes a batch with every kind of column; 5 rows unless told otherwise."""

    def make(n: int = 5) -> DataProto:
        return DataProto.from_dict(
            tensors={
                "ids": torch.arange(n * 2).reshape(n, 2),
                "logp": torch.linspace(0, 1, n, dtype=torch.bfloat16),
                "ragged": [torch.arange(i % 3) for i in range(n)],
            },
            non_tensors={"text": [f"t{i}" for i in range(n)], "num": np.arange(n, dtype=np.int32)},
            meta_info={"step": 3, "nested": {"list": [1, 2]}},
        )

    return make


@pytest.fixture
def rows_of() -> Callable[[DataProto, str], list]:
    """The rows of a column of any kind, as plain values."""

    def read(x: DataProto, name: str) -> list:
        column = x.batch[name] if name in x.batch else x.non_tensor_batch[name]
        return [row.tolist() for row in column.unbind()] if isinstance(column, torch.Tensor) else column.tolist()

    return read
