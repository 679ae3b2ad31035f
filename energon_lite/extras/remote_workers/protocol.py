"""Protocol of a trainer and a worker: frames on a connection, and the handshake that begins it.

A frame is a head of 16 bytes, then a body of an agreed size at most. Nothing is allocated for a frame before its head
was checked.

    head   magic "ENLW", kind (1 byte), 3 bytes of zeros, size of the body (8 bytes, little-endian)

In the handshake each side proves that it knows the secret, then they compare what they run.

    worker   HELLO     version of the protocol, is there a secret, 32 random bytes
    trainer  PROOF     32 random bytes, HMAC of both
    worker   WELCOME   HMAC of both, in its role
    trainer  MESSAGE   fingerprints of data, code and environment; size of a frame, at most
    worker   WELCOME   number of workers there; or REFUSAL with a text
"""

from __future__ import annotations

import hmac
import os
import select
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import msgpack
import numpy as np

from energon_lite.errors import UsageError

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
#: Version of the protocol.
_VERSION = 1
_HELLO = struct.Struct("<H?32s")
_PROOF = struct.Struct("<32s32s")
#: Largest frame of a handshake, except the card.
LARGEST_PROOF = 1 << 10
#: Largest card, which a trainer sends after it has proved that it knows the secret.
_LARGEST_CARD = 1 << 20
#: Seconds of a whole handshake, at most.
_SECONDS = 5.0


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


Card = Mapping[str, Any]


class RefusedError(UsageError):
    """The other side refuses to work with this one, with a reason."""


class _Timed:
    """Connection with a time by which all that is received must be here."""

    def __init__(self, connection: socket.socket, seconds: float):
        self._connection = connection
        self._end = time.monotonic() + seconds

    def recv_into(self, memory: memoryview) -> int:
        self._connection.settimeout(max(1e-3, self._end - time.monotonic()))
        return self._connection.recv_into(memory)


def _expect(received: Iterator[Frame | None], kind: int) -> memoryview:
    """Return the body of the next frame, which has to be of a kind.

    Raises:
        RefusedError: it is a refusal.
        FrameError: it is of another kind.
        OSError: it does not come.
    """
    got = next(received)
    if got is not None and got.kind == REFUSAL:
        raise RefusedError(bytes(got.body).decode("utf-8", "replace"))
    if got is None or got.kind != kind:
        raise FrameError("a frame out of turn")
    return got.body


def _proof(secret: bytes, role: bytes, *nonces: bytes) -> bytes:
    return hmac.digest(secret, b"energon-lite 1 " + role + b"".join(nonces), "sha256")


def _send(connection: socket.socket, kind: int, body: bytes) -> None:
    send_some(connection, frame(kind, [memoryview(body)] if body else ()))


def join(connection: socket.socket, secret: bytes | None, card: Card, seconds: float = _SECONDS) -> dict[str, Any]:
    """Shake hands with a worker; return what it says of itself. Called by the trainer.

    Args:
        connection: a connection that waits.
        secret: the shared secret.
        card: what this side runs.
        seconds: time that it may take.

    Raises:
        RefusedError: one side refuses the other.
        FrameError, OSError: the other side is no worker, or does not answer.
    """
    received = frames(_Timed(connection, seconds), [LARGEST_PROOF])  # type: ignore[arg-type]
    hello = _expect(received, HELLO)
    if hello.nbytes != _HELLO.size:
        raise FrameError("a greeting of another size")
    version, has_secret, theirs = _HELLO.unpack(hello)
    if version != _VERSION:
        raise RefusedError(f"the worker speaks version {version} of the protocol, this trainer {_VERSION}")
    if secret is not None and not has_secret:
        raise RefusedError("the worker has no secret, and this trainer has one", fix="start it with --secret-file")
    ours = os.urandom(32)
    _send(connection, PROOF, _PROOF.pack(ours, _proof(secret or b"", b"trainer", theirs, ours)))
    proof = _expect(received, WELCOME)
    if not hmac.compare_digest(bytes(proof), _proof(secret or b"", b"worker", ours, theirs)):
        raise RefusedError("the worker does not know the secret")
    _send(connection, MESSAGE, msgpack.packb(card))
    told: dict[str, Any] = msgpack.unpackb(_expect(received, WELCOME))
    return told


def greet(
    connection: socket.socket,
    secret: bytes | None,
    check: Callable[[Card], None],
    told: Card,
    seconds: float = _SECONDS,
) -> dict[str, Any]:
    """Shake hands with a trainer; return what it says of itself. Called by the worker.

    Args:
        connection: a connection that waits.
        secret: the shared secret.
        check: refuses what a trainer runs, with an error.
        told: what the trainer is told of this side.
        seconds: time that it may take.

    Raises:
        RefusedError: the trainer was refused, and was told why.
        FrameError, OSError: the other side is no trainer, or does not answer.
    """
    received = frames(_Timed(connection, seconds), limit := [LARGEST_PROOF])  # type: ignore[arg-type]
    ours = os.urandom(32)
    _send(connection, HELLO, _HELLO.pack(_VERSION, secret is not None, ours))
    proof = _expect(received, PROOF)
    if proof.nbytes != _PROOF.size:
        raise FrameError("a proof of another size")
    theirs, theirs_proof = _PROOF.unpack(proof)
    if not hmac.compare_digest(theirs_proof, _proof(secret or b"", b"trainer", ours, theirs)):
        raise _refuse(connection, RefusedError("the trainer does not know the secret of this worker"))
    _send(connection, WELCOME, _proof(secret or b"", b"worker", theirs, ours))
    limit.append(_LARGEST_CARD)
    body = _expect(received, MESSAGE)
    try:
        card = msgpack.unpackb(body)
        if not isinstance(card, dict):
            raise TypeError("no dict")
        check(card)
    except RefusedError as error:
        raise _refuse(connection, error) from None
    except Exception as error:
        raise FrameError(f"what the trainer runs cannot be read: {error}") from None
    _send(connection, WELCOME, msgpack.packb(told))
    return card


def _refuse(connection: socket.socket, error: RefusedError) -> RefusedError:
    """Tell the other side why it is refused; return the error."""
    body = str(error).encode()[:LARGEST_PROOF]
    _send(connection, REFUSAL, body)
    return error
