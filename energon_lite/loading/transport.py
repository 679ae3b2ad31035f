"""Objects between processes: pickle for the structure, plain memory for tensors and arrays.

Worker and trainer are the same program, so pickle is safe here (states and data sets are never pickled). Tensors are
not pickled at all: their memory is sent as it is, and the receiver's tensors look into the message that it received.
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

__all__ = ["Message", "pack", "receive", "send", "unpack"]

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


def send(connection: Connection, message: Message) -> None:
    """Send a message, straight from the memory where it is.

    Raises:
        OSError: the other side is gone.
    """
    waiting = [part for part in message.parts if part.nbytes]
    while waiting:
        sent = os.writev(connection.fileno(), waiting[:_VECTOR])
        while waiting and sent >= waiting[0].nbytes:
            sent -= waiting.pop(0).nbytes
        if sent:
            waiting[0] = waiting[0][sent:]


def receive(connection: Connection) -> Any:
    """The next object from a connection; its tensors share the memory that was received.

    Raises:
        EOFError, OSError: the other side is gone.
    """
    (count,) = struct.unpack("<Q", _read(connection, 8))
    sizes = struct.unpack(f"<{count}Q", _read(connection, 8 * count))
    return _loads(_read(connection, sum(map(_padded, sizes))), sizes)


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
