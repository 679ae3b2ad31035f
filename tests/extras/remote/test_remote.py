"""Data sets behind a URL, with fsspec's store in memory."""

from __future__ import annotations

import errno
import itertools
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from energon_lite import ReadAhead, Reading
from energon_lite.documents.paths import is_url
from energon_lite.errors import (
    DatasetError,
    FatalSampleError,
    FatalStorageError,
    MissingShardError,
    NotPreparedError,
    ShardChangedError,
)
from energon_lite.extras.remote import remote_index, store_tries
from energon_lite.extras.remote.remote_files import file_system, list_files, read_range, tried
from energon_lite.storage.files.shard_store import ShardStore
from energon_lite.storage.index.index_cache import local_meta
from energon_lite.storage.prepare import prepare_dataset
from energon_lite.storage.read.sample_reader import SampleReader
from energon_lite.storage.read.webdataset import WebdatasetSource
from tests.extras.remote.conftest import Clock
from tests.extras.remote.stored_files import parts_of
from tests.servers import Files, Ranges, upload
from tests.testing import train_loader

URL = "memory://bucket/ten"


@pytest.fixture
def prepared(ten: Path) -> None:
    prepare_dataset(ten, split_ratio="1,0,0")


@pytest.fixture
def uploaded(prepared: None, ten: Path, memory: Any) -> None:
    upload(ten, "bucket/ten")


def test_the_samples_are_those_of_the_local_folder(uploaded: None, ten: Path) -> None:
    local, there = WebdatasetSource.open(ten), WebdatasetSource.open(URL)
    assert there.fingerprint == local.fingerprint
    for index in range(10):
        one, other = SampleReader(there).sample(index), SampleReader(local).sample(index)
        assert (one.key, one.parts) == (other.key, other.parts)
        assert one.source.dataset_path == URL and one.source.shard_name == other.source.shard_name
    assert SampleReader(pickle.loads(pickle.dumps(there))).sample(3).parts == SampleReader(local).sample(3).parts


def test_small_files_are_copied_when_they_change(
    uploaded: None, ten: Path, memory: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    copied = []
    get_file = type(memory).get_file
    monkeypatch.setattr(
        type(memory), "get_file", lambda self, one, to, **more: copied.append(one) or get_file(self, one, to, **more)
    )
    meta = Path(local_meta(URL))
    there = {path.name for path in (ten / ".nv-meta").iterdir() if path.suffix not in (".sqlite", ".lock")}
    assert {path.name for path in (meta / ".nv-meta").iterdir()} == there == {Path(path).name for path in copied}
    copied.clear()
    assert local_meta(URL) == str(meta) and not copied
    memory.pipe_file("/bucket/ten/.nv-meta/split.yaml", b"split_parts: {train: [a.tar]}\n")
    memory.rm_file("/bucket/ten/.nv-meta/index.uuid")
    local_meta(URL)
    assert [Path(path).name for path in copied] == ["split.yaml"]
    assert (meta / ".nv-meta/split.yaml").read_text() == "split_parts: {train: [a.tar]}\n"
    assert not (meta / ".nv-meta/index.uuid").exists()


def test_what_is_not_there(uploaded: None, memory: Any) -> None:
    assert not is_url("/data") and not is_url("file:///data") and local_meta("/data") == "/data"
    with pytest.raises(NotPreparedError, match=r"no .nv-meta folder[\s\S]*memory://bucket/none"):
        WebdatasetSource.open("memory://bucket/none")


def test_shards_that_changed(uploaded: None, memory: Any) -> None:
    source = WebdatasetSource.open(URL)
    source.store = ShardStore()
    data = memory.cat_file("/bucket/ten/b.tar")
    memory.pipe_file("/bucket/ten/b.tar", b"x" + data[1:])
    with pytest.raises(ShardChangedError, match="same size, other contents"):
        SampleReader(source).sample(4)
    memory.pipe_file("/bucket/ten/b.tar", data[:-1])
    with pytest.raises(ShardChangedError, match=f"{len(data) - 1} bytes instead of {len(data)}"):
        WebdatasetSource.open(URL)
    memory.rm_file("/bucket/ten/b.tar")
    with pytest.raises(MissingShardError, match=r"b\.tar"):
        WebdatasetSource.open(URL)
    with pytest.raises(MissingShardError, match=r"b\.tar"):
        SampleReader(source).sample(5)


#: What stores answer to a request for ``whole[start:end]``.
WRONG: dict[str, Callable[[bytes, int, int], bytes]] = {
    "whole": lambda whole, start, end: whole,
    "from the start": lambda whole, start, end: whole[:end],
    "to the end": lambda whole, start, end: whole[start:],
    "one more": lambda whole, start, end: whole[start : end + 1],
    "one less": lambda whole, start, end: whole[start : end - 1],
    "nothing": lambda whole, start, end: b"",
    "cut": lambda whole, start, end: whole[: len(whole) // 2][start:end],
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_store_that_answers_with_other_bytes(
    wrong: str, uploaded: None, ten: Path, memory: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each sample is right or an error; also where the answer begins with the bytes that were asked for."""
    monkeypatch.setattr(store_tries, "_UNKNOWN", (0.0,))
    local, there = WebdatasetSource.open(ten), WebdatasetSource.open(URL)
    there.store = ShardStore()
    cat_file = type(memory).cat_file

    def answer(self: Any, path: str, start: int | None = None, end: int | None = None, **more: Any) -> bytes:
        return WRONG[wrong](cat_file(self, path), start or 0, end or 0)

    monkeypatch.setattr(type(memory), "cat_file", answer)
    refused = 0
    for index in range(10):
        try:
            assert SampleReader(there).sample(index).parts == SampleReader(local).sample(index).parts
        except DatasetError as error:
            refused += 1
            assert "bytes were answered instead of the " in str(error)
            assert isinstance(error, FatalStorageError) == (wrong not in ("one less", "nothing", "cut"))
    assert refused == 10 if wrong != "cut" else refused


def test_small_files_that_arrive_cut_off(uploaded: None, memory: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_tries, "_UNKNOWN", (0.0, 0.0))
    get_file, cuts = type(memory).get_file, [1]

    def cut(self: Any, one: str, to: str, **more: Any) -> None:
        get_file(self, one, to, **more)
        if one.endswith("split.yaml") and cuts[0]:
            cuts[0] -= 1
            os.truncate(to, 10)

    monkeypatch.setattr(type(memory), "get_file", cut)
    assert len(WebdatasetSource.open(URL)) == 10
    memory.pipe_file("/bucket/ten/.nv-meta/split.yaml", b"split_parts: {train: [a.tar]}\n")
    cuts[0] = 100
    with pytest.raises(DatasetError, match=r"10 bytes were answered instead of 30[\s\S]*split\.yaml"):
        WebdatasetSource.open(URL)


class Shifted(Ranges):
    shift = 3


@pytest.mark.usefixtures("prepared")
def test_over_http_with_ranges(serve: Callable[..., str], ten: Path) -> None:
    local, there = (WebdatasetSource.open(path, shards=["a.tar", "b.tar"]) for path in (ten, f"{serve(Ranges)}/ten"))
    assert parts_of(there, range(7)) == parts_of(local, range(7))
    (ten / "b.tar").unlink()
    there.store.close()
    with pytest.raises(MissingShardError, match=r"b\.tar"):
        SampleReader(there).sample(5)


@pytest.mark.parametrize(
    ("handler", "reason"),
    [(Files, "status 200"), (Shifted, "asked for bytes 0-511, and answered with 'bytes 3-514")],
)
@pytest.mark.usefixtures("prepared")
def test_a_server_that_does_not_give_the_range(serve: Callable[..., str], handler: type, reason: str) -> None:
    source = WebdatasetSource.open(f"{serve(handler)}/ten", shards=["a.tar"])
    source.store = ShardStore()
    with pytest.raises(FatalStorageError, match=reason) as caught:
        SampleReader(source).sample(0)
    assert "a.tar" in str(caught.value) and "nginx" in str(caught.value)


def test_requests_grow_while_reads_are_neighbours_and_shrink_else(monkeypatch: pytest.MonkeyPatch) -> None:
    requests = list[int]()
    monkeypatch.setattr(remote_index, "read_range", lambda _, __, size: requests.append(size) or bytes(size))
    file = remote_index.RangeFile("http://there/a.tar", 1 << 30)
    for offset in range(0, 64 << 20, 4096):
        assert file.read(4096, offset) == bytes(4096)
    assert requests == sorted(requests) and len(requests) < 20
    requests.clear()
    for offset in range(128 << 20, 256 << 20, 4 << 20):
        assert file.read(4096, offset) == bytes(4096)
    assert requests == sorted(requests, reverse=True) and requests[-1] < 1 << 14


@pytest.mark.usefixtures("prepared")
def test_what_has_no_version_is_copied_each_time(serve: Callable[..., str], ten: Path) -> None:
    url = f"{serve(Ranges)}/ten"
    assert len(WebdatasetSource.open(url, shards=["a.tar"])) == 4
    (ten / ".nv-meta/split.yaml").write_text("split_parts: {train: []}\n")
    assert (Path(local_meta(url)) / ".nv-meta/split.yaml").read_text() == "split_parts: {train: []}\n"


@pytest.mark.parametrize(
    "url", ["simplecache::memory://bucket/ten", "reference::memory://refs.json", "zip://x::file:///x"]
)
def test_chained_urls_are_refused(uploaded: None, url: str) -> None:
    """They make fsspec do other things than reading: write files, unpack, fill in templates that are programs."""
    for work in (WebdatasetSource.open, local_meta, list_files, lambda url: read_range(url, 0, 1)):
        with pytest.raises(DatasetError, match=r"chained URLs are not read[\s\S]*fix"):
            work(url)


def test_each_server_has_its_own_file_system(clients: None) -> None:
    """As those of SFTP, HDFS and Azure, whose objects are made for one server."""

    class OfServer(MemoryFileSystem):
        server: str

        def __init__(self, server: str):
            super().__init__()
            self.server = server

        @staticmethod
        def _get_kwargs_from_urls(path: str) -> dict[str, str]:
            return {"server": path.split("/")[2]}

    fsspec.register_implementation("ofserver", OfServer, clobber=True)
    assert [file_system(f"ofserver://{name}/x")[0].server for name in ("a", "b", "a")] == ["a", "b", "a"]


@pytest.mark.parametrize("url", ["nosuchthing://x/y", "://x", "http://[::1/x", "\0://x", "memory2://", "reference://x"])
def test_urls_that_nobody_reads(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_tries, "_UNKNOWN", ())
    with pytest.raises(DatasetError):
        local_meta(url)


@pytest.mark.parametrize("text", ["[" * 100_000, "[]", "7", "\\udcff", "{", '{"split.yaml": [[]]}'])
def test_a_damaged_record_of_copies_is_made_again(uploaded: None, tmp_path: Path, text: str) -> None:
    local_meta(URL)
    (record,) = (tmp_path / "cache").rglob("versions.json")
    record.write_text(text)
    assert len(WebdatasetSource.open(URL)) == 10
    assert record.read_text() != text


def away(*_: Any, **__: Any) -> bytes:
    raise ConnectionRefusedError(errno.ECONNREFUSED, "no one is there")


def test_a_store_that_is_away_is_waited_for_once(
    uploaded: None, memory: Any, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not once for each way in which a loader tries to read a sample."""
    document = b"{sample_type: TextSample, field_map: {text: txt}}"
    memory.pipe_file("/bucket/ten/.nv-meta/dataset.yaml", document)
    reading = Reading(read_ahead=ReadAhead(hedge=False, requests=1))
    with train_loader(URL, batch_size=1, reading=reading) as loader:
        batches = iter(loader)
        next(batches)
        with monkeypatch.context() as outage:
            outage.setattr(type(memory), "cat_file", away)
            began = clock.now
            with pytest.raises(FatalSampleError, match=r"the store cannot be read, for 6\d\d s: ConnectionRefused"):
                [*itertools.islice(batches, 10)]
    assert 600 <= clock.now - began < 630


def test_the_store_is_waited_for_anew_later(
    uploaded: None, memory: Any, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    cat_file, tries = type(memory).cat_file, list[str]()

    def noted(_: Any, path: str, **more: Any) -> bytes:
        tries.append(path)
        return away()

    def wait(url: str = f"{URL}/a.tar") -> float:
        began = clock.now
        with pytest.raises(FatalStorageError):
            read_range(url, 0, 6)
        return clock.now - began

    monkeypatch.setattr(type(memory), "cat_file", noted)
    assert wait() > 600
    tries.clear()
    assert wait() == 0 == wait("memory://bucket/other.tar") and len(tries) == 2
    assert wait("memory://another/a.tar") > 600, "another server"
    clock.now += 31
    assert wait() > 600
    monkeypatch.setattr(type(memory), "cat_file", cat_file)
    read_range(f"{URL}/a.tar", 0, 6)
    monkeypatch.setattr(type(memory), "cat_file", noted)
    assert wait() > 600, "it was there in between"


def test_a_short_wait_at_the_start_shortens_no_later_one(clock: Clock) -> None:
    with pytest.raises(FatalStorageError):
        tried(away, URL, None)
    began = clock.now
    with pytest.raises(FatalStorageError):
        tried(away, URL, None, 600.0)
    assert clock.now - began > 600
