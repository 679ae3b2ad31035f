"""A client of one HTTP server that supports one request, for a range of bytes, and one answer: that range.

General clients spend most of the time outside of the transfer: of the millisecond that ``s3fs`` needs for 7 kB, hardly
any is spent on the bytes. Any other answer raises :class:`UnusualAnswer`, after which the caller reads in another way.
Connections are kept, and used by one request at a time.

RFC 9110 (HTTP semantics), section 14; RFC 9112 (HTTP/1.1), section 6.
"""

from __future__ import annotations

import asyncio
import errno
import ssl
from typing import Any

from energon_lite.extras.remote.file_versions import Answer

#: Most bytes of the head of an answer.
_LARGEST_HEAD = 1 << 16
#: Statuses of an overloaded server: the request may be sent again later.
_BUSY = {b"408", b"429", b"500", b"502", b"503", b"504", b"509"}


class UnusualAnswer(Exception):
    """An answer other than the plain range: another status, encoded, in chunks. The caller reads in another way."""


class StatusError(OSError):
    """The server cannot answer at present.

    Attributes:
        status: the HTTP status.
    """

    def __init__(self, status: int):
        super().__init__(f"the server answered with status {status}")
        self.status = status


class _Stale(ConnectionResetError):
    """A kept connection was closed before a byte of the answer arrived."""


class RangeClient:
    """Fetcher of ranges from one server. It belongs to one event loop.

    Args:
        host, port: the server.
        context: context for TLS; None: without TLS.
        patience: seconds without a byte after which a request is given up.

    Example:
        >>> client = RangeClient("localhost", 80)
        >>> await client.get(b"GET /a.tar HTTP/1.1\\r\\nHost: localhost\\r\\n", 512, 100)
        Answer(data=b'...', etag='"5d8c72a5edda8"', modified='Wed, 21 Oct 2015 07:28:00 GMT')
    """

    def __init__(self, host: str, port: int, context: ssl.SSLContext | None = None, patience: float = 15.0):
        self._host = host
        self._port = port
        self._context = context
        self._patience = patience
        #: The connection used last comes last, so that unneeded ones are closed by the server.
        self._idle: list[_Connection] = []
        self._busy: set[_Connection] = set()
        self._watched = False

    async def get(self, head: bytes, offset: int, size: int) -> Answer:
        """Fetch the ``size`` bytes at ``offset``, at least one.

        Args:
            head: request line and headers except the range, each with its line end.

        Raises:
            UnusualAnswer: the answer is not the plain range.
            StatusError, ConnectionError, TimeoutError, OSError: the server, or the way to it, fails.
        """
        request = b"%bRange: bytes=%d-%d\r\n\r\n" % (head, offset, offset + size - 1)
        while True:
            connection = self._kept() or await self._connect()
            self._busy.add(connection)
            try:
                answer = await connection.ask(request, offset, size)
            except _Stale:
                continue
            except BaseException:  # also when cancelled: the rest of the answer would still arrive
                connection.close()
                raise
            finally:
                self._busy.discard(connection)
            self._idle.append(connection)
            return answer

    def _kept(self) -> _Connection | None:
        while self._idle:
            connection = self._idle.pop()
            if not connection.is_closed:
                return connection
        return None

    async def _connect(self) -> _Connection:
        loop = asyncio.get_running_loop()
        if not self._watched:
            self._watched = True
            loop.call_later(self._patience / 4, self._watch, loop)
        name = None if self._context is None else self._host
        opening = loop.create_connection(
            lambda: _Connection(loop), self._host, self._port, ssl=self._context, server_hostname=name
        )
        try:
            _, connection = await asyncio.wait_for(opening, self._patience)
        except asyncio.TimeoutError:  # not the built-in one before Python 3.11
            raise TimeoutError(errno.ETIMEDOUT, f"no connection after {self._patience:.0f} s") from None
        return connection

    def _watch(self, loop: asyncio.AbstractEventLoop) -> None:
        """End requests without a byte for ``patience`` seconds."""
        now = loop.time()
        for connection in [busy for busy in self._busy if now - busy.heard > self._patience]:
            connection.give_up(TimeoutError(errno.ETIMEDOUT, f"no answer for {self._patience:.0f} s"))
        self._watched = bool(self._busy)
        if self._watched:
            loop.call_later(self._patience / 4, self._watch, loop)


class _Connection(asyncio.Protocol):
    """A connection to the server, which carries one request at a time."""

    def __init__(self, loop: asyncio.AbstractEventLoop):
        self._loop = loop
        self._transport: Any = None
        self._answer: asyncio.Future[Answer] | None = None
        self._uses = 0
        self._is_last = False
        #: Time of the loop at which the last byte arrived.
        self.heard = loop.time()

    @property
    def is_closed(self) -> bool:
        return self._transport is None or self._transport.is_closing()

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def ask(self, request: bytes, offset: int, size: int) -> asyncio.Future[Answer]:
        self._offset = offset
        self._size = size
        self._uses += 1
        #: The received part of the head; the pieces of the body, and the number of missing bytes (0: no head yet).
        self._head, self._parts, self._left = b"", list[bytes](), 0
        self.heard = self._loop.time()
        self._answer = answer = self._loop.create_future()
        if self.is_closed:
            self.give_up(ConnectionResetError(errno.ECONNRESET, "the connection was closed"))
        else:
            self._transport.write(request)
        return answer

    def data_received(self, data: bytes) -> None:
        answer = self._answer
        if answer is None:
            self.close()  # there is no request
            return
        self.heard = self._loop.time()
        if self._left:
            self._parts.append(data)
            self._left -= len(data)
        else:
            data = self._head + data
            end = data.find(b"\r\n\r\n") + 4
            if end < 4:
                self._head = data
                if len(data) > _LARGEST_HEAD:
                    self.give_up(UnusualAnswer("a very long head"))
                return
            head = data[: end - 2]
            lowered = head.lower()
            error = self._error(lowered)
            if error is not None:
                self.give_up(error)
                return
            self._version = _field(head, lowered, b"\r\netag:"), _field(head, lowered, b"\r\nlast-modified:")
            self._left = self._size + end - len(data)
            self._parts.append(data[end:])
        if self._left < 0:
            self.give_up(UnusualAnswer("more bytes than announced"))
        elif not self._left:
            self._answer = None
            if self._is_last:
                self.close()
            if not answer.done():
                answer.set_result(Answer(b"".join(self._parts), *self._version))

    def _error(self, head: bytes) -> Exception | None:
        """The error of an answer, by its head in lower case; None if the answer is the range."""
        if not head.startswith(b"http/1.1 206"):
            return StatusError(int(head[9:12])) if head[9:12] in _BUSY else UnusualAnswer(head[:60].decode("latin-1"))
        is_it = (
            b"\r\ncontent-range: bytes %d-%d/" % (self._offset, self._offset + self._size - 1) in head
            and b"\r\ncontent-length: %d\r\n" % self._size in head
            and head.count(b"\r\ncontent-length:") == 1
            and b"\r\ntransfer-encoding:" not in head
            and b"\r\ncontent-encoding:" not in head
        )
        self._is_last = b"\r\nconnection: close\r\n" in head
        return None if is_it else UnusualAnswer("not the range")

    def connection_lost(self, error: Exception | None) -> None:
        if self._answer is not None:
            stale = self._uses > 1 and not self._head and not self._parts
            kind = _Stale if stale else ConnectionResetError
            self.give_up(kind(errno.ECONNRESET, f"the connection was closed: {error or 'the answer is incomplete'}"))
        self._transport = None

    def give_up(self, error: Exception) -> None:
        """End the request with an error, and close the connection."""
        answer, self._answer = self._answer, None
        if answer is not None and not answer.done():
            answer.set_exception(error)
        self.close()

    def close(self) -> None:
        self._answer = None
        if self._transport is not None:
            self._transport.abort()


def _field(head: bytes, lowered: bytes, name: bytes) -> str:
    """The value of a field of a head, empty if there is none; ``name`` has the line end before it, and the colon."""
    start = lowered.find(name) + len(name)
    return head[start : head.index(b"\r\n", start)].strip().decode("latin-1") if start >= len(name) else ""
