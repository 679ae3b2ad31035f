"""Room is counted over all processes, and nobody's room is lost for good."""

from __future__ import annotations

import os
import signal
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from energon_lite.errors import UsageError
from energon_lite.extras.media.cache_folder import CacheFolder
from tests.testing import examples

MOST = 100


def child(parent: Path, size: int) -> int:
    """A process that has a file of this size, and waits to be killed."""
    ready, told = os.pipe()
    process = os.fork()
    if not process:
        folder = CacheFolder(os.fspath(parent))
        path = folder.reserve(size, MOST, MOST)
        if path is not None:
            with open(os.path.join(path, "file"), "wb") as file:
                file.write(bytes(size))
        os.write(told, b"1" if path else b"0")
        signal.pause()
        os._exit(0)
    assert os.read(ready, 1) == b"1"
    os.close(ready)
    os.close(told)
    return process


def kill(process: int) -> None:
    os.kill(process, signal.SIGKILL)
    os.waitpid(process, 0)


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[CacheFolder]:
    made = CacheFolder(os.fspath(tmp_path / "cache"))
    yield made
    made.close()


def test_what_a_killed_process_had_is_removed(folder: CacheFolder) -> None:
    process = child(Path(folder.parent), 70)
    assert folder.reserve(31, MOST, 10) is None
    folder.sweep()
    assert folder.reserve(31, MOST, 10) is None, "it lives"
    kill(process)
    folder.sweep()
    assert folder.reserve(100, MOST, 10) is not None
    name, user = os.path.basename(folder.path), os.geteuid()
    assert sorted(os.listdir(folder.parent)) == [f".energon_lite_cache.{user}", name, f"{name}.{user}.usage"]
    folder.close()
    assert os.listdir(folder.parent) == []


def test_the_last_one_takes_its_own_parent_along(tmp_path: Path) -> None:
    one, two = (CacheFolder(os.fspath(tmp_path / "ours"), is_ours=True) for _ in range(2))
    assert os.path.isdir(one.path) and os.path.isdir(two.path)
    assert stat.S_IMODE(os.stat(one.path).st_mode) == 0o700
    one.close()
    assert (tmp_path / "ours").is_dir()
    two.close()
    assert not (tmp_path / "ours").exists()
    assert os.path.isdir(one.path), "made anew"
    one.close()


def test_a_forked_process_leaves_its_parents_folder_alone(folder: CacheFolder) -> None:
    path = folder.reserve(60, MOST, 10)
    process = os.fork()
    if not process:
        folder.forget()
        folder.close()
        os._exit(0 if os.path.isdir(path or "") else 1)
    assert os.waitpid(process, 0)[1] == 0
    assert CacheFolder(folder.parent).reserve(41, MOST, 10) is None


def test_a_place_that_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="cannot be used"):
        CacheFolder(os.fspath(tmp_path / "file")).reserve(1, MOST, 1)


def test_what_others_have_in_the_folder_stays(folder: CacheFolder) -> None:
    path = Path(folder.path).parent
    (path / "cache_notes").mkdir()
    (path / "notes.usage").write_text("mine")
    folder.close()
    assert sorted(os.listdir(path)) == ["cache_notes", "notes.usage"]


@settings(max_examples=examples(25))
@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 60), st.booleans()), max_size=30))
def test_the_sum_is_that_of_the_parts(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[int, int, bool]]
) -> None:
    parent = os.fspath(tmp_path_factory.mktemp("cache"))
    folders = [CacheFolder(parent) for _ in range(3)]
    held: list[list[tuple[int, str]]] = [[], [], []]
    for number, size, comes in steps:
        there = [size for one in held for size, _ in one]
        if comes:
            path = folders[number].reserve(size, MOST, 4)
            assert (path is not None) == (sum(there) + size <= MOST and len(there) < 4)
            held[number] += [] if path is None else [(size, path)]
        elif held[number]:
            folders[number].give_back(*held[number].pop())
        else:
            folders[number].close()
    for folder in folders:
        folder.close()
    assert os.listdir(parent) == []
