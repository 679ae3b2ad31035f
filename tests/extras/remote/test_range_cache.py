"""Folders and buckets of checked files hand out the bytes of the shard, whatever has happened to them and whoever
writes there; a cache folder touches nothing else."""

from __future__ import annotations

import os
import signal
import stat
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from energon_lite.errors import DatasetError, ShardChangedError, UsageError
from energon_lite.extras.remote import checked_bucket
from energon_lite.extras.remote.checked_bucket import CheckedBucket
from energon_lite.extras.remote.checked_folder import CheckedFolder
from energon_lite.extras.remote.read_ahead import RangeCache
from energon_lite.storage.files.shard_store import ShardIdentity, ShardRange, ShardStore, head_checksum
from energon_lite.storage.read.ranges import ReadAhead
from tests.accidents import damaged, forked
from tests.extras.remote.stored_files import files_in, objects, size_of
from tests.testing import examples, nightly_but


@pytest.fixture
def wanted(tmp_path: Path) -> ShardRange:
    data = bytes(range(256)) * 40
    (tmp_path / "a.tar").write_bytes(data)
    return ShardRange((str(tmp_path / "a.tar"), ShardIdentity(len(data), head_checksum(data))), 100, 2900)


def right(one: ShardRange) -> bytes:
    return Path(one.shard[0]).read_bytes()[one.offset :][: one.size]


def cache_in(folder: Path) -> RangeCache:
    return RangeCache(ReadAhead(folder=str(folder)))


@given(st.data())
def test_a_damaged_range_is_fetched_again(tmp_path: Path, wanted: ShardRange, data: st.DataObject) -> None:
    folder = tmp_path / "cache"
    assert bytes(cache_in(folder).get(wanted)) == right(wanted)
    (path,) = files_in(folder)
    whole = path.read_bytes()
    path.write_bytes(damaged(data, whole))
    for _ in range(2):
        assert bytes(cache_in(folder).get(wanted)) == right(wanted)
    assert path.read_bytes() == whole


def test_it_is_counted_and_told_once(tmp_path: Path, wanted: ShardRange, caplog: pytest.LogCaptureFixture) -> None:
    cache = cache_in(tmp_path / "cache")
    ranges = [wanted._replace(size=size) for size in (1900, 2900, 3900)]
    cache.load(ranges)
    for path in files_in(tmp_path / "cache"):
        path.write_bytes(bytes(path.stat().st_size))  # as a power cut may leave it
    cache._kept, cache._held = {}, {}
    assert [bytes(cache.get(one)) for one in ranges] == [right(one) for one in ranges]
    assert cache._folder is not None and cache._folder.damaged == 3
    assert caplog.text.count("is damaged, it is made again") == 1


def test_a_range_under_the_name_of_another(tmp_path: Path, wanted: ShardRange) -> None:
    folder, other = tmp_path / "cache", wanted._replace(offset=200)
    cache_in(folder).load([wanted, other])
    one, two = files_in(folder)
    whole = one.read_bytes()
    one.write_bytes(two.read_bytes())
    two.write_bytes(whole)
    assert [bytes(cache_in(folder).get(range_)) for range_ in (wanted, other)] == [right(wanted), right(other)]


def test_only_the_owner_may_look(tmp_path: Path, wanted: ShardRange) -> None:
    old = os.umask(0)
    try:
        cache_in(tmp_path / "cache").get(wanted)
    finally:
        os.umask(old)
    for path in (tmp_path / "cache", *(tmp_path / "cache").rglob("*")):
        assert not stat.S_IMODE(path.stat().st_mode) & 0o077, path


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_what_others_have_put_there_is_not_read(tmp_path: Path, wanted: ShardRange) -> None:
    folder = tmp_path / "cache"
    cache_in(folder).get(wanted)
    (path,) = files_in(folder)
    os.chown(path, 12345, 12345)
    os.truncate(wanted.shard[0], 10)
    with pytest.raises(DatasetError):
        cache_in(folder).get(wanted)


def test_links_are_not_followed(tmp_path: Path, wanted: ShardRange) -> None:
    folder, victim = tmp_path / "cache", tmp_path / "victim"
    cache_in(folder).get(wanted)
    (path,) = files_in(folder)
    victim.write_bytes(path.read_bytes())
    path.unlink()
    path.symlink_to(victim)
    before = victim.stat().st_mtime_ns
    assert bytes(cache_in(folder).get(wanted)) == right(wanted)
    assert not path.is_symlink() and victim.stat().st_mtime_ns == before
    for lock in range(256):
        (folder / f"{lock:03d}.lock").symlink_to(tmp_path / "made")
    path.unlink()
    assert bytes(cache_in(folder).get(wanted)) == right(wanted)
    assert not (tmp_path / "made").exists()


def test_a_folder_of_links(tmp_path: Path, wanted: ShardRange) -> None:
    folder, elsewhere = tmp_path / "cache", tmp_path / "elsewhere"
    elsewhere.mkdir()
    folder.mkdir()
    for number in range(256):
        (folder / f"{number:02x}").symlink_to(elsewhere)
    assert bytes(cache_in(folder).get(wanted)) == right(wanted)
    assert not list(elsewhere.iterdir())


@pytest.mark.parametrize("place", ["file", "file/below"])
def test_a_folder_that_is_none(tmp_path: Path, place: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match=r"the folder cannot be used[\s\S]*file"):
        cache_in(tmp_path / place)


class Counting(ShardStore):
    """Notes what is read."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[int] = []

    def read(self, path: str, identity: ShardIdentity, offset: int, size: int) -> bytes:
        self.asked.append(offset)
        return super().read(path, identity, offset, size)


def test_what_is_prefetched_is_fetched_once(wanted: ShardRange) -> None:
    store = Counting()
    cache = RangeCache(ReadAhead(memory_bytes=8000, hedge=False), store)
    ranges = [wanted._replace(offset=offset, size=1000) for offset in range(0, 9000, 1000)]
    cache.prefetch([ranges[0], *ranges])
    cache.prefetch(ranges)  # there is room for half of the memory
    cache.load(ranges[:3])
    assert sorted(store.asked)[:3] == [0, 1000, 2000] and len(store.asked) <= 4
    cache.load(ranges)
    assert [bytes(cache.get(one)) for one in ranges] == [right(one) for one in ranges]
    assert sorted(set(store.asked)) == list(range(0, 9000, 1000))


def test_what_was_prefetched_for_a_loop_that_was_left_takes_no_room(wanted: ShardRange) -> None:
    store = Counting()
    cache = RangeCache(ReadAhead(memory_bytes=8000, hedge=False), store)
    for first in range(0, 9000, 2000):
        ranges = [wanted._replace(offset=offset, size=1000) for offset in (first, first + 1000)]
        cache.prefetch(ranges)
        wait(cache._coming.values())
        assert len(store.asked) == first // 1000 + 2
        cache.load(ranges[:1])


def test_what_fails_fails_for_those_who_ask(wanted: ShardRange) -> None:
    cache = RangeCache(ReadAhead(), ShardStore())
    beyond = wanted._replace(offset=10_000, size=1000)
    cache.prefetch([wanted, beyond])
    cache.load([wanted, beyond])
    assert bytes(cache.get(wanted)) == right(wanted)
    for _ in range(2):
        with pytest.raises(ShardChangedError):
            cache.get(beyond)


# -- several writers, in folders and buckets ---------------------------------------------------------------------------


def bucket_at(url: str, limit: int = 1 << 30, distance: Callable[[str], float] = lambda name: 0.0) -> CheckedBucket:
    """A store in a bucket; ``distance`` gives that of the next use of a name."""
    distances: Any = lambda names: [*map(distance, names)]  # noqa: E731
    return CheckedBucket(url, limit, option="store", kept="kept", distances=distances)


@settings(max_examples=examples(60))
@given(st.data())
def test_what_comes_next_stays(data: st.DataObject) -> None:
    """A folder never exceeds its size, and only removes files that are needed later than all others."""
    sizes = data.draw(st.lists(st.integers(1, 300), min_size=4, max_size=24))
    limit = data.draw(st.integers(400, 1000))
    needed = data.draw(st.permutations(range(len(sizes))))
    with tempfile.TemporaryDirectory() as name:

        def distances(paths: Sequence[str]) -> list[float]:
            return [float(needed[int(os.path.basename(path))]) for path in paths]

        def folder() -> CheckedFolder:
            return CheckedFolder(name, limit, option="store", kept="kept", distances=distances)

        folders = [folder(), folder()]
        for number, size in enumerate(sizes):
            before = {int(path.name) for path in files_in(Path(name))}
            chosen = data.draw(st.sampled_from(folders))
            path = chosen.file("00", str(number))
            is_written = chosen.write(path, bytes([number]) * size, lambda number=number: float(needed[number]))
            there = {int(path.name) for path in files_in(Path(name))}
            assert size_of(files_in(Path(name))) <= limit
            assert there - before == {number} & there and is_written == (number in there)
            for gone in before - there:
                assert needed[gone] > max([2 * needed[number], *(needed[kept] for kept in there - {number})])
            assert is_written or 2 * needed[number] >= min(needed[:number])
        for number in there:
            assert bytes(folders[0].find(folders[0].file("00", str(number))) or b"") == bytes([number]) * sizes[number]


def test_what_was_not_used_for_longest_goes_first(tmp_path: Path) -> None:
    folder, count = CheckedFolder(str(tmp_path / "store"), 20 * 116, option="store"), tmp_path / "store/bytes.lock"
    places = [folder.place(b"%d" % number) for number in range(26)]
    for age, path in enumerate(places[:20]):  # full to the last byte
        assert folder.write(path, bytes(100))
        os.utime(path, (1000 + age, 1000 + age))
    assert count.read_bytes() == (20 * 116).to_bytes(8, "little")
    assert folder.find(places[0]) == folder.find(places[3]) == bytes(100)  # used again
    assert folder.write(places[20], bytes(100))
    assert [path for path in places[:21] if not os.path.exists(path)] == [places[1], places[2], places[4]]
    assert count.read_bytes() == (18 * 116).to_bytes(8, "little")
    count.write_bytes(b"cut")
    assert all(folder.write(path, bytes(100)) for path in places[21:24])
    assert size_of(files_in(tmp_path / "store")) <= 20 * 116
    there = files_in(tmp_path / "store")
    assert not folder.write(places[24], bytes(20 * 116 - 15)), "larger than the folder"
    assert files_in(tmp_path / "store") == there, "and nothing makes room for it"
    assert folder.write(places[24], bytes(20 * 116 - 16)) and files_in(tmp_path / "store") == [Path(places[24])]


def test_a_bucket_is_listed_when_it_may_be_full(bucket: str, memory: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of its folders by itself. What is needed last gives way, but only to what is needed much sooner."""
    listed, list_files = list[str](), checked_bucket.list_files
    monkeypatch.setattr(checked_bucket, "list_files", lambda *what: listed.append(what[1]) or list_files(*what))
    monkeypatch.setattr(checked_bucket, "_SHARE", 5)
    store = bucket_at(bucket, 256 * 1000 + 255, lambda name: 100.0 + int(name.rsplit("/", 1)[1]))

    def there(number: int, size: int = 100, distance: float = 0.0, folder: str = "00") -> list[int]:
        is_taken = store.write(f"{folder}/kept/{number}", bytes(size - 16), lambda: distance)
        names = [name.split("/")[3:] for name in objects()]
        return sorted(int(name) for where, _, name in names if where == folder) if is_taken else []

    assert there(50, folder="01") == [50] and [there(number) for number in range(9)][-1] == [*range(9)]
    assert listed == ["01", *["00"] * 5], "every 200 bytes"
    memory.pipe_file("/bucket/samples/00/other/77", bytes(100))  # of hooks that are not used any more
    assert there(9) == [*range(10), 77] and len(listed) == 6, "it is not yet seen"
    assert there(10, distance=60.0) == [*range(10)] and len(listed) == 7, "it went, but 108 is not twice as far as 60"
    assert there(10) == [*range(8), 10] and len(listed) == 8, "what is needed last went"
    assert there(11) == [*range(8), 10, 11] and len(listed) == 8, "full to the last byte"
    assert not there(12, distance=54.0) and len(listed) == 8, "108 had to go, which is not twice as far"
    assert there(12, distance=53.9) == [*range(8), 12] and not there(13, size=1001) and len(listed) == 9
    assert there(14, size=1000) == [14] and len(listed) == 10


def test_damaged_objects_are_told_once(bucket: str, memory: Any, caplog: pytest.LogCaptureFixture) -> None:
    store = bucket_at(bucket)
    for number in range(3):
        assert store.write(f"00/kept/{number}", b"data")
    for name in objects():
        memory.pipe_file(name, bytes(30))
    assert [store.find(f"00/kept/{number}") for number in range(3)] == [None] * 3 and store.damaged == 3
    assert caplog.text.count("an object of the store is damaged, it is made again (logged once)") == 1


def test_writers_race_in_a_bucket(bucket: str) -> None:
    values = {f"{number:02x}": bytes([number]) * 5000 for number in range(40)}

    def write(_: int) -> None:
        store = bucket_at(bucket)
        for name, value in values.items():
            store.write(store.file(name, name), value)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(write, range(8)))
    store = bucket_at(bucket)
    assert len(objects()) == 40
    for name, value in values.items():
        assert bytes(store.find(store.file(name, name)) or b"") == value


@pytest.mark.parametrize("kills", nightly_but({0}, [40, *range(1000, 1010)]))
def test_writers_that_are_killed_leave_whole_files(tmp_path: Path, kills: int) -> None:
    """Two writers at a time, in a folder with room for two thirds; each file is whole, or missing."""
    values = [bytes([number]) * (1000 + 200 * number) for number in range(12)]
    limit = 2 * sum(map(len, values)) // 3
    random = Random(kills)
    parent, (written, write) = os.getpid(), os.pipe()

    def work(order: list[int]) -> None:
        os.close(written)
        folder = CheckedFolder(str(tmp_path / "store"), limit, option="store")
        while os.getppid() == parent:  # which a limit of time may have ended
            for number in order:
                folder.write(folder.place(b"%d" % number), values[number])
                os.write(write, b"1")

    def start() -> int:
        return forked(partial(work, random.sample(range(12), 12)))

    def end(writer: int) -> None:
        os.kill(writer, signal.SIGKILL)
        assert os.waitpid(writer, 0)[1] == signal.SIGKILL, "it had failed"

    folder = CheckedFolder(str(tmp_path / "store"), limit, option="store")
    writers, found = [start(), start()], Counter[bool]()
    for kill in range(kills):
        os.read(written, 1 << 16)  # waits for one more file: else all might be killed before there is any
        time.sleep(0.004 * random.random())
        end(writers.pop(0))
        writers.append(start())
        read = folder.find(folder.place(b"%d" % (kill % 12)))
        found[read is None] += 1
        assert read is None or read == values[kill % 12]
    for writer in writers:
        end(writer)
    os.close(written)
    os.close(write)
    assert not folder.damaged and min(found[True], found[False]) > kills // 20
    assert size_of(files_in(tmp_path / "store")) <= limit + 2 * len(values[-1])
