"""Sink for Prometheus: a page over HTTP in its text format, from a server that limits what its clients can occupy."""

from __future__ import annotations

import math
import os
import re
import socket
import threading
import time
import weakref
from collections.abc import Mapping
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from energon_lite.errors import UsageError

#: The most simultaneous connections; each has a thread and a file descriptor.
MOST = 32
#: Seconds from the start of a connection, or its last answer, within which the next request must arrive.
PATIENCE = 10.0
#: Seconds that a connection may take to end after it was closed.
_ENDING = 1.0


class BoundedServer(ThreadingHTTPServer):
    """Server with a thread per connection; a surplus connection replaces the one that has been idle longest.

    So a client that sends its request at once is answered, even while others open connections without end. Forked
    processes take no part in it. A handler must call :meth:`answering` while it makes an answer, or it is cut off.
    """

    request_queue_size = 128  # a rejected client retries a second later
    daemon_threads = True
    block_on_close = False
    allow_reuse_port = False  # else another server at this port would get half of the requests

    def __init__(self, address: tuple[str, int], handler: Any):
        self._changed = threading.Condition()
        self._since: dict[socket.socket, float] = {}  # time of the last answer of each connection
        super().__init__(address, handler)
        _servers.add(self)

    def answering(self, request: socket.socket, is_begin: bool) -> None:
        """Mark the start of an answer (whose deadline is that of each write), or its end."""
        with self._changed:
            self._since[request] = math.inf if is_begin else time.monotonic()

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer a connection if there is room, or room can be made."""
        with self._changed:
            if len(self._since) >= MOST:
                _cut_off(min(self._since, key=self._since.__getitem__))
            if not self._changed.wait_for(lambda: len(self._since) < MOST, _ENDING):
                self.shutdown_request(request)
                return
            self._since[request] = time.monotonic()
        super().process_request(request, client_address)

    def service_actions(self) -> None:
        """Close connections that were idle too long; called whenever the server looks for new ones."""
        before = time.monotonic() - PATIENCE
        with self._changed:
            for request in [idle for idle, since in self._since.items() if since < before]:
                _cut_off(request)

    def close_request(self, request: Any) -> None:
        """Close a connection."""
        with self._changed:  # so that a reused descriptor is not cut off
            super().close_request(request)
            self._since.pop(request, None)
            self._changed.notify_all()

    def server_close(self) -> None:
        """Release the port and all connections."""
        super().server_close()
        with self._changed:
            for request in self._since:
                _cut_off(request)


def _cut_off(request: socket.socket) -> None:
    """Shut down a connection, so that its thread stops waiting."""
    with suppress(OSError):  # the client has closed it already
        request.shutdown(socket.SHUT_RDWR)


_servers: weakref.WeakSet[BoundedServer] = weakref.WeakSet()


def _let_go() -> None:
    """Close the sockets in a forked process, which would otherwise keep the port in use."""
    for server in _servers:
        server.socket.close()


os.register_at_fork(after_in_child=_let_go)


#: Path of the page.
_PATH = "/metrics"
#: Content type of the text format, see https://prometheus.io/docs/instrumenting/exposition_formats.
_CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
#: Names of numbers that only grow; Prometheus names of such numbers end with ``_total``.
_COUNTERS = re.compile(r"loader_(batches|samples|tokens|skipped|failed|dropped|bytes_read|worker_deaths|fallbacks)")
_GROWING = re.compile(r"loader_(cache_.*|.*_seconds|dataset_samples)")


class _Server(BoundedServer):
    """Server of the page, whose ``data`` is sent."""

    def __init__(self, address: tuple[str, int]):
        self.data = b""
        super().__init__(address, _Handler)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore clients that have disconnected, to keep the output of a training clean."""


class _Handler(BaseHTTPRequestHandler):
    timeout = PATIENCE
    server: _Server

    def do_GET(self) -> None:
        is_page = self.path.partition("?")[0] == _PATH
        data = self.server.data if is_page else f"there is only {_PATH}\n".encode()
        self.send_response(200 if is_page else 404)
        self.send_header("Content-Type", _CONTENT_TYPE if is_page else "text/plain; charset=utf-8")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        """Do not log requests."""


def _end(server: _Server, owner: int) -> None:
    """Release the port; forked processes take no part in it."""
    if os.getpid() == owner:
        server.shutdown()
        server.server_close()


class PrometheusEndpoint:
    """Address from which Prometheus fetches numbers. A :class:`~energon_lite.loading.MetricsSink`.

    It shows the numbers written last. Its clients occupy at most 32 threads and file descriptors, for 10 s each.

    Only this machine can reach it, unless ``host`` is set; there is no password.

    Args:
        port: the port; 0 for any free one, see ``url``. Each rank of a machine needs its own.
        host: the address to listen at; ``"0.0.0.0"`` for all addresses of the machine.
        labels: labels of all numbers, such as ``{"rank": "3"}``.

    Attributes:
        url: address of the numbers.

    Raises:
        UsageError: the port is in use, or Prometheus does not allow the name of a label.

    Example:
        >>> endpoint = PrometheusEndpoint(9464 + local_rank, labels={"rank": str(rank)})
        >>> loader = get_savable_loader(dataset, metrics=[endpoint])
    """

    def __init__(self, port: int, *, host: str = "127.0.0.1", labels: Mapping[str, str] | None = None):
        self._labels = {name: str(value) for name, value in (labels or {}).items()}
        for name in self._labels:
            if not re.fullmatch(r"(?!__)[a-zA-Z_][a-zA-Z0-9_]*", name) or name == "name":
                raise UsageError(f"{name!r} is not the name of a label", fix="letters, digits and _, and not 'name'")

        try:
            self._server = _Server((host, port))
        except (OSError, OverflowError) as error:
            raise UsageError(
                f"metrics cannot be served at {host}:{port}: {getattr(error, 'strerror', None) or error}",
                fix="give another port, or 0 for any that is free",
            ) from None
        self.url = f"http://{host}:{self._server.server_address[1]}{_PATH}"
        threading.Thread(target=self._server.serve_forever, args=(0.1,), name="energon-lite-page", daemon=True).start()
        self._end = weakref.finalize(self, _end, self._server, os.getpid())

    def write(self, values: Mapping[str, Any]) -> None:
        """Replace the shown numbers."""
        self._server.data = exposition({**values, "updated_timestamp_seconds": time.time()}, self._labels).encode()

    def close(self) -> None:
        """Release the port. May be called twice."""
        self._end()

    def __enter__(self) -> PrometheusEndpoint:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def exposition(values: Mapping[str, Any], labels: Mapping[str, str] | None = None) -> str:
    """Return numbers in the text format of Prometheus, without values of other types.

    ``loader/stage_seconds/read`` becomes ``energon_lite_loader_stage_seconds_total{name="read"}``: the text after the
    second slash (for others, the first) becomes a label.

    Example:
        >>> print(exposition({"loss": 2.5}), end="")
        # TYPE energon_lite_loss gauge
        energon_lite_loss 2.5
    """
    families: dict[str, list[str]] = {}
    for name, value in values.items():
        if name == "time" or not isinstance(value, (int, float)):
            continue
        metric, own = _named(name)
        inside = ",".join(f'{label}="{_escaped(text)}"' for label, text in {**(labels or {}), **own}.items())
        families.setdefault(metric, []).append(f"{metric}{f'{{{inside}}}' if inside else ''} {_number(value)}")
    kinds = {metric: "counter" if metric.endswith("_total") else "gauge" for metric in families}
    lines = [line for metric, rows in families.items() for line in (f"# TYPE {metric} {kinds[metric]}", *rows)]
    return "".join(f"{line}\n" for line in lines)


def _named(name: str) -> tuple[str, dict[str, str]]:
    """Return the name of a metric, and its label."""
    first, _, rest = name.partition("/")
    if first == "loader" and rest:
        second, _, rest = rest.partition("/")
        first = f"{first}_{second}"
    total = "_total" if _COUNTERS.fullmatch(first) or _GROWING.fullmatch(first) else ""
    return f"energon_lite_{re.sub('[^a-zA-Z0-9_]', '_', first)}{total}", {"name": rest} if rest else {}


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')


def _number(value: float) -> str:
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "+Inf" if value > 0 else "-Inf"
    return repr(float(value)) if isinstance(value, float) else str(int(value))
