"""A page for Prometheus: what is on it, who can read it, and what clients can take of a process that serves them."""

from __future__ import annotations

import math
import os
import re
import signal
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from energon_lite.errors import UsageError
from energon_lite.extras.inspect import PrometheusEndpoint, prometheus
from energon_lite.extras.inspect.preview.shown_run import RunOptions, ShownRun
from energon_lite.extras.inspect.preview.site import Site
from energon_lite.extras.inspect.prometheus import exposition
from tests.accidents import beside
from tests.extras.inspect.preview.served import serving
from tests.testing import free_port, in_time

#: The grammar of the text format, for what we write: comments, and a name, labels, and a number.
_LINE = re.compile(
    r"(# TYPE [a-zA-Z_:][\w:]* (counter|gauge))|"
    r'([a-zA-Z_:][\w:]*(\{[a-zA-Z_]\w*="([^"\\\n]|\\["\\n])*"(,[a-zA-Z_]\w*="([^"\\\n]|\\["\\n])*")*\})? '
    r"(-?\d+(\.\d+)?(e[+-]?\d+)?|NaN|[+-]Inf))",
    re.ASCII,
)


def get(url: str) -> tuple[str, str]:
    """The body, and its kind."""
    with urllib.request.urlopen(url, timeout=10) as answer:
        return answer.read().decode(), answer.headers["Content-Type"]


def test_what_is_on_the_page() -> None:
    values = {
        "step": 7,
        "time": 1.5,
        "loss": 2.5,
        "eval_loss/coco val": 3,
        "loader/wait_seconds": 0.25,
        "loader/stage_seconds/read": 1.0,
        "loader/stage_seconds/decode": 2.0,
        "loader/decode_seconds/a/b": 4.0,
        "words": "none",
    }
    assert exposition(values, {"rank": "3"}).splitlines() == [
        "# TYPE energon_lite_step gauge",
        'energon_lite_step{rank="3"} 7',
        "# TYPE energon_lite_loss gauge",
        'energon_lite_loss{rank="3"} 2.5',
        "# TYPE energon_lite_eval_loss gauge",
        'energon_lite_eval_loss{rank="3",name="coco val"} 3',
        "# TYPE energon_lite_loader_wait_seconds_total counter",
        'energon_lite_loader_wait_seconds_total{rank="3"} 0.25',
        "# TYPE energon_lite_loader_stage_seconds_total counter",
        'energon_lite_loader_stage_seconds_total{rank="3",name="read"} 1.0',
        'energon_lite_loader_stage_seconds_total{rank="3",name="decode"} 2.0',
        "# TYPE energon_lite_loader_decode_seconds_total counter",
        'energon_lite_loader_decode_seconds_total{rank="3",name="a/b"} 4.0',
    ]


@given(
    st.dictionaries(
        st.text(min_size=1), st.one_of(st.integers(), st.floats(), st.booleans(), st.text(), st.none()), max_size=5
    ),
    st.text(),
)
def test_every_line_is_of_the_format(values: dict[str, Any], label: str) -> None:
    text = exposition(values, {"host": label})
    assert all(_LINE.fullmatch(line) for line in text.split("\n")[:-1])
    assert text or not any(isinstance(value, (int, float)) for name, value in values.items() if name != "time")
    assert "".join(exposition({"x": math.inf, "y": math.nan}).split()).endswith("energon_lite_yNaN")


def test_it_is_served_to_this_machine_and_changes_with_what_is_written() -> None:
    with PrometheusEndpoint(0, labels={"rank": "0"}) as endpoint:
        assert endpoint.url.startswith("http://127.0.0.1:")
        assert get(endpoint.url)[0] == ""
        for loss in (2.5, 1.5):
            endpoint.write({"step": 1, "loss": loss})
            text, kind = get(endpoint.url + "?x=1")
            assert f'energon_lite_loss{{rank="0"}} {loss}\n' in text and "updated_timestamp_seconds" in text
            assert kind == "text/plain; version=0.0.4; charset=utf-8"
        for path in ("/", "/../etc/passwd", "/metrics/x"):
            with pytest.raises(urllib.error.HTTPError, match="404"):
                get(endpoint.url.replace("/metrics", path))
        with pytest.raises(urllib.error.HTTPError, match="501"):
            urllib.request.urlopen(urllib.request.Request(endpoint.url, data=b"x", method="POST"), timeout=10)


def test_a_port_that_is_taken_and_labels_that_are_none() -> None:
    port = free_port()
    with PrometheusEndpoint(port):
        with pytest.raises(UsageError, match=f"metrics cannot be served at 127.0.0.1:{port}"):
            PrometheusEndpoint(port)
    with PrometheusEndpoint(port):
        pass  # it is free again
    with pytest.raises(UsageError, match="another port"):
        PrometheusEndpoint(70_000)
    for name in ("a-b", "__x", "name", ""):
        with pytest.raises(UsageError, match="not the name of a label"):
            PrometheusEndpoint(0, labels={name: "x"})


def test_a_forked_process_does_not_keep_the_port() -> None:
    port = free_port()
    endpoint = PrometheusEndpoint(port)
    with beside(signal.pause):
        endpoint.close()
        endpoint.close()
        PrometheusEndpoint(port).close()


# -- clients that are slow, or many ------------------------------------------------------------------------------------


#: Connections of each client.
MANY = 500
#: Threads and descriptors that a server may take, whatever its clients do.
FEW = 50


@pytest.fixture(params=["metrics", "preview"])
def port(request: pytest.FixtureRequest, leaf_of: Any) -> Iterator[int]:
    if request.param == "metrics":
        with PrometheusEndpoint(0) as endpoint:
            endpoint.write({"step": 1})
            yield int(endpoint.url.split(":")[2].split("/")[0])
        return
    run = ShownRun.open(str(leaf_of(10)), RunOptions(batch_size=2))
    with serving(Site(run)) as server:
        yield server.server_address[1]


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
