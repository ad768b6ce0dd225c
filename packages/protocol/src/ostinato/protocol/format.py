"""The pickle-free format: a batch as one safetensors file.

    8 bytes     length n of the header, little-endian
    n bytes     header, JSON: tensor name -> {"dtype", "shape", "data_offsets"}, and "__metadata__"
    the rest    the tensors' bytes end to end, little-endian, row-major, the widest dtypes first

Any safetensors reader reads it. Tensor names say what they are (a column's own name follows the first slash):

    column/NAME     a dense tensor column or a numeric array, (B, ...)
    values/NAME     the rows of a jagged column end to end; offsets/NAME, (B + 1,) I64, where each begins and ends
    cells/NAME      an object column: UTF-8 JSON, one list with one entry a row

`__metadata__` (strings, as safetensors wants):

    format          "ostinato.dataproto"
    version         "1"; a reader refuses a version that it does not know
    rows            number of rows
    columns         JSON: [[name, kind], ...] in order; kind is "tensor", "array", "cells" or "jagged:D" (D: ragged dim)
    meta            JSON: meta_info without metrics
    metrics         JSON: null, or name -> [value, reduction, weight]
    crc32           8 hex digits: CRC-32 of the header without this entry (JSON, keys sorted, no spaces, ASCII), then of
                    the tensors' bytes

JSON here holds text, numbers, booleans, null, lists and dicts with text keys. NaN and infinities, which JSON lacks, are
`{"$": "nan"}`, `{"$": "inf"}`, `{"$": "-inf"}`; a dict that has a key "$" itself is `{"$": "dict", "of": {...}}`.
"""

from __future__ import annotations

import json
import mmap
import os
import struct
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ostinato.protocol import jagged
from ostinato.protocol.cells import as_bytes, object_array
from ostinato.protocol.errors import (
    CorruptedError,
    ForeignFormatError,
    TruncatedError,
    UnknownVersionError,
    UnserializableError,
    WireError,
)
from ostinato.protocol.json_cells import from_json, to_json
from ostinato.protocol.meta import METRICS
from ostinato.protocol.metrics import Metric

FORMAT = "ostinato.dataproto"
VERSION = "1"

_CODES: dict[torch.dtype, str] = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.int16: "I16",
    torch.uint16: "U16",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int32: "I32",
    torch.uint32: "U32",
    torch.float32: "F32",
    torch.int64: "I64",
    torch.uint64: "U64",
    torch.float64: "F64",
    torch.complex64: "C64",
}
_DTYPES = {code: dtype for dtype, code in _CODES.items()}
_ARRAY_CODES = {
    np.dtype(name): code
    for name, code in {
        "bool": "BOOL", "uint8": "U8", "int8": "I8", "int16": "I16", "uint16": "U16", "float16": "F16", "int32": "I32",
        "uint32": "U32", "float32": "F32", "int64": "I64", "uint64": "U64", "float64": "F64", "complex64": "C64",
    }.items()
}  # fmt: skip
_ARRAY_DTYPES = {code: dtype for dtype, code in _ARRAY_CODES.items()}

_LONGEST_HEADER = 1 << 32

Chunk = bytes | np.ndarray
Decoded = tuple[dict[str, torch.Tensor], dict[str, np.ndarray], dict[str, Any], int]


class _Writer:
    """Collects tensors by name."""

    def __init__(self) -> None:
        self.entries: dict[str, tuple[str, tuple[int, ...], np.ndarray]] = {}

    def tensor(self, column: str, key: str, tensor: torch.Tensor) -> None:
        if tensor.dtype not in _CODES:
            raise _no_dtype(column, tensor.dtype)
        self.entries[key] = (_CODES[tensor.dtype], tuple(tensor.shape), as_bytes(tensor.cpu()).numpy())

    def array(self, column: str, key: str, array: np.ndarray) -> None:
        if array.dtype not in _ARRAY_CODES:
            raise _no_dtype(column, array.dtype)
        octets = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        self.entries[key] = (_ARRAY_CODES[array.dtype], array.shape, octets)

    def layout(self) -> tuple[dict[str, Any], list[np.ndarray]]:
        """Header entries and buffers; widest first, so that every tensor is aligned to its dtype."""
        header, buffers, end = {}, [], 0
        for key, (code, shape, octets) in sorted(self.entries.items(), key=lambda e: (-_width(e[1][0]), e[0])):
            begin, end = end, end + octets.size
            header[key] = {"dtype": code, "shape": list(shape), "data_offsets": [begin, end]}
            buffers.append(octets)
        return header, buffers


def _width(code: str) -> int:
    return _DTYPES[code].itemsize


def _no_dtype(column: str, dtype: object) -> UnserializableError:
    return UnserializableError(
        f"column {column!r}: dtype {dtype} has no place in the format {FORMAT} {VERSION}; convert it "
        f"to one of {', '.join(sorted(str(d).removeprefix('torch.') for d in _CODES))}"
    )


def encode(
    tensors: Mapping[str, torch.Tensor], arrays: Mapping[str, np.ndarray], meta: Mapping[str, Any], num_rows: int
) -> list[Chunk]:
    """Write a batch.

    Args:
        tensors: tensor columns, on any device.
        arrays: numpy columns.
        meta: meta entries.
        num_rows: rows of the batch.

    Returns:
        The file in pieces, in order; columns are not copied.

    Raises:
        UnserializableError: a dtype, cell or meta entry that the format does not hold; the text names it.
    """
    writer, columns = _Writer(), []
    for name, column in tensors.items():
        if jagged.is_jagged(column):
            values, offsets, dim = jagged.unpacked(column)
            writer.tensor(name, f"values/{name}", values)
            writer.tensor(name, f"offsets/{name}", offsets)
            columns.append([name, f"jagged:{dim}"])
        else:
            writer.tensor(name, f"column/{name}", column)
            columns.append([name, "tensor"])
    for name, column in arrays.items():
        if column.dtype.kind == "O":
            text = _dumps([to_json(f"column {name!r}, row {i}", cell) for i, cell in enumerate(column)])
            writer.array(name, f"cells/{name}", np.frombuffer(text, dtype=np.uint8))
            columns.append([name, "cells"])
        else:
            writer.array(name, f"column/{name}", column)
            columns.append([name, "array"])
    header, buffers = writer.layout()
    header["__metadata__"] = {
        "format": FORMAT,
        "version": VERSION,
        "rows": str(num_rows),
        "columns": _dumps(columns).decode(),
        "meta": _dumps(to_json("meta_info", {k: v for k, v in meta.items() if k != METRICS})).decode(),
        "metrics": _dumps(_metrics_to_json(meta)).decode(),
    }
    header["__metadata__"]["crc32"] = _checksum(header, buffers)
    text = _dumps(header)
    text += b" " * (-len(text) % 8)
    return [struct.pack("<Q", len(text)), text, *buffers]


def _dumps(value: Any) -> bytes:
    return json.dumps(value, sort_keys=isinstance(value, dict), separators=(",", ":"), allow_nan=False).encode("ascii")


def _metrics_to_json(meta: Mapping[str, Any]) -> Any:
    if METRICS not in meta:
        return None
    told = {}
    for name, metric in meta[METRICS].items():
        where = f"metric {name!r}"
        if not isinstance(metric, Metric):
            raise UnserializableError(f"{where}: expected a Metric, got {type(metric).__name__}")
        value = list(metric.value) if isinstance(metric.value, tuple) else metric.value
        told[name] = [value, metric.reduction, metric.weight]
    return to_json("metrics", told)


def _checksum(header: Mapping[str, Any], buffers: list[Any]) -> str:
    plain = {k: v for k, v in header["__metadata__"].items() if k != "crc32"}
    crc = zlib.crc32(_dumps({**header, "__metadata__": plain}))
    for octets in buffers:
        crc = zlib.crc32(octets, crc)
    return f"{crc:08x}"


def decode(data: memoryview) -> Decoded:
    """Read what `encode` wrote.

    Args:
        data: the whole file.

    Returns:
        Tensor columns, numpy columns, meta and the row count; nothing shares `data`.

    Raises:
        ForeignFormatError: no header of this format.
        UnknownVersionError: another version.
        TruncatedError: the header tells of more bytes than there are.
        CorruptedError: checksum or structure do not fit.
    """
    data = data.cast("B")
    header, body = _open(data)
    metadata = header["__metadata__"]
    if metadata.get("crc32") != _checksum(header, [body]):
        raise CorruptedError(
            "the checksum does not fit: bytes were changed after the batch was written; write it again"
        )
    try:
        return _read(header, body)
    except (KeyError, ValueError, TypeError, RuntimeError) as error:
        raise CorruptedError(
            f"the checksum fits but the content makes no batch ({error}); its writer is at fault"
        ) from error


def _open(data: memoryview) -> tuple[dict[str, Any], memoryview]:
    """Header and body, as far as they can be trusted before the checksum is looked at."""
    if len(data) < 8:
        raise TruncatedError(f"a DataProto has at least 8 bytes, got {len(data)}")
    (length,) = struct.unpack("<Q", data[:8])
    foreign = f"these bytes are not a DataProto: no header of format {FORMAT!r} (to_bytes and save write it)"
    if length > _LONGEST_HEADER or (len(data) > 8 and data[8:9] != b"{"):
        raise ForeignFormatError(foreign)
    if length > len(data) - 8:
        raise TruncatedError(f"the header tells of {length} bytes, {len(data) - 8} are there; the end is missing")
    try:
        header = json.loads(bytes(data[8 : 8 + length]))
        metadata = header["__metadata__"]
        form, version = metadata["format"], metadata["version"]
        size = max((int(entry["data_offsets"][1]) for key, entry in header.items() if key != "__metadata__"), default=0)
    except (ValueError, KeyError, TypeError, IndexError, RecursionError) as error:
        if FORMAT.encode() in bytes(data[8 : 8 + length]):
            raise CorruptedError(f"the header of format {FORMAT!r} cannot be read ({error}); write it again") from error
        raise ForeignFormatError(foreign) from error
    if form != FORMAT:
        raise ForeignFormatError(f"{foreign}; the header says {form!r}")
    if version != VERSION:
        raise UnknownVersionError(
            f"{FORMAT} version {version!r} is not known here, version {VERSION!r} is; upgrade the reader"
        )
    body = data[8 + length :]
    if len(body) < size:
        raise TruncatedError(f"the columns take {size} bytes, {len(body)} are there; the end is missing")
    return header, body


def _read(header: dict[str, Any], body: memoryview) -> Decoded:
    metadata = header["__metadata__"]

    def octets(key: str) -> tuple[np.ndarray, str, list[int]]:
        entry = header[key]
        begin, end = entry["data_offsets"]
        return np.frombuffer(body[begin:end], dtype=np.uint8).copy(), entry["dtype"], entry["shape"]

    def tensor(key: str) -> torch.Tensor:
        values, code, shape = octets(key)
        return (
            torch.from_numpy(values).view(_DTYPES[code]).reshape(shape)
            if values.size
            else torch.empty(shape, dtype=_DTYPES[code])
        )

    tensors, arrays = {}, {}
    for name, kind in json.loads(metadata["columns"]):
        if name in tensors or name in arrays:
            raise ValueError(f"column {name!r} comes twice")
        if kind == "tensor":
            tensors[name] = tensor(f"column/{name}")
        elif kind == "array":
            values, code, shape = octets(f"column/{name}")
            arrays[name] = values.view(_ARRAY_DTYPES[code]).reshape(shape)
        elif kind == "cells":
            text = octets(f"cells/{name}")[0].tobytes()
            arrays[name] = object_array([from_json(cell) for cell in json.loads(text)])
        else:
            values, offsets = tensor(f"values/{name}"), tensor(f"offsets/{name}")
            tensors[name] = jagged.checked(name, values, offsets, int(kind.removeprefix("jagged:")))
    num_rows = int(metadata["rows"])
    if any(len(column) != num_rows for column in (tensors | arrays).values()):
        raise ValueError(f"not every column has {num_rows} rows")
    meta = from_json(json.loads(metadata["meta"]))
    metrics = from_json(json.loads(metadata["metrics"]))
    if metrics is not None:
        meta[METRICS] = {name: Metric(*parts) for name, parts in metrics.items()}
    return jagged.share_offsets(tensors), arrays, meta, num_rows


def write_file(path: str | os.PathLike[str], chunks: list[Chunk]) -> None:
    """Write a file beside its place and rename it.

    Args:
        path: the file to make or replace.
        chunks: its content in pieces.
    """
    path = Path(path)
    beside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with beside.open("wb") as file:
            for chunk in chunks:
                file.write(chunk)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise


def read_file(path: str | os.PathLike[str]) -> Decoded:
    """Read what `write_file` wrote.

    Args:
        path: the file.

    Returns:
        As `decode`.

    Raises:
        WireError: as `decode`, with the path in the text.
    """
    with Path(path).open("rb") as file:
        try:
            if not os.fstat(file.fileno()).st_size:
                raise TruncatedError("the file is empty")
            # The map closes with its last view, which an error's traceback may keep for a while.
            return decode(memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)))
        except WireError as error:
            raise type(error)(f"{os.fspath(path)}: {error}") from error
