"""Objects between processes: pickle for the structure, plain memory for tensors and arrays.

Worker and trainer are the same program, so pickle is safe here (states and data sets are never pickled). Tensors are
not pickled at all: their memory is sent as it is, and the receiver's tensors look into the message that it received.
Large messages lie in memory that both sides see (:mod:`energon_lite.loading.workers.segments`), small ones go through
the pipe.
"""

from __future__ import annotations

import io
import itertools
import os
import pickle
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch

from energon_lite.loading.workers.segments import SegmentReader, SegmentWriter

__all__ = ["Message", "pack", "receive", "send", "unpack"]

_ALIGNMENT = 64
#: Messages from so many bytes on are worth a segment.
_LARGE = 16 << 10
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


def send(connection: Connection, message: Message, segments: SegmentWriter | None = None) -> None:
    """Send a message, straight from the memory where it is.

    Args:
        segments: a large message is put into one of these, if there is a free one.

    Raises:
        OSError: the other side is gone.
    """
    if segments is not None and message.size >= _LARGE:
        number = segments.write(message.parts, message.size, message.lead)
        if number is not None:
            message = Message([memoryview(struct.pack("<4Q", 0, number, message.lead, message.size))], 32)
    waiting = [part for part in message.parts if part.nbytes]
    while waiting:
        sent = os.writev(connection.fileno(), waiting[:_VECTOR])
        while waiting and sent >= waiting[0].nbytes:
            sent -= waiting.pop(0).nbytes
        if sent:
            waiting[0] = waiting[0][sent:]


def receive(connection: Connection, segments: SegmentReader | None = None) -> tuple[Any, int]:
    """The next object from a connection, and its size in bytes; its tensors share the memory that was received.

    Args:
        segments: where the other side puts large messages.

    Raises:
        EOFError, OSError: the other side is gone.
    """
    (count,) = struct.unpack("<Q", _read(connection, 8))
    if not count:
        assert segments is not None
        number, lead, size = struct.unpack("<3Q", _read(connection, 24))
        return unpack(segments.view(number, lead, size)), size
    sizes = struct.unpack(f"<{count}Q", _read(connection, 8 * count))
    size = sum(map(_padded, sizes))
    return _loads(_read(connection, size), sizes), size


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


def _read(connection: Connection, size: int) -> memoryview:
    """So many bytes, in memory of their own that is neither cleared nor copied."""
    memory = memoryview(np.empty(size, dtype=np.uint8))  # type: ignore[arg-type]
    done = 0
    while done < size:
        got = os.readv(connection.fileno(), [memory[done:]])
        if not got:
            raise EOFError
        done += got
    return memory
