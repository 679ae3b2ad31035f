"""Files that appear complete or not at all, and the locks of those who make them."""

from __future__ import annotations

import fcntl
import logging
import multiprocessing
import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from energon_lite.storage.files import atomic_file
from energon_lite.storage.files.atomic_file import lock, only_one, replacing, unlock, write_bytes
from tests.testing import descriptors, in_time, told_of


def test_replaces_a_file_as_a_whole(tmp_path: Path) -> None:
    (tmp_path / "f").write_text("old")
    write_bytes(str(tmp_path / "f"), b"new", memoryview(b" text"))
    assert (tmp_path / "f").read_text() == "new text"
    assert [path.name for path in tmp_path.iterdir()] == ["f"]


@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
def test_a_failure_leaves_the_old_file_and_nothing_else(tmp_path: Path, error: type[BaseException]) -> None:
    (tmp_path / "f").write_text("old")
    with pytest.raises(error), replacing(str(tmp_path / "f")) as temporary:
        Path(temporary).write_text("half")
        assert (tmp_path / "f").read_text() == "old"
        raise error
    assert (tmp_path / "f").read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["f"]


@contextmanager
def held(path: Path) -> Iterator[int]:
    """The lock of a holder that does not go on, and one more descriptor of the file."""
    handles = [os.open(path, os.O_RDWR | os.O_CREAT) for _ in range(2)]
    try:
        fcntl.flock(handles[0], fcntl.LOCK_EX)
        yield handles[1]
    finally:
        for handle in handles:
            os.close(handle)


def test_a_lock_is_waited_for_no_longer_than_was_said(tmp_path: Path) -> None:
    with held(tmp_path / "file") as other:
        began = time.monotonic()
        assert not in_time(lambda: lock(other, 0.3))
        assert 0.3 <= time.monotonic() - began < 5
        assert not lock(other, 0.0)


def test_a_lock_that_becomes_free_is_got(tmp_path: Path) -> None:
    one, other = (os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT) for _ in range(2))
    assert lock(one, 0.0) and not lock(other, 0.0)
    threading.Timer(0.2, unlock, [one]).start()
    assert in_time(lambda: lock(other, 300.0))
    os.close(one)
    os.close(other)


def test_a_process_that_is_forked_meanwhile_keeps_no_lock(tmp_path: Path) -> None:
    """It has a copy of the descriptor, by which the lock would live as long as a loader's worker does."""
    with only_one(str(tmp_path / "index")):
        os.link(tmp_path / "index.lock", tmp_path / "same.lock")
        child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
        child.start()
    handle = os.open(tmp_path / "same.lock", os.O_RDWR)
    try:
        assert lock(handle, 0.0)
    finally:
        os.close(handle)
        child.kill()
        child.join()


def test_who_makes_an_index_waits_for_no_holder_that_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its machine may have died; the file system still has its lock."""
    caplog.set_level(logging.WARNING)
    monkeypatch.setattr(atomic_file, "_PATIENCE", 1.0, raising=False)
    monkeypatch.setattr(atomic_file, "_TOLD", 0.1, raising=False)

    def make() -> str:
        with only_one(str(tmp_path / "index")):
            return "made"

    with held(tmp_path / "index.lock"):
        assert in_time(make) == "made"
        (told,) = told_of(caplog, tmp_path / "index.lock")
        assert "at most 1 s" in told
        monkeypatch.setattr(atomic_file, "_PATIENCE", 3600.0)
        assert in_time(make) == "made"  # nobody waits for that lock again


def test_only_one_at_a_time_makes_a_file(tmp_path: Path) -> None:
    """Also where some wait for a lock file that its holder removes, and others come later."""
    inside, most = [], []

    def make(_: int) -> None:
        for _ in range(20):
            with only_one(str(tmp_path / "index")):
                inside.append(None)
                most.append(len(inside))
                time.sleep(0.0005)
                inside.pop()

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(make, range(6)))
    assert max(most) == 1 and not list(tmp_path.iterdir())


def test_a_lock_that_cannot_be_removed_is_given_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: str) -> None:
        raise PermissionError(path)

    monkeypatch.setattr(atomic_file, "remove_if_there", refuse)
    before = descriptors()
    with pytest.raises(PermissionError), only_one(str(tmp_path / "index")):
        pass
    assert not descriptors() - before
