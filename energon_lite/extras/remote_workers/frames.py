"""Frames on a connection: a head of 16 bytes, then a body of an agreed size at most.

    head   magic "ENLW", kind (1 byte), 3 bytes of zeros, size of the body (8 bytes, little-endian)

Nothing is allocated for a frame before its head was checked.
"""

from __future__ import annotations

import select
import socket
import ssl
import struct
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import suppress
from typing import NamedTuple

import numpy as np

#: Kinds of frames: beginning and proof of a handshake, its good and bad end; a sign of life; jobs or answers.
HELLO, PROOF, WELCOME, REFUSAL, BEAT, MESSAGE = range(6)
#: Kinds between a trainer and its receiver only: an answer is in a segment; segments are free again; the worker is
#: silent.
IN_SEGMENT, RELEASED, SILENT = 6, 7, 8
_HEAD = struct.Struct("<4sB3xQ")
_MAGIC = b"ENLW"
#: Most parts written by one call; the system allows 1,024.
_VECTOR = 512
#: Errors of a socket that would have to wait.
WOULD_WAIT = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)


#: Function that returns memory for a body of a size; None: new memory is made.
Room = Callable[[int], "memoryview | None"]


class FrameError(ConnectionError):
    """The other side sends what is no frame, or one that is larger than agreed."""


class Frame(NamedTuple):
    """A received frame."""

    kind: int
    body: memoryview


def frame(kind: int, parts: Sequence[memoryview] = ()) -> list[memoryview]:
    """Return the parts of a frame."""
    return [memoryview(_HEAD.pack(_MAGIC, kind, sum(part.nbytes for part in parts))), *parts]


def frames(connection: socket.socket, limits: Sequence[int], room: Room | None = None) -> Iterator[Frame | None]:
    """Yield the frames of a connection; None: no complete frame is here, and the connection does not wait.

    Args:
        connection: a socket, perhaps with TLS.
        limits: largest size of a body; the last number counts, and may be changed meanwhile.
        room: function that returns memory for bodies; None: new memory is made for each.

    Raises:
        FrameError: see there.
        EOFError, OSError: the connection has ended.
    """
    while True:
        yield (yield from _next_frame(connection, limits, room))


def _next_frame(connection: socket.socket, limits: Sequence[int], room: Room | None) -> Generator[None, None, Frame]:
    head = bytearray(_HEAD.size)
    yield from _fill(connection, memoryview(head))
    magic, kind, size = _HEAD.unpack(head)
    if magic != _MAGIC or kind > SILENT or any(head[5:8]):
        raise FrameError("what came is no frame")
    if size > limits[-1]:
        raise FrameError(f"a frame of {size:,} bytes; {limits[-1]:,} were agreed")
    body = None if room is None else room(size)
    if body is None:
        body = memoryview(np.empty(size, dtype=np.uint8))  # type: ignore[arg-type]
    yield from _fill(connection, body)
    return Frame(kind, body)


def _fill(connection: socket.socket, memory: memoryview) -> Iterator[None]:
    while memory.nbytes:
        try:
            got = connection.recv_into(memory)
        except WOULD_WAIT:
            yield
            continue
        if not got:
            raise EOFError
        memory = memory[got:]


def send_some(connection: socket.socket, waiting: list[memoryview]) -> None:
    """Send as much of ``waiting`` as a connection takes (all of it, if it waits), and remove that from it.

    Raises:
        OSError: the connection has ended.
    """
    while waiting:
        try:
            if isinstance(connection, ssl.SSLSocket):
                sent = connection.send(waiting[0]) if waiting[0].nbytes else 0
            else:
                sent = connection.sendmsg(waiting[:_VECTOR])
        except WOULD_WAIT:
            return
        while waiting and sent >= waiting[0].nbytes:
            sent -= waiting.pop(0).nbytes
        if sent:
            waiting[0] = waiting[0][sent:]


class FrameConnection:
    """Connection after its handshake: one thread receives frames, another one sends some.

    Args:
        connection: the connection.
        max_bytes: size of a body that comes, at most.
        room: see :func:`frames`.
    """

    def __init__(self, connection: socket.socket, max_bytes: int, room: Room | None = None):
        connection.setblocking(False)
        self._connection = connection
        self._frames = frames(self, [max_bytes], room)  # type: ignore[arg-type]
        self._lock = threading.Lock()  # TLS takes one call at a time

    def recv_into(self, memory: memoryview) -> int:
        """Receive bytes; called by the frames."""
        return self._connection.recv_into(memory)

    def wait(self, event: int, seconds: float = 1.0) -> bool:
        """Wait for an event of the connection; return False if the time has run out."""
        ready = select.poll()
        ready.register(self._connection, event)
        return bool(ready.poll(1000 * seconds))

    def receive(self) -> Frame:
        """Wait for the next frame.

        Raises:
            FrameError, EOFError, OSError: see :func:`frames`.
        """
        while True:
            with self._lock:
                got = next(self._frames)
            if got is not None:
                return got
            self.wait(select.POLLIN)

    def send(self, parts: list[memoryview]) -> None:
        """Send all parts.

        Raises:
            OSError: the connection has ended.
        """
        while True:
            with self._lock:
                send_some(self._connection, parts)
            if not parts:
                return
            self.wait(select.POLLOUT)

    def end(self) -> None:
        """End the connection for both threads, and for the other side."""
        with suppress(OSError):
            socket.socket.shutdown(self._connection, socket.SHUT_RDWR)


def keep_alive(connection: socket.socket) -> None:
    """Have the system end a connection whose other side does not answer for some seconds, and send at once."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, True)
    for name, seconds in (("TCP_KEEPIDLE", 5), ("TCP_KEEPINTVL", 2), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), seconds)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, True)
