"""The columns of a batch: making them, looking at them, and every operation on names.

`DataProto` adds the operations on rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Self

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase

from ostinato.protocol import payload
from ostinato.protocol.cells import as_array, same
from ostinato.protocol.errors import (
    ColumnConflictError,
    ColumnTypeError,
    RowCountError,
)
from ostinato.protocol.jagged import share_offsets
from ostinato.protocol.meta import METRICS, checked_meta, copy_meta, merge_meta
from ostinato.protocol.metrics import Metric
from ostinato.protocol.names import column_name, new_names, wanted_names


class ColumnStore:
    """Named columns of equally many rows, and the operations that move whole columns.

    Attributes:
        batch: tensor columns.
        non_tensor_batch: numpy columns.
        meta_info: values for the batch as a whole.
    """

    batch: TensorDict
    non_tensor_batch: dict[str, np.ndarray]
    meta_info: dict[str, Any]

    def __init__(
        self,
        batch: TensorDictBase | Mapping[str, Any] | None = None,
        non_tensor_batch: Mapping[str, Any] | None = None,
        meta_info: Mapping[str, Any] | None = None,
    ):
        """Check and wrap columns; see `from_dict` for what is taken.

        Raises:
            ColumnTypeError: a value cannot be a column.
            ColumnConflictError: a name is both a tensor and a numpy column.
            RowCountError: columns have unlike numbers of rows.
            MetricError: "metrics" is no dict of name -> Metric.
        """
        counts = {}
        if isinstance(batch, TensorDictBase):
            if not batch.batch_dims:
                raise RowCountError(
                    "DataProto: the TensorDict has batch_size [], so no rows; build it with batch_size=[num_rows]"
                )
            counts["batch.batch_size"] = batch.batch_size[0]
        tensors = {column_name(name): payload.as_tensor(name, value) for name, value in _items("batch", batch)}
        arrays = {
            column_name(name): as_array(name, value) for name, value in _items("non_tensor_batch", non_tensor_batch)
        }
        if both := tensors.keys() & arrays.keys():
            raise ColumnConflictError(
                f"DataProto: {sorted(both)} are given as tensors and as non-tensors; a name is one column: rename one"
            )
        counts |= {name: payload.num_rows(column) for name, column in (tensors | arrays).items()}
        if len(set(counts.values())) > 1:
            told = ", ".join(f"{name} {count}" for name, count in counts.items())
            raise RowCountError(f"DataProto: all columns need the same number of rows, got {told}")
        self._fill(share_offsets(tensors), arrays, copy_meta(checked_meta(meta_info)), next(iter(counts.values()), 0))

    def _fill(
        self, tensors: Mapping[str, torch.Tensor], arrays: dict[str, np.ndarray], meta: dict[str, Any], num_rows: int
    ) -> None:
        self.batch = TensorDict(dict(tensors), batch_size=[num_rows])
        self.non_tensor_batch = arrays
        self.meta_info = meta

    @classmethod
    def _of(
        cls,
        tensors: Mapping[str, torch.Tensor],
        arrays: Mapping[str, np.ndarray],
        meta: dict[str, Any],
        num_rows: int,
    ) -> Self:
        """Wrap columns that are known to be in order."""
        made = cls.__new__(cls)
        made._fill(tensors, dict(arrays), meta, num_rows)
        return made

    @classmethod
    def from_dict(
        cls,
        tensors: Mapping[str, Any] | None = None,
        non_tensors: Mapping[str, Any] | None = None,
        meta_info: Mapping[str, Any] | None = None,
    ) -> Self:
        """Build a batch.

        Args:
            tensors: name -> (B, ...) tensor, shared; jagged tensor; or list of B tensors of shape (length, ...), which
                become a jagged column whether or not their lengths are equal.
            non_tensors: name -> list, which becomes a (B,) object column whatever its cells are, or numpy array.
            meta_info: small JSON-like values; "metrics" is reserved for a dict of name -> Metric.

        Returns:
            The batch; without any column it has no rows.

        Raises:
            ColumnTypeError: a value cannot be a column.
            ColumnConflictError: a name is given twice.
            RowCountError: columns have unlike numbers of rows.
            MetricError: "metrics" is no dict of name -> Metric.
        """
        return cls(tensors, non_tensors, meta_info)

    @classmethod
    def from_single_dict(cls, data: Mapping[str, Any], meta_info: Mapping[str, Any] | None = None) -> Self:
        """Build a batch from one dict: tensors and lists of tensors are tensor columns, all else numpy columns.

        Args:
            data: name -> column, as in `from_dict`.
            meta_info: as in `from_dict`.

        Returns:
            The batch.

        Raises:
            ColumnTypeError: a value cannot be a column.
            RowCountError: columns have unlike numbers of rows.
        """
        columns = dict(_items("data", data))
        tensors = {name: value for name, value in columns.items() if _holds_tensors(value)}
        return cls(tensors, {name: value for name, value in columns.items() if name not in tensors}, meta_info)

    def __len__(self) -> int:
        return self.batch.batch_size[0]

    def __repr__(self) -> str:
        told = [f"{name} {payload.describe(column)}" for name, column in self._columns().items()]
        return f"{type(self).__name__}({len(self)} rows; {', '.join(told) or 'no columns'}; meta {self.meta_info!r})"

    def __eq__(self, other: object) -> bool:
        """Whether rows, columns, dtypes, devices, values and meta are the same; NaN equals NaN, order is no matter."""
        if not isinstance(other, ColumnStore):
            return NotImplemented
        mine, theirs = self._columns(), other._columns()
        return (
            len(self) == len(other)
            and mine.keys() == theirs.keys()
            and all(payload.same(column, theirs[name]) for name, column in mine.items())
            and same(self.meta_info, other.meta_info)
        )

    __hash__ = None  # type: ignore[assignment]

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of all columns, tensors first."""
        return (*self._tensors(), *self.non_tensor_batch)

    @property
    def metrics(self) -> dict[str, Metric]:
        """The metrics that came with this batch; write through `with_metrics`."""
        return self.meta_info.get(METRICS, {})

    def _tensors(self) -> dict[str, torch.Tensor]:
        return dict(self.batch.items())  # type: ignore[arg-type]

    def _arrays(self) -> dict[str, np.ndarray]:
        """The numpy columns, checked: a plain dict takes anything that is written into it."""
        for name, column in self.non_tensor_batch.items():
            if not isinstance(column, np.ndarray) or column.shape[:1] != (len(self),):
                raise RowCountError(
                    f"column {name!r} was written into non_tensor_batch as {type(column).__name__} of shape "
                    f"{np.shape(column)} in a batch of {len(self)} rows; add columns with union instead"
                )
        return self.non_tensor_batch

    def _columns(self) -> dict[str, payload.Column]:
        return {**self._tensors(), **self._arrays()}

    def _names(self, where: str, names: Iterable[str]) -> dict[str, None]:
        """Names in order, each once; a lone string is one name."""
        return wanted_names(where, names, self.columns, f"this batch of {len(self)} rows")

    def select(self, columns: Iterable[str]) -> Self:
        """Keep these columns alone.

        Args:
            columns: names of tensor and numpy columns; none keeps the row count only.

        Returns:
            Their batch, with all meta entries.

        Raises:
            MissingColumnError: a name is no column.
        """
        return self._select(self._names("select", columns), copy_meta(self.meta_info))

    def _select(self, names: Iterable[str], meta: dict[str, Any]) -> Self:
        tensors, arrays = self._tensors(), self._arrays()
        return self._of(
            {name: tensors[name] for name in names if name in tensors},
            {name: arrays[name] for name in names if name in arrays},
            meta,
            len(self),
        )

    def get(self, columns: Iterable[str] | None = None) -> Self:
        """Bring rows here: a `select`, since they are here already; a handle to rows elsewhere answers the same call.

        Args:
            columns: names; None takes all.

        Returns:
            The batch of these columns.

        Raises:
            MissingColumnError: a name is no column.
        """
        return self.select(self.columns if columns is None else columns)

    def drop(self, columns: Iterable[str]) -> Self:
        """Leave these columns out.

        Args:
            columns: names.

        Returns:
            The batch of all other columns.

        Raises:
            MissingColumnError: a name is no column.
        """
        names = self._names("drop", columns)
        return self._select([name for name in self.columns if name not in names], copy_meta(self.meta_info))

    def pop(self, columns: Iterable[str]) -> Self:
        """Take columns out of this batch, which is changed; the metrics stay.

        Args:
            columns: names.

        Returns:
            The batch of the columns taken.

        Raises:
            MissingColumnError: a name is no column; nothing was taken.
        """
        names = self._names("pop", columns)
        taken = self._select(names, copy_meta(self.meta_info, metrics=False))
        rest = self.drop(names)
        self.batch, self.non_tensor_batch = rest.batch, rest.non_tensor_batch
        return taken

    def rename(self, names: Mapping[str, str]) -> Self:
        """Give columns new names; two may swap theirs.

        Args:
            names: old name -> new name.

        Returns:
            The batch under the new names.

        Raises:
            MissingColumnError: an old name is no column.
            ColumnConflictError: two columns would have one name.
        """
        new_names(names, self.columns, f"this batch of {len(self)} rows")
        return self._of(
            {names.get(name, name): column for name, column in self._tensors().items()},
            {names.get(name, name): column for name, column in self.non_tensor_batch.items()},
            copy_meta(self.meta_info),
            len(self),
        )

    def union(self, other: ColumnStore) -> Self:
        """Put the columns of two batches of the same rows side by side.

        Args:
            other: batch of equally many rows; one without rows and columns brings its meta entries alone. A column that
                both hold must be equal (NaN equals NaN).

        Returns:
            The batch of all columns and meta entries; metrics are merged by their reductions.

        Raises:
            RowCountError: unlike numbers of rows.
            ColumnConflictError: both hold a column of one name, and they differ.
            MetaConflictError: both hold a meta entry of one key, and they differ.
        """
        mine, theirs = self._columns(), other._columns()
        if len(self) != len(other) and (mine or len(self)) and (theirs or len(other)):
            raise RowCountError(
                f"union: batches of {len(self)} rows ({', '.join(mine)}) and {len(other)} rows ({', '.join(theirs)}); "
                "bring both to the same rows first"
            )
        for name in mine.keys() & theirs.keys():
            if not payload.same(mine[name], theirs[name]):
                raise ColumnConflictError(
                    f"union: column {name!r} is a {payload.describe(mine[name])} in one batch and a "
                    f"{payload.describe(theirs[name])} in the other, and they differ; rename or drop one"
                )
        meta = merge_meta("union", [self.meta_info, other.meta_info])
        tensors = self._tensors() | {name: t for name, t in other._tensors().items() if name not in mine}
        arrays = {**self._arrays(), **{k: v for k, v in other._arrays().items() if k not in mine}}
        return self._of(share_offsets(tensors), arrays, meta, max(len(self), len(other)))

    def with_meta(self, **entries: Any) -> Self:
        """Set meta entries.

        Args:
            entries: key = value; a key that is there already gets the new value.

        Returns:
            The same columns with the entries set.

        Raises:
            MetricError: "metrics" is set to something else than a dict of name -> Metric.
        """
        meta = copy_meta(self.meta_info | checked_meta(entries))
        return self._of(self._tensors(), self._arrays(), meta, len(self))

    def with_metrics(self, metrics: Mapping[str, Metric]) -> Self:
        """Set the metrics.

        Args:
            metrics: name -> Metric; takes the place of those that are there.

        Returns:
            The same columns with these metrics alone.

        Raises:
            MetricError: no dict of name -> Metric.
        """
        return self.with_meta(**{METRICS: metrics})


def _items(where: str, columns: Any) -> Iterable[tuple[Any, Any]]:
    if columns is None:
        return ()
    if not isinstance(columns, Mapping | TensorDictBase):
        raise ColumnTypeError(f"DataProto: {where} must be a dict of name -> column, got {type(columns).__name__}")
    return columns.items()


def _holds_tensors(value: object) -> bool:
    if isinstance(value, list | tuple):
        return bool(value) and all(isinstance(row, torch.Tensor) for row in value)
    return isinstance(value, torch.Tensor)
