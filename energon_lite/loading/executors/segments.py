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

__all__ = ["MemoryFiles", "SegmentReader", "SegmentWriter", "Segments"]

#: Segments grow by whole multiples of this, and begin at multiples of that: no result is as large.
_STEP, _REGION = 1 << 20, 1 << 40
#: Smaller messages do not need a segment, unless so many may wait in the pipe that it would be full.
_LARGE, _PIPE = 16 << 10, 96 << 10
#: Parts written by one call; the system allows 1,024.
_VECTOR = 512


class MemoryFiles:
    """Descriptors of anonymous files, made by the trainer and handed to a worker when it starts.

    Args:
        count: how many; there are none where the system has no such files.
    """

    def __init__(self, count: int):
        self.descriptors: list[int] = []
        if hasattr(os, "memfd_create"):
            self.descriptors = [os.memfd_create("energon_lite", os.MFD_CLOEXEC) for _ in range(count)]
        self._close = weakref.finalize(self, _close, list(self.descriptors))

    @property
    def is_open(self) -> bool:
        """Whether they can be used in this process."""
        return self._close.alive

    def close(self) -> None:
        """Close them in this process."""
        self._close()

    def __getstate__(self) -> dict[str, Any]:
        # Only on the way to a process that is being started.
        context.assert_spawning(self)
        return self.__dict__ | {"descriptors": [reduction.DupFd(one) for one in self.descriptors], "_close": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, descriptors=[one.detach() for one in state["descriptors"]])
        self._close = weakref.finalize(self, _close, list(self.descriptors))


class Segments(MemoryFiles):
    """One worker's segments.

    Args:
        count: how many: one is being written, some wait for their turn, one or two are with the user.
    """

    def __init__(self, count: int):
        super().__init__(1)
        self.count = count if self.descriptors else 0


def _close(descriptors: Sequence[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


def _grown(end: int) -> int:
    """Bytes of a segment in which something ends at ``end``."""
    return -(-end // _STEP) * _STEP


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

    def write(self, parts: Sequence[memoryview], size: int, offset: int) -> int | None:
        """Write ``parts`` (``size`` bytes) from ``offset`` on; returns its number, None: all are in use."""
        if not self._free:
            return None
        number = self._free[-1]  # the one released last: the fewer are in use, the less memory
        (descriptor,), end = self._segments.descriptors, offset + size
        offset += number * _REGION
        try:
            if end > self._sizes[number]:
                needed = number * _REGION + _grown(end)
                if os.fstat(descriptor).st_size < needed:
                    os.ftruncate(descriptor, needed)
                self._sizes[number] = _grown(end)
            waiting = list(parts)
            while waiting:
                written = os.pwritev(descriptor, waiting[:_VECTOR], offset)
                offset += written
                while waiting and written >= waiting[0].nbytes:
                    written -= waiting.pop(0).nbytes
                if written:
                    waiting[0] = waiting[0][written:]
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

    def view(self, number: int, offset: int, size: int) -> memoryview:
        """What a worker wrote. The segment is released when this, and all that looks into it, is gone."""
        mapped = self._maps.get(number)
        if mapped is None or len(mapped) < offset + size:
            (descriptor,) = self._segments.descriptors
            mapped = mmap.mmap(descriptor, _grown(offset + size), offset=number * _REGION)
            self._maps[number] = mapped
        memory = np.frombuffer(mapped, dtype=np.uint8, count=size, offset=offset)
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
