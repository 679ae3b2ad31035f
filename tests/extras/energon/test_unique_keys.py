from __future__ import annotations

import os
import tarfile
from pathlib import Path
from typing import Any

import pytest

from energon_lite.errors import ShardFormatError
from energon_lite.extras.energon import unique_keys
from energon_lite.extras.energon.unique_keys import make_keys_unique
from energon_lite.storage.index.packed_index import PackedIndex
from energon_lite.storage.tar_scan import scan_shard
from tests.testing import command, write_tar


def names(path: Path) -> list[str]:
    with tarfile.open(path) as tar:
        return tar.getnames()


def contents(path: Path) -> list[bytes]:
    with tarfile.open(path) as tar:
        return [tar.extractfile(member).read() for member in tar]  # type: ignore[union-attr]


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    for name in ("a.tar", "sub/b.tar"):
        write_tar(tmp_path / name, [("0", {"txt": name.encode(), "cls": b"0"}), ("x/1", {"txt": b"one"})])
    return tmp_path


def test_names_get_the_name_of_their_shard(shards: Path) -> None:
    before = contents(shards / "a.tar")
    sizes = os.path.getsize(shards / "a.tar")
    assert make_keys_unique(str(shards), ["a.tar", "sub/b.tar"]) == ["a.tar", "sub/b.tar"]
    assert names(shards / "a.tar") == ["a.tar/0.txt", "a.tar/0.cls", "a.tar/x/1.txt"]
    assert names(shards / "sub/b.tar")[0] == "sub/b.tar/0.txt"
    assert contents(shards / "a.tar") == before and os.path.getsize(shards / "a.tar") == sizes
    assert scan_shard(str(shards), "sub/b.tar").all_keys() == ["sub/b.tar/0", "sub/b.tar/x/1"]
    assert make_keys_unique(str(shards), ["a.tar", "sub/b.tar"]) == []


def test_unique_ones_stay(shards: Path) -> None:
    before = (shards / "a.tar").read_bytes()
    assert make_keys_unique(str(shards), ["a.tar"]) == [] and (shards / "a.tar").read_bytes() == before


def test_members_that_belong_to_no_sample_stay(shards: Path) -> None:
    write_tar(shards / "a.tar", [("__meta__/0", {"txt": b""}), ("0", {"txt": b"a"})])
    make_keys_unique(str(shards), ["a.tar", "sub/b.tar"])
    assert names(shards / "a.tar") == ["__meta__/0.txt", "a.tar/0.txt"]


@pytest.mark.parametrize(("length", "fits"), [(90, True), (96, True), (97, False)])
def test_long_names(tmp_path: Path, length: int, fits: bool) -> None:
    """Of a name, 100 bytes stand in one place, and what is in front of a slash in another."""
    for name in ("a.tar", "b.tar"):
        with tarfile.open(
            tmp_path / name, "w", format=tarfile.GNU_FORMAT if length > 96 else tarfile.USTAR_FORMAT
        ) as tar:
            tar.addfile(tarfile.TarInfo("k" * length + ".txt"))
    if fits:
        make_keys_unique(str(tmp_path), ["a.tar", "b.tar"])
        assert names(tmp_path / "b.tar") == [f"b.tar/{'k' * length}.txt"]
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
    assert names(shards / "sub/b.tar") == ["sub/b.tar/0.txt", "0.cls", "x/1.txt"]
    make_keys_unique(str(shards), ["a.tar", "sub/b.tar"])
    assert names(shards / "sub/b.tar") == ["sub/b.tar/0.txt", "sub/b.tar/0.cls", "sub/b.tar/x/1.txt"]


def test_prepare_makes_keys_unique(shards: Path) -> None:
    options = ("--non-interactive", "--split-ratio", "1,0,0", "--fix-duplicates", "--no-progress")
    code, output = command("prepare", shards, *options)
    assert code == 0 and "Keys collided: the members of 2 shards" in output
    index = PackedIndex.open(str(shards / ".nv-meta" / "energon_lite.idx"))
    assert [*index.keys(0, len(index))] == ["a.tar/0", "a.tar/x/1", "sub/b.tar/0", "sub/b.tar/x/1"]
    assert index.uuid == (shards / ".nv-meta" / "index.uuid").read_text()
    code, output = command("prepare", shards, *options, "--force-overwrite")
    assert code == 0 and "All keys are unique; no shard was changed" in output
    code, output = command("prepare", shards, "--tar-index-only", "--fix-duplicates")
    assert code == 1 and "--fix-duplicates: needs no --tar-index-only" in output
