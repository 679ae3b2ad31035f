"""Requests at the same time, in threads and in an event loop: answers, errors, and second ones for those that hang."""

from __future__ import annotations

import asyncio
import gc
import os
import threading
import weakref
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import wait
from typing import Any

import pytest
from fsspec.asyn import get_loop

from energon_lite.extras.remote import fetches as module
from energon_lite.extras.remote.fetches import Fetches
from energon_lite.storage.files.shard_store import ShardIdentity, ShardRange
from tests.testing import until

SHARD = ("s3://bucket/a.tar", ShardIdentity(1 << 40, 0))


def ranges(count: int, first: int = 0) -> list[ShardRange]:
    return [ShardRange(SHARD, 100 * number, 10) for number in range(first, first + count)]


class Source:
    """Answers with the offset; those in ``hangs`` take so long the first time, those in ``fails`` raise."""

    def __init__(self, delay: float = 0.002, hangs: dict[int, float] | None = None, fails: Sequence[int] = ()):
        self.delay, self.hangs, self.fails = delay, hangs or {}, fails
        self.asked: Counter[int] = Counter()
        self.at_once = self.most = 0
        self.lock, self.is_over = threading.Lock(), threading.Event()

    def begin(self, one: ShardRange) -> float:
        with self.lock:
            self.asked[one.offset] += 1
            self.at_once += 1
            self.most = max(self.most, self.at_once)
            return self.hangs.get(one.offset, self.delay) if self.asked[one.offset] == 1 else self.delay

    def end(self, one: ShardRange) -> bytes:
        with self.lock:
            self.at_once -= 1
        if one.offset in self.fails:
            raise ValueError(one.offset)
        return str(one.offset).encode()

    def read(self, one: ShardRange) -> bytes:
        self.is_over.wait(self.begin(one))
        return self.end(one)

    async def read_in_loop(self, one: ShardRange) -> bytes:
        await asyncio.sleep(self.begin(one))
        return self.end(one)

    def fetches(self, kind: str, requests: int = 8, **how: Any) -> Fetches:
        if kind == "threads":
            return Fetches(self.read, requests, **how)
        return Fetches(self.read, requests, loop_of=lambda _: get_loop(), read_in_loop=self.read_in_loop, **how)


kinds = pytest.mark.parametrize("kind", ["threads", "loop"])


@kinds
def test_each_gets_its_own_answer(kind: str) -> None:
    source = Source(fails=[300])
    fetches = source.fetches(kind, is_hedged=False)
    first, second = fetches.start(ranges(40)), fetches.start(ranges(5, 40))
    wait(second)
    wait(first)
    wait(first)  # they are there
    for fetch in [*first, *second]:
        if fetch.one.offset == 300:
            assert isinstance(fetch.exception(), ValueError)
        else:
            assert fetch.result() == str(fetch.one.offset).encode()
    assert source.most <= 8 and set(source.asked.values()) == {1}


@kinds
def test_what_hangs_is_asked_for_once_more(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_SPARE", 180.0)  # so those that a busy machine delays leave some for what hangs
    source = Source(hangs={100 * 30: 20.0, 100 * 50: 20.0})
    fetches = source.fetches(kind, requests=64)
    for begin in range(0, 60, 20):
        some = fetches.start(ranges(20, begin))
        wait(some)
        assert [fetch.result() for fetch in some] == [str(fetch.one.offset).encode() for fetch in some]
    source.is_over.set()
    assert source.asked[3000] >= 2 and source.asked[5000] >= 2 and fetches.hedged >= 2
    assert max(source.asked.values()) <= 3


@kinds
def test_a_store_that_is_slow_as_a_whole_is_not_asked_more(kind: str) -> None:
    source = Source()
    fetches = source.fetches(kind, requests=64)
    wait(fetches.start(ranges(64)))
    source.delay = 0.3
    wait(fetches.start(ranges(300, 100)))
    assert sum(source.asked.values()) <= 364 + 16 + 36 + 2


@kinds
def test_after_a_fork(kind: str) -> None:
    source = Source()
    fetches = source.fetches(kind)
    wait(fetches.start(ranges(3)))
    pending = fetches.start(ranges(8, 50))
    with source.lock:  # a thread that held it would not be in the child, to release it
        child = os.fork()
    if not child:
        some = fetches.start(ranges(20, 100))
        wait(some)
        os._exit(0 if [fetch.result() for fetch in some] == [str(fetch.one.offset).encode() for fetch in some] else 1)
    wait(pending)
    assert os.waitpid(child, 0)[1] == 0


@kinds
def test_threads_end_when_there_is_nothing_to_do(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def use(fetches: Fetches) -> None:
        for first in (0, 40):  # threads that have ended begin again
            for number in range(first, first + 40):  # each is done at once, and nobody is busy then
                wait(fetches.start(ranges(1, number)))
                assert until(lambda: not fetches._busy.is_set(), 60)
            assert until(lambda: fetches._watcher is None and not fetches._threads, 60)

    monkeypatch.setattr(module, "_IDLE", 0.05)
    fetches = Source(delay=0.0).fetches(kind)
    use(fetches)
    gone = weakref.ref(fetches)
    del fetches
    assert until(lambda: gc.collect() >= 0 and gone() is None, 60)
