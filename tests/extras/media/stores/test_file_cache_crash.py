"""Eight processes share a cache, and are killed in the middle of what they do."""

from __future__ import annotations

import os
import random
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from energon_lite.extras.media import FileStoreCachePool
from energon_lite.extras.media.cache_folder import CacheFolder
from tests.extras.media.stores.numbered_store import NumberedStore, value_of

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
    process = os.fork()
    if not process:
        try:
            work(parent, number)
        finally:
            os._exit(4)
    return process


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


def kill(processes: list[int]) -> None:
    for process in processes:
        os.kill(process, signal.SIGKILL)
    for process in processes:
        _, status = os.waitpid(process, 0)
        assert os.WIFSIGNALED(status), f"a value was not whole, or something was raised: {status}"


def test_never_above_the_limit_and_clean_after_a_crash(tmp_path: Path) -> None:
    processes = [start(tmp_path, number) for number in range(PROCESSES)]
    try:
        seen = watch(tmp_path, 0.7)
        kill(processes[:4])
        del processes[:4]
        processes += [start(tmp_path, number) for number in range(20, 22)]  # they clean up when they start
        seen += watch(tmp_path, 0.7)
        left = stop(tmp_path, processes)
    finally:
        kill(processes)
    assert LIMIT / 2 < max(seen) <= LIMIT, (max(seen), len(seen))
    assert usage(tmp_path) == left > 0, "there is something to clean up"
    pool = pool_of(tmp_path)
    assert usage(tmp_path) == 0 and list(tmp_path.iterdir()) == [], "the next start has done it"
    lazy: Any = pool.get_lazy(NumberedStore(), "x-60000")
    assert lazy.entry.send_to_cache_future.result(60) and lazy.get() == value_of("x-60000")
    pool.close()
    assert list(tmp_path.iterdir()) == []
