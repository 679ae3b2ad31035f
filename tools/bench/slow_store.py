"""A store that is far away, for benchmarks: file systems for fsspec that wait, and at times hang or fail.

Local files behind a delay for each request (requests may wait together) and a bandwidth that all requests and processes
share. ``far://`` waits in an event loop, as s3fs, gcsfs and fsspec's HTTP do; ``slow://`` in the caller's thread, as
other file systems do. :data:`STORE` says how slow it is; forked workers have the same store.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import random
import time
from dataclasses import dataclass
from typing import Any

import fsspec
from fsspec.asyn import AsyncFileSystem
from fsspec.implementations.local import LocalFileSystem

__all__ = ["STORE", "Store"]


@dataclass
class Store:
    """How slow it is.

    Args:
        delay: seconds of a request.
        bandwidth: bytes a second, of all together.
        hanging, hang: the share of requests that take so many seconds more.
        failing: the share of requests that fail.
    """

    delay: float = 5e-3
    bandwidth: float = 200e6
    hanging: float = 0.0
    hang: float = 1.0
    failing: float = 0.0

    def __post_init__(self) -> None:
        #: Until when the line is busy; requests; bytes.
        self._line = multiprocessing.Value("d", 0.0)
        self._requests, self._bytes = multiprocessing.Value("q", 0), multiprocessing.Value("q", 0)
        self._random = random.SystemRandom()

    def set(self, **how: float) -> None:
        """Another store from now on."""
        for name, value in how.items():
            setattr(self, name, value)
        self._requests.value = self._bytes.value = 0

    @property
    def counts(self) -> tuple[int, int]:
        """Requests and bytes so far."""
        return self._requests.value, self._bytes.value

    def wait_for(self, size: int) -> float:
        """Seconds until the answer to a request for so many bytes is here; it may raise instead."""
        with self._line.get_lock():
            now = time.monotonic()
            self._requests.value += 1
            self._bytes.value += size
            self._line.value = max(self._line.value, now + self.delay) + size / self.bandwidth
            seconds = self._line.value - now
        chance = self._random.random() if self.hanging or self.failing else 1.0
        if chance < self.failing:
            raise ConnectionResetError("the store fails, as it was told to")
        return seconds + (self.hang if chance < self.failing + self.hanging else 0.0)


STORE = Store()


def _read(path: str, start: int | None, end: int | None) -> bytes:
    file = os.open(path, os.O_RDONLY)
    try:
        size = os.fstat(file).st_size
        return os.pread(file, (size if end is None else min(end, size)) - (start or 0), start or 0)
    finally:
        os.close(file)


class SlowFileSystem(LocalFileSystem):
    """Waits in the caller's thread."""

    protocol = "slow"

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return path.removeprefix("slow://")

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **_: Any) -> bytes:
        data = _read(path, start, end)
        time.sleep(max(0.0, STORE.wait_for(len(data))))
        return data


class FarFileSystem(AsyncFileSystem):
    """Waits in an event loop."""

    protocol = "far"
    _local = LocalFileSystem()

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return path.removeprefix("far://")

    async def _cat_file(self, path: str, start: int | None = None, end: int | None = None, **_: Any) -> bytes:
        data = _read(path, start, end)
        await asyncio.sleep(max(0.0, STORE.wait_for(len(data))))
        return data

    async def _info(self, path: str, **_: Any) -> Any:
        return self._local.info(path)

    async def _find(self, path: str, **how: Any) -> Any:
        return self._local.find(path, **{name: how[name] for name in ("detail", "withdirs") if name in how})

    async def _get_file(self, path: str, target: str, **_: Any) -> None:
        self._local.get_file(path, target)


fsspec.register_implementation("slow", SlowFileSystem)
fsspec.register_implementation("far", FarFileSystem)
