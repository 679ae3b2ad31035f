"""Room is counted over all processes, and nobody's room is lost for good."""

from __future__ import annotations

import os
import random
import signal
import stat
import time
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from energon_lite.errors import UsageError
from energon_lite.extras.media import FileStoreCachePool
from energon_lite.extras.media.cache_folder import CacheFolder
from tests.accidents import forked
from tests.extras.media.stores.numbered_store import NumberedStore, value_of
from tests.testing import examples, until

MOST = 100


def child(parent: Path, size: int) -> int:
    """A process that has a file of this size, and waits to be killed."""

    def wait() -> None:
        path = CacheFolder(os.fspath(parent)).reserve(size, MOST, MOST)
        Path(path or "", "file").write_bytes(bytes(size))
        signal.pause()

    process = forked(wait)
    assert until(lambda: [*parent.rglob("file")])
    return process


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[CacheFolder]:
    made = CacheFolder(os.fspath(tmp_path / "cache"))
    yield made
    made.close()


def test_what_a_killed_process_had_is_removed(folder: CacheFolder) -> None:
    process = child(Path(folder.parent), 70)
    assert folder.reserve(31, MOST, 10) is None
    opened = len(os.listdir("/dev/fd"))
    folder.sweep()
    assert folder.reserve(31, MOST, 10) is None, "it lives"
    kill_all([process])
    folder.sweep()
    assert folder.reserve(100, MOST, 10) is not None and len(os.listdir("/dev/fd")) == opened
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
    assert os.waitpid(forked(lambda: (folder.forget(), folder.close())), 0)[1] == 0
    assert os.path.isdir(path or "")
    assert CacheFolder(folder.parent).reserve(41, MOST, 10) is None


def test_a_place_that_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="cannot be used"):
        CacheFolder(os.fspath(tmp_path / "file")).reserve(1, MOST, 1)
    (tmp_path / "link").symlink_to(tmp_path)
    for name, user in (("link", os.geteuid()), ("other", os.geteuid() + 1)):
        made = CacheFolder(os.fspath(tmp_path / name), is_ours=True)
        made._user = user
        with pytest.raises(UsageError, match="belongs to another user"):
            made.reserve(1, MOST, 1)


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


# -- eight processes share a cache, and are killed in the middle of what they do ---------------------------------------


PROCESSES, LIMIT, LARGEST = 8, 400_000, 60_000


def work(parent: Path, number: int) -> None:
    """Fetch, and compare, until killed; the process ends by itself if anything is not whole."""
    generator, store, pool = random.Random(number), NumberedStore(), pool_of(parent)
    waiting: list[tuple[str, Any]] = []
    while True:
        key = f"{number}.{generator.randrange(50)}-{generator.randrange(1, LARGEST)}"
        waiting.append((key, pool.get_lazy(store, key)))
        if len(waiting) > 8:
            key, lazy = waiting.pop(generator.randrange(len(waiting)))
            if generator.random() < 0.9 and lazy.get() != value_of(key):
                os._exit(3)
        store.reads.clear()


def pool_of(parent: Path) -> FileStoreCachePool:
    pool = FileStoreCachePool(parent_cache_dir=parent, num_workers=2)
    pool.max_cache_size = LIMIT
    return pool


def start(parent: Path, number: int) -> int:
    return forked(partial(work, parent, number))


def usage(parent: Path) -> int:
    """Bytes of all files in the folders of processes."""
    sizes: dict[int, int] = {}
    for folder in os.scandir(parent):
        if folder.is_dir():
            with suppress(FileNotFoundError):
                for file in os.scandir(folder):
                    with suppress(FileNotFoundError):
                        sizes[file.inode()] = file.stat().st_size  # it may be renamed meanwhile
    return sum(sizes.values())


def watch(parent: Path, seconds: float) -> list[int]:
    """What is there again and again, each time while nobody may begin another file; until it is much."""
    seen, begin = list[int](), time.monotonic()
    while time.monotonic() < begin + seconds or (max(seen, default=0) <= LIMIT / 2 and time.monotonic() < begin + 60):
        with CacheFolder(os.fspath(parent))._counting():
            seen.append(usage(parent))
        time.sleep(0.01)
    return seen


def stop(parent: Path, processes: list[int]) -> int:
    """Stop them at a moment at which they have something on the disk; the bytes."""
    for _ in range(100):
        for process in processes:
            os.kill(process, signal.SIGSTOP)
        time.sleep(0.02)
        if left := usage(parent):
            return left
        for process in processes:
            os.kill(process, signal.SIGCONT)
        time.sleep(0.02)
    raise AssertionError("nothing was ever there")


def kill_all(processes: list[int]) -> None:
    for process in processes:
        os.kill(process, signal.SIGKILL)
    for process in processes:
        _, status = os.waitpid(process, 0)
        assert os.WIFSIGNALED(status), f"a value was not whole, or something was raised: {status}"


def test_never_above_the_limit_and_clean_after_a_crash(tmp_path: Path) -> None:
    processes = [start(tmp_path, number) for number in range(PROCESSES)]
    try:
        seen = watch(tmp_path, 0.7)
        kill_all(processes[:4])
        del processes[:4]
        processes += [start(tmp_path, number) for number in range(20, 22)]  # they clean up when they start
        seen += watch(tmp_path, 0.7)
        left = stop(tmp_path, processes)
    finally:
        kill_all(processes)
    assert LIMIT / 2 < max(seen) <= LIMIT, (max(seen), len(seen))
    assert usage(tmp_path) == left > 0, "there is something to clean up"
    pool = pool_of(tmp_path)
    assert usage(tmp_path) == 0 and list(tmp_path.iterdir()) == [], "the next start has done it"
    lazy: Any = pool.get_lazy(NumberedStore(), "x-60000")
    assert lazy.entry.send_to_cache_future.result(60) and lazy.get() == value_of("x-60000")
    pool.close()
    assert list(tmp_path.iterdir()) == []
