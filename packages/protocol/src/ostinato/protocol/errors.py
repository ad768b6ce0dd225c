"""Named refusals of `ostinato.protocol`.

Every error is a `ProtocolError` and also the stdlib error that a caller would expect in its place. All of them carry
one text, so they survive pickling.
"""

from __future__ import annotations


class ProtocolError(Exception):
    """Root of every error that this wheel raises."""

    def __str__(self) -> str:
        # KeyError would print the repr of the text.
        return str(self.args[0]) if self.args else type(self).__name__


class MissingColumnError(ProtocolError, KeyError):
    """A column was asked for that the batch does not hold."""


class ColumnConflictError(ProtocolError, ValueError):
    """Two columns claim one name and differ."""


class ColumnTypeError(ProtocolError, TypeError):
    """A value cannot be a column: wrong type, layout or dtype."""


class ColumnMismatchError(ProtocolError, ValueError):
    """Columns that must be alike have another dtype, width, layout or device, or are missing in one part."""


class RowCountError(ProtocolError, ValueError):
    """Columns or batches that must have equally many rows do not."""


class RowIndexError(ProtocolError, IndexError):
    """An index names no row, or is of no kind that can name rows."""


class RowsElsewhereError(ProtocolError, AttributeError):
    """Something was asked of a handle to rows elsewhere that only rows here can answer."""


class ArgumentError(ProtocolError, ValueError):
    """An argument is outside what the operation takes."""


class EmptyConcatError(ProtocolError, ValueError):
    """There was nothing to concatenate."""


class MetaConflictError(ProtocolError, ValueError):
    """Two batches hold different values under one key of `meta_info`."""


class MetricError(ProtocolError, ValueError):
    """A metric cannot be made, or two of one name cannot be merged."""


class WireError(ProtocolError, ValueError):
    """Bytes cannot be written or read; root of the errors of `to_bytes`, `from_bytes`, `save` and `load`."""


class UnserializableError(WireError, TypeError):
    """A column or meta entry has no form in the pickle-free format."""


class ForeignFormatError(WireError):
    """The bytes are not a DataProto."""


class UnknownVersionError(WireError):
    """The bytes were written in a version of the format that this code does not read."""


class TruncatedError(WireError, EOFError):
    """The bytes end before the batch does."""


class CorruptedError(WireError):
    """The bytes were changed after they were written."""
