"""Objects between processes: pickle for the structure, plain memory for tensors and arrays.

Worker and trainer are the same program, so pickle is safe here (states and data sets are never pickled). Tensors are
not pickled at all: their memory is sent as it is, and the receiver's tensors look into the message that it received.
Large messages lie in memory that both sides see (:mod:`energon_lite.loading.executors.segments`), small ones go through
the pipe.
"""

from __future__ import annotations

import fcntl
import io
import itertools
import os
import pickle
import socket
import struct
import termios
from array import array
from collections.abc import Generator, Iterator, Sequence
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch

from energon_lite.loading.executors.segments import SegmentReader, SegmentWriter, write

__all__ = ["Channel", "Message", "WholeMessages", "pack", "receive", "send", "unpack"]

#: Of what is in a message; its size in bytes is a multiple of it.
_ALIGNMENT = 64


class _Pickler(pickle.Pickler):
    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, torch.Tensor) and obj.device.type not in ("cpu", "meta"):
            raise TypeError(f"a tensor on {obj.device} is not sent to another process")
        if type(obj) is not torch.Tensor or obj.layout is not torch.strided or obj.device.type != "cpu":
            return NotImplemented
        if obj.is_quantized or obj.requires_grad or obj.is_conj() or obj.is_neg():
            return NotImplemented
        if not obj.numel():
            return partial(torch.empty, dtype=obj.dtype), (tuple(obj.shape),)
        memory = obj.contiguous().reshape(-1).view(torch.uint8).numpy().data
        return _tensor, (pickle.PickleBuffer(memory), obj.dtype, tuple(obj.shape))


def _tensor(memory: Any, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.frombuffer(memory, dtype=dtype).reshape(shape)


#: An object ready to be sent: the sizes of what follows, the pickled structure, then the raw memory of each tensor or
#: array; each is filled up so that, in the receiver's memory, what follows stands aligned.
Message = list[memoryview]


def pack(obj: Any) -> Message:
    """What has to be sent of ``obj``. The memory of tensors is not copied, so they must not change until it is sent."""
    buffers: list[pickle.PickleBuffer] = []
    stream = io.BytesIO()
    _Pickler(stream, protocol=5, buffer_callback=buffers.append).dump(obj)
    views = [stream.getbuffer(), *(buffer.raw() for buffer in buffers)]
    table = struct.pack(f"<{1 + len(views)}Q", len(views), *(view.nbytes for view in views))
    parts = [memoryview(table), *views]
    filled = [(part, memoryview(bytes(-part.nbytes % _ALIGNMENT))) for part in parts]
    return [part for pair in filled for part in pair if part.nbytes]


def unpack(memory: memoryview) -> Any:
    """The object of a message whose parts lie one after the other in ``memory``; its tensors look into it."""
    (count,) = struct.unpack_from("<Q", memory)
    sizes = struct.unpack_from(f"<{count}Q", memory, 8)
    starts = itertools.accumulate(size + -size % _ALIGNMENT for size in (8 + 8 * count, *sizes))
    structure, *buffers = (memory[start : start + size] for start, size in zip(starts, sizes, strict=False))
    return pickle.loads(structure, buffers=buffers)


def send(connection: Connection, message: Message, segments: SegmentWriter | None = None) -> None:
    """Send a message, straight from the memory where it is; waits until the other side takes it.

    Args:
        segments: a large message is put into one of these, if there is a free one.

    Raises:
        OSError: the other side is gone.
    """
    number = None if segments is None else segments.write(message)
    write(connection.fileno(), _led(message, number))


def _led(message: Message, segment: int | None = None) -> Message:
    """What goes through the pipe: how large a message is and whether it is in a segment; then the message, if not."""
    lead = struct.pack("<2Q", sum(part.nbytes for part in message), 0 if segment is None else 1 + segment)
    return [memoryview(lead), *(message if segment is None else ())]


def receive(connection: Connection, segments: SegmentReader | None = None) -> tuple[Any, int]:
    """The next object from a connection, and its size in bytes; its tensors share the memory that was received.

    Args:
        segments: where the other side puts large messages.

    Raises:
        EOFError, OSError: the other side is gone.
    """
    found = next(_receiving(connection.fileno(), segments))
    assert found is not None  # since the pipe blocks
    return found


class WholeMessages:
    """Tells whether the next message has come as a whole, so that receiving it does not wait.

    Args:
        connection: an end of a two-way pipe.
    """

    def __init__(self, connection: Connection):
        self._socket = socket.socket(fileno=os.dup(connection.fileno()))

    def is_one_here(self) -> bool:
        try:
            lead = self._socket.recv(16, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except OSError:
            return False
        if len(lead) < 16:
            return False
        size, segment = struct.unpack("<2Q", lead)
        if segment:
            return True
        here = array("i", [0])
        fcntl.ioctl(self._socket.fileno(), termios.FIONREAD, here)
        return here[0] >= 16 + int(size)


def _receiving(descriptor: int, segments: SegmentReader | None) -> Iterator[tuple[Any, int] | None]:
    """The objects that come through a pipe, with their sizes; None: the next one is not here yet, or not whole."""
    while True:
        yield (yield from _receive_one(descriptor, segments))


def _receive_one(descriptor: int, segments: SegmentReader | None) -> Generator[None, None, tuple[Any, int]]:
    lead = _memory(16)
    yield from _fill(lead, descriptor)
    size, segment = struct.unpack("<2Q", lead)
    if segment:
        assert segments is not None
        return unpack(segments.view(segment - 1, size)), size
    body = _memory(size)
    yield from _fill(body, descriptor)
    return unpack(body), size


def _fill(memory: memoryview, descriptor: int) -> Iterator[None]:
    """Fill memory from a pipe; yields whenever that would have to wait."""
    while memory.nbytes:
        try:
            got = os.readv(descriptor, [memory])
        except BlockingIOError:
            yield
            continue
        if not got:
            raise EOFError
        memory = memory[got:]


def _memory(size: int) -> memoryview:
    """So many bytes, neither cleared nor copied."""
    return memoryview(np.empty(size, dtype=np.uint8))  # type: ignore[arg-type]


class Channel:
    """The trainer's end of a worker's pipe: neither sending nor receiving ever waits for the worker.

    Args:
        connection: the end; it does not block from now on.
        segments: where the worker puts large messages.
    """

    def __init__(self, connection: Connection, segments: SegmentReader):
        os.set_blocking(connection.fileno(), False)
        self._connection = connection
        self._segments = segments
        self._unsent: Message = []
        self._received = _receiving(connection.fileno(), segments)

    def fileno(self) -> int:
        return self._connection.fileno()

    @property
    def is_full(self) -> bool:
        """True if something waits to be sent until the worker has read what was sent before."""
        return bool(self._unsent)

    def send(self, jobs: Sequence[tuple[int, Any]], *, noted: bool) -> None:
        """Send jobs with their tickets, or as much of them as the pipe takes; :meth:`flush` sends the rest.

        Args:
            noted: each step is noted before it is taken, since a worker died, or hung, in this job before.

        Raises:
            OSError: the worker is gone.
        """
        self._unsent += _led(pack((jobs, self._segments.take_released(), noted)))
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
        return next(self._received)

    def close(self) -> None:
        self._connection.close()
        self._segments.close()
