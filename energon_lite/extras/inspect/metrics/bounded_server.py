"""A server over HTTP whose clients can take few of the threads and files of its process, however slow they are."""

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

#: Connections at the same time; each has a thread and a file descriptor.
MOST = 32
#: Seconds from one answer of a connection, or from its begin, until its next request has to be here.
PATIENCE = 10.0
#: Seconds that a connection may take to end after it was cut off.
_ENDING = 1.0


class BoundedServer(ThreadingHTTPServer):
    """Answers each connection in a thread; one too many takes the place of the one that has asked for nothing longest.

    So a client that asks at once gets its answer, even while others open connections without end. Forked processes have
    no part in it. While a handler makes an answer it says so with :meth:`answering`, else it is cut off.
    """

    request_queue_size = 128  # one that finds no room here tries again a second later
    daemon_threads = True
    block_on_close = False
    allow_reuse_port = False  # else another server at the same port would get half of the requests

    def __init__(self, address: tuple[str, int], handler: Any):
        self._changed = threading.Condition()
        self._since: dict[socket.socket, float] = {}  # when each connection got its last answer
        super().__init__(address, handler)
        _servers.add(self)

    def answering(self, request: socket.socket, is_begin: bool) -> None:
        """The answer to a request begins (its deadline is that of each write), or has ended."""
        with self._changed:
            self._since[request] = math.inf if is_begin else time.monotonic()

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer a connection, if there is room or room can be made."""
        with self._changed:
            if len(self._since) >= MOST:
                _cut_off(min(self._since, key=self._since.__getitem__))
            if not self._changed.wait_for(lambda: len(self._since) < MOST, _ENDING):
                self.shutdown_request(request)
                return
            self._since[request] = time.monotonic()
        super().process_request(request, client_address)

    def service_actions(self) -> None:
        """Cut off who has asked for nothing too long; called each time that the server looks for new connections."""
        before = time.monotonic() - PATIENCE
        with self._changed:
            for request in [one for one, since in self._since.items() if since < before]:
                _cut_off(request)

    def close_request(self, request: Any) -> None:
        """Close a connection."""
        with self._changed:  # so that none is cut off whose descriptor is another one's by now
            super().close_request(request)
            self._since.pop(request, None)
            self._changed.notify_all()

    def server_close(self) -> None:
        """Let go of the port, and of all connections."""
        super().server_close()
        with self._changed:
            for request in self._since:
                _cut_off(request)


def _cut_off(request: socket.socket) -> None:
    """End a connection: whatever its thread waits for there, it waits no more."""
    with suppress(OSError):  # the client was faster
        request.shutdown(socket.SHUT_RDWR)


_servers: weakref.WeakSet[BoundedServer] = weakref.WeakSet()


def _let_go() -> None:
    """In a forked process: else the port would be taken as long as that lives."""
    for server in _servers:
        server.socket.close()


os.register_at_fork(after_in_child=_let_go)
