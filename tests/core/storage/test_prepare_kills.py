"""SIGKILL at every single step of a preparation: what is left is harmless, and running again completes it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from energon_lite.extras.energon import index_sqlite as sqlite_index
from energon_lite.storage.files import atomic_file
from energon_lite.storage.files.atomic_file import remove_leftovers, temporary_path
from energon_lite.storage.prepare import PrepareOptions, index_again, prepare_dataset
from energon_lite.storage.read.webdataset import WebdatasetSource
from tests.testing import killed_at_every_step

OPTIONS = {"split_ratio": "1,0,0", "sample_type": "TextSample", "field_map": {"text": "txt"}, "workers": 1}


pytestmark = pytest.mark.usefixtures("quick_disk")


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


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
def test_a_first_preparation(ten: Path) -> None:
    shards = contents(ten)
    prepare_dataset(ten, **OPTIONS)
    expected = contents(ten)

    def clean() -> None:
        for name in contents(ten).keys() - shards.keys():
            (ten / name).unlink()
        shutil.rmtree(ten / ".nv-meta")

    steps = partial = 0
    for killed in killed_while(ten, lambda: prepare_dataset(ten, **OPTIONS), clean):
        steps, partial = steps + killed, partial + (contents(ten) != expected)
        if contents(ten) != expected:
            prepare_dataset(ten, **OPTIONS)  # without force_overwrite, as one would run it again
            assert contents(ten) == expected
    assert steps > 30 and partial > 30


def test_a_preparation_over_another(ten: Path, make_tar: Callable[..., Path]) -> None:
    """The folder is loaded as it was before or as it shall be, or not at all."""
    prepare_dataset(ten, **OPTIONS)
    old = contents(ten)
    make_tar("ten/new.tar", [("new.txt", b"new")])
    again = {**OPTIONS, "split_ratio": "1,1,0", "force_overwrite": True}
    prepare_dataset(ten, **again)
    expected = contents(ten)

    def restore() -> None:
        for name in contents(ten):
            if not name.endswith(".tar"):
                (ten / name).unlink()
        for name, data in old.items():
            if not name.endswith(".tar"):
                (ten / name).write_bytes(data)

    states = set()
    for _ in killed_while(ten, lambda: prepare_dataset(ten, **again), restore):
        found = contents(ten)
        states.add((found.get(".nv-meta/.info.json"), found.get(".nv-meta/split.yaml")))
        if found != expected:
            prepare_dataset(ten, **again)
        assert contents(ten) == expected
    before, after = [(data[".nv-meta/.info.json"], data[".nv-meta/split.yaml"]) for data in (old, expected)]
    assert {before, after} <= states and {info for info, _ in states - {before, after}} == {None}


def test_indexing_again(ten: Path) -> None:
    prepare_dataset(ten, **OPTIONS)
    expected = contents(ten)
    for _ in killed_while(ten, lambda: index_again(str(ten), PrepareOptions(workers=1))):
        assert len(WebdatasetSource.open(ten)) == 10
        index_again(str(ten), PrepareOptions(workers=1))
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
    for path in (mine, users, others, old):
        path.write_bytes(b"")
    os.utime(old, (0, 0))
    removed = [Path(path).name.split(".")[1] for path in remove_leftovers(str(tmp_path))]
    assert sorted(removed) == ["dead", "old"]
    assert sorted(tmp_path.iterdir()) == sorted([mine, users, others])


def test_the_lock_of_a_process_that_was_killed_is_removed(ten: Path) -> None:
    prepare_dataset(ten, **OPTIONS)
    (ten / ".nv-meta/energon_lite.idx.lock").touch()
    prepare_dataset(ten, force_overwrite=True, **OPTIONS)
    assert not (ten / ".nv-meta/energon_lite.idx.lock").exists()
    (ten / ".nv-meta/energon_lite.idx").unlink()
    assert len(WebdatasetSource.open(ten)) == 10  # it makes the index, under a lock
    assert not (ten / ".nv-meta/energon_lite.idx.lock").exists()
