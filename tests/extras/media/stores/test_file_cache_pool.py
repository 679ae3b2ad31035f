"""Values are fetched once, kept while somebody refers to them, and read from their store where there is no room."""

from __future__ import annotations

import copy
import gc
import os
import pickle
import threading
from collections.abc import Callable, Iterator
from concurrent import futures
from pathlib import Path
from typing import Any

import pytest

from energon_lite.errors import MissingEntryError, UsageError
from energon_lite.extras.media import FileCacheLazy, FileStoreCachePool, SystemFileStore, file_cache_pool
from energon_lite.storage import SampleDecoder
from energon_lite.storage.files.atomic_file import write_bytes
from energon_lite.storage.stores import DecodeFileStore, DirectLazy, MockLazy, NoCachePool, PrimaryFileStore
from tests.accidents import forked
from tests.extras.media.stores.numbered_store import NumberedStore, source_of, value_of
from tests.fork_server import run_program
from tests.testing import in_time

MakePool = Callable[..., FileStoreCachePool]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[MakePool]:
    pools = []

    def pool(**more: Any) -> FileStoreCachePool:
        pools.append(FileStoreCachePool(parent_cache_dir=tmp_path / "cache", **more))
        return pools[-1]

    yield pool
    for one in pools:
        one.close()
    assert not (tmp_path / "cache").exists() or os.listdir(tmp_path / "cache") == []


def files(pool: FileStoreCachePool) -> list[int]:
    return sorted(path.stat().st_size for path in pool.cache_dir.iterdir())


def fetched(lazy: Any) -> bool:
    """Whether it is on the disk, when its thread is done."""
    found: bool = lazy.entry.send_to_cache_future.result(60)
    return found


@pytest.mark.parametrize("method", ["raw", "pickle"])
def test_a_value_is_fetched_once_and_is_the_same_each_time(make: MakePool, method: Any) -> None:
    pool, store = make(method=method), NumberedStore()
    one, two = (pool.get_lazy(store, "a-100") for _ in range(2))
    assert isinstance(one, FileCacheLazy) and one == two and len({one, two}) == 1
    assert fetched(one) and store.reads == ["a-100"] and len(files(pool)) == 1
    sample: dict[str, Any] = {}
    value = one.get(sample)
    assert value == value_of("a-100") and one.get() is value
    assert sample["__sources__"] == (source_of("a-100"),)
    assert two.get() == value and two.get() == value
    assert files(pool) == [] and store.reads == ["a-100"]
    assert (pool.current_cache_size, pool.current_cache_count) == (0, 0)


def test_values_are_decoded_when_they_are_asked_for_or_before(make: MakePool, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('{"n": [1, 2]}')
    (tmp_path / "none.json").write_text("null")
    store = DecodeFileStore(SystemFileStore(tmp_path), decoder=SampleDecoder())
    for method in ("raw", "pickle"):
        pool = make(method=method)
        lazy, nothing = pool.get_lazy(store, "a.json"), pool.get_lazy(store, "none.json")
        assert fetched(lazy) and fetched(nothing)
        assert pool.get(store, "a.json") == lazy.get() == {"n": [1, 2]}
        assert nothing.get() is None and nothing.get() is None and nothing.entry.refcount == 0  # type: ignore[attr-defined]


def test_parts_of_different_samples_are_different(make: MakePool) -> None:
    store = NumberedStore()
    primaries = [PrimaryFileStore[bytes](store, key) for key in ("a", "b")]
    for pool in (make(), NoCachePool()):
        lazies = [pool.get_lazy(primary, ".x-10") for primary in primaries]
        assert lazies[0] != lazies[1] and lazies[0] == pool.get_lazy(store, "a.x-10")
        assert [lazy.get() for lazy in lazies] == [value_of("a.x-10"), value_of("b.x-10")]


def test_what_has_not_begun_is_read_directly(make: MakePool) -> None:
    pool, store = make(num_workers=1), NumberedStore()
    store.gate = threading.Event()
    first, lazy, other = (pool.get_lazy(store, key) for key in ("a-10", "b-10", "b-10"))
    direct = NumberedStore()
    lazy.ds = lazy.entry.ds = direct  # type: ignore[attr-defined]
    assert in_time(lazy.get) == value_of("b-10") and direct.reads == ["b-10"]
    store.gate.set()
    assert fetched(first) and fetched(other), "it is fetched for the other one after all"
    assert other.get() == value_of("b-10")


def test_without_room_values_wait_and_are_read_when_they_are_asked_for(make: MakePool) -> None:
    pool, store = make(num_workers=1, max_cache_count=10), NumberedStore()
    pool.max_cache_size = 150
    large, one, two, three = (pool.get_lazy(store, key) for key in ("l-151", "a-100", "b-100", "c-50"))
    assert not fetched(large) and fetched(one), "what is larger than all of the cache waits for nothing"
    assert not two.entry.send_to_cache_future.done() and files(pool) == [100]  # type: ignore[attr-defined]
    assert in_time(two.get) == value_of("b-100")
    assert fetched(three) and files(pool) == [50, 100]
    assert [lazy.get() for lazy in (large, one, three)] == [value_of(key) for key in ("l-151", "a-100", "c-50")]
    assert files(pool) == []


def test_pools_of_one_folder_share_its_room(make: MakePool) -> None:
    store, pools = NumberedStore(), [make(num_workers=1, max_cache_count=1) for _ in range(2)]
    one = pools[0].get_lazy(store, "a-10")
    assert fetched(one)
    two = pools[1].get_lazy(store, "b-10")
    with pytest.raises(futures.TimeoutError):  # not the built-in one before Python 3.11
        two.entry.send_to_cache_future.result(0.3)  # type: ignore[attr-defined]
    one.get()
    assert fetched(two) and two.get() == value_of("b-10")


def test_values_that_nobody_refers_to_any_more(make: MakePool) -> None:
    pool, store = make(), NumberedStore()
    lazies = [pool.get_lazy(store, f"{name}-10") for name in "abc"] + [pool.to_cache([1], "aside")]
    assert all(map(fetched, lazies[:3])) and len(files(pool)) == 4
    del lazies
    gc.collect()
    last = pool.get_lazy(store, "d-20")
    assert fetched(last) and files(pool) == [20] and pool.current_cache_count == 1
    del last
    pool.release()
    assert list(pool.parent_cache_dir.iterdir()) == []
    assert pool.get_lazy(store, "e-10").get() == value_of("e-10"), "it can be used again"


def test_a_value_that_nobody_refers_to_once_it_is_written(make: MakePool, monkeypatch: pytest.MonkeyPatch) -> None:
    pool, store = make(), NumberedStore()
    store.gate = threading.Event()
    lazies: list[Any] = [pool.get_lazy(store, "a-10")]
    future = lazies[0].entry.send_to_cache_future

    def write(*arguments: Any, **more: Any) -> None:
        write_bytes(*arguments, **more)
        if lazies:
            lazies.clear()
            pool.get_lazy(store, "b-10").get()

    monkeypatch.setattr(file_cache_pool, "write_bytes", write)
    store.gate.set()
    assert not future.result(60) and files(pool) == [] and pool.current_cache_count == 0


def test_values_put_aside(make: MakePool) -> None:
    pool = make(max_cache_count=1)
    one, two, nothing = pool.to_cache({"n": 1}, "one"), pool.to_cache([2], "two"), pool.to_cache(None, "none")
    assert len(files(pool)) == 1, "for the second one there is no room"
    assert one != two and hash(one) != hash(two)
    first = one.get()
    assert first == {"n": 1} and one.get() is first and two.get() == [2] and nothing.get() is None
    pool.release()
    assert pickle.loads(pickle.dumps(one)).get() == {"n": 1}


def test_what_a_store_raises_is_raised_by_get(make: MakePool, tmp_path: Path) -> None:
    pool = make()
    lazy, other = (pool.get_lazy(SystemFileStore(tmp_path), "missing") for _ in range(2))
    for one in (lazy, lazy, other):
        with pytest.raises(MissingEntryError, match="missing"):
            in_time(one.get)


def test_a_file_that_somebody_cut_or_removed_is_read_again(make: MakePool) -> None:
    pool, store = make(), NumberedStore()
    cut, gone = pool.get_lazy(store, "a-100"), pool.get_lazy(store, "b-100")
    assert fetched(cut) and fetched(gone)
    cut.entry.cache_path.write_bytes(value_of("a-100")[:50])  # type: ignore[attr-defined]
    gone.entry.cache_path.unlink()  # type: ignore[attr-defined]
    assert cut.get() == value_of("a-100") and gone.get() == value_of("b-100")


def test_after_the_end_values_come_from_their_stores(make: MakePool) -> None:
    pool, store = make(num_workers=1), NumberedStore()
    lazy, aside = pool.get_lazy(store, "a-10"), pool.to_cache(1, "aside")
    assert fetched(lazy)
    pool.close()
    pool.close()
    assert lazy.get() == value_of("a-10")
    for call in (lambda: pool.get_lazy(store, "a-10"), lambda: pool.to_cache(1, "x"), aside.get):
        with pytest.raises(UsageError, match="closed"):
            call()


def test_in_another_process_they_are_read_directly(make: MakePool) -> None:
    pool, store = make(), NumberedStore()
    lazy = pool.get_lazy(store, "a-10")
    assert fetched(lazy)

    def elsewhere() -> None:
        values = pool.get_lazy(store, "b-10").get(), lazy.get()
        assert values == (value_of("b-10"), value_of("a-10")) and pool.current_cache_count == 0
        pool.close()

    assert os.waitpid(forked(elsewhere), 0)[1] == 0
    assert files(pool) == [10] and lazy.get() == value_of("a-10")


def test_copies_of_lazy_values(make: MakePool) -> None:
    pool = make()
    lazy = pool.get_lazy(SystemFileStore(Path(__file__).parent), "numbered_store.py")
    for other in (copy.copy(lazy), pickle.loads(pickle.dumps(lazy))):
        assert isinstance(other, DirectLazy) and other.get().startswith(b'"""A store')
    again = pickle.loads(pickle.dumps(pool))
    assert again.parent_cache_dir == pool.parent_cache_dir and again.cache_dir != pool.cache_dir
    again.close()


def test_other_lazy_values() -> None:
    mock = MockLazy("a", str.upper)
    assert mock.get() == "A" and mock == MockLazy("a", str.upper) != MockLazy("b", str.upper)
    store, pool = NumberedStore(), NoCachePool()
    direct = pool.get_lazy(store, "a-10")
    samples: list[dict[str, Any]] = [{}, {}]
    assert direct.get(samples[0]) is direct.get(samples[1]) and samples[0] == samples[1] and store.reads == ["a-10"]
    assert pool.to_cache(store, "x").get() is store


@pytest.mark.parametrize(
    "wrong", [{"num_workers": 0}, {"max_cache_size_gbytes": 0}, {"max_cache_count": -1}, {"method": "zip"}]
)
def test_settings_that_cannot_be(tmp_path: Path, wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        FileStoreCachePool(parent_cache_dir=tmp_path, **wrong)


PROGRAM = """
import sys
from energon_lite.extras.media import FileStoreCachePool
from tests.extras.media.stores.numbered_store import NumberedStore
pool = FileStoreCachePool(parent_cache_dir=sys.argv[1], num_workers=1, max_cache_count=1)
lazies = [pool.get_lazy(NumberedStore(), f"{n}-10") for n in range(9)]
lazies[0].entry.send_to_cache_future.result(60)
assert len(list(pool.cache_dir.iterdir())) == 1
"""


def test_a_program_that_forgets_to_close_ends_and_leaves_nothing(tmp_path: Path) -> None:
    root = Path(__file__).parents[4]
    environment = os.environ | {"PYTHONPATH": str(root)}
    program = ["-c", PROGRAM, str(tmp_path)]
    run_program(program, check=True, timeout=100, cwd=root, env=environment)
    assert list(tmp_path.iterdir()) == []
