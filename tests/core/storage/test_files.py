"""Files that appear complete or not at all, and the locks of those who make them; files that are opened (a pipe has no
size and no end: who opens it waits for its writer), and mapped; and the container of the library's own formats: what is
written is read, whole or block by block, or an error."""

from __future__ import annotations

import fcntl
import gc
import json
import logging
import multiprocessing
import os
import struct
import time
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays_of

from energon_lite.errors import DataIndexError, DatasetError, MissingShardError
from energon_lite.extras.tools.packed_list import PackedList
from energon_lite.storage.dataset_scan import Shards
from energon_lite.storage.files import atomic_file, stored_array
from energon_lite.storage.files.array_file import ALIGN, BLOCK, FileKind, read_arrays, write_arrays, writing
from energon_lite.storage.files.atomic_file import lock, only_one, replacing, write_bytes
from energon_lite.storage.files.byte_ranges import map_file, open_file
from energon_lite.storage.files.shard_store import ShardIdentity, ShardStore
from energon_lite.storage.files.stored_array import FileBody, StoredArray, open_arrays
from energon_lite.storage.index.column_file import ColumnFile, column_path
from energon_lite.storage.index.columns import write_column
from energon_lite.storage.read.webdataset import WebdatasetSource
from tests.accidents import damaged
from tests.testing import descriptors, examples, in_time, told_of


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


def test_what_became_a_pipe_is_made_again_or_missing(data: Path) -> None:
    index = data / ".nv-meta/energon_lite.idx"
    into_pipe(index)
    assert len(in_time(lambda: WebdatasetSource.open(data))) == 10 and index.is_file()
    write_column(data, "length", range(10))
    (column,) = ColumnFile.stored(str(data), "length")
    assert column.path == column_path(os.path.dirname(column.path), "length")
    into_pipe(column.path)
    assert in_time(lambda: ColumnFile.stored(str(data), "length")) == []
    files = Shards(str(data))
    files.write_failure("a.tar")
    assert files.find(["a.tar", "b.tar"]) == {"a.tar": None}
    into_pipe(files.path("a.tar"))
    assert in_time(lambda: files.find(["a.tar"])) == {}


def test_a_shard_or_a_list_that_became_a_pipe(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.tar")
    with pytest.raises(MissingShardError):
        in_time(lambda: ShardStore().read(str(tmp_path / "a.tar"), ShardIdentity(10, 0), 0, 1))
    with pytest.raises((FileNotFoundError, DatasetError)):
        in_time(lambda: PackedList.open(tmp_path / "a.tar"))


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


# -- array files

KIND = FileKind(b"ENRGLTST", 1, "test file", "make it again")
NUMBERS = np.arange(3 * 4000, dtype=np.int64).reshape(-1, 3)  # 12 blocks


def opened(path: Path) -> tuple[FileBody, StoredArray]:
    if not path.exists():
        write_arrays(str(path), KIND, {"numbers": NUMBERS}, {})
    array = open_arrays(str(path), KIND)[0]["numbers"]
    return array._body, array


shapes = st.lists(st.integers(0, 5), min_size=1, max_size=3).map(tuple)
values = shapes.flatmap(
    lambda shape: st.sampled_from(["<i8", "|u1", ">i4", "<f4", "|b1"]).flatmap(
        lambda dtype: arrays_of.arrays(np.dtype(dtype), shape, elements={"allow_nan": False} if "f" in dtype else None)
    )
)


@given(st.dictionaries(st.text(max_size=4), values, max_size=4), st.dictionaries(st.text(max_size=3), st.integers()))
def test_what_is_written_is_read(tmp_path: Path, arrays: dict[str, Any], meta: dict[str, int]) -> None:
    path = str(tmp_path / "a")
    write_arrays(path, KIND, arrays, meta)
    whole, found = read_arrays(path, KIND)
    stored, also_found = open_arrays(path, KIND)
    assert found == also_found == meta and whole.keys() == stored.keys() == arrays.keys()
    for name, array in arrays.items():
        for got in (whole[name], stored[name][:], np.asarray(stored[name])):
            assert (got.dtype, got.shape) == (array.dtype, array.shape) and (got == array).all()


def test_an_array_may_come_in_chunks_and_meta_at_the_end(tmp_path: Path) -> None:
    path = str(tmp_path / "a")
    with writing(path, KIND, {"n": 1}) as file:
        file.add("small", np.arange(3, dtype=np.uint8))
        file.stream("numbers", "<i8", (3,), (row.tobytes() for row in NUMBERS))
        file.meta["m"] = 2
    arrays, meta = read_arrays(path, KIND)
    assert meta == {"n": 1, "m": 2} and (arrays["numbers"] == NUMBERS).all() and arrays["small"].tolist() == [0, 1, 2]
    write_arrays(str(tmp_path / "b"), KIND, {"small": np.arange(3, dtype=np.uint8), "numbers": NUMBERS}, meta)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    assert sorted(os.listdir(tmp_path)) == ["a", "b"]


@pytest.mark.parametrize(
    "table",
    [{}, {"arrays": {}}, {"arrays": {}, "meta": {}}, {"arrays": {"x": 1}, "meta": {}}, {"arrays": 5, "meta": {}}, []],
)
def test_a_table_that_says_something_else(tmp_path: Path, table: Any) -> None:
    text = struct.pack("<I", 0) + json.dumps(table).encode()  # the checksum of an empty body
    head = struct.pack("<IQQI28x", 1, 64, len(text) - 4, zlib.crc32(text))
    (tmp_path / "a").write_bytes(struct.pack("<8sI", b"ENRGLTST", zlib.crc32(head)) + head + text)
    for read in (read_arrays, open_arrays):
        if table == {"arrays": {}, "meta": {}}:
            assert read(str(tmp_path / "a"), KIND) == ({}, {})
            continue
        with pytest.raises(DataIndexError, match="table"):
            read(str(tmp_path / "a"), KIND)


@settings(max_examples=examples(200))
@given(st.data())
def test_damage_is_an_error_or_changes_nothing(tmp_path: Path, data: st.DataObject) -> None:
    path = tmp_path / "a"
    write_arrays(str(path), KIND, {"numbers": NUMBERS[:500]}, {"k": 1})
    path.write_bytes(damaged(data, path.read_bytes()))
    with suppress(DataIndexError):
        arrays, meta = read_arrays(str(path), KIND)
        assert meta == {"k": 1} and (arrays["numbers"] == NUMBERS[:500]).all()
    with suppress(DataIndexError):
        stored, meta = open_arrays(str(path), KIND)
        assert meta == {"k": 1} and (stored["numbers"][:] == NUMBERS[:500]).all()


@given(rows=st.lists(st.integers(0, 3990)), count=st.integers(1, 9), kept=st.sampled_from([0, 1, 100]))
def test_numbers_are_the_same_however_blocks_are_kept(tmp_path: Path, rows: list[int], count: int, kept: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stored_array, "_KEPT", kept)
        patch.setattr(stored_array, "_taken", {})  # by files that others have open
        file, array = opened(tmp_path / "a")
    assert (file.memory is None) == (kept < 12)
    first = np.array(rows, dtype=np.int64)
    assert (array.take(first, 0) == NUMBERS[first]).all()
    assert (array.stretches(first, count) == NUMBERS[first[:, None] + np.arange(count)]).all()
    expected = [NUMBERS[row : row + count].tobytes() for row in rows]
    assert file.read_each(ALIGN + 24 * first, np.full_like(first, 24 * count)) == expected
    assert array.raw_each(np.stack([first, first + count], 1)) == expected
    assert [file.read(ALIGN + 24 * row, 24 * count) for row in rows] == expected
    assert (array[::7] == NUMBERS[::7]).all()


def test_what_a_forked_process_has_verified_is_right_for_all_of_them_whatever_happens_to_the_file(
    tmp_path: Path,
) -> None:
    file, array = opened(tmp_path / "a")
    last = len(NUMBERS) - 1
    child = os.fork()
    if not child:
        found = (array.take(np.arange(2000, last), 0) == NUMBERS[2000:last]).all()
        os._exit(0 if found else 1)
    assert os.waitpid(child, 0)[1] == 0
    os.truncate(tmp_path / "a", 100)
    assert (array.take(np.arange(2000, last), 0) == NUMBERS[2000:last]).all()
    with pytest.raises(DataIndexError, match=r"test file cannot be read[\s\S]*start the run again"):
        file.read(ALIGN + BLOCK, 8)  # nobody has asked for this block before


def test_shared_memory_is_bounded_and_files_that_are_opened_twice_have_it_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stored_array, "_shared", type(stored_array._shared)())
    monkeypatch.setattr(stored_array, "_taken", {})
    monkeypatch.setattr(stored_array, "_KEPT", 30)
    files = [opened(tmp_path / name) for name in "aabc"]
    memory = [file.memory for file, _ in files]
    assert memory[0] is memory[1] and memory[2] is not None and memory[3] is None
    assert sum(map(len, stored_array._shared.values())) < 30 * BLOCK
    del files[2], memory
    assert opened(tmp_path / "c")[0].memory is not None  # b has given its back


def test_places_outside_are_refused(tmp_path: Path) -> None:
    file, array = opened(tmp_path / "a")
    for offset in (-8, 0, ALIGN + NUMBERS.nbytes):
        with pytest.raises(DataIndexError, match="there are no"):
            file.read_each(np.array([offset]), np.array([8]))
        with pytest.raises(DataIndexError, match="there are no"):
            file.read(offset, 8)
    with pytest.raises(IndexError):
        array.take(np.array([len(NUMBERS)]), 0)
