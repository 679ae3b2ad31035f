"""Files that appear complete or not at all, and the locks of those who make them; files that are opened (a pipe has no
size and no end: who opens it waits for its writer), and mapped."""

from __future__ import annotations

import fcntl
import gc
import logging
import multiprocessing
import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from energon_lite.errors import DatasetError, MissingShardError
from energon_lite.extras.tools.packed_list import PackedList
from energon_lite.storage.files import atomic_file
from energon_lite.storage.files.atomic_file import lock, only_one, replacing, write_bytes
from energon_lite.storage.files.byte_ranges import map_file, open_file
from energon_lite.storage.files.shard_store import ShardIdentity, ShardStore
from energon_lite.storage.index.column_file import ColumnFile, column_path
from energon_lite.storage.index.columns import write_column
from energon_lite.storage.prepare.dataset_scan import Shards
from energon_lite.storage.prepare.prepare import prepare_dataset
from energon_lite.storage.read.webdataset import WebdatasetSource
from tests.testing import descriptors, in_time, told_of


def test_replaces_a_file_as_a_whole(tmp_path: Path) -> None:
    (tmp_path / "f").write_text("old")
    write_bytes(str(tmp_path / "f"), b"new", memoryview(b" text"))
    assert (tmp_path / "f").read_text() == "new text"
    assert [path.name for path in tmp_path.iterdir()] == ["f"]


@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
def test_a_failure_leaves_the_old_file_and_nothing_else(tmp_path: Path, error: type[BaseException]) -> None:
    (tmp_path / "f").write_text("old")
    with pytest.raises(error), replacing(str(tmp_path / "f")) as temporary:
        Path(temporary).write_text("half")
        assert (tmp_path / "f").read_text() == "old"
        raise error
    assert (tmp_path / "f").read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["f"]


@contextmanager
def held(path: Path) -> Iterator[int]:
    """The lock of a holder that does not go on, and one more descriptor of the file."""
    handles = [os.open(path, os.O_RDWR | os.O_CREAT) for _ in range(2)]
    try:
        fcntl.flock(handles[0], fcntl.LOCK_EX)
        yield handles[1]
    finally:
        for handle in handles:
            os.close(handle)


def test_a_lock_is_waited_for_no_longer_than_was_said(tmp_path: Path) -> None:
    with held(tmp_path / "file") as other:
        began = time.monotonic()
        assert not in_time(lambda: lock(other, 0.3))
        assert 0.3 <= time.monotonic() - began < 5
        assert not lock(other, 0.0)


def test_a_process_that_is_forked_meanwhile_keeps_no_lock(tmp_path: Path) -> None:
    """It has a copy of the descriptor, by which the lock would live as long as a loader's worker does."""
    with only_one(str(tmp_path / "index")):
        os.link(tmp_path / "index.lock", tmp_path / "same.lock")
        child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
        child.start()
    handle = os.open(tmp_path / "same.lock", os.O_RDWR)
    try:
        assert lock(handle, 0.0)
    finally:
        os.close(handle)
        child.kill()
        child.join()


def test_who_makes_an_index_waits_for_no_holder_that_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its machine may have died; the file system still has its lock."""
    caplog.set_level(logging.WARNING)
    monkeypatch.setattr(atomic_file, "_PATIENCE", 1.0, raising=False)
    monkeypatch.setattr(atomic_file, "_TOLD", 0.1, raising=False)

    def make() -> str:
        with only_one(str(tmp_path / "index")):
            return "made"

    with held(tmp_path / "index.lock"):
        assert in_time(make) == "made"
        (told,) = told_of(caplog, tmp_path / "index.lock")
        assert "at most 1 s" in told
        monkeypatch.setattr(atomic_file, "_PATIENCE", 3600.0)
        assert in_time(make) == "made"  # nobody waits for that lock again


def test_only_one_at_a_time_makes_a_file(tmp_path: Path) -> None:
    """Also where some wait for a lock file that its holder removes, and others come later."""
    inside, most = [], []

    def make(_: int) -> None:
        for _ in range(20):
            with only_one(str(tmp_path / "index")):
                inside.append(None)
                most.append(len(inside))
                time.sleep(0.0005)
                inside.pop()

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(make, range(6)))
    assert max(most) == 1 and not list(tmp_path.iterdir())


def test_a_lock_that_cannot_be_removed_is_given_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: str) -> None:
        raise PermissionError(path)

    monkeypatch.setattr(atomic_file, "remove_if_there", refuse)
    before = descriptors()
    with pytest.raises(PermissionError), only_one(str(tmp_path / "index")):
        pass
    assert not descriptors() - before


# -- files that are opened


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
