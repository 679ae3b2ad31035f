"""Read-only HTTP server of one page, in a thread."""

from __future__ import annotations

import os
import threading
import weakref
from http.server import BaseHTTPRequestHandler
from typing import Any

from energon_lite.errors import UsageError
from energon_lite.extras.inspect.metrics.bounded_server import PATIENCE, BoundedServer

__all__ = ["PageServer"]


class PageServer:
    """Server of a page until it is closed, or this process ends. Forked processes take no part in it.

    Args:
        host, port: address to listen at; port 0 for any free one.
        path: path of the page; other paths are not found.
        content_type: MIME type of the page.

    Attributes:
        page: the page, whose ``data`` is served.
        url: address of the page.

    Raises:
        UsageError: the port is in use or invalid, or the host is unknown.
    """

    def __init__(self, host: str, port: int, path: str, content_type: str):
        self.page = _Page(path, content_type)
        try:
            server = _Server((host, port), self.page)
        except (OSError, OverflowError) as error:
            raise UsageError(
                f"nothing can be served at {host}:{port}: {getattr(error, 'strerror', None) or error}",
                fix="give another port, or 0 for any that is free",
            ) from None
        self.url = f"http://{host}:{server.server_address[1]}{path}"
        thread = threading.Thread(target=server.serve_forever, args=(0.1,), name="energon-lite-page", daemon=True)
        thread.start()
        self._end = weakref.finalize(self, _end, server, os.getpid())

    def close(self) -> None:
        """Release the port. May be called twice."""
        self._end()


class _Page:
    """Path, type and contents of the page."""

    def __init__(self, path: str, content_type: str):
        self.path = path
        self.content_type = content_type
        self.data = b""


class _Server(BoundedServer):
    def __init__(self, address: tuple[str, int], page: _Page):
        self.page = page
        super().__init__(address, _Handler)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore clients that have disconnected, to keep the output of a training clean."""


class _Handler(BaseHTTPRequestHandler):
    timeout = PATIENCE
    server: _Server

    def do_GET(self) -> None:
        page = self.server.page
        is_page = self.path.partition("?")[0] == page.path
        data = page.data if is_page else f"there is only {page.path}\n".encode()
        self.send_response(200 if is_page else 404)
        self.send_header("Content-Type", page.content_type if is_page else "text/plain; charset=utf-8")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        """Do not log requests."""


def _end(server: _Server, owner: int) -> None:
    if os.getpid() == owner:
        server.shutdown()
        server.server_close()
