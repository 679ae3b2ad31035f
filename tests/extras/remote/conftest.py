"""A bucket in memory, a clock, and runs with a store of samples."""

from __future__ import annotations

from collections.abc import Iterator

import fsspec
import pytest

from energon_lite.extras.remote import remote_files, store_tries
from energon_lite.storage.files import retries
from tests.extras.remote.store_runs import run
from tests.extras.remote.stored_files import wait_for_writers

__all__ = ["Clock", "bucket", "clock", "run"]


@pytest.fixture
def bucket() -> Iterator[str]:
    """URL of a bucket in memory."""
    fs = fsspec.filesystem("memory")
    yield "memory://bucket/samples"
    wait_for_writers()  # else the next test would find what they write
    fs.store.clear()  # `rm` fails where several threads have made the same folder: fsspec lists it twice
    fs.pseudo_dirs[:] = [""]


class Clock:
    """A clock that sleeping sets forward."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The clock of requests that are tried again."""
    clock = Clock()
    for module in (remote_files, retries):
        monkeypatch.setattr(module, "time", clock)
    monkeypatch.setattr(store_tries, "_gave_up", {})
    return clock
