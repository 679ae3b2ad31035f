"""A preparation that was interrupted, or whose folder has grown, reads only what it does not know."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from energon_lite.errors import DataIndexError
from energon_lite.storage import dataset_scan
from energon_lite.storage.dataset_scan import Shards
from energon_lite.storage.index.nv_meta import read_info
from energon_lite.storage.index.packed_index import PackedIndex
from energon_lite.storage.prepare import index_again, prepare_dataset
from energon_lite.storage.read.sample_reader import SampleReader
from energon_lite.storage.read.webdataset import WebdatasetSource
from energon_lite.storage.tar_scan import ShardScan, scan_shard
from tests.testing import damaged, examples

Scanned = list[str]
OPTIONS = {"split_ratio": "1,0,0", "sample_type": "TextSample", "field_map": {"text": "txt"}, "force_overwrite": True}


def prepare(folder: Path, workers: int = 1, rescan: bool = False) -> None:
    prepare_dataset(folder, workers=workers, rescan=rescan, **OPTIONS)  # type: ignore[arg-type]


@pytest.fixture
def scanned(monkeypatch: pytest.MonkeyPatch) -> Scanned:
    """The names of the shards that are scanned from here on."""
    names: Scanned = []
    scan = dataset_scan.scan_shard

    def recorded(root: str, name: str) -> ShardScan:
        names.append(name)
        return scan(root, name)

    monkeypatch.setattr(dataset_scan, "scan_shard", recorded)
    return names


def write_result(folder: Path, name: str) -> Path:
    """The result file that a scan of the shard leaves."""
    files = Shards(str(folder))
    files.write(name, files.inputs(name), scan_shard(str(folder), name))
    return Path(files.path(name))


def contents(folder: Path) -> dict[str, bytes]:
    """All files but the shards."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path.suffix != ".tar"
    }


def same(one: ShardScan, other: ShardScan) -> bool:
    names = ("headers", "first_part", "parts", "key_offsets")
    plain = [name for name in vars(one) if name not in names]
    return all(np.array_equal(getattr(one, name), getattr(other, name)) for name in names) and all(
        getattr(one, name) == getattr(other, name) for name in plain
    )


class TestWhatIsKnown:
    def test_the_killed_run_continues(self, ten: Path, scanned: Scanned) -> None:
        for name in ("a.tar", "sub/c.tar"):
            write_result(ten, name)
        prepare(ten)
        assert scanned == ["b.tar"] and len(WebdatasetSource.open(ten)) == 10
        assert len(list(ten.rglob("*.tar.idx"))) == 3

    def test_a_grown_folder(self, ten: Path, scanned: Scanned, make_tar: Callable[..., Path]) -> None:
        prepare(ten)
        assert len(scanned) == 3
        make_tar("ten/aa.tar", [("new.txt", b"new"), ("new.cls", b"1")])
        scanned.clear()
        prepare(ten)
        assert scanned == ["aa.tar"] and read_info(str(ten)) == {"a.tar": 4, "aa.tar": 1, "b.tar": 3, "sub/c.tar": 3}
        grown = contents(ten)
        prepare(ten, rescan=True)
        assert scanned == ["aa.tar", "a.tar", "aa.tar", "b.tar", "sub/c.tar"] and contents(ten) == grown

    def test_nothing_new(self, ten: Path, scanned: Scanned) -> None:
        prepare(ten)
        before = contents(ten)
        (ten / "b.tar.idx").unlink()
        (ten / "a.tar.idx").write_bytes(b"damaged")
        scanned.clear()
        prepare(ten)
        assert scanned == [] and contents(ten) == before

    def test_indexing_again_reads_all(self, ten: Path, scanned: Scanned) -> None:
        prepare(ten)
        scanned.clear()
        index_again(str(ten))
        assert len(scanned) == 3

    @pytest.mark.parametrize("change", ["size", "time", "head"])
    @pytest.mark.parametrize("where", ["result", "index"])
    def test_a_changed_shard_is_read(
        self, ten: Path, scanned: Scanned, make_tar: Callable[..., Path], change: str, where: str
    ) -> None:
        shard = ten / "b.tar"
        if where == "index":
            prepare(ten)
        else:
            for name in ("a.tar", "b.tar", "sub/c.tar"):
                write_result(ten, name)
        times = shard.stat()
        keys = "rst" if change == "head" else "456"
        extra = [("z.txt", b"z" * 9000)] if change == "size" else []
        members = [member for key in keys for member in ((f"{key}.txt", b"text 9"), (f"{key}.cls", b"9"))]
        make_tar("ten/b.tar", members + extra)
        assert (shard.stat().st_size == times.st_size) == (change != "size")
        # The clock of the file system may not have gone on since it was written.
        os.utime(shard, ns=(times.st_atime_ns, times.st_mtime_ns + 10**9 * (change == "time")))
        scanned.clear()
        prepare(ten)
        assert scanned == ["b.tar"]
        assert SampleReader(WebdatasetSource.open(ten)).sample(4).key == keys[0]

    @settings(max_examples=examples(400))
    @given(st.data())
    def test_flipped_bits_and_cuts_never_give_other_samples(self, ten: Path, data: st.DataObject) -> None:
        scan = scan_shard(str(ten), "b.tar")
        path, files = write_result(ten, "b.tar"), Shards(str(ten))
        path.write_bytes(damaged(data, path.read_bytes()))
        if files.find(["b.tar"]):
            found = files.read("b.tar")
            assert (found.all_keys(), found.parts.tolist()) == (scan.all_keys(), scan.parts.tolist())
        else:
            with pytest.raises(DataIndexError, match=r"b\.tar was damaged or removed"):
                files.read("b.tar")

    def test_an_index_with_a_flipped_bit_is_made_anew(self, ten: Path, scanned: Scanned) -> None:
        prepare(ten)
        before, path = contents(ten), ten / ".nv-meta/energon_lite.idx"
        data = bytearray(path.read_bytes())
        data[data.index(b"0123")] ^= 1  # a key
        path.write_bytes(data)
        scanned.clear()
        prepare(ten)
        assert len(scanned) == 3 and contents(ten) == before

    @pytest.mark.parametrize("link", ["folder", "mark"])
    def test_links_that_came_with_the_data_are_not_followed(self, ten: Path, tmp_path: Path, link: str) -> None:
        victim = tmp_path / "victim"
        victim.mkdir()
        (victim / "unfinished").write_text("a text")
        meta = ten / ".nv-meta"
        meta.mkdir()
        if link == "folder":
            (meta / "energon_lite.shards").symlink_to(victim)
        else:
            (meta / "energon_lite.unfinished").symlink_to(victim / "unfinished")
        prepare(ten)
        assert len(WebdatasetSource.open(ten)) == 10
        assert not (meta / "energon_lite.shards").exists() and not (meta / "energon_lite.unfinished").exists()
        assert [path.name for path in victim.iterdir()] == ["unfinished"]
        assert (victim / "unfinished").read_text() == "a text"

    def test_other_rules_for_samples(self, ten: Path, scanned: Scanned, monkeypatch: pytest.MonkeyPatch) -> None:
        prepare(ten)
        write_result(ten, "b.tar")
        scanned.clear()
        monkeypatch.setattr("energon_lite.storage.dataset_scan.SCAN_RULES", 99)
        prepare(ten)
        assert len(scanned) == 3

    def test_broken_shards_do_not_cost_the_others(self, ten: Path, scanned: Scanned) -> None:
        whole = (ten / "b.tar").read_bytes()
        os.truncate(ten / "b.tar", 2500)
        with pytest.raises(Exception, match="truncated"):
            prepare(ten)
        (ten / "b.tar").write_bytes(whole)
        scanned.clear()
        prepare(ten)
        assert scanned == ["b.tar"]


def test_results_and_the_index_give_back_what_was_scanned(ten: Path, make_tar: Callable[..., Path]) -> None:
    make_tar("ten/odd.tar", [("caf\udce9/x.b", b""), ("caf\udce9/x.a", b"1"), ("y.b", b"22"), ("none", b"")])
    make_tar("ten/empty.tar", [])
    names = ["odd.tar", "empty.tar", "a.tar", "sub/c.tar"]
    scans, files = [scan_shard(str(ten), name) for name in names], Shards(str(ten))
    for name in names:
        write_result(ten, name)
    assert list(files.find(names)) == names
    PackedIndex.from_scans(scans).write(str(ten / "i.idx"))
    index = PackedIndex.open(str(ten / "i.idx"))
    for row, scan in enumerate(scans):
        assert same(files.read(scan.name), scan) and same(index.scan(row), scan)
    assert not same(scans[0], scans[2])


def test_the_result_of_another_shard_is_not_used(ten: Path) -> None:
    files = Shards(str(ten))
    os.replace(write_result(ten, "a.tar"), files.path("b.tar"))
    assert files.find(["a.tar", "b.tar"]) == {}
    assert files.path("sub/c.tar") != files.path("c.tar")
