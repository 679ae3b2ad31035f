"""Objects between processes: pickle for the structure, plain memory for tensors and arrays.

Worker and trainer are the same program, so pickle is safe here (states and data sets are never pickled). Tensors are
not pickled at all: their memory is sent as it is, and the receiver's tensors look into the message that it received.
Large messages lie in memory that both sides see (:mod:`energon_lite.loading.executors.segments`), small ones go through
the pipe.
"""

from __future__ import annotations

import io
import itertools
import os
import pickle
import struct
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch

from energon_lite.loading.executors.segments import SegmentReader, SegmentWriter

__all__ = ["Channel", "Message", "pack", "receive", "send", "unpack"]

_ALIGNMENT = 64
#: Parts written by one call; the system allows 1,024.
_VECTOR = 512


class _Pickler(pickle.Pickler):
    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is not torch.Tensor or obj.layout is not torch.strided or obj.device.type != "cpu":
            return NotImplemented
        if obj.is_quantized or obj.requires_grad or obj.is_conj() or obj.is_neg():
            return NotImplemented
        if not obj.numel():
            return _empty, (obj.dtype, tuple(obj.shape))
        memory = obj.contiguous().reshape(-1).view(torch.uint8).numpy().data
        return _tensor, (pickle.PickleBuffer(memory), obj.dtype, tuple(obj.shape))


def _tensor(memory: Any, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.frombuffer(memory, dtype=dtype).reshape(shape)


def _empty(dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype)


@dataclass(frozen=True)
class Message:
    """An object ready to be sent.

    Args:
        parts: the sizes of what follows, the pickled structure, then the raw memory of each tensor or array.
        size: bytes in all.
    """

    parts: list[memoryview]
    size: int

    @property
    def lead(self) -> int:
        """Bytes to be left free before it, so that tensors are aligned if it is put into aligned memory."""
        return -self.parts[0].nbytes % _ALIGNMENT


def pack(obj: Any) -> Message:
    """What has to be sent of ``obj``. The memory of tensors is not copied, so they must not change until it is sent."""
    buffers: list[pickle.PickleBuffer] = []
    stream = io.BytesIO()
    _Pickler(stream, protocol=5, buffer_callback=buffers.append).dump(obj)
    views = [stream.getbuffer(), *(buffer.raw() for buffer in buffers)]
    sizes = [view.nbytes for view in views]
    parts = [memoryview(struct.pack(f"<Q{len(sizes)}Q", len(sizes), *sizes))]
    for view in views:
        padding = _padded(view.nbytes) - view.nbytes  # what follows stands aligned in the receiver's memory
        parts += [view, memoryview(bytes(padding))] if padding else [view]
    return Message(parts, sum(part.nbytes for part in parts))


def place(message: Message, segments: SegmentWriter) -> Message:
    """Put a large message into a free segment; the message that says where it is, or the same one."""
    number = segments.write(message.parts, message.size, message.lead) if message.size >= segments.worth else None
    if number is None:
        return message
    return Message([memoryview(struct.pack("<4Q", 0, number, message.lead, message.size))], 32)


def write(descriptor: int, waiting: list[memoryview]) -> None:
    """Write as much of ``waiting`` as the pipe takes (all of it, if it blocks), and take that out of it.

    Raises:
        OSError: the other side is gone.
    """
    while waiting:
        try:
            sent = os.writev(descriptor, waiting[:_VECTOR])
        except BlockingIOError:
            return
        while waiting and sent >= waiting[0].nbytes:
            sent -= waiting.pop(0).nbytes
        if sent:
            waiting[0] = waiting[0][sent:]


def send(connection: Connection, message: Message, segments: SegmentWriter | None = None) -> None:
    """Send a message, straight from the memory where it is; waits until the other side takes it.

    Args:
        segments: a large message is put into one of these, if there is a free one.

    Raises:
        OSError: the other side is gone.
    """
    message = message if segments is None else place(message, segments)
    write(connection.fileno(), [part for part in message.parts if part.nbytes])


def receive(connection: Connection, segments: SegmentReader | None = None) -> tuple[Any, int]:
    """The next object from a connection, and its size in bytes; its tensors share the memory that was received.

    Args:
        segments: where the other side puts large messages.

    Raises:
        EOFError, OSError: the other side is gone.
    """
    received = receiving(segments)
    wanted = next(received)
    while True:
        while wanted.nbytes:
            wanted = wanted[_read(connection.fileno(), wanted) :]
        try:
            wanted = received.send(None)
        except StopIteration as done:
            return done.value


#: Yields memory that has to be filled from the pipe before it goes on; returns the object and its size.
Receiving = Generator[memoryview, None, tuple[Any, int]]


def receiving(segments: SegmentReader | None) -> Receiving:
    """Receive one object, by somebody else's reading."""
    lead = _memory(8)
    yield lead
    (count,) = struct.unpack("<Q", lead)
    if not count:
        assert segments is not None
        place = _memory(24)
        yield place
        number, offset, size = struct.unpack("<3Q", place)
        return unpack(segments.view(number, offset, size)), size
    table = _memory(8 * count)
    yield table
    sizes = struct.unpack(f"<{count}Q", table)
    body = _memory(sum(map(_padded, sizes)))
    yield body
    return _loads(body, sizes), body.nbytes


class Channel:
    """The trainer's end of a worker's pipe: neither sending nor receiving ever waits for the worker.

    Args:
        connection: the end; it does not block from now on.
        segments: where the worker puts large messages.
    """

    def __init__(self, connection: Connection, segments: SegmentReader):
        os.set_blocking(connection.fileno(), False)
        self._connection, self._segments = connection, segments
        self._unsent: list[memoryview] = []
        self._receiving = receiving(segments)
        self._wanted = next(self._receiving)

    def fileno(self) -> int:
        return self._connection.fileno()

    @property
    def is_full(self) -> bool:
        """Whether something waits to be sent until the worker has read what was sent before."""
        return bool(self._unsent)

    def send(self, message: Message) -> None:
        """Send a message, or as much of it as the pipe takes; :meth:`flush` sends the rest.

        Raises:
            OSError: the worker is gone.
        """
        self._unsent += [part for part in message.parts if part.nbytes]
        self.flush()

    def flush(self) -> None:
        """Send what waits, as far as the pipe takes it.

        Raises:
            OSError: the worker is gone.
        """
        write(self.fileno(), self._unsent)

    def receive(self) -> tuple[Any, int] | None:
        """The next object and its size in bytes; None: it is not here yet, or not whole.

        Raises:
            EOFError, OSError: the worker is gone.
        """
        while True:
            while self._wanted.nbytes:
                try:
                    self._wanted = self._wanted[_read(self.fileno(), self._wanted) :]
                except BlockingIOError:
                    return None
            try:
                self._wanted = self._receiving.send(None)
            except StopIteration as done:
                self._receiving = receiving(self._segments)
                self._wanted = next(self._receiving)
                return done.value

    def close(self) -> None:
        self._connection.close()
        self._segments.close()


def unpack(memory: memoryview) -> Any:
    """The object of a message whose parts lie one after the other in ``memory``; its tensors look into it."""
    (count,) = struct.unpack_from("<Q", memory)
    sizes = struct.unpack_from(f"<{count}Q", memory, 8)
    return _loads(memory[8 * (count + 1) :], sizes)


def _loads(memory: memoryview, sizes: Sequence[int]) -> Any:
    starts = itertools.accumulate(map(_padded, sizes), initial=0)
    structure, *buffers = (memory[start : start + size] for start, size in zip(starts, sizes, strict=False))
    return pickle.loads(structure, buffers=buffers)


def _padded(size: int) -> int:
    return size + -size % _ALIGNMENT


def _memory(size: int) -> memoryview:
    """So many bytes, neither cleared nor copied."""
    return memoryview(np.empty(size, dtype=np.uint8))  # type: ignore[arg-type]


def _read(descriptor: int, memory: memoryview) -> int:
    """Read into ``memory`` what is there; returns how much that is."""
    got = os.readv(descriptor, [memory])
    if not got:
        raise EOFError
    return got
