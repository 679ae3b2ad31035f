"""Concurrent requests for ranges, with a second request for those that take far too long.

If a file system works in an event loop (``s3fs``, ``gcsfs``, ``http``), all requests wait in that one thread;
otherwise each waits in a thread of a pool. A request that takes twice as long as requests of its size usually do is
sent once more, and the first answer counts: of a thousand requests to an object store, some hang for a second. At most
a tenth of all requests are sent twice, so that a store that is slow as a whole gets no further load.

J. Dean and L. A. Barroso, The Tail at Scale, CACM 2013, call this a hedged request.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from contextlib import nullcontext
from queue import Empty, SimpleQueue
from typing import Any

from energon_lite.storage.files.shard_store import ShardRange

#: Most requests for the same range; a second one may hang, too.
_TRIES = 3
#: Requests that may be sent twice in a burst.
_SPARE = 16.0
#: Further requests that may be sent twice, for each answer.
_SHARE = 0.1
#: Seconds; a request that is younger is never late.
_SHORT = 0.01
#: Seconds after which a request is late while the usual time is unknown.
_UNKNOWN = 1.0
#: Seconds after which an idle thread ends: it keeps the objects alive that it reads for.
_IDLE = 10.0
#: Largest size, in bytes, up to which all requests take about the same time.
_SMALL = 1 << 17
#: Fewest answers of a size that are needed for a first estimate of their time.
_KNOWN = 16
#: Fewest answers after which the estimate is renewed.
_AGAIN = 32


class Fetch(Future["bytes | memoryview"]):
    """A request for a range: a future of its bytes.

    Args:
        one: the range.
    """

    def __init__(self, one: ShardRange):
        super().__init__()
        self.one = one
        self.started = 0.0  # time of the first request
        self.tries = 1  # requests that were sent, or are about to be
        self.tasks: list[asyncio.Task[None]] = []


class Fetches:
    """Sender of concurrent requests for ranges.

    Args:
        read: reads a range, in a thread.
        requests: the most requests at the same time.
        loop_of: the event loop in which ``read_in_loop`` can read a range; None: it is read in a thread.
        read_in_loop: reads a range in an event loop.
        is_hedged: send a second request for a range that takes too long.

    Example:
        >>> fetches = Fetches(read, 64)
        >>> some = fetches.start([one, other])
        >>> some[0].result()
        b'...'
    """

    def __init__(
        self,
        read: Callable[[ShardRange], bytes | memoryview],
        requests: int,
        *,
        loop_of: Callable[[ShardRange], Any] = lambda _: None,
        read_in_loop: Callable[[ShardRange], Coroutine[Any, Any, bytes]] | None = None,
        is_hedged: bool = True,
    ):
        self._read = read
        self._requests = requests
        self._is_hedged = is_hedged
        self._loop_of = loop_of
        self._read_in_loop = read_in_loop
        self._process = 0
        self._times: dict[int, _Times] = {}
        #: Number of second requests.
        self.hedged = 0

    def _begin(self) -> None:
        """Create threads, locks and queues again: they do not survive a fork."""
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._queue: SimpleQueue[Fetch] = SimpleQueue()
        self._threads = 0
        self._places = asyncio.Semaphore(self._requests)  # for first requests in the loop
        self._active = set[Fetch]()
        self._spare = _SPARE
        self._busy = threading.Event()
        self._watcher: threading.Thread | None = None

    def start(self, ranges: Sequence[ShardRange]) -> list[Fetch]:
        """Start to fetch ranges. Does not wait."""
        if self._process != os.getpid():
            self._begin()
        fetches = [Fetch(span) for span in ranges]
        loops: dict[Any, list[Fetch]] = {}
        for fetch in fetches:
            loops.setdefault(self._loop_of(fetch.one), []).append(fetch)
        with self._lock:
            self._active.update(fetches)
            if self._is_hedged and fetches:
                self._busy.set()  # before they are sent: then they may already be done
                if self._watcher is None:
                    self._watcher = threading.Thread(target=self._watch, name="energon-lite-hedge", daemon=True)
                    self._watcher.start()
        for loop, group in loops.items():
            if loop is None:
                self._to_threads(group, self._requests)
            else:
                loop.call_soon_threadsafe(self._send, group, True)
        return fetches

    def _finish(self, fetch: Fetch, data: bytes | memoryview, error: BaseException | None = None) -> None:
        with self._lock:
            if fetch.done():
                return
            self._active.discard(fetch)
            if self._is_hedged:
                self._spare = min(_SPARE, self._spare + _SHARE)
                if error is None:
                    self._times_of(fetch.one.size).add(time.monotonic() - fetch.started)
            if not self._active:
                self._busy.clear()
            if error is None:
                fetch.set_result(data)
            else:
                fetch.set_exception(error)
        for task in fetch.tasks:
            task.cancel()  # the other request; the current one has ended

    # -- in threads -----------------------------------------------------------------------------------------------

    def _to_threads(self, fetches: Sequence[Fetch], most: int) -> None:
        with self._lock:
            for fetch in fetches:
                self._queue.put(fetch)
            while self._threads < min(most, self._threads + self._queue.qsize()):
                self._threads += 1
                threading.Thread(
                    target=self._work, args=(self._queue,), name=f"energon-lite-read-{self._threads}", daemon=True
                ).start()

    def _work(self, queue: SimpleQueue[Fetch]) -> None:
        while True:
            try:
                fetch = queue.get(timeout=_IDLE)
            except Empty:
                with self._lock:
                    if queue.empty():
                        self._threads -= 1
                        return
                continue
            if fetch.done():
                continue
            fetch.started = fetch.started or time.monotonic()
            try:
                self._finish(fetch, self._read(fetch.one))
            except BaseException as error:
                self._finish(fetch, b"", error)
            del fetch

    # -- in an event loop -----------------------------------------------------------------------------------------

    def _send(self, fetches: Sequence[Fetch], is_first: bool) -> None:
        loop = asyncio.get_running_loop()
        for fetch in fetches:
            if not fetch.done():
                fetch.tasks.append(loop.create_task(self._request(fetch, is_first)))

    async def _request(self, fetch: Fetch, is_first: bool) -> None:
        assert self._read_in_loop is not None
        task, data, error = asyncio.current_task(), b"", None
        try:
            async with self._places if is_first else nullcontext():
                fetch.started = fetch.started or time.monotonic()
                data = await self._read_in_loop(fetch.one)
        except asyncio.CancelledError:
            return
        except BaseException as failure:
            error = failure
        finally:
            if task in fetch.tasks:
                fetch.tasks.remove(task)
        if error is None or not fetch.tasks:  # otherwise the other request may still succeed
            self._finish(fetch, data, error)

    # -- requests that take too long -----------------------------------------------------------------------------

    def _times_of(self, size: int) -> _Times:
        return self._times.setdefault(max(_SMALL, size).bit_length() // 2, _Times())

    def _watch(self) -> None:
        while True:
            is_busy = self._busy.wait(_IDLE)
            with self._lock:
                if not (is_busy or self._active):
                    self._watcher = None
                    return
                now, late = time.monotonic(), list[Fetch]()
                shortest = _UNKNOWN
                for fetch in self._active:
                    limit = self._times_of(fetch.one.size).limit
                    shortest = min(shortest, limit)
                    waits = fetch.started and fetch.tries < _TRIES and now - fetch.started > limit * fetch.tries
                    if waits and self._spare >= 1.0:
                        self._spare -= 1.0
                        fetch.tries += 1
                        late.append(fetch)
            self.hedged += len(late)
            for fetch in late:
                if (loop := self._loop_of(fetch.one)) is None:
                    self._to_threads([fetch], self._requests * _TRIES)
                else:
                    loop.call_soon_threadsafe(self._send, [fetch], False)
            time.sleep(max(shortest / 4, _SHORT / 2))


class _Times:
    """Durations of recent answers of about one size, in seconds."""

    def __init__(self) -> None:
        self._seconds: deque[float] = deque(maxlen=256)
        self._new = 0
        #: Seconds after which a request is late.
        self.limit = _UNKNOWN

    def add(self, seconds: float) -> None:
        self._seconds.append(seconds)
        self._new += 1
        if self._new >= (_AGAIN if self.limit != _UNKNOWN else _KNOWN):
            self._new = 0
            known = sorted(self._seconds)
            middle, most = known[len(known) // 2], known[len(known) * 9 // 10]
            self.limit = max(_SHORT, 2 * middle, 1.3 * most)
