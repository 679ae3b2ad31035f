from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from energon_lite.errors import MissingShardError
from energon_lite.storage.tar_scan import scan_shard


def test_scan(make_tar: Callable[..., Path], tmp_path: Path) -> None:
    make_tar(
        "s/a.tar",
        [
            ("__meta__/x.txt", b"skip"),
            ("0.txt", b"zero"),
            ("0.cls", b"0"),
            ("LICENSE", b"skip"),
            ("f/1.txt", b"one"),
            ("0.txt", b"again"),
        ],
    )
    scan = scan_shard(str(tmp_path), "s/a.tar")
    assert scan.all_keys() == ["0", "f/1", "0"]
    assert scan.part_names == ("txt", "cls")
    # Each member takes 1024 bytes; the first one is skipped.
    assert scan.headers.tolist() == [1024, 4096, 5120]
    assert scan.first_part.tolist() == [0, 2, 3, 4]
    assert scan.parts.tolist() == [[1536, 4, 0], [2560, 1, 1], [4608, 3, 0], [5632, 5, 0]]
    assert (scan.end, scan.size) == (6144, (tmp_path / "s/a.tar").stat().st_size)


def test_names_that_are_not_text_survive(make_tar: Callable[..., Path], tmp_path: Path) -> None:
    make_tar("a.tar", [("caf\udce9.txt", b"")])
    assert scan_shard(str(tmp_path), "a.tar").all_keys()[0] == "caf\udce9"


def test_a_missing_shard(tmp_path: Path) -> None:
    with pytest.raises(MissingShardError, match=r"gone\.tar"):
        scan_shard(str(tmp_path), "gone.tar")
