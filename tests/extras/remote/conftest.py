"""A store in memory, servers of files, a clock, and runs with a store of samples."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import fsspec
import pytest

from energon_lite.extras.remote import file_versions, remote_files, store_tries
from energon_lite.storage.files import retries
from tests.extras.remote.store_runs import made, run
from tests.extras.remote.stored_files import wait_for_writers
from tests.servers import web_server

__all__ = ["Clock", "bucket", "clock", "made", "run"]


@pytest.fixture(autouse=True)
def _nothing_of_other_tests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No cached files, no known versions of objects, and all requests for records to spare."""
    monkeypatch.setenv("ENERGON_LITE_CACHE", str(tmp_path / "cache"))
    for name, fresh in (("_known", {}), ("_compared", {}), ("_spare", [64.0])):
        monkeypatch.setattr(file_versions, name, fresh)


@pytest.fixture
def memory() -> Iterator[Any]:
    """fsspec's store in memory, which is empty afterwards."""
    fs = fsspec.filesystem("memory")
    yield fs
    wait_for_writers()  # else the next test would find what they write
    fs.store.clear()  # `rm` fails where several threads have made the same folder: fsspec lists it twice
    fs.pseudo_dirs[:] = [""]


@pytest.fixture
def bucket(memory: Any) -> str:
    """URL of a bucket in memory."""
    return "memory://bucket/samples"


@pytest.fixture
def clients(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of other tests are not known."""
    monkeypatch.setattr(remote_files, "_file_systems", {})
    monkeypatch.setattr(remote_files, "_opened", {})
    monkeypatch.setattr("energon_lite.extras.remote.direct_ranges._known", {})


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[..., str]]:
    """``serve(handler)``: URL of the test's folder at a server that answers by such handlers."""
    pytest.importorskip("aiohttp")
    with ExitStack() as servers:

        def start(handler: Callable[..., Any], **options: Any) -> str:
            return servers.enter_context(web_server(partial(handler, directory=str(tmp_path), **options)))

        yield start


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
