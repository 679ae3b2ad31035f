"""Remote data sets without a packed index: it is made of what Energon put beside the shards, or of their headers."""

from __future__ import annotations

import multiprocessing
import os
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import fsspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from energon_lite.errors import MissingShardError, ShardChangedError, ShardFormatError
from energon_lite.extras.energon import index_sqlite
from energon_lite.extras.remote import remote_index as making
from energon_lite.storage.prepare import prepare_dataset
from energon_lite.storage.read.sample_reader import SampleReader
from energon_lite.storage.read.webdataset import WebdatasetSource
from tests.testing import until

URL = "memory://bucket/ten"
DATABASE = ".nv-meta/index.sqlite"


@pytest.fixture
def memory() -> Iterator[Any]:
    fs = fsspec.filesystem("memory")
    yield fs
    fs.store.clear()
    fs.pseudo_dirs[:] = [""]


@pytest.fixture
def upload(ten: Path, memory: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    monkeypatch.setenv("ENERGON_LITE_CACHE", str(tmp_path / "cache"))
    prepare_dataset(ten, split_ratio="1,0,0")

    def upload() -> None:
        for path in ten.rglob("*"):
            if path.is_file() and path.name != "energon_lite.idx":
                memory.pipe_file(f"/bucket/ten/{path.relative_to(ten)}", path.read_bytes())

    upload()
    return upload


def samples(source: WebdatasetSource) -> list[Any]:
    return [SampleReader(source).sample(index)[:2] for index in range(len(source))]


@pytest.fixture
def requests(memory: Any, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int, int]]:
    made, cat_file = [], type(memory).cat_file

    def counted(self: Any, path: str, start: int = 0, end: int = 0, **more: Any) -> Any:
        made.append((path, start, end))
        return cat_file(self, path, start=start, end=end, **more)

    monkeypatch.setattr(type(memory), "cat_file", counted)
    return made


@pytest.mark.parametrize("has_database", [True, False])
def test_the_samples_are_those_of_the_local_folder(
    upload: object, ten: Path, memory: Any, requests: list[Any], has_database: bool
) -> None:
    if not has_database:
        memory.rm_file(f"/bucket/ten/{DATABASE}")
    local, there = WebdatasetSource.open(ten), WebdatasetSource.open(URL)
    assert samples(there) == samples(local)
    assert (there.fingerprint, there.contents) == (local.fingerprint, local.contents)
    assert there.index.digest == local.index.digest
    made = len(requests)
    again = WebdatasetSource.open(URL)
    assert len(requests) == made and again.index.digest == there.index.digest  # it was kept


def test_with_a_database_shards_are_not_read(upload: object, requests: list[Any]) -> None:
    WebdatasetSource.open(URL)
    assert sorted(requests) == [(f"/bucket/ten/{name}", 0, 512) for name in ("a.tar", "b.tar", "sub/c.tar")]


def test_a_changed_set_is_noticed(upload: Callable[[], None], ten: Path, make_tar: Any, tmp_path: Path) -> None:
    def change(members: list[tuple[str, bytes]]) -> None:
        make_tar("ten/b.tar", members)
        prepare_dataset(ten, split_ratio="1,0,0", force_overwrite=True)
        upload()

    first = WebdatasetSource.open(URL)
    change([(f"n{number}.txt", b"other") for number in range(5)])
    second = WebdatasetSource.open(URL)
    assert len(first) == 10 and len(second) == 12 and second.key(4) == "n0"
    assert len(list((tmp_path / "cache/index").glob("*.idx"))) == 2  # a run may still read by the first
    for path in (tmp_path / "cache/index").glob("*.idx"):
        os.utime(path, (0, 0))
    change([("x.txt", b"other")])
    assert len(WebdatasetSource.open(URL)) == 8
    assert len(list((tmp_path / "cache/index").glob("*.idx"))) == 1


def test_shards_that_are_not_those_that_were_prepared(upload: object, ten: Path, memory: Any, make_tar: Any) -> None:
    shard = make_tar("ten/b.tar", [(f"n{number}.txt", b"other") for number in range(4)])
    memory.pipe_file("/bucket/ten/b.tar", shard.read_bytes())  # the database does not know of it
    with pytest.raises(ShardChangedError, match=r"4 samples, but 3[\s\S]*b\.tar"):
        WebdatasetSource.open(URL)
    memory.rm_file("/bucket/ten/b.tar")
    with pytest.raises(MissingShardError, match=r"memory://bucket/ten/b\.tar"):
        WebdatasetSource.open(URL)


#: What somebody may have done to the database.
DAMAGES = [
    "DROP TABLE sample_parts",
    "UPDATE sample_parts SET content_byte_offset = content_byte_offset + 512 WHERE sample_index = 1",
    "UPDATE sample_parts SET content_byte_size = 1 << 60",
    "UPDATE sample_parts SET content_byte_offset = -512",
    "UPDATE sample_parts SET part_name = NULL",
    "UPDATE sample_parts SET part_name = 7",
    "UPDATE sample_parts SET sample_index = 99 WHERE sample_index = 0",
    "DELETE FROM sample_parts WHERE sample_index = 0",
    "DELETE FROM sample_parts",
    "DELETE FROM samples WHERE sample_index = 0",
    "UPDATE samples SET sample_key = 'z' || sample_key",
    "UPDATE samples SET sample_index = sample_index + 1",
    "UPDATE samples SET byte_offset = byte_offset + 3",
    "UPDATE samples SET byte_size = 1 << 62",
    "UPDATE samples SET byte_offset = 'x'",
    "UPDATE samples SET sample_key = x'ff' || sample_key",
    "UPDATE samples SET tar_file_id = tar_file_id + 1",
    "DROP TABLE samples; CREATE VIEW samples AS SELECT 0 tar_file_id, 'x' sample_key, 0 sample_index, 0 byte_offset, "
    "512 byte_size",
]


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_database_that_lies_is_not_believed(upload: Callable[[], None], ten: Path, damage: str) -> None:
    before = samples(WebdatasetSource.open(ten))
    with closing(sqlite3.connect(ten / DATABASE)) as connection:
        connection.executescript(damage)
        connection.commit()
    upload()
    assert samples(WebdatasetSource.open(URL)) == before


@given(place=st.integers(0, 1 << 14), size=st.integers(0, 300))
def test_a_damaged_database(
    upload: Callable[[], None], ten: Path, memory: Any, tmp_path: Path, place: int, size: int
) -> None:
    """It may say other names and sizes than the shards, where nobody can tell; it never takes anything else down."""
    data = bytearray((ten / DATABASE).read_bytes())
    place %= len(data)
    data[place : place + size] = os.urandom(len(data[place : place + size]))
    memory.pipe_file(f"/bucket/ten/{DATABASE}", bytes(data))
    for old in (tmp_path / "cache").rglob("*.idx"):
        old.unlink()
    source = WebdatasetSource.open(URL)
    assert len(source) == 10 and len(samples(source)) == 10


def test_a_broken_shard_is_named(upload: object, memory: Any) -> None:
    memory.rm_file(f"/bucket/ten/{DATABASE}")
    data = memory.cat_file("/bucket/ten/b.tar")
    memory.pipe_file("/bucket/ten/b.tar", data[:1024] + b"\xff" * 512 + data[1536:])
    with pytest.raises(ShardFormatError, match=r"at byte 1024[\s\S]*b\.tar"):
        WebdatasetSource.open(URL)


def _open(queue: Any) -> None:
    digest = WebdatasetSource.open(URL).index.digest
    queue.put(digest)


def test_many_processes_make_it_once(
    upload: object, memory: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory.rm_file(f"/bucket/ten/{DATABASE}")
    (tmp_path / "notes").mkdir()
    scan = making.scan_remote_shard

    def slow(root: str, name: str, size: int) -> Any:
        (tmp_path / "notes" / f"{os.getpid()}-{name.replace('/', '-')}").touch()
        time.sleep(0.2)
        return scan(root, name, size)

    monkeypatch.setattr(making, "scan_remote_shard", slow)
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    processes = [context.Process(target=_open, args=(queue,)) for _ in range(4)]
    for process in processes:
        process.start()
    digests = {queue.get(timeout=120) for _ in processes}
    for process in processes:
        process.join()
    assert len(digests) == 1 and len(list((tmp_path / "notes").iterdir())) == 3


def test_killed_half_way(upload: object, memory: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        slow = index_sqlite.DATABASE._replace(scans=lambda *_: time.sleep(200))
        patch.setattr(index_sqlite, "DATABASE", slow)  # the database has been copied
        process = multiprocessing.get_context("fork").Process(target=_open, args=(None,))
        process.start()
        folder = tmp_path / "cache/index"
        assert until(lambda: list(folder.glob(".energon.sqlite*.tmp"))) and process.is_alive()
        process.kill()
        process.join()
    assert len(WebdatasetSource.open(URL)) == 10
    assert [path.suffix for path in folder.iterdir()] == [".idx"]
