"""A batch on its way: what travels, what arrives, and who may write to it."""

from __future__ import annotations

import enum
import json
import pickle
import struct
import warnings
import zlib

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ostinato.protocol import DataProto, Metric, errors, shared_views
from ostinato.protocol.format import FORMAT, VERSION
from ostinato.protocol.testing import assert_equal


def _full(n=4):
    return DataProto.from_dict(
        {
            "ids": torch.arange(n * 3).reshape(n, 3),
            "half": torch.linspace(0, 1, n, dtype=torch.bfloat16),
            "flag": torch.arange(n) % 2 == 0,
            "ragged": [torch.arange(i, dtype=torch.int32) for i in range(n)],
        },
        {
            "text": [f"tëxt {i}" for i in range(n)],
            "cells": [{"k": [i, None, 1.5]} for i in range(n)],
            "num": np.arange(n),
        },
        {"step": 3, "metrics": {"loss": Metric.mean(0.5, 2)}},
    )


def _through_store(x):
    """Pickle as an object store does: buffers apart, mapped read-only into every reader."""
    buffers = []
    data = pickle.dumps(x, protocol=5, buffer_callback=buffers.append)
    return data, [bytes(buffer) for buffer in buffers]


# ---------------------------------------- pickle


def test_writers_do_not_change_shared_memory_and_torch_does_not_warn():
    """H-05: the second reader sees the old values."""
    data, store = _through_store(_full())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        first = pickle.loads(data, buffers=store)
        for name in ("ids", "half"):
            first.batch[name].add_(1)
        first.batch["ragged"].values().add_(1)
        first.non_tensor_batch["num"] += 1
        second = pickle.loads(data, buffers=store)
    assert_equal(second, _full())


def test_writable_buffers_are_copied_too():
    """H-05 where the store hands out writable memory, as multiprocessing's does, or the sender's own."""
    x = _full()
    buffers = []
    data = pickle.dumps(x, protocol=5, buffer_callback=buffers.append)
    for store in (buffers, [bytearray(buffer) for buffer in buffers]):
        pickle.loads(data, buffers=store).batch["ids"].add_(1)
        pickle.loads(data, buffers=store).non_tensor_batch["num"] += 1
        assert_equal(pickle.loads(data, buffers=store), _full())
    assert_equal(x, _full())


def test_shared_views_are_views_where_asked():
    """H-05: whoever promises not to write may look at the buffers themselves."""
    data, store = _through_store(_full())
    addresses = [np.frombuffer(buffer, dtype=np.uint8).ctypes.data for buffer in store]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with shared_views():
            every = pickle.loads(data, buffers=store)
        with shared_views(["ids"]):
            one = pickle.loads(data, buffers=store)
        none = pickle.loads(data, buffers=store)
    assert_equal(every, _full())
    assert every.batch["ids"].data_ptr() in addresses
    assert every.batch["ragged"].values().data_ptr() in addresses
    with pytest.raises(ValueError, match="read-only"):
        every.non_tensor_batch["num"] += 1
    assert one.batch["ids"].data_ptr() in addresses
    assert one.batch["half"].data_ptr() not in addresses
    assert none.batch["ids"].data_ptr() not in addresses
    del store, data
    assert_equal(every, _full())


def test_unaligned_shared_buffers_arrive_whole():
    x = DataProto.from_dict({"a": torch.arange(5.0)}, {"n": np.arange(5)})
    data, store = _through_store(x)
    odd = [memoryview(b"x" + buffer)[1:] for buffer in store]
    with shared_views():
        assert_equal(pickle.loads(data, buffers=odd), x)


@pytest.mark.parametrize("out_of_band", [True, False])
def test_a_view_travels_as_its_own_rows(out_of_band):
    """P-228: one row of a large batch does not drag the batch along, in cells either."""
    big = torch.zeros(1000, 1000)
    x = DataProto.from_dict(
        {"dense": big, "ragged": [torch.zeros(1000)] * 1000},
        {"num": np.zeros((1000, 1000)), "cells": [{"image": [row]} for row in big]},
    )
    for piece in (x[3], x[3:4], x[[3]], x.chunk(1000)[3], x[:0]):
        buffers = []
        data = pickle.dumps(piece, protocol=5, buffer_callback=buffers.append if out_of_band else None)
        assert len(data) + sum(len(bytes(buffer)) for buffer in buffers) < 30_000
        assert_equal(pickle.loads(data, buffers=buffers), piece)


def test_tensors_in_cells_arrive_private():
    x = DataProto.from_dict(
        non_tensors={"c": [{"t": torch.arange(3)}, (torch.ones(1, dtype=torch.bfloat16), "x"), None]}
    )
    data, store = _through_store(x)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        first = pickle.loads(data, buffers=store)
        first.non_tensor_batch["c"][0]["t"].add_(1)
    assert_equal(pickle.loads(data, buffers=store), x)
    assert type(first.non_tensor_batch["c"][1]) is tuple


def test_large_payloads_travel_out_of_band():
    x = DataProto.from_dict({"a": torch.zeros(1000)}, {"n": np.zeros(1000)})
    data, store = _through_store(x)
    assert len(data) < 1000
    assert sorted(map(len, store)) == [4000, 8000]


def test_a_pickled_batch_leaves_gradients_behind():
    x = DataProto.from_dict({"a": torch.ones(2, requires_grad=True) * 2})
    assert not pickle.loads(pickle.dumps(x)).batch["a"].requires_grad


def test_subclasses_stay_what_they_are():
    x = _Sub.from_dict({"a": torch.ones(2)})
    for y in (pickle.loads(pickle.dumps(x)), x[0], *x.chunk(2), _Sub.concat([x]), _Sub.from_bytes(x.to_bytes())):
        assert type(y) is _Sub


class _Sub(DataProto):
    pass


# ---------------------------------------- bytes


def _header(data):
    (length,) = struct.unpack("<Q", data[:8])
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def _written(header, body, *, right=True):
    metadata = header["__metadata__"]
    metadata.pop("crc32", None)

    def compact(value):
        return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()

    if right:
        metadata["crc32"] = f"{zlib.crc32(body, zlib.crc32(compact(header))):08x}"
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + body


def test_the_documented_format_can_be_written_by_hand():
    ids = np.arange(6, dtype="<i8").reshape(2, 3)
    cells = json.dumps([{"a": None}, "é"]).encode()
    header = {
        "column/ids": {"dtype": "I64", "shape": [2, 3], "data_offsets": [0, 48]},
        "cells/c": {"dtype": "U8", "shape": [len(cells)], "data_offsets": [48, 48 + len(cells)]},
        "__metadata__": {
            "format": "ostinato.dataproto",
            "version": "1",
            "rows": "2",
            "columns": '[["ids","tensor"],["c","cells"]]',
            "meta": '{"x":{"$":"nan"}}',
            "metrics": '{"m":[0.5,"mean",3]}',
        },
    }
    x = DataProto.from_bytes(_written(header, ids.tobytes() + cells))
    expected = DataProto.from_dict({"ids": torch.from_numpy(ids)}, {"c": [{"a": None}, "é"]}, {"x": float("nan")})
    assert_equal(x, expected.with_metrics({"m": Metric.mean(0.5, 3)}))


def test_a_safetensors_reader_reads_it():
    safetensors = pytest.importorskip("safetensors.torch")
    x = _full()
    read = safetensors.load(x.to_bytes())
    assert torch.equal(read["column/ids"], x.batch["ids"])
    assert torch.equal(read["column/half"], x.batch["half"])
    assert torch.equal(read["values/ragged"], x.batch["ragged"].values())
    assert read["offsets/ragged"].tolist() == [0, 0, 1, 3, 6]
    assert json.loads(bytes(read["cells/text"].tolist()))[1] == "tëxt 1"


def test_names_do_not_clash_whatever_they_are():
    x = DataProto.from_dict(
        {"a": [torch.ones(1)], "values/a": torch.ones(1), "offsets/a": torch.ones(1), "__metadata__": torch.ones(1)},
        {"cells/a": ["x"], 'ü/\n"': [1], "column/a": np.ones(1)},
    )
    assert_equal(DataProto.from_bytes(x.to_bytes()), x)


def test_bytes_are_private_copies():
    x = _full()
    data = bytearray(x.to_bytes())
    y = DataProto.from_bytes(data)
    data[:] = b"\0" * len(data)
    assert_equal(y, x)
    y.batch["ids"].add_(1)
    y.non_tensor_batch["num"] += 1
    assert_equal(DataProto.from_bytes(memoryview(x.to_bytes())), x)


def test_every_truncation_is_named():
    """Whatever is missing of the end, the error says so."""
    data = _full().to_bytes()
    for length in range(len(data)):
        with pytest.raises(errors.TruncatedError):
            DataProto.from_bytes(data[:length])


def test_every_changed_byte_is_named():
    data = _full(2).to_bytes()
    for place in range(len(data)):
        for flip in (1, 0x20, 0x80):
            broken = bytearray(data)
            broken[place] ^= flip
            with pytest.raises(errors.WireError):
                DataProto.from_bytes(broken)
    with pytest.raises(errors.CorruptedError, match="checksum"):
        DataProto.from_bytes(data + b"x")
    with pytest.raises(errors.CorruptedError, match="checksum"):
        DataProto.from_bytes(data[:-1] + bytes([data[-1] ^ 1]))


@given(st.binary(max_size=64))
def test_other_bytes_are_named(data):
    with pytest.raises(errors.WireError):
        DataProto.from_bytes(data)


def test_foreign_files_are_named():
    safetensors = pytest.importorskip("safetensors.torch")
    for data in (
        pickle.dumps(_full()),
        safetensors.save({"a": torch.ones(2)}),
        b"PK\x03\x04" + b"\0" * 40,
        b"{}" * 20,
        b"\xff" * 20,
    ):
        with pytest.raises(errors.ForeignFormatError, match="not a DataProto"):
            DataProto.from_bytes(data)


def test_unknown_versions_are_named():
    header, body = _header(_full().to_bytes())
    header["__metadata__"]["version"] = "2"
    with pytest.raises(errors.UnknownVersionError, match=rf"{FORMAT} version '2'.*'{VERSION}'"):
        DataProto.from_bytes(_written(header, body))


@pytest.mark.parametrize(
    "change",
    [
        lambda h: h["__metadata__"].update(rows="5"),
        lambda h: h["__metadata__"].update(rows="x"),
        lambda h: h["__metadata__"].update(columns='[["ids","tensor"],["ids","tensor"]]'),
        lambda h: h["__metadata__"].update(columns='[["gone","tensor"]]'),
        lambda h: h["__metadata__"].update(columns='[["ids","sparse"]]'),
        lambda h: h["__metadata__"].update(columns='[["ragged","jagged:7"]]'),
        lambda h: h["__metadata__"].update(meta='{"a":{"$":"pickle"}}'),
        lambda h: h["__metadata__"].update(meta="[" * 100_000),
        lambda h: h["__metadata__"].update(metrics='{"m":[1,"median",1]}'),
        lambda h: h["__metadata__"].pop("meta"),
        lambda h: h["column/ids"].update(shape=[5, 5]),
        lambda h: h["column/ids"].update(dtype="X9"),
        lambda h: h["column/ids"].update(data_offsets=[3, 98]),
        lambda h: h["offsets/ragged"].update(data_offsets=h["column/ids"]["data_offsets"], shape=[12]),
    ],
)
def test_well_signed_nonsense_is_named(change):
    header, body = _header(_full().to_bytes())
    change(header)
    with pytest.raises(errors.CorruptedError, match="no batch"):
        DataProto.from_bytes(_written(header, body))


class _Label(enum.IntEnum):
    A = 1


@pytest.mark.parametrize(
    "cell",
    [(1, 2), {1, 2}, b"x", np.float64(1.0), np.int64(1),
     np.ones(2), torch.ones(2), object(), {1: "a"}, {"a": {"b": (1,)}}, [[(1,)]], 1j, _Label.A],
)  # fmt: skip
def test_cells_without_a_form_are_refused_by_name(cell):
    """Nothing is converted in silence, and nothing is written."""
    x = DataProto.from_dict(non_tensors={"odd": ["fine", cell]})
    with pytest.raises(errors.UnserializableError, match=r"column 'odd', row 1") as caught:
        x.to_bytes()
    assert isinstance(caught.value, TypeError)
    with pytest.raises(errors.UnserializableError, match=r"meta_info, key 'odd'"):
        DataProto(meta_info={"odd": cell}).to_bytes()
    assert_equal(pickle.loads(pickle.dumps(x[0])), x[0])


@pytest.mark.parametrize("dtype", [torch.complex128])
def test_dtypes_without_a_form_are_refused_by_name(dtype):
    with pytest.raises(errors.UnserializableError, match=r"'odd'.*complex128"):
        DataProto.from_dict({"odd": torch.ones(2, dtype=dtype)}).to_bytes()
    with pytest.raises(errors.UnserializableError, match=r"'odd'.*complex128"):
        DataProto.from_dict(non_tensors={"odd": np.ones(2, dtype=complex)}).to_bytes()


# ---------------------------------------- files


def test_files_round_trip_and_are_written_beside_and_renamed(tmp_path):
    path = tmp_path / "batch.bin"
    x = _full()
    x.save(path)
    assert_equal(DataProto.load(str(path)), x)
    assert path.read_bytes() == x.to_bytes()
    x[:1].save(path)
    assert_equal(DataProto.load(path), x[:1].with_meta(step=3))
    assert [p.name for p in tmp_path.iterdir()] == ["batch.bin"]


def test_a_loaded_batch_does_not_hang_on_its_file(tmp_path):
    path = tmp_path / "batch.bin"
    _full().save(path)
    x = DataProto.load(path)
    path.write_bytes(b"\0" * path.stat().st_size)
    x.batch["ids"].add_(0)
    assert_equal(x, _full())


def test_a_failed_save_leaves_the_old_file_alone(tmp_path, monkeypatch):
    path = tmp_path / "batch.bin"
    _full().save(path)
    with pytest.raises(errors.UnserializableError):
        DataProto.from_dict(non_tensors={"a": [b"x"]}).save(path)
    monkeypatch.setattr("os.fsync", lambda _: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        _full(2).save(path)
    assert [p.name for p in tmp_path.iterdir()] == ["batch.bin"]
    assert_equal(DataProto.load(path), _full())


def test_errors_of_files_name_the_file(tmp_path):
    path = tmp_path / "batch.bin"
    path.write_bytes(b"")
    with pytest.raises(errors.TruncatedError, match=r"batch\.bin"):
        DataProto.load(path)
    path.write_bytes(_full().to_bytes()[:-1])
    with pytest.raises(errors.TruncatedError, match=r"batch\.bin"):
        DataProto.load(path)
    path.write_bytes(b"something else, longer than a header's length")
    with pytest.raises(errors.ForeignFormatError, match=r"batch\.bin"):
        DataProto.load(path)
    with pytest.raises(FileNotFoundError):
        DataProto.load(tmp_path / "none")
