"""Files that are opened (a pipe has no size and no end: who opens it waits for its writer), and mapped."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import numpy as np
import pytest

from energon_lite.errors import DatasetError, MissingShardError
from energon_lite.extras.tools.packed_list import PackedList
from energon_lite.storage.dataset_scan import Shards
from energon_lite.storage.files.byte_ranges import map_file, open_file
from energon_lite.storage.files.shard_store import ShardIdentity, ShardStore
from energon_lite.storage.index.column_file import ColumnFile, column_path
from energon_lite.storage.index.columns import write_column
from energon_lite.storage.prepare import prepare_dataset
from energon_lite.storage.read.webdataset import WebdatasetSource
from tests.testing import descriptors, in_time


@pytest.fixture
def prepared(ten: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ENERGON_LITE_CACHE", str(tmp_path / "cache"))
    prepare_dataset(ten, split_ratio="1,0,0", crude=True)
    return ten


def into_pipe(path: Path | str) -> None:
    os.makedirs(os.path.dirname(path), exist_ok=True)
    if os.path.exists(path):
        os.unlink(path)
    os.mkfifo(path)


def test_files_and_folders_open_as_ever(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x")
    for path in (tmp_path / "file", tmp_path):
        handle = open_file(str(path), os.O_RDONLY)
        assert os.get_blocking(handle)
        os.close(handle)


@pytest.mark.parametrize("name", ["pipe", "/dev/null"])
def test_what_is_no_file_is_not_there(tmp_path: Path, name: str) -> None:
    os.mkfifo(tmp_path / "pipe")
    before = descriptors()
    with pytest.raises(FileNotFoundError, match="pipe, a device"):
        in_time(lambda: open_file(str(tmp_path / name), os.O_RDONLY))
    assert not descriptors() - before


def test_an_index_that_is_a_pipe_is_made_again(prepared: Path) -> None:
    into_pipe(prepared / ".nv-meta/energon_lite.idx")
    assert len(in_time(lambda: WebdatasetSource.open(prepared))) == 10
    assert (prepared / ".nv-meta/energon_lite.idx").is_file()


def test_a_column_that_is_a_pipe_is_none(prepared: Path) -> None:
    write_column(prepared, "length", range(10))
    (column,) = ColumnFile.stored(str(prepared), "length")
    assert column.path == column_path(os.path.dirname(column.path), "length")
    into_pipe(column.path)
    assert in_time(lambda: ColumnFile.stored(str(prepared), "length")) == []


def test_a_result_file_that_is_a_pipe_is_none(prepared: Path) -> None:
    files = Shards(str(prepared))
    files.write_failure("a.tar")
    assert files.find(["a.tar", "b.tar"]) == {"a.tar": None}
    into_pipe(files.path("a.tar"))
    assert in_time(lambda: files.find(["a.tar"])) == {}


def test_a_shard_that_became_a_pipe(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.tar")
    with pytest.raises(MissingShardError):
        in_time(lambda: ShardStore().read(str(tmp_path / "a.tar"), ShardIdentity(10, 0), 0, 1))


def test_a_list_that_is_a_pipe(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "names.pack")
    with pytest.raises((FileNotFoundError, DatasetError)):
        in_time(lambda: PackedList.open(tmp_path / "names.pack"))


def _mapped(path: Path) -> memoryview:
    with open(path, "rb") as file:
        return map_file(file.fileno())


def _places(path: Path) -> int:
    """In how many places of this process's memory a file is."""
    return Path("/proc/self/maps").read_text().count(str(path))


@pytest.mark.parametrize("size", [0, 1, 4096, 100_001])
def test_the_bytes_of_the_file(tmp_path: Path, size: int) -> None:
    path = tmp_path / "file"
    path.write_bytes(os.urandom(size))
    view = _mapped(path)
    assert bytes(view) == path.read_bytes() and view.readonly
    assert not np.frombuffer(view, dtype=np.uint8).flags.writeable


def test_no_file_stays_open_and_the_memory_goes_with_the_last_view(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(range(256)) * 64)
    before = descriptors()
    array = np.frombuffer(_mapped(path)[256:], dtype=np.uint8)  # only an array over a part of it refers to it
    assert not descriptors() - before
    gc.collect()
    assert _places(path) == 1
    path.unlink()
    assert array[:3].tolist() == [0, 1, 2]
    del array
    gc.collect()
    assert _places(path) == 0


def test_what_cannot_be_mapped(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x")
    fd = os.open(tmp_path / "file", os.O_WRONLY)
    with pytest.raises(OSError, match=os.strerror(13)):
        map_file(fd)
    os.close(fd)
