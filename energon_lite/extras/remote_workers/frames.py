"""Frames on a connection: a head of 16 bytes, then a body of an agreed size at most.

    head   magic "ENLW", kind (1 byte), 3 bytes of zeros, size of the body (8 bytes, little-endian)

Nothing is allocated for a frame before its head was checked.
"""

from __future__ import annotations

import socket
import ssl
import struct
from collections.abc import Generator, Iterator, Sequence
from typing import NamedTuple

import numpy as np

#: Kinds of frames: beginning and proof of a handshake, its good and bad end; a sign of life; jobs or answers.
HELLO, PROOF, WELCOME, REFUSAL, BEAT, MESSAGE = range(6)
_HEAD = struct.Struct("<4sB3xQ")
_MAGIC = b"ENLW"
#: Parts written by one call; the system allows 1,024.
_VECTOR = 512
#: Errors of a socket that would have to wait.
WOULD_WAIT = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)


class FrameError(ConnectionError):
    """The other side sends what is no frame, or one that is larger than agreed."""


class Frame(NamedTuple):
    """A received frame."""

    kind: int
    body: memoryview


def frame(kind: int, parts: Sequence[memoryview] = ()) -> list[memoryview]:
    """Return the parts of a frame."""
    return [memoryview(_HEAD.pack(_MAGIC, kind, sum(part.nbytes for part in parts))), *parts]


def frames(connection: socket.socket, limits: Sequence[int]) -> Iterator[Frame | None]:
    """Yield the frames of a connection; None: no complete frame is here, and the connection does not wait.

    Args:
        connection: a socket, perhaps with TLS.
        limits: largest size of a body; the last number counts, and may be changed meanwhile.

    Raises:
        FrameError: see there.
        EOFError, OSError: the connection has ended.
    """
    while True:
        yield (yield from _next_frame(connection, limits))


def _next_frame(connection: socket.socket, limits: Sequence[int]) -> Generator[None, None, Frame]:
    head = bytearray(_HEAD.size)
    yield from _fill(connection, memoryview(head))
    magic, kind, size = _HEAD.unpack(head)
    if magic != _MAGIC or kind > MESSAGE or any(head[5:8]):
        raise FrameError("what came is no frame")
    if size > limits[-1]:
        raise FrameError(f"a frame of {size:,} bytes; {limits[-1]:,} were agreed")
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
