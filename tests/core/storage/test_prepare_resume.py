"""A preparation that was interrupted, or whose folder has grown, reads only what it does not know; after a SIGKILL at
any step, what is left is harmless; and of several at the same time, one does it."""

from __future__ import annotations

import multiprocessing
import os
import random
import shutil
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from energon_lite.errors import DataIndexError, DatasetError
from energon_lite.extras.energon import index_sqlite as sqlite_index
from energon_lite.storage import dataset_scan
from energon_lite.storage.dataset_scan import Shards
from energon_lite.storage.files import atomic_file
from energon_lite.storage.files.atomic_file import remove_leftovers, temporary_path
from energon_lite.storage.index.nv_meta import read_info
from energon_lite.storage.index.packed_index import PackedIndex
from energon_lite.storage.prepare import PrepareOptions, index_again, prepare_dataset
from energon_lite.storage.read.sample_reader import SampleReader
from energon_lite.storage.read.webdataset import WebdatasetSource
from energon_lite.storage.tar_scan import ShardScan, scan_shard
from tests.accidents import damaged, killed_at_every_step
from tests.testing import calls_here, examples, write_members, write_tar

OPTIONS: Any = {"split_ratio": "1,0,0", "sample_type": "TextSample", "field_map": {"text": "txt"}, "workers": 1}


def prepare(folder: Path, **more: Any) -> int:
    """Also over an earlier one; the number of samples."""
    return prepare_dataset(folder, **(OPTIONS | {"force_overwrite": True} | more)).samples


@pytest.fixture
def scanned(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Folder and name of each shard that is scanned from here on."""
    return calls_here(monkeypatch, dataset_scan, "scan_shard")


def names_of(scanned: list[Any]) -> list[str]:
    return [name for _, name in scanned]


def write_result(folder: Path, name: str) -> Path:
    """The result file that a scan of the shard leaves."""
    files = Shards(str(folder))
    files.write(name, files.inputs(name), scan_shard(str(folder), name))
    return Path(files.path(name))


def contents(folder: Path) -> dict[str, bytes]:
    """All files but the shards."""
    files = [path for path in folder.rglob("*") if path.is_file() and path.suffix != ".tar"]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def same(one: ShardScan, other: ShardScan) -> bool:
    return all(np.array_equal(getattr(one, name), getattr(other, name)) for name in vars(one))


def test_the_killed_run_continues(ten: Path, scanned: list[Any]) -> None:
    for name in ("a.tar", "sub/c.tar"):
        write_result(ten, name)
    prepare(ten)
    assert names_of(scanned) == ["b.tar"] and len(WebdatasetSource.open(ten)) == 10
    assert len(list(ten.rglob("*.tar.idx"))) == 3


def test_a_grown_folder(ten: Path, scanned: list[Any]) -> None:
    prepare(ten)
    assert len(scanned) == 3
    write_members(ten / "aa.tar", [("new.txt", b"new"), ("new.cls", b"1")])
    scanned.clear()
    prepare(ten)
    assert names_of(scanned) == ["aa.tar"]
    assert read_info(str(ten)) == {"a.tar": 4, "aa.tar": 1, "b.tar": 3, "sub/c.tar": 3}
    grown = contents(ten)
    prepare(ten, rescan=True)
    assert names_of(scanned) == ["aa.tar", "a.tar", "aa.tar", "b.tar", "sub/c.tar"] and contents(ten) == grown


def test_a_folder_without_anything_new(ten: Path, scanned: list[Any]) -> None:
    prepare(ten)
    before = contents(ten)
    (ten / "b.tar.idx").unlink()
    (ten / "a.tar.idx").write_bytes(b"damaged")
    scanned.clear()
    prepare(ten)
    assert names_of(scanned) == [] and contents(ten) == before


def test_indexing_again_reads_all(ten: Path, scanned: list[Any]) -> None:
    prepare(ten)
    scanned.clear()
    index_again(str(ten))
    assert len(scanned) == 3


@pytest.mark.parametrize("change", ["size", "time", "head"])
@pytest.mark.parametrize("where", ["result", "index"])
def test_a_changed_shard_is_read(ten: Path, scanned: list[Any], change: str, where: str) -> None:
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
    write_members(ten / "b.tar", members + extra)
    assert (shard.stat().st_size == times.st_size) == (change != "size")
    # The clock of the file system may not have gone on since it was written.
    os.utime(shard, ns=(times.st_atime_ns, times.st_mtime_ns + 10**9 * (change == "time")))
    scanned.clear()
    prepare(ten)
    assert names_of(scanned) == ["b.tar"]
    assert SampleReader(WebdatasetSource.open(ten)).sample(4).key == keys[0]


@settings(max_examples=examples(400))
@given(st.data())
def test_flipped_bits_and_cuts_never_give_other_samples(ten: Path, data: st.DataObject) -> None:
    scan = scan_shard(str(ten), "b.tar")
    path, files = write_result(ten, "b.tar"), Shards(str(ten))
    path.write_bytes(damaged(data, path.read_bytes()))
    if files.find(["b.tar"]):
        found = files.read("b.tar")
        assert (found.all_keys(), found.parts.tolist()) == (scan.all_keys(), scan.parts.tolist())
    else:
        with pytest.raises(DataIndexError, match=r"b\.tar was damaged or removed"):
            files.read("b.tar")


def test_an_index_with_a_flipped_bit_is_made_anew(ten: Path, scanned: list[Any]) -> None:
    prepare(ten)
    before, path = contents(ten), ten / ".nv-meta/energon_lite.idx"
    data = bytearray(path.read_bytes())
    data[data.index(b"0123")] ^= 1  # a key
    path.write_bytes(data)
    scanned.clear()
    prepare(ten)
    assert len(scanned) == 3 and contents(ten) == before


@pytest.mark.parametrize("link", ["folder", "mark"])
def test_links_that_came_with_the_data_are_not_followed(ten: Path, tmp_path: Path, link: str) -> None:
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


def test_other_rules_for_samples(ten: Path, scanned: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    prepare(ten)
    write_result(ten, "b.tar")
    scanned.clear()
    monkeypatch.setattr("energon_lite.storage.dataset_scan.SCAN_RULES", 99)
    prepare(ten)
    assert len(scanned) == 3


def test_broken_shards_do_not_cost_the_others(ten: Path, scanned: list[Any]) -> None:
    whole = (ten / "b.tar").read_bytes()
    os.truncate(ten / "b.tar", 2500)
    with pytest.raises(Exception, match="truncated"):
        prepare(ten)
    assert {path.name for path in ten.rglob("*.tar.idx")} == {"a.tar.idx", "c.tar.idx"}
    (ten / "b.tar").write_bytes(whole)
    scanned.clear()
    prepare(ten)
    assert names_of(scanned) == ["b.tar"]


def test_results_and_the_index_give_back_what_was_scanned(ten: Path) -> None:
    write_members(ten / "odd.tar", [("caf\udce9/x.b", b""), ("caf\udce9/x.a", b"1"), ("y.b", b"22"), ("none", b"")])
    write_members(ten / "empty.tar", [])
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


# -- killed at every step


def killed_while(
    folder: Path, work: Callable[[], object], before: Callable[[], object] = lambda: None
) -> Iterator[bool]:
    """After each kill, what is there."""
    for killed in killed_at_every_step(work, before, [(sqlite_index, "_sample_rows"), (sqlite_index, "_part_rows")]):
        # Energon takes this for a folder of other files, which it refuses to load and to prepare.
        meta = folder / ".nv-meta"
        assert not (meta / "index.sqlite").exists() or (meta / ".info.json").exists()
        yield killed


@pytest.mark.slow
@pytest.mark.usefixtures("quick_disk")
def test_a_first_preparation(ten: Path) -> None:
    prepare_dataset(ten, **OPTIONS)
    expected = contents(ten)

    def clean() -> None:
        for name in contents(ten):
            (ten / name).unlink()
        shutil.rmtree(ten / ".nv-meta")

    steps = incomplete = 0
    for killed in killed_while(ten, lambda: prepare_dataset(ten, **OPTIONS), clean):
        steps, incomplete = steps + killed, incomplete + (contents(ten) != expected)
        if contents(ten) != expected:
            prepare_dataset(ten, **OPTIONS)  # without force_overwrite, as one would run it again
            assert contents(ten) == expected
    assert steps > 30 and incomplete > 30


@pytest.mark.usefixtures("quick_disk")
def test_a_preparation_over_another(ten: Path) -> None:
    """The folder is loaded as it was before or as it shall be, or not at all."""
    prepare_dataset(ten, **OPTIONS)
    old = contents(ten)
    write_members(ten / "new.tar", [("new.txt", b"new")])
    again = partial(prepare, ten, split_ratio="1,1,0")
    again()
    expected = contents(ten)

    def restore() -> None:
        for name in contents(ten):
            (ten / name).unlink()
        for name, data in old.items():
            (ten / name).write_bytes(data)

    states = set()
    for _ in killed_while(ten, again, restore):
        found = contents(ten)
        states.add((found.get(".nv-meta/.info.json"), found.get(".nv-meta/split.yaml")))
        if found != expected:
            again()
        assert contents(ten) == expected
    before, after = [(data[".nv-meta/.info.json"], data[".nv-meta/split.yaml"]) for data in (old, expected)]
    assert {before, after} <= states and {info for info, _ in states - {before, after}} == {None}


@pytest.mark.usefixtures("quick_disk")
def test_indexing_again_that_is_killed(ten: Path) -> None:
    prepare_dataset(ten, **OPTIONS)
    expected = contents(ten)
    again = partial(index_again, str(ten), PrepareOptions(workers=1))
    for _ in killed_while(ten, again):
        assert len(WebdatasetSource.open(ten)) == 10
        again()
        assert contents(ten) == expected


def test_leftovers_of_the_dead_are_removed_and_those_of_the_living_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    child = os.fork()
    if not child:
        Path(temporary_path(str(tmp_path / "dead.idx"))).write_bytes(b"half")
        os._exit(0)
    os.waitpid(child, 0)
    mine, users = Path(temporary_path(str(tmp_path / "mine.idx"))), tmp_path / ".notes.tmp"
    with monkeypatch.context() as patch:
        patch.setattr(atomic_file, "_host", lambda: "00000000")
        others = Path(temporary_path(str(tmp_path / "others.idx")))
        old = Path(temporary_path(str(tmp_path / "old.idx")))
    absurd = Path(str(mine).replace(f".{os.getpid()}.", f".{10**20}."))  # no process has this number
    for path in (mine, users, others, old, absurd):
        path.write_bytes(b"")
    os.utime(old, (0, 0))
    removed = [Path(path).name.split(".")[1] for path in remove_leftovers(str(tmp_path))]
    assert sorted(removed) == ["dead", "mine", "old"]
    assert sorted(tmp_path.iterdir()) == sorted([mine, users, others])


def test_the_lock_of_a_process_that_was_killed_is_removed(ten: Path) -> None:
    prepare_dataset(ten, **OPTIONS)
    (ten / ".nv-meta/energon_lite.idx.lock").touch()
    prepare(ten)
    assert not (ten / ".nv-meta/energon_lite.idx.lock").exists()
    (ten / ".nv-meta/energon_lite.idx").unlink()
    (ten / ".nv-meta/energon_lite.idx.lock").touch()
    assert len(WebdatasetSource.open(ten)) == 10  # it makes the index, under a lock
    assert not (ten / ".nv-meta/energon_lite.idx.lock").exists()


# -- at once


SHARDS = 30


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for number in range(SHARDS):
        write_tar(tmp_path / f"data/{number}.tar", [(f"{number}-{k}", {"txt": b"x"}) for k in range(9)])
    return tmp_path / "data"


def slowly(*_: object) -> None:
    """So that they meet, also on a quick disk."""
    time.sleep(random.random() / 100)


@pytest.mark.parametrize("trial", range(3))
def test_three_at_once(folder: Path, trial: int) -> None:
    context = multiprocessing.get_context("fork")
    start, answers = context.Barrier(3), context.SimpleQueue()

    def body() -> None:
        start.wait(120)
        try:
            answers.put(str(prepare(folder, progress=slowly)))
        except BaseException as error:
            answers.put(f"{type(error).__name__}: {error}")

    processes = [context.Process(target=body) for _ in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(300)
    said = sorted(answers.get() for _ in processes)
    assert said[0] == str(9 * SHARDS)
    assert all(one == said[0] or one.startswith("DatasetError: another process prepares") for one in said), said
    assert len(WebdatasetSource.open(str(folder), split_part="train")) == 9 * SHARDS
    left = {file.name for file in folder.rglob("*") if file.suffix not in (".tar", ".idx")}
    assert left == {".nv-meta", ".info.json", "dataset.yaml", "index.sqlite", "index.uuid", "split.yaml"}


def test_one_that_comes_while_another_decides(folder: Path) -> None:
    """And after it, or after it has failed, the next one may."""
    refused: list[DatasetError] = []

    def progress(done: int, count: int, words: str) -> None:
        if done != 1:
            return
        for other in (partial(prepare_dataset, **OPTIONS), index_again):
            with pytest.raises(DatasetError, match="another process prepares this folder") as found:
                other(str(folder))
            refused.append(found.value)
        raise KeyboardInterrupt

    prepare(folder)
    with pytest.raises(KeyboardInterrupt):
        prepare(folder, rescan=True, progress=progress)
    assert len(refused) == 2 and refused[0].where == str(folder)
    assert prepare(folder) == index_again(str(folder)).samples == 9 * SHARDS
