"""Memory that a worker writes and the trainer reads: large results do not pass through the pipe.

A worker has a few segments. It writes a result into one that is free; the trainer's tensors look right into it, and
when the last of them is gone, the segment is free again. So nothing is allocated, cleared or mapped from batch to
batch. If all segments are in use (the user keeps batches), results go through the pipe into memory of their own.

All segments of a worker are regions of one anonymous file (``memfd``), which takes memory only where something was
written. It has no name in ``/dev/shm`` that could stay behind, and vanishes with the last process that has it, however
that ended.
"""

from __future__ import annotations

import mmap
import os
import weakref
from collections.abc import Sequence
from multiprocessing import context, reduction
from typing import Any

import numpy as np

__all__ = ["MemoryFile", "SegmentReader", "SegmentWriter", "Segments", "write"]

#: Segments grow by whole multiples of this, and begin at multiples of that: no result is as large.
_STEP, _REGION = 1 << 20, 1 << 40
#: Smaller messages do not need a segment, unless so many may wait in the pipe that it would be full.
_LARGE, _PIPE = 16 << 10, 96 << 10
#: Parts written by one call; the system allows 1,024.
_VECTOR = 512


class MemoryFile:
    """An anonymous file, made by the trainer and handed to a worker when it starts.

    Attributes:
        descriptor: -1 where the system has no such files.
        close: closes it in this process; it is ``alive`` before.
    """

    def __init__(self) -> None:
        has_any = hasattr(os, "memfd_create")
        self._take(os.memfd_create("energon_lite", os.MFD_CLOEXEC) if has_any else -1)

    def _take(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self.close = weakref.finalize(self, _close, descriptor)

    def __getstate__(self) -> dict[str, Any]:
        # Only on the way to a process that is being started.
        context.assert_spawning(self)
        return self.__dict__ | {"descriptor": self.descriptor >= 0 and reduction.DupFd(self.descriptor), "close": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._take(state["descriptor"].detach() if state["descriptor"] else -1)


def _close(descriptor: int) -> None:
    if descriptor >= 0:
        os.close(descriptor)


class Segments(MemoryFile):
    """One worker's segments.

    Args:
        count: how many: one is being written, some wait for their turn, one or two are with the user.
    """

    def __init__(self, count: int):
        super().__init__()
        self.count = count if self.descriptor >= 0 else 0


def write(descriptor: int, waiting: list[memoryview]) -> None:
    """Write as much of ``waiting`` as a pipe takes (all of it, if it blocks, or is a file), and take that out of it.

    Raises:
        OSError: the other side is gone, or no memory is left.
    """
    while waiting:
        try:
            written = os.writev(descriptor, waiting[:_VECTOR])
        except BlockingIOError:
            return
        while waiting and written >= waiting[0].nbytes:
            written -= waiting.pop(0).nbytes
        if written:
            waiting[0] = waiting[0][written:]


def _grown(size: int) -> int:
    """Bytes of a segment that has a message of so many."""
    return -(-size // _STEP) * _STEP


class SegmentWriter:
    """The worker's side."""

    def __init__(self, segments: Segments):
        self._segments = segments
        self._sizes = [0] * segments.count
        self._free = list(range(segments.count))
        #: Messages from so many bytes on are worth a segment.
        self.worth = min(_LARGE, _PIPE // max(1, segments.count))

    def release(self, numbers: Sequence[int]) -> None:
        """The trainer has no more use for these."""
        self._free += numbers

    def write(self, message: Sequence[memoryview]) -> int | None:
        """Write a large message; returns the number of its segment, None: it is small, or all are in use."""
        size = sum(part.nbytes for part in message)
        if not self._free or size < self.worth:
            return None
        number = self._free[-1]  # the one released last: the fewer are in use, the less memory
        descriptor = self._segments.descriptor
        try:
            if size > self._sizes[number]:
                needed = number * _REGION + _grown(size)
                if os.fstat(descriptor).st_size < needed:
                    os.ftruncate(descriptor, needed)
                self._sizes[number] = _grown(size)
            os.lseek(descriptor, number * _REGION, os.SEEK_SET)
            write(descriptor, list(message))
        except OSError:  # no memory for it; the pipe takes its time, but needs none
            return None
        self._free.remove(number)
        return number


class SegmentReader:
    """The trainer's side."""

    def __init__(self, segments: Segments):
        self._segments = segments
        self._maps: dict[int, mmap.mmap] = {}
        #: Segments that nobody looks into any more; filled by finalizers, so only by steps that cannot be interrupted.
        self._released: list[int] = []

    def view(self, number: int, size: int) -> memoryview:
        """What a worker wrote. The segment is released when this, and all that looks into it, is gone."""
        mapped = self._maps.get(number)
        if mapped is None or len(mapped) < size:
            mapped = mmap.mmap(self._segments.descriptor, _grown(size), offset=number * _REGION)
            self._maps[number] = mapped
        memory = np.frombuffer(mapped, dtype=np.uint8, count=size)
        weakref.finalize(memory, self._released.append, number).atexit = False
        return memoryview(memory)  # type: ignore[arg-type]

    def take_released(self) -> list[int]:
        """The numbers of segments to be given back to the worker."""
        released: list[int] = []
        while self._released:
            released.append(self._released.pop())
        return released

    def close(self) -> None:
        """Forget the segments; what still looks into them keeps its memory."""
        self._maps.clear()
        self._segments.close()
