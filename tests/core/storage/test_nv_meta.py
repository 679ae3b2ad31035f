"""What is in ``.nv-meta``: small files about the data set, and the packed index, which is made where there is none."""

from __future__ import annotations

import json
import logging
import os
import struct
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from energon_lite.errors import DataIndexError, ShardChangedError, ShardFormatError
from energon_lite.storage.index import index_cache, nv_meta
from energon_lite.storage.index.index_cache import index_places
from energon_lite.storage.prepare import prepare_dataset
from energon_lite.storage.read.sample_reader import SampleReader
from energon_lite.storage.read.webdataset import WebdatasetSource
from energon_lite.storage.tar_scan import scan_shard
from tests.testing import told_of, write_members


@pytest.fixture
def root(tmp_path: Path) -> str:
    (tmp_path / ".nv-meta").mkdir()
    return str(tmp_path)


def test_info(root: str) -> None:
    counts = {"b.tar": 3, "a.tar": 0}
    assert not nv_meta.is_prepared(root)
    path = nv_meta.write_info(root, counts)
    assert nv_meta.is_prepared(root) and list(nv_meta.read_info(root).items()) == list(counts.items())
    document = json.loads(Path(path).read_text())
    assert set(document) == {"energon_version", "shard_counts"}  # Energon refuses other keys
    assert not Path(root, ".nv-meta/.info.yaml").exists()


def test_info_of_old_data_sets(root: str) -> None:
    nv_meta.write_info(root, {"a.tar": 5}, legacy=True)
    Path(root, ".nv-meta/.info.json").unlink()
    assert nv_meta.is_prepared(root) and nv_meta.read_info(root) == {"a.tar": 5}


OUTSIDE = (
    *("/etc/passwd", "../x.tar", "a/../../x.tar", "..", ""),
    *("s3://b/x.tar", "file:///x.tar", "a\0b", "a/..", "\ud800"),
)


@pytest.mark.parametrize("name", [nv_meta.INFO_JSON, nv_meta.INFO_YAML])
@pytest.mark.parametrize("shard", OUTSIDE)
def test_shards_outside_of_the_folder(root: str, shard: str, name: str) -> None:
    """What a folder says about itself may be anybody's words: they lead to no file outside of it."""
    Path(root, ".nv-meta", name).write_text(json.dumps({"shard_counts": {"a.tar": 1, shard: 2}}))
    with pytest.raises(DataIndexError, match=rf"(outside of|damaged)[\s\S]*{name}[\s\S]*fix: "):
        nv_meta.read_info(root)


@pytest.mark.parametrize("shard", ["a.tar", "sub/d.d/a..b.tar", "...tar", "./a.tar", "caf\udce9.tar"])
def test_shards_inside_of_the_folder(root: str, shard: str) -> None:
    nv_meta.write_info(root, {shard: 2})
    assert nv_meta.read_info(root) == {shard: 2}


@pytest.mark.parametrize("name", [nv_meta.INFO_JSON, nv_meta.INFO_YAML])
@pytest.mark.parametrize(
    "data",
    [
        *(b"", b"[]", b"{}", b"\xff\xfe", b"[" * 100_000, b"- " * 9000),
        *(b'{"shard_counts": %b}' % counts for counts in (b"[1]", b'{"a": -1}', b'{"a": true}')),
        b'{"shard_counts": {"a": ' + b"9" * 5000 + b"}}",
    ],
    ids=range(10),
)
def test_a_damaged_info(root: str, name: str, data: bytes) -> None:
    """Also not UTF-8, nested without end, numbers without end: an error that names the file."""
    Path(root, ".nv-meta", name).write_bytes(data)
    with pytest.raises(DataIndexError, match=rf"list of shards is damaged[\s\S]*{name}[\s\S]*--force-overwrite"):
        nv_meta.read_info(root)


@pytest.mark.parametrize("read", [nv_meta.read_info, nv_meta.read_uuid])
def test_files_without_end(root: str, read: Callable[[str], object]) -> None:
    """A file of holes takes no room on a disk, and all memory where it is read."""
    for name in (nv_meta.INFO_JSON, nv_meta.UUID_FILE):
        with open(Path(root, ".nv-meta", name), "wb") as file:
            file.truncate(1 << 40)
    with pytest.raises(DataIndexError, match=r"more than [0-9]+ bytes"):
        read(root)


@given(data=st.data())
def test_a_changed_info_is_read_or_refused_by_us(root: str, data: st.DataObject) -> None:
    text = bytearray(Path(nv_meta.write_info(root, {"a.tar": 3, "b/c.tar": 10})).read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        at, length = data.draw(st.integers(0, len(text))), data.draw(st.integers(0, 9))
        text[at : at + length] = data.draw(
            st.binary(max_size=6) | st.sampled_from([b"[", b"{", b'"', b"../", b"9" * 5000])
        )
    Path(root, ".nv-meta/.info.json").write_bytes(text)
    try:
        counts = nv_meta.read_info(root)
    except DataIndexError as error:
        assert error.fix and error.where
    else:
        assert all(name and ".." not in name.split("/") and not name.startswith("/") for name in counts)


def test_uuid(root: str) -> None:
    assert nv_meta.read_uuid(root) == ""
    nv_meta.write_meta(root, nv_meta.UUID_FILE, "12-34")
    assert nv_meta.read_uuid(root) == "12-34"
    Path(root, ".nv-meta", nv_meta.UUID_FILE).write_bytes(b"\xff\xfe")
    with pytest.raises(DataIndexError, match=r"not text[\s\S]*index\.uuid"):
        nv_meta.read_uuid(root)


def test_tar_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nv_meta, "_LARGEST", 23)  # no limit of this file, which has 8 bytes a sample
    write_members(tmp_path / "s/a.0.tar", [("0.txt", b"x"), ("0.cls", b"x"), ("1.txt", b"x" * 600)])
    scan, path = scan_shard(str(tmp_path), "s/a.0.tar"), tmp_path / "s/a.0.tar.idx"
    for earlier in (b"", bytes(24), bytes(25)):
        path.write_bytes(earlier)
        assert nv_meta.write_shard_index(str(tmp_path), scan) == str(path)
        assert struct.unpack("<3Q", path.read_bytes()) == (0, 2048, 3584)
    written = path.stat()
    nv_meta.write_shard_index(str(tmp_path), scan)
    assert path.stat().st_ino == written.st_ino  # it is right, so it is not replaced


# -- the packed index


@pytest.fixture
def foreign(ten: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder as another tool has prepared it: without our index."""
    (ten / ".nv-meta").mkdir()
    nv_meta.write_info(str(ten), {"a.tar": 4, "b.tar": 3, "sub/c.tar": 3})
    (ten / ".nv-meta/index.uuid").write_text("0-0-0")
    monkeypatch.setenv("ENERGON_LITE_CACHE", str(tmp_path / "cache"))
    return ten


def last_key(path: Path) -> str:
    source = WebdatasetSource.open(path)
    return SampleReader(source).sample(len(source) - 1).key


def test_is_made_beside_the_data_once(foreign: Path, caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    assert last_key(foreign) == "9"
    assert "no packed index" in caplog.text and "energon-lite prepare" in caplog.text
    written = (foreign / ".nv-meta/energon_lite.idx").stat()
    caplog.clear()
    assert last_key(foreign) == "9"
    assert not told_of(caplog, foreign) and (foreign / ".nv-meta/energon_lite.idx").stat().st_ino == written.st_ino
    assert not (tmp_path / "cache").exists()


def test_is_made_in_the_users_cache_where_the_data_cannot_be_written(
    foreign: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    beside, cached = index_places(str(foreign))
    assert cached.startswith(str(tmp_path / "cache"))
    refuse_writing(monkeypatch, str(foreign))
    assert last_key(foreign) == "9"
    assert os.path.exists(cached) and not os.path.exists(beside)
    made = os.stat(cached).st_ino
    assert last_key(foreign) == "9" and os.stat(cached).st_ino == made


def test_nowhere_to_write(foreign: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refuse_writing(monkeypatch, str(tmp_path))
    (tmp_path / "cache" / "index").mkdir(parents=True)
    with pytest.raises(DataIndexError, match=r"cannot be written anywhere[\s\S]*ENERGON_LITE_CACHE"):
        WebdatasetSource.open(foreign)


def refuse_writing(monkeypatch: pytest.MonkeyPatch, folder: str) -> None:
    """Let opening for writing below ``folder`` fail as on a read-only file system (root may write anywhere else)."""
    real = os.open

    def guarded(path: str, flags: int, *args: int) -> int:
        if flags & os.O_RDWR and str(path).startswith(folder):
            raise OSError(30, "Read-only file system", str(path))
        return real(path, flags, *args)

    monkeypatch.setattr(os, "open", guarded)


def test_two_data_sets_of_one_name_do_not_share_a_place(tmp_path: Path) -> None:
    assert index_places(str(tmp_path / "a/data"))[1] != index_places(str(tmp_path / "b/data"))[1]


def test_is_made_again_when_another_tool_has_prepared_anew(foreign: Path) -> None:
    prepare_dataset(foreign, split_ratio="1,0,0", force_overwrite=True)
    # Other samples, the same number.
    write_members(foreign / "sub/c.tar", [("x.txt", b""), ("y.txt", b""), ("z.txt", b"z" * 30_000)])
    (foreign / ".nv-meta/index.uuid").write_text("1-1-1")
    assert last_key(foreign) == "z"


def test_is_made_again_when_shards_were_added_or_reordered(foreign: Path) -> None:
    assert last_key(foreign) == "9"
    counts = {"sub/c.tar": 3, "b.tar": 3, "a.tar": 4}
    (foreign / ".nv-meta/.info.json").write_text(json.dumps({"shard_counts": counts}))
    assert last_key(foreign) == "3"


def test_a_damaged_index_is_made_again(foreign: Path, caplog: pytest.LogCaptureFixture) -> None:
    last_key(foreign)
    os.truncate(foreign / ".nv-meta/energon_lite.idx", 100)
    caplog.set_level(logging.WARNING)
    assert last_key(foreign) == "9" and "too short" in caplog.text


def test_shards_that_do_not_fit_the_preparation(foreign: Path) -> None:
    write_members(foreign / "b.tar", [("4.txt", b"")])
    with pytest.raises(ShardChangedError, match=r"has 1 sample, but 3 when[\s\S]*b.tar[\s\S]*--force-overwrite"):
        WebdatasetSource.open(foreign)


def test_shards_that_cannot_be_read(foreign: Path) -> None:
    os.truncate(foreign / "b.tar", 700)
    with pytest.raises(ShardFormatError, match=r"truncated[\s\S]*b.tar"):
        WebdatasetSource.open(foreign)


def test_many_ranks_at_once(foreign: Path) -> None:
    """One makes the index, the others wait."""
    together = Barrier(6)

    def rank(_: int) -> str:
        together.wait(100)
        return last_key(foreign)

    make = index_cache.PackedIndex.from_scans
    with patch.object(index_cache.PackedIndex, "from_scans", side_effect=make) as made, ThreadPoolExecutor(6) as pool:
        assert list(pool.map(rank, range(6))) == ["9"] * 6
    assert made.call_count == 1


def test_a_lock_that_is_a_link_is_not_followed(foreign: Path, tmp_path: Path) -> None:
    """A folder from elsewhere must not make, or lock, a file outside of itself."""
    (foreign / ".nv-meta/energon_lite.idx.lock").symlink_to(tmp_path / "made")
    assert last_key(foreign) == "9"
    assert not (tmp_path / "made").exists() and os.path.exists(index_places(str(foreign))[1])
