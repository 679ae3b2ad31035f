"""Transfer of objects between processes: pickle for the structure, raw memory for tensors and arrays; and channels, the
trainer's ends of the connections to its workers.

Worker and trainer are the same program, so pickle is safe here (states and data sets are never pickled). Tensors are
not pickled: their memory is sent unchanged, and the receiver's tensors refer to the message that it received. Large
messages are in shared memory (:mod:`energon_lite.loading.executors.segments`), small ones go through the pipe.
"""

from __future__ import annotations

import io
import itertools
import os
import pickle
import socket
import struct
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import suppress
from functools import partial
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any, NoReturn

import numpy as np
import torch

from energon_lite.errors import FatalSampleError, UsageError, field_of, listed
from energon_lite.hooks import place_of
from energon_lite.loading.executors.segments import SegmentReader, SegmentWriter, write
from energon_lite.loading.makers.chunk_job import Made
from energon_lite.tensors import fields_of

#: Alignment of the parts of a message, in bytes.
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


#: A packed object: the sizes of the parts that follow, the pickled structure, then the raw memory of each tensor or
#: array; each part is padded so that the next one is aligned in the receiver's memory.
Message = list[memoryview]


def pack(obj: Any) -> Message:
    """Return the message of ``obj``. Tensor memory is not copied, so it must not change until it has been sent."""
    buffers: list[pickle.PickleBuffer] = []
    stream = io.BytesIO()
    _Pickler(stream, protocol=5, buffer_callback=buffers.append).dump(obj)
    return message_of([stream.getbuffer(), *(buffer.raw() for buffer in buffers)])


def unpack(memory: memoryview) -> Any:
    """Return the object of a message whose parts are contiguous in ``memory``; its tensors refer to that memory."""
    structure, *buffers = parts_of(memory)
    return pickle.loads(structure, buffers=buffers)


def message_of(views: Sequence[memoryview]) -> Message:
    """Return the message that has these parts."""
    table = struct.pack(f"<{1 + len(views)}Q", len(views), *(view.nbytes for view in views))
    parts = [memoryview(table), *views]
    filled = [(part, memoryview(bytes(-part.nbytes % _ALIGNMENT))) for part in parts]
    return [part for pair in filled for part in pair if part.nbytes]


def parts_of(memory: memoryview) -> list[memoryview]:
    """Return the parts of a message that are contiguous in ``memory``.

    Raises:
        ValueError, struct.error: it is no message.
    """
    (count,) = struct.unpack_from("<Q", memory)
    if 8 * count >= memory.nbytes:
        raise ValueError(f"a message of {memory.nbytes} bytes with {count} parts")
    sizes = struct.unpack_from(f"<{count}Q", memory, 8)
    starts = itertools.accumulate(size + -size % _ALIGNMENT for size in (8 + 8 * count, *sizes))
    return [memory[start : start + size] for start, size in zip(starts, sizes, strict=False)]


def send(connection: Connection, message: Message, segments: SegmentWriter | None = None) -> None:
    """Send a message from its own memory, without a copy; wait until the other side has taken it.

    Args:
        segments: segments for large messages, as long as one is free.

    Raises:
        OSError: the other side has closed the pipe.
    """
    number = None if segments is None else segments.write(message)
    write(connection.fileno(), led(message, number))


def led(message: Message, segment: int | None = None) -> Message:
    """Return the parts for the pipe: the size of the message and its segment (0: none); then, if none, the message."""
    lead = struct.pack("<2Q", sum(part.nbytes for part in message), 0 if segment is None else 1 + segment)
    return [memoryview(lead), *(message if segment is None else ())]


def receiving(descriptor: int, segments: SegmentReader | None = None) -> Iterator[tuple[Any, int] | None]:
    """Yield the objects that come through a pipe, with their sizes in bytes; their tensors share the received memory.
    None: the pipe does not block, and the next object is not complete yet.

    Args:
        descriptor: this end of the pipe.
        segments: segments that the other side uses for large messages.

    Raises:
        EOFError, OSError: the other side has closed the pipe.
    """
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
    """Fill memory from a pipe; yield whenever the pipe is empty."""
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
    """Return ``size`` bytes of uninitialised memory."""
    return memoryview(np.empty(size, dtype=np.uint8))  # type: ignore[arg-type]


class Channel:
    """The trainer's end of the connection to a worker: neither sending nor receiving ever waits for the worker."""

    def fileno(self) -> int:
        """Return the descriptor that is readable when answers have come, or when the worker has ended."""
        raise NotImplementedError

    @property
    def is_full(self) -> bool:
        """True if a part of an earlier message is not sent yet, because the connection is full."""
        return False

    def send(self, jobs: Sequence[tuple[int, Any]], *, noted: bool) -> None:
        """Send jobs with their tickets, or as much of them as the connection takes; :meth:`flush` sends the rest.

        Args:
            noted: note each step before it begins, because a worker died, or hung, in this job before.

        Raises:
            OSError: the worker has ended.
        """
        raise NotImplementedError

    def flush(self) -> None:
        """Send the rest of earlier messages, or as much of it as the connection takes.

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
        """Close the connection; the worker then ends."""
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


#: Largest number of samples that a message names.
_SHOWN = 4
#: Largest depth of nested containers that are searched.
_DEPTH = 20


def unsendable(result: Any, error: BaseException, packs: Callable[[Any], Message] = pack) -> FatalSampleError:
    """Return the error for the result of a job that cannot be sent.

    Args:
        result: the batch, and the other parts of the result.
        error: the error that packing it raised.
        packs: the function that packs.
    """
    batch = result[0] if isinstance(result, tuple) and result else result
    if isinstance(batch, list) and batch and all(isinstance(entry, Made) for entry in batch):  # batches of a chunk
        parts = [made.batch for made in batch]
        carried = [made.carried for made in batch if made.carried is not None]
        parts += [item.value for one in carried for item in (*one.items, *one.samples)]
        batch = next((part for part in parts if _fails(packs, part)), batch)
    path, value = _culprit(packs, batch, "", _DEPTH)
    keys = field_of(batch, "__key__")
    on_device = isinstance(value, torch.Tensor) and value.device.type not in ("cpu", "meta")
    sendable = "pickled" if packs is pack else "sent to another machine"
    return FatalSampleError(
        f"a batch cannot be sent from its worker process: {path or 'it'} is {_described(value)}",
        where=f"samples {listed(keys, _SHOWN)}" if isinstance(keys, (list, tuple)) else None,
        fix="let hooks work on the CPU, and have batches copied to the device ahead: "
        'get_savable_loader(dataset).to("cuda")'
        if on_device
        else f"leave it out, or make it of what can be {sendable} ({str(error) or type(error).__name__}): tensors, "
        "arrays, texts, numbers, and objects of classes at the top of a module; or do without processes: "
        'num_workers=0, or start_method="thread"',
    )


def raise_unpicklable(encoder: Any, method: str, error: BaseException) -> NoReturn:
    """Raise the error for workers that cannot be started because their start method needs pickling.

    Raises:
        UsageError: names the part of the task encoder that cannot be pickled.
        BaseException: ``error`` itself, if another part cannot be pickled.
    """
    if not _fails(pickle.dumps, encoder):
        raise error
    cls = type(encoder)
    inner = "<locals>" in cls.__qualname__
    path, value = ("", encoder) if inner else _culprit(pickle.dumps, encoder, "self", _DEPTH)
    what = f"its class {cls.__qualname__} is made inside of a function" if inner else f"{path} is {_described(value)}"
    fix = "make it of functions and classes at the top of a module, or make it in the worker when a hook first needs it"
    fix = "define the class at the top of a module" if inner else fix
    raise UsageError(
        f"the task encoder {cls.__name__} cannot be pickled, which start_method={method!r} has to do: {what}",
        where=f"{cls.__module__}.{cls.__qualname__}",
        fix=f'{fix}; or use start_method="fork", which pickles nothing',
    ) from None


def _culprit(dumps: Callable[[Any], Any], value: Any, path: str, depth: int) -> tuple[str, Any]:
    """Return the innermost part of a value that cannot be pickled, with its path."""
    for name, part in _parts(value) if depth else ():
        if _fails(dumps, part):
            return _culprit(dumps, part, f"{path}{name}" if path else name.lstrip("."), depth - 1)
    return path, value


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        yield from ((f"[{key!r}]", part) for key, part in value.items())
    elif isinstance(value, (list, tuple)) and not hasattr(value, "_fields"):
        yield from ((f"[{place}]", part) for place, part in enumerate(value))
    else:
        own = fields_of(value)
        if own is None and not isinstance(value, (type, torch.Tensor)) and not callable(value):
            own = getattr(value, "__dict__", None)
        yield from ((f".{name}", part) for name, part in (own or {}).items())


def _fails(dumps: Callable[[Any], Any], value: Any) -> bool:
    try:
        dumps(value)
    except Exception:
        return True
    return False


def _described(value: Any) -> str:
    """Return a description of a value: the place of its code, its device, or its type."""
    if (place := place_of(value)) is not None:
        return f"the function {value.__qualname__} ({place})"
    if isinstance(value, torch.Tensor):
        return f"a tensor on {value.device}, {value.layout}"
    return f"a {type(value).__module__}.{type(value).__qualname__}".replace("a builtins.", "a ")
