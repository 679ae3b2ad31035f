from __future__ import annotations

import json
import logging
import multiprocessing
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from energon_lite.errors import DataIndexError, ShardChangedError, ShardFormatError
from energon_lite.storage.index import index_cache
from energon_lite.storage.index.index_cache import index_places
from energon_lite.storage.prepare.prepare import prepare_dataset
from energon_lite.storage.read.sample_reader import SampleReader
from energon_lite.storage.read.webdataset import WebdatasetSource
from tests.testing import told_of


@pytest.fixture
def foreign(ten: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder as another tool has prepared it: without our index."""
    meta = ten / ".nv-meta"
    meta.mkdir()
    counts = {"a.tar": 4, "b.tar": 3, "sub/c.tar": 3}
    (meta / ".info.json").write_text(json.dumps({"energon_version": "7.4.1", "shard_counts": counts}))
    (meta / "index.uuid").write_text("0-0-0")
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


def test_is_made_again_when_another_tool_has_prepared_anew(foreign: Path, make_tar: Callable[..., Path]) -> None:
    prepare_dataset(foreign, split_ratio="1,0,0", force_overwrite=True)
    make_tar("ten/sub/c.tar", [("x.txt", b""), ("y.txt", b""), ("z.txt", b"z" * 30_000)])  # other samples, same number
    (foreign / ".nv-meta/index.uuid").write_text("1-1-1")
    assert last_key(foreign) == "z"


def test_is_made_again_when_shards_were_added_or_reordered(foreign: Path, make_tar: Callable[..., Path]) -> None:
    assert last_key(foreign) == "9"
    counts = {"sub/c.tar": 3, "b.tar": 3, "a.tar": 4}
    (foreign / ".nv-meta/.info.json").write_text(json.dumps({"shard_counts": counts}))
    assert last_key(foreign) == "3"


def test_a_damaged_index_is_made_again(foreign: Path, caplog: pytest.LogCaptureFixture) -> None:
    last_key(foreign)
    os.truncate(foreign / ".nv-meta/energon_lite.idx", 100)
    caplog.set_level(logging.WARNING)
    assert last_key(foreign) == "9" and "too short" in caplog.text


def test_shards_that_do_not_fit_the_preparation(foreign: Path, make_tar: Callable[..., Path]) -> None:
    make_tar("ten/b.tar", [("4.txt", b"")])
    with pytest.raises(ShardChangedError, match=r"has 1 sample, but 3 when[\s\S]*b.tar[\s\S]*--force-overwrite"):
        WebdatasetSource.open(foreign)


def test_shards_that_cannot_be_read(foreign: Path) -> None:
    os.truncate(foreign / "b.tar", 700)
    with pytest.raises(ShardFormatError, match=r"truncated[\s\S]*b.tar"):
        WebdatasetSource.open(foreign)


def _open(path: str, barrier: object, results: object) -> None:
    made = []
    make = index_cache.PackedIndex.from_scans
    index_cache.PackedIndex.from_scans = lambda *args, **more: made.append(1) or make(*args, **more)  # type: ignore
    barrier.wait()  # type: ignore[attr-defined]
    results.put((last_key(Path(path)), len(made)))  # type: ignore[attr-defined]


def test_many_ranks_at_once(foreign: Path) -> None:
    context = multiprocessing.get_context("fork")
    barrier, results = context.Barrier(6), context.Queue()
    ranks = [context.Process(target=_open, args=(str(foreign), barrier, results)) for _ in range(6)]
    for rank in ranks:
        rank.start()
    found = [results.get(timeout=300) for _ in ranks]
    for rank in ranks:
        rank.join()
    assert [key for key, _ in found] == ["9"] * 6
    assert sum(made for _, made in found) == 1  # one made it, the others waited


def test_a_lock_that_is_a_link_is_not_followed(foreign: Path, tmp_path: Path) -> None:
    """A folder from elsewhere must not make, or lock, a file outside of itself."""
    (foreign / ".nv-meta/energon_lite.idx.lock").symlink_to(tmp_path / "made")
    assert last_key(foreign) == "9"
    assert not (tmp_path / "made").exists() and os.path.exists(index_places(str(foreign))[1])
