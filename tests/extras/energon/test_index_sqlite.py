from __future__ import annotations

import functools
import os
import shutil
import sqlite3
import tarfile
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from energon_lite.errors import DatasetError, ShardFormatError
from energon_lite.extras.energon import index_sqlite as sqlite_index
from energon_lite.extras.energon import unique_keys
from energon_lite.extras.energon.index_sqlite import build_sqlite_index, find_duplicate_keys
from energon_lite.extras.energon.unique_keys import make_keys_unique
from energon_lite.storage.index.packed_index import PackedIndex
from energon_lite.storage.prepare import index_again, prepare_dataset
from energon_lite.storage.tar_scan import scan_shard
from tests.accidents import killed_at_every_step
from tests.testing import output_of, refusal_of, write_tar


def rows(database: Path, query: str) -> list[Any]:
    with closing(sqlite3.connect(database)) as connection:
        return connection.execute(query).fetchall()


DATABASE = ".nv-meta/index.sqlite"
KEYS = [f"{number}.cls" for number in range(10)]
MEDIA = """
CREATE TABLE media_metadata (entry_key TEXT PRIMARY KEY, metadata_type TEXT NOT NULL, metadata_json TEXT NOT NULL);
CREATE TABLE media_filters (filter_id INTEGER PRIMARY KEY AUTOINCREMENT, strategy TEXT NOT NULL, patterns TEXT,
                            created_at_utc TEXT DEFAULT CURRENT_TIMESTAMP, UNIQUE(strategy, patterns));
INSERT INTO media_filters (strategy, patterns) VALUES ('extension', 'jpg');
CREATE INDEX by_type ON media_metadata(metadata_type);
"""


def media(root: Path) -> tuple[list[str], list[str]]:
    keys = rows(root / DATABASE, "SELECT entry_key FROM media_metadata ORDER BY entry_key")
    return [key for (key,) in keys], [text for (text,) in rows(root / DATABASE, "SELECT patterns FROM media_filters")]


def samples_of(root: Path) -> int:
    ((count,),) = rows(root / DATABASE, "SELECT count(*) FROM samples")
    return int(count)


def files(root: Path) -> list[str]:
    return sorted(path.name for path in (root / ".nv-meta").iterdir() if "sqlite" in path.name)


def prepared_again(root: Path, indexes_only: bool = False, **options: Any) -> Any:
    """The report of another preparation of a folder."""
    if indexes_only:
        return index_again(str(root))
    return prepare_dataset(root, split_ratio="1,0,0", force_overwrite=True, **options)


@pytest.fixture
def prepared(ten: Path) -> Path:
    """With what Energon adds when it measures pictures and videos."""
    prepare_dataset(ten, split_ratio="1,0,0")
    with closing(sqlite3.connect(ten / DATABASE)) as connection, connection:
        connection.executescript(MEDIA)
        rows = [(key, "image", '{"width": 1}') for key in KEYS]
        connection.executemany("INSERT INTO media_metadata VALUES (?, ?, ?)", rows)
    return ten


@pytest.mark.parametrize("indexes_only", [True, False])
def test_tables_of_others_are_kept(prepared: Path, indexes_only: bool) -> None:
    report = prepared_again(prepared, indexes_only)
    assert media(prepared) == (KEYS, ["jpg"])
    assert report.warnings == (
        "index.sqlite: kept what others wrote into it: media_filters (1 row), media_metadata (10 rows)",
    )
    assert samples_of(prepared) == 10 and files(prepared) == ["index.sqlite"]
    names = rows(prepared / DATABASE, "SELECT name FROM sqlite_master WHERE type = 'index'")
    assert {("by_type",), ("idx_samples_by_tar_and_idx",)} <= {*names}
    with closing(sqlite3.connect(prepared / DATABASE)) as connection:
        assert connection.execute("INSERT INTO media_filters (strategy) VALUES ('x')").lastrowid == 2


def test_rows_about_what_has_changed_are_dropped(prepared: Path, make_tar: Callable[..., Path]) -> None:
    """A member that is gone, has moved in its shard or has another size has no row any more; the others stay."""
    make_tar(
        "ten/b.tar", [("4.txt", b"text 4"), ("4.cls", b"4"), ("5.txt", bytes(600)), ("5.cls", b"5"), ("6.cls", b"66")]
    )
    make_tar("ten/0.tar", [("new.txt", b"new"), ("new.cls", b"1")])
    (prepared / "sub/c.tar").unlink()
    warning = prepared_again(prepared).warnings[-1]
    assert media(prepared)[0] == KEYS[:5]
    assert "index.sqlite: 5 of 10 rows of media_metadata were about members that are gone or changed" in warning
    assert "energon-lite prepare-media" in warning


@pytest.mark.parametrize("duplicates", [True, False])
def test_what_cannot_be_kept_in_place_is_kept_beside(
    prepared: Path, make_tar: Callable[..., Path], duplicates: bool
) -> None:
    """Without a database (it is not wanted, or keys are not unique) the tables wait for the next one."""
    if duplicates:
        make_tar("ten/d.tar", [("0.txt", b"again")])
    report = prepared_again(prepared, sqlite=duplicates)
    assert not (prepared / DATABASE).exists()
    assert any("energon_lite.kept.sqlite" in warning for warning in report.warnings)
    (prepared / "d.tar").unlink(missing_ok=True)
    prepared_again(prepared)
    assert media(prepared)[0] == KEYS and files(prepared) == ["index.sqlite"]


def test_a_kill_at_any_time_loses_no_table(prepared: Path, quick_disk: None, tmp_path: Path) -> None:
    shutil.copytree(prepared / ".nv-meta", tmp_path / "before")

    def restore() -> None:
        shutil.rmtree(prepared / ".nv-meta")
        shutil.copytree(tmp_path / "before", prepared / ".nv-meta")

    steps = 0

    def work() -> None:
        prepared_again(prepared, workers=1)

    for killed in killed_at_every_step(work, restore, [(sqlite_index, "_sample_rows")]):
        steps += killed
        if killed:
            work()
        assert media(prepared)[0] == KEYS and files(prepared) == ["index.sqlite"]
    assert steps > 20


@pytest.mark.parametrize("data", [b"", b"no database", b"SQLite format 3\0" + bytes(200)])
@pytest.mark.parametrize("indexes_only", [True, False])
def test_a_database_that_is_none_is_replaced(prepared: Path, data: bytes, indexes_only: bool) -> None:
    (prepared / DATABASE).write_bytes(data)
    prepared_again(prepared, indexes_only)
    assert samples_of(prepared) == 10


def test_a_damaged_database_is_not_thrown_away(prepared: Path) -> None:
    """Its tables can be seen, and not be read."""
    ((root,),) = rows(prepared / DATABASE, "SELECT rootpage FROM sqlite_master WHERE name = 'media_metadata'")
    ((size,),) = rows(prepared / DATABASE, "PRAGMA page_size")
    data = bytearray((prepared / DATABASE).read_bytes())
    data[(root - 1) * size : root * size] = b"\xff" * size
    (prepared / DATABASE).write_bytes(data)
    report = prepared_again(prepared)
    assert any("energon_lite.kept.sqlite" in warning and "malformed" in warning for warning in report.warnings)
    assert (prepared / ".nv-meta/energon_lite.kept.sqlite").read_bytes() == data
    assert samples_of(prepared) == 10


def test_a_database_runs_nothing(prepared: Path, tmp_path: Path) -> None:
    """Views, triggers and virtual tables of others are not taken over."""
    with closing(sqlite3.connect(prepared / DATABASE)) as connection, connection:
        connection.executescript(
            "CREATE VIEW media_view AS SELECT 1; CREATE VIRTUAL TABLE texts USING fts4(body);"
            "CREATE TRIGGER t AFTER INSERT ON media_metadata BEGIN DELETE FROM samples; END;"
        )
    prepared_again(prepared)
    master = rows(prepared / DATABASE, "SELECT type, name FROM sqlite_master")
    kinds, names = ({row[place] for row in master} for place in (0, 1))
    assert kinds == {"table", "index"} and "texts" not in names and "media_metadata" in names
    assert samples_of(prepared) == 10


def test_keys_that_appear_twice_or_are_not_text(make_tar: Callable[..., Path], tmp_path: Path) -> None:
    make_tar("a.tar", [("0.txt", b""), ("1.txt", b"")])
    make_tar("b.tar", [("1.txt", b"")])
    scans = [scan_shard(str(tmp_path), name) for name in ("a.tar", "b.tar")]
    assert not build_sqlite_index(str(tmp_path / "index.sqlite"), scans)
    assert next(find_duplicate_keys(scans)) == ("1", "a.tar", "b.tar")
    make_tar("a.tar", [("caf\udce9.txt", b"")])
    assert not build_sqlite_index(str(tmp_path / "other.sqlite"), [scan_shard(str(tmp_path), "a.tar")])


@pytest.mark.parametrize("indexes_only", [True, False])
@pytest.mark.slow
def test_a_database_that_is_in_use_is_not_thrown_away(
    prepared: Path, monkeypatch: pytest.MonkeyPatch, indexes_only: bool
) -> None:
    """What cannot be looked at now may hold tables of others."""
    monkeypatch.setattr(sqlite3, "connect", functools.partial(sqlite3.connect, timeout=0.1))
    before = (prepared / DATABASE).read_bytes()
    with closing(sqlite3.connect(prepared / DATABASE)) as writer:
        writer.execute("BEGIN EXCLUSIVE")
        with pytest.raises(DatasetError, match=r"index\.sqlite.*locked"):
            prepared_again(prepared, indexes_only)
        writer.rollback()
    assert (prepared / DATABASE).read_bytes() == before
    prepared_again(prepared)
    assert media(prepared)[0] == KEYS


# -- keys that are made unique, as ``index.sqlite`` needs them --------------------------------------------------------


def members(path: Path) -> list[str]:
    with tarfile.open(path) as tar:
        return tar.getnames()


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    for name in ("a.tar", "sub/b.tar"):
        write_tar(tmp_path / name, [("0", {"txt": name.encode(), "cls": b"0"}), ("x/1", {"txt": b"one"})])
    return tmp_path


def test_names_get_the_name_of_their_shard(shards: Path) -> None:
    before = (shards / "a.tar").read_bytes()
    assert make_keys_unique(str(shards), ["a.tar"]) == [] and (shards / "a.tar").read_bytes() == before  # unique ones
    assert make_keys_unique(str(shards), ["a.tar", "sub/b.tar"]) == ["a.tar", "sub/b.tar"]
    assert members(shards / "a.tar") == ["a.tar/0.txt", "a.tar/0.cls", "a.tar/x/1.txt"]
    assert members(shards / "sub/b.tar")[0] == "sub/b.tar/0.txt"
    with tarfile.open(shards / "a.tar") as tar:
        assert [tar.extractfile(member).read() for member in tar] == [b"a.tar", b"0", b"one"]  # type: ignore[union-attr]
    assert os.path.getsize(shards / "a.tar") == len(before)
    assert scan_shard(str(shards), "sub/b.tar").all_keys() == ["sub/b.tar/0", "sub/b.tar/x/1"]
    assert make_keys_unique(str(shards), ["a.tar", "sub/b.tar"]) == []


def test_members_that_belong_to_no_sample_stay(shards: Path) -> None:
    write_tar(shards / "a.tar", [("__meta__/0", {"txt": b""}), ("0", {"txt": b"a"})])
    make_keys_unique(str(shards), ["a.tar", "sub/b.tar"])
    assert members(shards / "a.tar") == ["__meta__/0.txt", "a.tar/0.txt"]


@pytest.mark.parametrize(("length", "fits"), [(90, True), (96, True), (97, False)])
def test_long_members(tmp_path: Path, length: int, fits: bool) -> None:
    """Of a name, 100 bytes stand in one place, and what is in front of a slash in another."""
    for name in ("a.tar", "b.tar"):
        kind = tarfile.GNU_FORMAT if length > 96 else tarfile.USTAR_FORMAT
        with tarfile.open(tmp_path / name, "w", format=kind) as tar:
            tar.addfile(tarfile.TarInfo("k" * length + ".txt"))
    if fits:
        make_keys_unique(str(tmp_path), ["a.tar", "b.tar"])
        assert members(tmp_path / "b.tar") == [f"b.tar/{'k' * length}.txt"]
        return
    before = (tmp_path / "a.tar").read_bytes()
    with pytest.raises(ShardFormatError, match="no room"):
        make_keys_unique(str(tmp_path), ["a.tar", "b.tar"])
    assert (tmp_path / "a.tar").read_bytes() == before


def test_one_that_was_killed_is_finished(shards: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write, written = os.pwrite, []

    def dies(*arguments: Any) -> int:
        written.append(arguments)
        if len(written) == 5:
            raise KeyboardInterrupt
        return write(*arguments)

    monkeypatch.setattr(unique_keys.os, "pwrite", dies)
    with pytest.raises(KeyboardInterrupt):
        make_keys_unique(str(shards), ["a.tar", "sub/b.tar"])
    assert members(shards / "sub/b.tar") == ["sub/b.tar/0.txt", "0.cls", "x/1.txt"]
    make_keys_unique(str(shards), ["a.tar", "sub/b.tar"])
    assert members(shards / "sub/b.tar") == ["sub/b.tar/0.txt", "sub/b.tar/0.cls", "sub/b.tar/x/1.txt"]


def test_prepare_makes_keys_unique(shards: Path) -> None:
    options = ("--non-interactive", "--split-ratio", "1,0,0", "--fix-duplicates", "--no-progress")
    assert "Keys collided: the members of 2 shards" in output_of("prepare", shards, *options)
    index = PackedIndex.open(str(shards / ".nv-meta" / "energon_lite.idx"))
    assert [*index.keys(0, len(index))] == ["a.tar/0", "a.tar/x/1", "sub/b.tar/0", "sub/b.tar/x/1"]
    assert index.uuid == (shards / ".nv-meta" / "index.uuid").read_text()
    output = output_of("prepare", shards, *options, "--force-overwrite")
    assert "No two shards have a key in common; no shard was changed" in output
    output = refusal_of("prepare", shards, "--tar-index-only", "--fix-duplicates")
    assert "--fix-duplicates: needs no --tar-index-only" in output
