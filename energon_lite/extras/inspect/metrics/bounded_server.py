"""HTTP server that limits the threads and files that its clients can occupy, even slow ones."""

from __future__ import annotations

import math
import os
import socket
import threading
import time
import weakref
from contextlib import suppress
from http.server import ThreadingHTTPServer
from typing import Any

__all__ = ["BoundedServer"]

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
