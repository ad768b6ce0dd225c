"""DataProto: the one object that every stage passes on."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Sequence
from os import PathLike
from typing import TYPE_CHECKING, Any, Self, overload

import numpy as np
import torch

from ostinato.protocol import payload, rows, wire
from ostinato.protocol.errors import ArgumentError, EmptyConcatError
from ostinato.protocol.jagged import share_offsets
from ostinato.protocol.meta import METRICS, copy_meta, merge_meta
from ostinato.protocol.store import ColumnStore

if TYPE_CHECKING:
    from ostinato.protocol.future import DataProtoFuture


class DataProto(ColumnStore):
    """Rows of tensors, rows of anything else, and a few values that hold for all rows.

    Every operation returns a new DataProto that shares storage with its operand and changes nothing; `pop` alone takes
    columns out of its operand. A name is one column, tensor or not.

    `chunk` and `split` give the metrics to their first piece, since together the pieces are the batch and a metric
    counts once; indexing and mini-batches carry none; every other operation keeps them.

    Attributes:
        batch: tensor columns, (B, ...) dense or (B, *, ...) jagged, in a flat TensorDict of batch size (B,); it is
            there, and knows B, even when there are no tensor columns.
        non_tensor_batch: numpy columns, (B,) object or (B, ...) numeric.
        meta_info: small JSON-like values, and under "metrics" a dict of name -> Metric.
    """

    def chunk(self, n: int) -> list[Self]:
        """Cut into n pieces whose sizes differ by at most one, longer ones first; `concat(chunk(n))` is this batch.

        Args:
            n: number of pieces, at least 1; more than rows give empty pieces.

        Returns:
            n batches that are views; the first has the metrics.

        Raises:
            ArgumentError: n is not a whole number >= 1.
        """
        return self._cut(rows.chunk_bounds(len(self), n))

    def split(self, size: int) -> list[Self]:
        """Cut into pieces of `size` rows, the last one of what is left; no rows give one empty piece.

        Args:
            size: rows a piece, at least 1.

        Returns:
            Batches that are views; the first has the metrics.

        Raises:
            ArgumentError: size is not a whole number >= 1.
        """
        return self._cut(rows.split_bounds(len(self), size))

    @overload
    def union(self, other: ColumnStore) -> Self: ...
    @overload
    def union(self, other: DataProtoFuture) -> DataProtoFuture: ...
    def union(self, other: ColumnStore | DataProtoFuture) -> Self | DataProtoFuture:
        """Put the columns of two batches of the same rows side by side.

        Args:
            other: batch of equally many rows; one without rows and columns brings its meta entries alone. A column that
                both hold must be equal (NaN equals NaN). Of a `DataProtoFuture` the rows stay where they are.

        Returns:
            The batch of all columns and meta entries, metrics merged by their reductions; a future if `other` is one.

        Raises:
            RowCountError: unlike numbers of rows.
            ColumnConflictError: both hold a column of one name, and they differ.
            MetaConflictError: both hold a meta entry of one key, and they differ.
        """
        if isinstance(other, ColumnStore):
            return super().union(other)
        from ostinato.protocol.future import DataProtoFuture  # which stands on this module

        return DataProtoFuture.of(self).union(other)

    def _cut(self, bounds: rows.Bounds) -> list[Self]:
        pieces = payload.cut(self._tensors(), self._arrays(), bounds)
        return [
            self._of(tensors, arrays, copy_meta(self.meta_info, metrics=i == 0), bounds[i][1] - bounds[i][0])
            for i, (tensors, arrays) in enumerate(pieces)
        ]

    @classmethod
    def concat(cls, parts: Iterable[DataProto]) -> Self:
        """Put batches of the same columns end to end.

        Args:
            parts: at least one batch; all agree in columns, dtypes, widths and devices, and in the meta entries that
                they share.

        Returns:
            All rows, with every meta entry; metrics are merged by their reductions. One part alone shares storage. If a
            part is a `DataProtoFuture`, so is the result.

        Raises:
            EmptyConcatError: no parts.
            ArgumentError: no list of batches.
            ColumnMismatchError: parts differ in columns or in what their columns are.
            MetaConflictError: parts differ in a meta entry.
        """
        parts = parts_of(parts)
        if not parts:
            raise EmptyConcatError("concat: no parts, so the columns are not known; keep one empty piece (chunk does)")
        if not all(isinstance(part, ColumnStore) for part in parts):
            from ostinato.protocol.future import DataProtoFuture

            return DataProtoFuture.concat(parts)  # type: ignore[return-value]
        tensors, arrays = payload.join([(part._tensors(), part._arrays()) for part in parts])
        return cls._of(tensors, arrays, merge_meta("concat", [part.meta_info for part in parts]), sum(map(len, parts)))

    def _take(self, index: np.ndarray, *, metrics: bool) -> Self:
        tensors, arrays = payload.take(self._tensors(), self._arrays(), index)
        return self._of(tensors, arrays, copy_meta(self.meta_info, metrics=metrics), len(index))

    def __getitem__(self, item: int | slice | Sequence[int] | np.ndarray | torch.Tensor) -> Self:
        """Pick rows: an int gives a batch of one row; a slice, a mask or a list of row numbers a batch of those.

        Args:
            item: negative numbers count from the end; a mask has one boolean a row.

        Returns:
            The rows, without metrics; slices of step 1 are views.

        Raises:
            RowIndexError: a row that does not exist, or something that names no rows.
        """
        picked = rows.selection(len(self), item)
        if isinstance(picked, slice):
            (piece,) = self._cut([(picked.start, picked.stop)])
            piece.meta_info.pop(METRICS, None)
            return piece
        return self._take(picked, metrics=False)

    def __iter__(self) -> Iterator[Self]:
        return (self[i] for i in range(len(self)))

    def reorder(self, indices: Sequence[int] | np.ndarray | torch.Tensor) -> Self:
        """Put rows in another order; `x.reorder(p).reorder(argsort(p))` is x.

        Args:
            indices: row i of the result is row indices[i]; names each row exactly once.

        Returns:
            The rows in that order.

        Raises:
            RowIndexError: a row is missing, named twice or does not exist.
        """
        return self._take(rows.permutation(len(self), indices), metrics=True)

    def repeat(self, n: int, interleave: bool = True) -> Self:
        """Repeat every row n times.

        Args:
            n: how often, at least 1.
            interleave: a a b b where true, a b a b where false.

        Returns:
            n times as many rows; object cells are shared between repeats.

        Raises:
            ArgumentError: n is not a whole number >= 1.
        """
        return self._take(rows.repeat_index(len(self), n, interleave), metrics=True)

    def pad_to_multiple(self, k: int) -> tuple[Self, int]:
        """Fill rows up to a multiple of k by starting again at row 0, as often as needed.

        Args:
            k: at least 1.

        Returns:
            The padded batch and the number of rows added, in [0, k), for `unpad`. A batch without rows stays so.

        Raises:
            ArgumentError: k is not a whole number >= 1.
        """
        index, pad = rows.padding_index(len(self), k)
        return (self._take(index, metrics=True) if pad else self.get()), pad

    def unpad(self, pad: int) -> Self:
        """Take the last `pad` rows away; the inverse of `pad_to_multiple`.

        Args:
            pad: in [0, rows].

        Returns:
            The rows before them, as views.

        Raises:
            ArgumentError: pad is not a whole number in that range.
        """
        pad = rows.whole_number("unpad", "pad", pad, 0)
        if pad > len(self):
            raise ArgumentError(
                f"unpad: cannot take {pad} rows from a batch of {len(self)}; give what pad_to_multiple gave"
            )
        return self._cut([(0, len(self) - pad)])[0]

    def make_iterator(self, mini_batch_size: int, epochs: int = 1, shuffle_seed: int | None = None) -> Iterator[Self]:
        """Go through the rows in mini-batches.

        Args:
            mini_batch_size: rows a mini-batch; an epoch's last one holds what is left.
            epochs: passes over all rows.
            shuffle_seed: gives every epoch its own order, the same on every machine; None keeps the rows' order.

        Returns:
            Iterator of batches without metrics; a batch without rows yields nothing.

        Raises:
            ArgumentError: a size or count below 1.
        """
        bounds = rows.split_bounds(len(self), mini_batch_size) if len(self) else []
        epochs = rows.whole_number("make_iterator", "epochs", epochs, 1)
        orders = (rows.epoch_order(len(self), shuffle_seed, epoch) for epoch in range(epochs))
        return (
            self[start:stop] if order is None else self[order[start:stop]] for order in orders for start, stop in bounds
        )

    def to(self, device: str | int | torch.device, non_blocking: bool = False) -> Self:
        """Bring tensor columns to a device.

        Args:
            device: as in `torch.Tensor.to`; tensors that are there already are shared.
            non_blocking: as in `torch.Tensor.to`.

        Returns:
            The same rows; numpy columns stay in host memory.
        """
        tensors = payload.move(self._tensors(), torch.device(device), non_blocking)
        return self._of(tensors, self._arrays(), copy_meta(self.meta_info), len(self))

    def __copy__(self) -> Self:
        return self.get()

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        tensors = share_offsets({name: column.clone() for name, column in self._tensors().items()})
        return self._of(tensors, copy.deepcopy(self._arrays(), memo), copy.deepcopy(self.meta_info, memo), len(self))

    def __reduce_ex__(self, protocol: int) -> tuple[Any, ...]:  # type: ignore[override]
        return wire.reduce(type(self), self._tensors(), self._arrays(), self.meta_info, len(self), int(protocol))

    def to_bytes(self) -> bytes:
        """Write the batch in the versioned, pickle-free format of `ostinato.protocol.wire`.

        Returns:
            A safetensors file's bytes; `from_bytes` gives an equal batch in host memory.

        Raises:
            UnserializableError: a column's dtype, a cell or a meta entry has no form there.
        """
        return b"".join(wire.encode(self._tensors(), self._arrays(), self.meta_info, len(self)))

    @classmethod
    def from_bytes(cls, data: bytes | bytearray | memoryview) -> Self:
        """Read what `to_bytes` wrote.

        Args:
            data: the bytes; nothing of the batch shares them.

        Returns:
            The batch, tensors in host memory.

        Raises:
            ForeignFormatError: these bytes are something else.
            UnknownVersionError: written in a version that this code does not read.
            TruncatedError: the end is missing.
            CorruptedError: bytes were changed.
        """
        return cls._of(*wire.decode(memoryview(data)))

    def save(self, path: str | PathLike[str]) -> None:
        """Write the bytes of `to_bytes` to a file, beside it first and then renamed, so that it is there whole or not.

        Args:
            path: file to make or replace; its folder exists.

        Raises:
            UnserializableError: as in `to_bytes`; the file is as it was.
        """
        wire.write_file(path, wire.encode(self._tensors(), self._arrays(), self.meta_info, len(self)))

    @classmethod
    def load(cls, path: str | PathLike[str]) -> Self:
        """Read what `save` wrote.

        Args:
            path: the file.

        Returns:
            The batch, tensors in host memory; the file is not kept open.

        Raises:
            WireError: as in `from_bytes`, with the path in the text.
        """
        return cls._of(*wire.read_file(path))


def parts_of(parts: Any) -> list[Any]:
    """Read what `concat` is given.

    Raises:
        ArgumentError: one batch, whose iteration would give its rows, or no iterable.
    """
    if isinstance(parts, Iterable) and not hasattr(parts, "chunk"):
        return list(parts)
    raise ArgumentError(f"concat: expected a list of batches, got {type(parts).__name__}; put it into brackets")
