"""Clients that are slow, or many: what they can take of the process that serves them."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from energon_lite.extras.inspect import PrometheusEndpoint, prometheus
from energon_lite.extras.inspect.preview.server import PreviewServer
from energon_lite.extras.inspect.preview.shown_run import RunOptions, ShownRun
from energon_lite.extras.inspect.preview.site import Site
from tests.testing import in_time

#: Connections of each client.
MANY = 500
#: Threads and descriptors that a server may take, whatever its clients do.
FEW = 50


@pytest.fixture(params=["metrics", "preview"])
def port(request: pytest.FixtureRequest, tmp_path: Path, leaf_of: object) -> Iterator[int]:
    if request.param == "metrics":
        with PrometheusEndpoint(0) as endpoint:
            endpoint.write({"step": 1})
            yield int(endpoint.url.split(":")[2].split("/")[0])
        return
    run = ShownRun.open(str(leaf_of(10)), RunOptions(batch_size=2))  # type: ignore[operator]
    with PreviewServer(Site(run)) as server:
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        yield server.server_address[1]
        server.shutdown()


def answer(port: int) -> bytes:
    with socket.create_connection(("127.0.0.1", port), timeout=10) as client:
        client.sendall(b"GET /metrics HTTP/1.0\r\nHost: 127.0.0.1\r\n\r\n")
        return b"".join(iter(lambda: client.recv(1 << 16), b""))


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_many_slow_clients_take_few_threads_and_files(port: int) -> None:
    threads, files = threading.active_count(), open_files()
    most_threads = most_files = 0
    with ExitStack() as clients:
        for number in range(MANY):
            client = clients.enter_context(socket.create_connection(("127.0.0.1", port), timeout=10))
            client.send(b"GET /metrics HT")
            most_threads = max(most_threads, threading.active_count() - threads)
            most_files = max(most_files, open_files() - files - number - 1)
        time.sleep(0.2)
        most_threads = max(most_threads, threading.active_count() - threads)
        assert in_time(lambda: answer(port)).startswith(b"HTTP/1.")
    assert most_threads < FEW and most_files < FEW
    assert b"energon_lite_step 1" in answer(port) or b"token" in answer(port)


def test_who_sends_a_byte_now_and_then_is_not_waited_for(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prometheus, "PATIENCE", 0.5)
    with socket.create_connection(("127.0.0.1", port), timeout=10) as client, pytest.raises(OSError):
        for _ in range(100):  # which takes five seconds, or more
            client.send(b"G")
            time.sleep(0.05)
