"""MDS folders, laid by hand; and, where ``mosaicml-streaming`` is installed, by that."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import os
import pickle
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from energon_lite.errors import EmptyDatasetError, MissingShardError, ShardFormatError, UsageError
from energon_lite.extras.formats.mds import MdsSource, open_source
from energon_lite.extras.formats.mds_values import decoder_of, fixed_size, ndarray_bytes
from energon_lite.storage.read.source import source_opener
from tests.servers import upload
from tests.tables_by_hand import write_mds

COLUMNS: dict[str, tuple[str, int | None]] = {"text": ("str", None), "n": ("int", 8), "x": ("ndarray:int16:2", 4)}


def sample(number: int) -> list[bytes]:
    return [f"té {number}".encode(), np.int64(number).tobytes(), np.array([number, -1], "<i2").tobytes()]


def value(number: int) -> dict[str, Any]:
    return {"text": f"té {number}", "n": number, "x": [number, -1]}


def plain(found: Any) -> dict[str, Any]:
    return {name: one.tolist() if isinstance(one, np.ndarray) else one for name, one in found.items()}


SHARDS = [[sample(0), sample(1)], [sample(2)], [], [sample(3), sample(4), sample(5)]]


def test_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = open_source(str(write_mds(tmp_path, COLUMNS, SHARDS)), "train")
    assert len(source) == 6 and source.part_names == {"text", "n", "x"}
    assert [plain(source.read(index)) for index in range(6)] == [value(number) for number in range(6)]
    found = pickle.loads(pickle.dumps(source)).read_many([5, 0, 2, 5])
    assert found["n"] == [5, 0, 2, 5] and found["text"][1] == "té 0"
    assert source.select(frozenset(["n"])).read(3) == {"n": 3} and source.read_many([])["n"] == []
    names = [source.shard_names[source.locate(index)[0]][-7:] for index in (1, 2, 3)]
    assert names == ["000.mds", "001.mds", "003.mds"]
    found["x"][0][0] = 77
    monkeypatch.chdir(tmp_path)
    for path in (str(tmp_path / "index.json"), "index.json"):
        assert open_source(path, "val").identity == source.identity


def test_folders_of_splits(tmp_path: Path) -> None:
    write_mds(tmp_path / "train", COLUMNS, SHARDS)
    write_mds(tmp_path / "validation", COLUMNS, SHARDS[:1])
    assert len(open_source(str(tmp_path), "train")) == 6 and len(open_source(str(tmp_path), "val")) == 2
    with pytest.raises(EmptyDatasetError, match="nor a folder for split 'test'") as error:
        open_source(str(tmp_path), "test")
    assert "train, validation" in str(error.value.fix)
    assert source_opener(str(tmp_path)) is not None
    everything = pickle.loads(pickle.dumps(open_source(str(tmp_path), ""))).select(frozenset(["n"]))  # for `lint`
    assert everything.read_many(range(8))["n"] == [*range(6), 0, 1]
    assert everything.shard_names[-1] == f"validation/{open_source(str(tmp_path), 'val').shard_names[-1]}"
    write_mds(tmp_path / "test", {"n": COLUMNS["n"]}, [])
    write_mds(tmp_path / "other", {"n": COLUMNS["n"]}, [[[sample(0)[1]]]])
    with pytest.raises(ShardFormatError, match="do not have the same columns"):
        open_source(str(tmp_path), "")


@pytest.mark.parametrize("compression", ["gz", "bz2", "zstd", "zstd:7", "br"])
def test_compressed_shards_are_unpacked_into_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compression: str
) -> None:
    monkeypatch.setenv("ENERGON_LITE_CACHE", str(tmp_path / "cache"))
    pack: Any = {"gz": gzip.compress, "bz2": bz2.compress}.get(compression)
    if pack is None:
        codec = pytest.importorskip("pyarrow").Codec("zstd" if "zstd" in compression else "brotli")
        pack = partial(codec.compress, asbytes=True)
    folder = write_mds(tmp_path / "mds", COLUMNS, SHARDS, pack, compression)
    source = MdsSource(str(folder))
    assert [plain(source.read(index)) for index in range(6)] == [value(number) for number in range(6)]
    first, *others = sorted((tmp_path / "cache").rglob("*.mds"), key=lambda path: path.name)
    assert len(others) == 2  # the empty one was not needed
    (folder / first.name).write_bytes(bytes(first.stat().st_size))
    os.utime(folder / first.name, (1, 1))  # older than the packed one
    first.write_bytes(b"cut")
    assert plain(MdsSource(str(folder)).read(0)) == value(0)
    (folder / first.name).write_bytes(b"cut")
    assert plain(MdsSource(str(folder)).read(0)) == value(0)
    for packed in folder.glob("*.mds.*"):
        packed.unlink()
    assert MdsSource(str(folder)).read(4)["n"] == 4
    monkeypatch.setenv("ENERGON_LITE_CACHE", str(tmp_path / "other"))
    with pytest.raises(MissingShardError):
        MdsSource(str(folder)).read(4)


def test_behind_a_url(tmp_path: Path) -> None:
    source = open_source(f"{upload(write_mds(tmp_path, COLUMNS, SHARDS), 'mds')}/index.json", "train")
    assert source.read_many([4, 1])["n"] == [4, 1]


def test_encodings() -> None:
    def check(encoding: str, data: bytes, expected: Any) -> None:
        decode = decoder_of(encoding)
        assert decode is not None
        found = decode(data)
        assert type(found) is type(expected)
        assert (found == expected).all() if isinstance(expected, np.ndarray) else found == expected

    check("bytes", b"ab", b"ab")
    check("str_int", b"123456789012345678901", 123456789012345678901)
    check("str_float", b"1.5", 1.5)
    check("str_decimal", b"1.10", Decimal("1.10"))
    check("json", b'{"a": [1]}', {"a": [1]})
    check("uint8", b"\xff", np.uint8(255))
    check("float16", np.float16(1.5).tobytes(), np.float16(1.5))
    check("ndarray", bytes([33, 2 << 2, 1, 2]) + np.array([5, 6], "<i4").tobytes(), np.array([[5, 6]], "i4"))
    check("ndarray:uint8", bytes([1 << 2 | 1, 3, 0, 7, 8, 9]), np.array([7, 8, 9], "u1"))
    head = np.array([0, 2, 1, 2], "<u4").tobytes()
    check("list[jpeg]", head + b"abb", [b"a", b"bb"])
    check("jpeg_array", head[4:] + b"abb", [b"a", b"bb"])
    for name in ("png", "jpeg", "pkl"):
        check(name, b"as it is", b"as it is")
    assert decoder_of("other") is decoder_of("ndarray:complex64") is decoder_of("str:3") is None
    sizes = {"int": 8, "uint16": 2, "ndarray:int64:2,3": 48, "ndarray": None, "str": None}
    assert {encoding: fixed_size(encoding) for encoding in sizes} == sizes
    for array in (np.arange(256, dtype="u2"), np.zeros(1 << 16, "u1"), np.zeros((1, 2, 3), "f4")):
        data = ndarray_bytes(array)
        assert data is not None and ndarray_bytes(array.astype(array.dtype.newbyteorder(">"))) == data
        check("ndarray", data, array)
    assert ndarray_bytes(np.zeros(0)) is ndarray_bytes(np.array(3)) is ndarray_bytes(np.array([True])) is None
    if np.lib.NumpyVersion(np.__version__) >= "2.0.0":  # before, an array has at most 32 dimensions
        assert ndarray_bytes(np.zeros((1,) * 63)) is not ndarray_bytes(np.zeros((1,) * 64)) is None


def test_files_get_the_extension_by_which_they_are_decoded_or_refused(tmp_path: Path) -> None:
    columns: Any = {"image": ("jpeg", None), "jpg": ("png", None), "old": ("pkl", None)}
    source = MdsSource(str(write_mds(tmp_path, columns, [[[b"1", b"2", b"3"]]])))
    assert source.read(0) == {"image.jpg": b"1", "jpg": b"2", "old.pkl": b"3"}


def test_damaged_folders(tmp_path: Path) -> None:
    folder = write_mds(tmp_path, COLUMNS, SHARDS)
    index, shard = folder / "index.json", folder / "shard.00000.mds"
    text, data = index.read_text(), shard.read_bytes()
    changes = {
        "JSONDecodeError": text[:-5],
        "version 1": text.replace('{"version": 2', '{"version": 1'),
        "unknown encoding 'other'": text.replace('"str"', '"other"'),
        "outside of the folder": text.replace("shard.00000", "../shard.00000"),
        "negative": text.replace('"samples": 2', '"samples": -2'),
        "negative sizes": text.replace('"bytes": ', '"bytes": -'),
        "format 'xyz'": text.replace('"mds"', '"xyz"'),
        "AttributeError|TypeError|KeyError": json.dumps({"version": 2, "shards": [3]}),
    }
    for words, broken in changes.items():
        index.write_text(broken)
        with pytest.raises(ShardFormatError, match=words) as error:
            MdsSource(str(folder))
        assert error.value.where == str(index)
    index.write_text(text)
    bad_head, bad_offset = data[:3] + b"\x09" + data[4:], data[:8] + b"\xff\xff\0\0" + data[12:]
    for broken_data in (data[:-1], bad_head, bad_offset, b""):
        shard.write_bytes(broken_data)
        with pytest.raises(ShardFormatError) as error:
            MdsSource(str(folder)).read(0)
        assert str(error.value.where).startswith(str(shard))
    end = data.index("té 0".encode())
    shard.write_bytes(data[:end] + b"\xff" + data[end + 1 :])
    source = MdsSource(str(folder))
    with pytest.raises(ShardFormatError, match="sample 0 cannot be read: UnicodeDecodeError"):
        source.read(0)
    assert source.read(1)["n"] == 1  # the others are as they were


def test_compressed_shards_that_are_damaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ENERGON_LITE_CACHE", str(tmp_path / "cache"))
    folder = write_mds(tmp_path / "mds", COLUMNS, SHARDS[:1], gzip.compress, "gz")
    packed = folder / "shard.00000.mds.gz"
    packed.write_bytes(packed.read_bytes()[:20] + b"\0" * 30 + packed.read_bytes()[50:])
    with pytest.raises(ShardFormatError) as error:
        MdsSource(str(folder)).read(0)
    assert error.value.where == str(packed)
    index = folder / "index.json"
    write_mds(folder, COLUMNS, SHARDS[:1], gzip.compress, "gz")
    index.write_text(index.read_text().replace('.mds", "bytes": ', '.mds", "bytes": 1'))
    with pytest.raises(ShardFormatError, match="unpacks to other than"):
        MdsSource(str(folder)).read(0)
    index.write_text(index.read_text().replace('"compression": "gz"', '"compression": "rar"'))
    with pytest.raises(UsageError, match="compression 'rar' is unknown"):
        MdsSource(str(folder)).read(0)


@pytest.mark.slow
@pytest.mark.parametrize("compression", [None, "zstd", "gz", "snappy"])
def test_what_streaming_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compression: str | None) -> None:
    streaming = pytest.importorskip("streaming")
    from PIL import Image

    monkeypatch.setenv("ENERGON_LITE_CACHE", str(tmp_path / "cache"))
    image = Image.fromarray(np.arange(48, dtype=np.uint8).reshape(4, 4, 3))
    values = {
        "a": ("int", -3), "b": ("str", "é"), "c": ("bytes", b"\0"), "d": ("ndarray", np.ones((2, 3), "f4")),
        "e": ("ndarray:int64", np.arange(4)), "f": ("uint16", np.uint16(9)), "g": ("str_int", 3**50),
        "h": ("json", [None]),
        "i": ("pil", image), "j": ("png", image), "k": ("list[pil]", [image]),
        "l": ("ndarray:int8:2", np.ones(2, "i1")),
        "m": ("float64", np.float64(0.1)), "n": ("str_decimal", Decimal("1.1")),
    }  # fmt: skip
    columns = {name: encoding for name, (encoding, _) in values.items()}
    options: Any = {"columns": columns, "compression": compression, "size_limit": 2000}
    with streaming.MDSWriter(out=str(tmp_path / "mds"), **options) as out:
        for _ in range(9):
            out.write({name: one for name, (_, one) in values.items()})
    source = MdsSource(str(tmp_path / "mds"))
    assert len(source) == 9 and len(source.shards) > 1
    for index in (8, 0):
        found = source.read(index)
        found["j"] = Image.open(io.BytesIO(found.pop("j.png")))
        for name, (_, expected) in values.items():
            assert np.array_equal(np.asarray(found[name]), np.asarray(expected)), name
