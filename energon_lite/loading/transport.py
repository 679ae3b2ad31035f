"""Objects between processes: pickle for the structure, plain memory for tensors and arrays.

Worker and trainer are the same program, so pickle is safe here (states and data sets are never pickled). Tensors are
not pickled at all: their memory is sent as it is, and the receiver's tensors look into the message that it received.
"""

from __future__ import annotations

import io
import pickle
import struct
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch

__all__ = ["pack", "receive", "send"]

_ALIGNMENT = 64


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


def pack(obj: Any) -> bytearray:
    """One message that holds ``obj``: the sizes of its parts, the pickled structure, then the raw memory."""
    parts: list[pickle.PickleBuffer] = []
    stream = io.BytesIO()
    _Pickler(stream, protocol=5, buffer_callback=parts.append).dump(obj)
    views: list[Any] = [stream.getbuffer(), *(part.raw() for part in parts)]
    header = struct.pack(f"<Q{len(views)}Q", len(views), *(view.nbytes for view in views))
    message = bytearray(_layout(len(header), [view.nbytes for view in views])[-1])
    message[: len(header)] = header
    for start, view in zip(_layout(len(header), [view.nbytes for view in views]), views, strict=False):
        message[start : start + view.nbytes] = view
    return message


def unpack(message: bytearray) -> Any:
    """The object that :func:`pack` put into ``message``; its tensors share the memory of the message."""
    (count,) = struct.unpack_from("<Q", message)
    sizes = struct.unpack_from(f"<{count}Q", message, 8)
    starts = _layout(8 + 8 * count, list(sizes))
    view = memoryview(message)
    structure, *buffers = (view[start : start + size] for start, size in zip(starts, sizes, strict=False))
    return pickle.loads(structure, buffers=buffers)


def _layout(header: int, sizes: list[int]) -> list[int]:
    """Where each part starts, aligned; at the end, where the message ends."""
    starts, end = [], header
    for size in sizes:
        start = -(-end // _ALIGNMENT) * _ALIGNMENT
        starts.append(start)
        end = start + size
    return [*starts, end]


def send(connection: Connection, message: bytearray) -> None:
    """Send a packed message, its length first, so that the receiver can put it where it will stay."""
    connection.send_bytes(struct.pack("<Q", len(message)))
    connection.send_bytes(message)


def receive(connection: Connection, unpacked: Callable[[bytearray], Any] = unpack) -> Any:
    """The next object from a connection.

    Raises:
        EOFError, OSError: the other side is gone.
    """
    (length,) = struct.unpack("<Q", connection.recv_bytes())
    message = bytearray(length)
    connection.recv_bytes_into(message)
    return unpacked(message)
