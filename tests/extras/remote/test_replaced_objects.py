"""An object that is replaced while a run reads it, by one of the same size and first block, ends the run."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from energon_lite import ReadAhead, Reading
from energon_lite.errors import ShardChangedError
from energon_lite.extras.remote import file_versions, read_ahead, remote_files
from energon_lite.extras.remote.remote_files import read_range
from energon_lite.storage.files.byte_ranges import read_bytes, size_of
from energon_lite.storage.prepare import prepare_dataset
from tests.servers import Ranges
from tests.testing import calls_here, nightly_but, train_loader

SHARDS, EACH = 3, 20
SAMPLES = SHARDS * EACH


class Versioned(Ranges):
    """Ranges of files, with the validators that ``named`` lists, as nginx makes them."""

    named: tuple[str, ...] = ("ETag", "Last-Modified")
    in_ranges = True
    protocol_version = "HTTP/1.1"

    def end_headers(self) -> None:
        path = self.translate_path(self.path)
        if os.path.isfile(path) and self.names_versions:
            status = os.stat(path)
            if "ETag" in self.named:
                self.send_header("ETag", f'"{status.st_mtime_ns:x}-{status.st_size:x}"')
            if "Last-Modified" in self.named:
                super().send_header("Last-Modified", self.date_time_string(status.st_mtime))
        super().end_headers()

    def send_header(self, keyword: str, value: str) -> None:
        if keyword != "Last-Modified":  # the server's own, added above
            super().send_header(keyword, value)

    def do_HEAD(self) -> None:
        self.names_versions = True
        super().do_HEAD()

    def do_GET(self) -> None:
        self.names_versions = self.in_ranges
        super().do_GET()


@dataclass
class Served:
    """A data set behind a URL, whose shards can be replaced."""

    folder: Path
    serve: Callable[..., str]
    make_tar: Any

    def url(self, **how: Any) -> str:
        """Its URL at a server with these attributes."""
        return f"{self.serve(type('Answers', (Versioned,), how))}/data"

    def write(self, folder: str, text: str) -> None:
        for shard in range(SHARDS):
            numbers = range(shard * EACH, (shard + 1) * EACH)
            # The first sample is the same, and all have the same size.
            members = [(f"{n:02d}.txt", b"the first" if n % EACH == 0 else f"{text} {n:02d}".encode()) for n in numbers]
            self.make_tar(f"{folder}/{shard}.tar", members)

    def replace(self, shard: int = 1) -> None:
        self.write("new", "new")
        path, new = (self.folder / name / f"{shard}.tar" for name in ("data", "new"))
        before = path.stat()
        os.utime(new, ns=(before.st_atime_ns, before.st_mtime_ns + 5_000_000_000))  # never there with that time
        os.replace(new, path)
        assert path.stat().st_size == before.st_size


@pytest.fixture
def served(serve: Callable[..., str], clients: None, make_tar: Any, tmp_path: Path) -> Served:
    made = Served(tmp_path, serve, make_tar)
    made.write("data", "old")
    prepare_dataset(tmp_path / "data", split_ratio="1,0,0", sample_type="TextSample", field_map={"text": "txt"})
    return made


def loader_of(url: str, workers: int, **reading: Any) -> Any:
    order: dict[str, Any] = {"shuffle_buffer_size": None, "max_samples_per_sequence": None}
    how = {"virtual_epoch_length": SAMPLES // 5, "reading": Reading(read_ahead=ReadAhead(**reading)), **order}
    return train_loader(url, workers, batch_size=5, start_method="fork", **how)


SERVERS = {"etag": {}, "last modified": {"named": ("Last-Modified",)}, "only in the record": {"in_ranges": False}}


@pytest.mark.parametrize(
    ("server", "client", "workers"),
    nightly_but({0, 3, 5, 6, 9, 10}, itertools.product(SERVERS, ["ours", "fsspec"], [0, 2])),
)
def test_a_shard_that_is_replaced_ends_the_run(
    served: Served, monkeypatch: pytest.MonkeyPatch, server: str, client: str, workers: int
) -> None:
    how: dict[str, Any] = SERVERS[server]
    if client == "fsspec":
        monkeypatch.setattr(remote_files, "direct_ranges", lambda fs: None)
    if not how.get("in_ranges", True):
        monkeypatch.setattr(file_versions, "_RECHECK", 0.0)
    texts = list[str]()
    with loader_of(served.url(**how), workers, memory_bytes=1) as loader:
        batches = iter(loader)
        texts += next(batches).text
        served.replace()
        with pytest.raises(ShardChangedError, match=r"was replaced while[\s\S]*1\.tar") as caught:
            for batch in itertools.islice(batches, 3 * SAMPLES // 5):
                texts += batch.text
    assert "new" not in " ".join(texts) and "start the run again" in str(caught.value)


@pytest.mark.parametrize("named", [("ETag",), ()], ids=["versions", "no versions"])
def test_the_cache_folder_has_no_ranges_of_an_earlier_object(served: Served, named: tuple[str, ...]) -> None:
    """Of a store without versions nothing is kept in the folder."""
    url, found = served.url(named=named), list[list[str]]()
    for _ in range(2):
        with loader_of(url, 0, folder=str(served.folder / "ranges")) as loader:
            found.append([text for batch in loader for text in batch.text])
        read_ahead._shared.clear()  # as in another process
        for shard in range(SHARDS):
            served.replace(shard)
    assert [sum(text.startswith(word) for text in texts) for texts in found for word in ("old", "new")] == [
        *(SAMPLES - SHARDS, 0),
        *(0, SAMPLES - SHARDS),
    ]


def test_files_that_are_no_shards(served: Served) -> None:
    """Tables, and streams of single files, expect the version of which they were opened; then the newest one."""
    path = f"{served.url()}/1.tar"
    for _ in range(2):
        size = size_of(path)
        assert read_bytes(path, 0, size) == (served.folder / "data/1.tar").read_bytes()
        served.replace()
        with pytest.raises(ShardChangedError, match=r"was replaced while[\s\S]*1\.tar"):
            read_bytes(path, 0, size)


def test_a_store_without_versions_in_its_answers(memory: Any, bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as fsspec's in memory: its record is compared, for few reads of many."""
    memory.pipe_file(bucket, b"x" * 1000)
    asked = calls_here(monkeypatch, type(memory), "info")
    monkeypatch.setattr(file_versions, "_RECHECK", 0.0)
    monkeypatch.setattr(file_versions, "_spare", [2.0])
    for _ in range(160):
        read_range(bucket, 0, 10)
    assert 10 <= len(asked) <= 13
    memory.pipe_file(bucket, b"y" * 1000)
    with pytest.raises(ShardChangedError, match="was replaced while"):
        for _ in range(17):
            read_range(bucket, 0, 10)
    with pytest.raises(ShardChangedError, match="was replaced while"):
        read_range(bucket, 0, 10)
