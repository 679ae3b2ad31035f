"""Channels: the trainer's end of the way to a worker."""

from __future__ import annotations

import os
import socket
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

from energon_lite.loading.executors.segments import SegmentReader, write
from energon_lite.loading.executors.transport import Message, led, pack, receiving


class Channel:
    """The trainer's end of the way to a worker: neither sending nor receiving ever waits for the worker."""

    def fileno(self) -> int:
        """Return the descriptor that is readable when answers have come, or when the worker has ended."""
        raise NotImplementedError

    @property
    def is_full(self) -> bool:
        """True if data cannot be sent before the worker has read what was sent earlier."""
        return False

    def send(self, jobs: Sequence[tuple[int, Any]], *, noted: bool) -> None:
        """Send jobs with their tickets, or as much of them as the way takes; :meth:`flush` sends the rest.

        Args:
            noted: note each step before it begins, because a worker died, or hung, in this job before.

        Raises:
            OSError: the worker has ended.
        """
        raise NotImplementedError

    def flush(self) -> None:
        """Send the rest of earlier messages, as far as the way takes it.

        Raises:
            OSError: the worker has ended.
        """

    def receive(self) -> tuple[Any, int] | None:
        """Return the next message and its size in bytes; None: it is not complete yet. A message has answers, the
        seconds that they took, and a list of times.

        Raises:
            EOFError, OSError: the worker has ended.
        """
        raise NotImplementedError

    def close(self) -> None:
        """Close the way; the worker then ends."""
        raise NotImplementedError


class PipeChannel(Channel):
    """Channel to a process, through a pipe.

    Args:
        connection: the end of the pipe, or one of a pair of sockets; it is made non-blocking.
        segments: segments that the worker uses for large messages.
    """

    def __init__(self, connection: Connection | socket.socket, segments: SegmentReader):
        os.set_blocking(connection.fileno(), False)
        self._connection = connection
        self._segments = segments
        self._unsent: Message = []
        self._received = receiving(connection.fileno(), segments)

    def fileno(self) -> int:
        return self._connection.fileno()

    @property
    def is_full(self) -> bool:
        return bool(self._unsent)

    def send(self, jobs: Sequence[tuple[int, Any]], *, noted: bool) -> None:
        self._unsent += led(pack((jobs, self._segments.take_released(), noted)))
        self.flush()

    def flush(self) -> None:
        write(self.fileno(), self._unsent)

    def receive(self) -> tuple[Any, int] | None:
        return next(self._received)

    def close(self) -> None:
        self._connection.close()
        self._segments.close()


class WakingChannel(Channel):
    """Channel whose answers another thread of this process puts into a queue; a pipe wakes the trainer, which polls."""

    def __init__(self) -> None:
        # The writing end is never closed: its descriptor must not be reused while a thread may still write.
        self._connection, self._writer = Pipe(duplex=False)
        os.set_blocking(self.fileno(), False)
        self._answers: deque[tuple[Any, int]] = deque()

    def fileno(self) -> int:
        return self._connection.fileno()

    def receive(self) -> tuple[Any, int] | None:
        with suppress(BlockingIOError):
            os.read(self.fileno(), 1 << 16)  # an answer is in the queue before its byte is in the pipe
        return self._answers.popleft() if self._answers else None

    def put(self, message: Any, size: int) -> None:
        """Hand a message and its size in bytes to the trainer; called by the other thread."""
        self._answers.append((message, size))
        self.wake()

    @property
    def is_closed(self) -> bool:
        """True if the trainer has closed the channel."""
        return self._connection.closed

    def close(self) -> None:
        self.wake()
        self._connection.close()

    def wake(self) -> None:
        """Have the trainer look."""
        with suppress(BrokenPipeError):  # the pool is closed
            os.write(self._writer.fileno(), b"\0")
