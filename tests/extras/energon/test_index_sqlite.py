from __future__ import annotations

import functools
import shutil
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from energon_lite.errors import DatasetError
from energon_lite.extras.energon import index_sqlite as sqlite_index
from energon_lite.extras.energon.index_sqlite import build_sqlite_index, find_duplicate_keys
from energon_lite.storage.prepare import index_again, prepare_dataset
from energon_lite.storage.tar_scan import scan_shard
from tests.testing import killed_at_every_step


def test_contents(make_tar: Callable[..., Path], tmp_path: Path) -> None:
    make_tar("a.tar", [("0.txt", b"zero"), ("0.cls", b"0"), ("1.txt", b"one")])
    make_tar("b.tar", [("f/2.txt", b"two")])
    scans = [scan_shard(str(tmp_path), name) for name in ("a.tar", "b.tar")]
    assert [*find_duplicate_keys(scans)] == []
    assert build_sqlite_index(str(tmp_path / "index.sqlite"), scans)
    with closing(sqlite3.connect(tmp_path / "index.sqlite")) as database:
        assert database.execute("SELECT * FROM samples").fetchall() == [
            (0, "0", 0, 0, 2048),
            (0, "1", 1, 2048, 1024),
            (1, "f/2", 0, 0, 1024),
        ]
        assert database.execute("SELECT * FROM sample_parts").fetchall() == [
            (0, 0, "txt", 512, 4),
            (0, 0, "cls", 1536, 1),
            (0, 1, "txt", 2560, 3),
            (1, 0, "txt", 512, 3),
        ]


MEDIA = """
CREATE TABLE media_metadata (entry_key TEXT PRIMARY KEY, metadata_type TEXT NOT NULL, metadata_json TEXT NOT NULL);
CREATE TABLE media_filters (filter_id INTEGER PRIMARY KEY AUTOINCREMENT, strategy TEXT NOT NULL, patterns TEXT,
                            created_at_utc TEXT DEFAULT CURRENT_TIMESTAMP, UNIQUE(strategy, patterns));
INSERT INTO media_filters (strategy, patterns) VALUES ('extension', 'jpg');
CREATE INDEX by_type ON media_metadata(metadata_type);
"""


def add_media(database: Path, keys: list[str]) -> None:
    """What Energon adds when it measures pictures and videos."""
    with closing(sqlite3.connect(database)) as connection, connection:
        connection.executescript(MEDIA)
        rows = [(key, "image", '{"width": 1}') for key in keys]
        connection.executemany("INSERT INTO media_metadata VALUES (?, ?, ?)", rows)


def media(database: Path) -> tuple[list[str], list[str]]:
    with closing(sqlite3.connect(database)) as connection:
        keys = [key for (key,) in connection.execute("SELECT entry_key FROM media_metadata ORDER BY entry_key")]
        return keys, [text for (text,) in connection.execute("SELECT patterns FROM media_filters")]


@pytest.fixture
def prepared(ten: Path) -> Path:
    prepare_dataset(ten, split_ratio="1,0,0")
    add_media(ten / ".nv-meta/index.sqlite", [f"{number}.cls" for number in range(10)])
    return ten


DATABASE = ".nv-meta/index.sqlite"
AGAIN = {"split_ratio": "1,0,0", "force_overwrite": True}


@pytest.mark.parametrize("indexes_only", [True, False])
def test_tables_of_others_are_kept(prepared: Path, indexes_only: bool) -> None:
    report = index_again(str(prepared)) if indexes_only else prepare_dataset(prepared, **AGAIN)
    assert media(prepared / DATABASE) == ([f"{number}.cls" for number in range(10)], ["jpg"])
    assert report.warnings == (
        "index.sqlite: kept what others wrote into it: media_filters (1 row), media_metadata (10 rows)",
    )
    with closing(sqlite3.connect(prepared / DATABASE)) as connection:
        assert connection.execute("SELECT count(*) FROM samples").fetchone() == (10,)
        names = [name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'index'")]
        assert "by_type" in names and "idx_samples_by_tar_and_idx" in names
        assert connection.execute("INSERT INTO media_filters (strategy) VALUES ('x')").lastrowid == 2
    assert sorted(path.name for path in (prepared / ".nv-meta").iterdir() if "sqlite" in path.name) == ["index.sqlite"]


def test_rows_about_what_has_changed_are_dropped(prepared: Path, make_tar: Callable[..., Path]) -> None:
    """A member that is gone, has moved in its shard or has another size has no row any more; the others stay."""
    make_tar(
        "ten/b.tar", [("4.txt", b"text 4"), ("4.cls", b"4"), ("5.txt", bytes(600)), ("5.cls", b"5"), ("6.cls", b"66")]
    )
    make_tar("ten/0.tar", [("new.txt", b"new"), ("new.cls", b"1")])
    (prepared / "sub/c.tar").unlink()
    report = prepare_dataset(prepared, **AGAIN)
    assert media(prepared / DATABASE)[0] == ["0.cls", "1.cls", "2.cls", "3.cls", "4.cls"]
    assert (
        "index.sqlite: 5 of 10 rows of media_metadata were about members that are gone or changed"
        in report.warnings[-1]
    )
    assert "energon-lite prepare-media" in report.warnings[-1]


@pytest.mark.parametrize("duplicates", [True, False])
def test_what_cannot_be_kept_in_place_is_kept_beside(
    prepared: Path, make_tar: Callable[..., Path], duplicates: bool
) -> None:
    """Without a database (it is not wanted, or keys are not unique) the tables wait for the next one."""
    if duplicates:
        make_tar("ten/d.tar", [("0.txt", b"again")])
    report = prepare_dataset(prepared, sqlite=duplicates, **AGAIN)
    assert not (prepared / DATABASE).exists()
    assert any("energon_lite.kept.sqlite" in warning for warning in report.warnings)
    (prepared / "d.tar").unlink(missing_ok=True)
    prepare_dataset(prepared, **AGAIN)
    assert media(prepared / DATABASE)[0] == [f"{number}.cls" for number in range(10)]
    assert not (prepared / ".nv-meta/energon_lite.kept.sqlite").exists()


def test_a_kill_at_any_time_loses_no_table(prepared: Path, quick_disk: None, tmp_path: Path) -> None:
    shutil.copytree(prepared / ".nv-meta", tmp_path / "before")

    def restore() -> None:
        shutil.rmtree(prepared / ".nv-meta")
        shutil.copytree(tmp_path / "before", prepared / ".nv-meta")

    steps = 0
    for killed in killed_at_every_step(
        lambda: prepare_dataset(prepared, workers=1, **AGAIN), restore, [(sqlite_index, "_sample_rows")]
    ):
        steps += killed
        if killed:
            prepare_dataset(prepared, workers=1, **AGAIN)
        assert media(prepared / DATABASE)[0] == [f"{number}.cls" for number in range(10)]
        names = [path.name for path in (prepared / ".nv-meta").iterdir() if "sqlite" in path.name]
        assert names == ["index.sqlite"]
    assert steps > 20


HOSTILE = [
    b"",
    b"no database",
    b"SQLite format 3\0" + bytes(200),
]


@pytest.mark.parametrize("data", HOSTILE)
@pytest.mark.parametrize("indexes_only", [True, False])
def test_a_database_that_is_none_is_replaced(prepared: Path, data: bytes, indexes_only: bool) -> None:
    (prepared / DATABASE).write_bytes(data)
    _ = index_again(str(prepared)) if indexes_only else prepare_dataset(prepared, **AGAIN)
    with closing(sqlite3.connect(prepared / DATABASE)) as connection:
        assert connection.execute("SELECT count(*) FROM samples").fetchone() == (10,)


def test_a_damaged_database_is_not_thrown_away(prepared: Path) -> None:
    """Its tables can be seen, and not be read."""
    with closing(sqlite3.connect(prepared / DATABASE)) as connection, connection:
        (root,) = connection.execute("SELECT rootpage FROM sqlite_master WHERE name = 'media_metadata'").fetchone()
        (size,) = connection.execute("PRAGMA page_size").fetchone()
    data = bytearray((prepared / DATABASE).read_bytes())
    data[(root - 1) * size : root * size] = b"\xff" * size
    (prepared / DATABASE).write_bytes(data)
    report = prepare_dataset(prepared, **AGAIN)
    assert any("energon_lite.kept.sqlite" in warning and "malformed" in warning for warning in report.warnings)
    assert (prepared / ".nv-meta/energon_lite.kept.sqlite").read_bytes() == data
    with closing(sqlite3.connect(prepared / DATABASE)) as connection:
        assert connection.execute("SELECT count(*) FROM samples").fetchone() == (10,)


def test_a_database_runs_nothing(prepared: Path, tmp_path: Path) -> None:
    """Views, triggers and virtual tables of others are not taken over."""
    with closing(sqlite3.connect(prepared / DATABASE)) as connection, connection:
        connection.executescript(
            "CREATE VIEW media_view AS SELECT 1; CREATE VIRTUAL TABLE texts USING fts4(body);"
            "CREATE TRIGGER t AFTER INSERT ON media_metadata BEGIN DELETE FROM samples; END;"
        )
    prepare_dataset(prepared, **AGAIN)
    with closing(sqlite3.connect(prepared / DATABASE)) as connection:
        kinds = {kind for (kind,) in connection.execute("SELECT type FROM sqlite_master")}
        names = {name for (name,) in connection.execute("SELECT name FROM sqlite_master")}
        assert kinds == {"table", "index"} and "texts" not in names and "media_metadata" in names
        assert connection.execute("SELECT count(*) FROM samples").fetchone() == (10,)


def test_keys_that_appear_twice(make_tar: Callable[..., Path], tmp_path: Path) -> None:
    make_tar("a.tar", [("0.txt", b""), ("1.txt", b"")])
    make_tar("b.tar", [("1.txt", b"")])
    scans = [scan_shard(str(tmp_path), name) for name in ("a.tar", "b.tar")]
    assert not build_sqlite_index(str(tmp_path / "index.sqlite"), scans)
    assert next(find_duplicate_keys(scans)) == ("1", "a.tar", "b.tar")


def test_keys_that_are_not_text(make_tar: Callable[..., Path], tmp_path: Path) -> None:
    make_tar("a.tar", [("caf\udce9.txt", b"")])
    assert not build_sqlite_index(str(tmp_path / "index.sqlite"), [scan_shard(str(tmp_path), "a.tar")])


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
            _ = index_again(str(prepared)) if indexes_only else prepare_dataset(prepared, **AGAIN)
        writer.rollback()
    assert (prepared / DATABASE).read_bytes() == before
    prepare_dataset(prepared, **AGAIN)
    assert len(media(prepared / DATABASE)[0]) == 10
