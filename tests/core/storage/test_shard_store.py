from __future__ import annotations

import errno
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from energon_lite.errors import DatasetError, FatalSampleError, FatalStorageError, MissingShardError, ShardChangedError
from energon_lite.storage.files import retries, shard_store
from energon_lite.storage.files.shard_store import ShardIdentity, ShardStore, head_checksum
from tests.testing import descriptors


def shard(path: Path, data: bytes) -> tuple[str, ShardIdentity]:
    path.write_bytes(data)
    return str(path), ShardIdentity(len(data), head_checksum(data))


@pytest.fixture
def ten_bytes(tmp_path: Path) -> tuple[ShardStore, str, ShardIdentity]:
    """A store that has a shard open, and the shard."""
    store, (path, identity) = ShardStore(), shard(tmp_path / "a", b"0123456789")
    assert store.read(path, identity, 0, 1) == b"0"
    return store, path, identity


def test_keeps_a_bounded_number_of_files_open(tmp_path: Path) -> None:
    shards = [shard(tmp_path / str(i), bytes([i])) for i in range(10)]
    before = descriptors()
    store = ShardStore(capacity=3)
    for number in [*range(10), 7, 0, 7]:
        assert store.read(*shards[number], 0, 1) == bytes([number])
        assert len(store) <= 3 and len(descriptors() - before) <= 3
    store.close()
    assert not descriptors() - before
    assert store.read(*shards[4], 0, 1) == b"\x04"


def test_the_file_unused_for_longest_goes_first(tmp_path: Path) -> None:
    (one, id1), (two, id2), (three, id3) = (shard(tmp_path / n, n.encode()) for n in "123")
    store = ShardStore(capacity=2)
    for path, identity in ((one, id1), (two, id2), (one, id1), (three, id3)):
        store.read(path, identity, 0, 1)
    os.unlink(one)
    assert store.read(one, id1, 0, 1) == b"1"  # still open
    os.unlink(two)
    with pytest.raises(MissingShardError, match="/2"):
        store.read(two, id2, 0, 1)


def test_another_file_under_the_same_name(tmp_path: Path) -> None:
    path, identity = shard(tmp_path / "a", b"old text")
    shard(tmp_path / "a", b"longer text")
    with pytest.raises(ShardChangedError, match="11 bytes instead of 8"):
        ShardStore().read(path, identity, 0, 3)
    shard(tmp_path / "a", b"new text")
    with pytest.raises(ShardChangedError, match="same size, other contents"):
        ShardStore().read(path, identity, 0, 3)


def test_a_file_that_was_replaced_while_open(tmp_path: Path) -> None:
    store = ShardStore()
    path, identity = shard(tmp_path / "a", b"old text")
    assert store.read(path, identity, 0, 3) == b"old"
    os.unlink(path)
    path, other = shard(tmp_path / "a", b"new text")
    assert store.read(path, other, 0, 3) == b"new"  # as someone sees it who opened the data set just now
    assert store.read(path, identity, 0, 3) == b"old"  # and as someone who has read it from the start


def test_a_file_that_shrinks_while_open(ten_bytes: Any) -> None:
    store, path, identity = ten_bytes
    os.truncate(path, 5)
    assert store.read(path, identity, 0, 5) == b"01234"
    with pytest.raises(ShardChangedError, match="5 bytes instead of 10"):
        store.read(path, identity, 3, 4)


def failing(monkeypatch: pytest.MonkeyPatch, call: str, number: int, times: int) -> None:
    """Let so many of the next calls of a function of ``os`` fail."""
    left, real = [None] * times, getattr(os, call)

    def fails(*arguments: Any) -> Any:
        if left:
            left.pop()
            raise OSError(number, os.strerror(number))
        return real(*arguments)

    monkeypatch.setattr(os, call, fails)


@pytest.mark.parametrize("number", [errno.ESTALE, errno.EIO, errno.ETIMEDOUT])
@pytest.mark.parametrize("times", [1, 2, 4])
def test_a_failure_that_passes_goes_unnoticed(
    ten_bytes: Any, monkeypatch: pytest.MonkeyPatch, number: int, times: int
) -> None:
    monkeypatch.setattr(retries, "_LOCAL", (0.0, 0.001, 0.001, 0.001))
    store, path, identity = ten_bytes
    failing(monkeypatch, "pread", number, times)
    assert store.read(path, identity, 3, 4) == b"3456"


def test_a_stale_handle_is_replaced_by_a_new_one(ten_bytes: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The handle of a file on a server that was restarted fails until the file is opened again."""
    (store, path, identity), read = ten_bytes, shard_store.LocalFile.read
    stale = store.open(path, identity)

    def fails(self: shard_store.LocalFile, size: int, offset: int) -> bytes:
        if self is stale:
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        return read(self, size, offset)

    monkeypatch.setattr(shard_store.LocalFile, "read", fails)
    assert store.read(path, identity, 3, 4) == b"3456"


def test_a_failure_that_does_not_pass_is_waited_for_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the error names the shard."""
    waits: list[float] = []
    monkeypatch.setattr(shard_store, "time", SimpleNamespace(sleep=waits.append))
    path, identity = shard(tmp_path / "a", b"0123456789")
    store = ShardStore()
    for number, most in ((errno.EACCES, 0), (errno.EIO, 4), (errno.EIO, 1)):
        waits.clear()
        failing(monkeypatch, "pread", number, 1000)
        with pytest.raises(DatasetError, match=rf"{os.strerror(number)}[\s\S]*/a"):
            store.read(path, identity, 3, 4)
        assert len(waits) == most


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE, errno.ENOMEM])
@pytest.mark.parametrize("call", ["open", "pread"])
def test_a_shortage_is_waited_for_and_is_no_samples_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, call: str
) -> None:
    monkeypatch.setattr(retries, "_SHORT", (0.0, 0.001, 0.001))
    (path, identity), (other, its) = shard(tmp_path / "a", b"0123456789"), shard(tmp_path / "b", b"b")
    store = ShardStore()
    store.read(other, its, 0, 1)
    failing(monkeypatch, call, number, 3)
    assert store.read(path, identity, 3, 4) == b"3456"
    assert len(store) == 1  # it gave back what it had
    for _ in range(2):
        store.close()
        failing(monkeypatch, call, number, 4)
        with pytest.raises(FatalStorageError, match="ulimit -n" if number != errno.ENOMEM else "more memory") as caught:
            store.read(path, identity, 3, 4)
        assert isinstance(caught.value, FatalSampleError) and path in str(caught.value)


def test_reads_above_the_systems_limit_are_put_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("energon_lite.storage.files.shard_store._LARGEST_READ", 4)
    path, identity = shard(tmp_path / "a", b"0123456789")
    assert ShardStore().read(path, identity, 1, 9) == b"123456789"


def test_threads_that_evict_each_others_files(tmp_path: Path) -> None:
    shards = [shard(tmp_path / str(i), bytes([i]) * 100) for i in range(8)]
    store = ShardStore(capacity=1)

    def right(seed: int) -> bool:
        numbers = [(seed + step * 3) % 8 for step in range(400)]
        reads = [store.read(*shards[number], step % 90, 10) for step, number in enumerate(numbers)]
        return reads == [bytes([number]) * 10 for number in numbers]

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(right, range(4)))


def test_a_fork_and_its_parent_read_through_the_same_files(tmp_path: Path) -> None:
    path, identity = shard(tmp_path / "a", bytes(range(256)) * 40)
    store = ShardStore()
    store.read(path, identity, 0, 1)
    child = os.fork()
    good = all(store.read(path, identity, i, 1)[0] == i % 256 for i in range(2000))
    if child == 0:
        os._exit(0 if good else 1)
    assert good and os.waitpid(child, 0)[1] == 0


def test_many_reads_give_what_each_of_them_gives(tmp_path: Path) -> None:
    shards = [shard(tmp_path / f"{number}.tar", bytes([number]) * 600 + b"end") for number in range(5)]
    store = ShardStore(capacity=2)
    wanted = [(shards[number % 5], 100 * number % 601, number % 3) for number in range(40)]
    assert store.fetch(wanted) == [store.read(*one, offset, size) for one, offset, size in wanted]
    assert len(store) == 2
    with pytest.raises(ShardChangedError):  # it was cut short while it was open
        os.truncate(shards[0][0], 601)
        store.fetch([(shards[0], 0, 1), (shards[0], 600, 3)])


def test_an_error_that_ends_the_run_gets_no_second_try(ten_bytes: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even if its cause may pass: who raised it has waited for that already."""
    store, path, identity = ten_bytes
    reads = 0

    def given_up(self: Any, size: int, offset: int) -> bytes:
        nonlocal reads
        reads += 1
        raise FatalStorageError("the store has not answered for minutes") from OSError(errno.ESTALE, "stale")

    monkeypatch.setattr(shard_store.LocalFile, "read", given_up)
    with pytest.raises(FatalStorageError, match="has not answered for minutes"):
        store.read(path, identity, 0, 3)
    assert reads == 1
