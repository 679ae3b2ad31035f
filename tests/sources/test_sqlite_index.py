from __future__ import annotations

import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

from energon_lite.sources.sqlite_index import build_sqlite_index, find_duplicate_key
from energon_lite.sources.tar_scan import scan_shard


def test_contents(make_tar: Callable[..., Path], tmp_path: Path) -> None:
    make_tar("a.tar", [("0.txt", b"zero"), ("0.cls", b"0"), ("1.txt", b"one")])
    make_tar("b.tar", [("f/2.txt", b"two")])
    scans = [scan_shard(str(tmp_path), name) for name in ("a.tar", "b.tar")]
    assert find_duplicate_key(scans) is None
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


def test_keys_that_appear_twice(make_tar: Callable[..., Path], tmp_path: Path) -> None:
    make_tar("a.tar", [("0.txt", b""), ("1.txt", b"")])
    make_tar("b.tar", [("1.txt", b"")])
    scans = [scan_shard(str(tmp_path), name) for name in ("a.tar", "b.tar")]
    assert not build_sqlite_index(str(tmp_path / "index.sqlite"), scans)
    assert find_duplicate_key(scans) == ("1", "a.tar", "b.tar")


def test_keys_that_are_not_text(make_tar: Callable[..., Path], tmp_path: Path) -> None:
    make_tar("a.tar", [("caf\udce9.txt", b"")])
    assert not build_sqlite_index(str(tmp_path / "index.sqlite"), [scan_shard(str(tmp_path), "a.tar")])
