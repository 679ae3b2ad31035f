from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from energon_lite.errors import DataIndexError, UsageError
from energon_lite.storage.index.column_file import column_folders
from energon_lite.storage.index.columns import Column, write_column
from energon_lite.storage.index.index_cache import open_index
from energon_lite.storage.index.packed_index import PackedIndex
from energon_lite.storage.prepare.prepare import prepare_dataset
from energon_lite.storage.read.webdataset import WebdatasetSource

VALUES = np.arange(10, dtype=np.int32) * 11


def prepare(folder: Path) -> None:
    prepare_dataset(folder, split_ratio="1,0,0", force_overwrite=True, sqlite=False)


def column_of(folder: Path, name: str = "length") -> Column:
    return WebdatasetSource.open(folder).column(name)


def test_as_an_array(data: Path) -> None:
    path = write_column(data, "length", VALUES)
    column = column_of(data)
    assert path == str(data / ".nv-meta/energon_lite.columns/length.col")
    assert (len(column), column.shape, column.dtype, column.name) == (10, (10,), np.int32, "length")
    assert np.asarray(column).tolist() == list(column) == VALUES.tolist()
    assert column[3] == column[np.int64(3)] == column[-7] == 33
    assert column[np.array([[9, 0], [-1, 4]])].tolist() == [[99, 0], [99, 44]]
    assert column[[]].tolist() == []
    for key in (10, -11, [0, 10]):
        with pytest.raises(IndexError):
            column[key]
    for key in ([True] * 10, 1.5, "a"):
        with pytest.raises(TypeError):
            column[key]


@given(st.integers(-12, 12) | st.none(), st.integers(-12, 12) | st.none(), st.integers(-3, 3).filter(bool))
def test_slices(ten: Path, start: int | None, stop: int | None, step: int) -> None:
    if not (ten / ".nv-meta").exists():
        prepare(ten)
        write_column(ten, "length", VALUES)
    for shards in (None, ["sub/c.tar", "a.tar", "b.tar"]):
        column = WebdatasetSource.open(ten, shards=shards).column("length")
        whole = np.asarray(column)
        assert column[start:stop:step].tolist() == whole[start:stop:step].tolist()


def test_the_fingerprint_is_that_of_the_values(data: Path) -> None:
    write_column(data, "length", VALUES)
    before = column_of(data).fingerprint
    part = WebdatasetSource.open(data, shards=["a.tar"])
    first = part.column("length").fingerprint
    write_column(data, "length", VALUES)
    assert column_of(data).fingerprint == before
    write_column(data, "length", np.append(VALUES[:-1], 0).astype(np.int32))
    assert column_of(data).fingerprint != before
    assert part.column("length").fingerprint == first  # another shard has changed


def test_a_column_that_is_not_there(data: Path) -> None:
    with pytest.raises(DataIndexError, match=r"no column 'length'\n[\s\S]*energon-lite measure"):
        column_of(data)
    write_column(data, "weight", VALUES / 7)
    with pytest.raises(DataIndexError, match="no column 'length'; it has weight"):
        column_of(data)
    assert column_of(data, "weight")[9] == 99 / 7


def test_a_shard_that_has_other_contents_of_the_same_shape(data: Path, make_tar: Callable[..., Path]) -> None:
    write_column(data, "length", VALUES)
    index = open_index(str(data))[0]
    old = (data / "a.tar").stat()
    members = [(f"{n}.{part}", text) for n in range(4) for part, text in (("txt", f"TEXT {n}".encode()), ("cls", b"7"))]
    make_tar("ten/a.tar", members)
    os.utime(data / "a.tar", ns=(old.st_atime_ns, old.st_mtime_ns + 5))
    prepare(data)
    assert open_index(str(data))[0].digest == index.digest  # only the time tells
    with pytest.raises(DataIndexError, match=r"older than the data set[\s\S]*length.col"):
        column_of(data)


def test_a_folder_that_is_prepared_again_without_a_change_and_a_copy_have_it(data: Path, tmp_path: Path) -> None:
    write_column(data, "length", VALUES)
    prepare(data)
    assert np.asarray(column_of(data)).tolist() == VALUES.tolist()
    shutil.copytree(data, tmp_path / "copy", copy_function=shutil.copyfile)
    assert np.asarray(column_of(tmp_path / "copy")).tolist() == VALUES.tolist()
    assert column_of(tmp_path / "copy").fingerprint == column_of(data).fingerprint


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda data: data[:-1], "too short"),
        (lambda data: data + b"x", "too short or too long"),
        (lambda data: data[:10], "this is not a {name}"),
        (lambda data: b"PK" + data[2:], "this is not a {name}"),
        (lambda data: data[:12] + b"\x63" + data[13:], "format 99, this library reads format 3"),
        (lambda data: data[:-2] + b"!" + data[-1:], "wrong checksum"),
    ],
)
def test_damage_is_named(data: Path, damage: Callable[[bytes], bytes], message: str) -> None:
    column, index = Path(write_column(data, "length", VALUES)), data / ".nv-meta/energon_lite.idx"
    for path, name, cure, read in (
        (column, "column", "measure again", lambda: column_of(data)),
        (index, "packed index", "prepare", lambda: PackedIndex.open(str(index))),
    ):
        path.write_bytes(damage(path.read_bytes()))
        with pytest.raises(DataIndexError, match=message.format(name=name)) as caught:
            read()
        assert str(path) in str(caught.value) and cure in str(caught.value)


@pytest.mark.parametrize("dtype", ["<i4", "<i8", "|u1", "<f4", ">i4"])
def test_types(data: Path, dtype: str) -> None:
    write_column(data, "x", VALUES.astype(dtype), maker={"by": "hand"})
    column = column_of(data, "x")
    assert list(column) == VALUES.astype(dtype).tolist() and column.maker == {"by": "hand"}
    assert column.dtype.byteorder in "=|<"


def test_equal_values_give_equal_files(data: Path) -> None:
    one, other = (Path(write_column(data, "length", VALUES)).read_bytes() for _ in range(2))
    assert one == other
    assert [path.name for path in (data / ".nv-meta/energon_lite.columns").iterdir()] == ["length.col"]


def test_wrong_values(data: Path) -> None:
    with pytest.raises(UsageError, match=r"shape \[9\] for 10 samples"):
        write_column(data, "length", VALUES[:9])
    with pytest.raises(UsageError, match="object values"):
        write_column(data, "length", np.array([None] * 10))
    for name in ("", "a/b", ".x", "x" * 101):
        with pytest.raises(UsageError, match="cannot be called"):
            write_column(data, name, VALUES)


def test_beside_the_cache_if_the_data_cannot_be_written(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ENERGON_LITE_CACHE", str(tmp_path / "cache"))
    (data / ".nv-meta/energon_lite.columns").write_text("in the way of a folder")
    path = write_column(data, "length", VALUES)
    assert path.startswith(str(tmp_path / "cache")) and column_folders(str(data))[1] == os.path.dirname(path)
    assert np.asarray(column_of(data)).tolist() == VALUES.tolist()
    (data / ".nv-meta/energon_lite.columns").unlink()
    write_column(data, "length", VALUES + 1)  # beside the data now, which goes first
    assert column_of(data)[0] == 1
