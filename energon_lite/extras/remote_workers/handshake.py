"""Handshake of a trainer and a worker: each proves that it knows the secret, then they compare what they run.

worker   HELLO     version of the protocol, is there a secret, 32 random bytes
trainer  PROOF     32 random bytes, HMAC of both
worker   WELCOME   HMAC of both, in its role
trainer  MESSAGE   fingerprints of data, code and environment; size of a frame, at most
worker   WELCOME   number of workers there; or REFUSAL with a text
"""

from __future__ import annotations

import hmac
import os
import socket
import struct
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import msgpack

from energon_lite.errors import UsageError
from energon_lite.extras.remote_workers.frames import (
    HELLO,
    MESSAGE,
    PROOF,
    REFUSAL,
    WELCOME,
    Frame,
    FrameError,
    frame,
    frames,
    send_some,
)

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
