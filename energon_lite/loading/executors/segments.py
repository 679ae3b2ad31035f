"""Shared memory that a worker writes and the trainer process reads: large results, which do not pass through the pipe,
and notes on a worker that dies or hangs.

A worker has a few segments. It writes a result into a free segment; the trainer's tensors refer to this memory, and
when the last of them is deleted, the segment is free again. So nothing is allocated, cleared or mapped per batch. If
all segments are in use (because the user keeps batches), results go through the pipe into memory of their own.

All segments of a worker are regions of one anonymous file (``memfd``), which uses memory only where it was written. It
has no name in ``/dev/shm`` that could be left over, and is freed with the last process that has it, however that ended.
"""

from __future__ import annotations

import contextlib
import faulthandler
import mmap
import os
import signal
import struct
import time
import weakref
from collections.abc import Sequence
from multiprocessing import context, reduction
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:  # imports torch
    from energon_lite.loading.makers.outcomes import Address

#: Unit of the size of a segment, in bytes.
_STEP = 1 << 20
#: Distance between the starts of two segments, in bytes; larger than any result.
_REGION = 1 << 40
#: Size in bytes from which on a message is put into a segment.
_LARGE = 16 << 10
#: Bytes that may wait in the pipe; with many segments, smaller messages use segments, too, so that it is never full.
_PIPE = 96 << 10
#: Parts written by one call; the system allows 1,024.
_VECTOR = 512


class MemoryFile:
    """Anonymous file, made by the trainer and handed to a worker when it starts.

    Args:
        descriptor: descriptor of a file that another process has made; None: a new file.

    Attributes:
        descriptor: file descriptor; -1 if the system has no such files.
        close: function that closes the file in this process; its ``alive`` is True before.
    """

    def __init__(self, descriptor: int | None = None) -> None:
        if descriptor is None:
            has_any = hasattr(os, "memfd_create")
            descriptor = os.memfd_create("energon_lite", os.MFD_CLOEXEC) if has_any else -1
        self._take(descriptor)

    def _take(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self.close = weakref.finalize(self, _close, descriptor)

    def __getstate__(self) -> dict[str, Any]:
        # Only used to hand the file to a process that is being started.
        context.assert_spawning(self)
        return self.__dict__ | {"descriptor": self.descriptor >= 0 and reduction.DupFd(self.descriptor), "close": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._take(state["descriptor"].detach() if state["descriptor"] else -1)


def _close(descriptor: int) -> None:
    if descriptor >= 0:
        os.close(descriptor)


class Segments(MemoryFile):
    """Segments of one worker.

    Args:
        count: number of segments: one is being written, some wait for their turn, the user has one or two.
        descriptor: see :class:`MemoryFile`.
    """

    def __init__(self, count: int, descriptor: int | None = None):
        super().__init__(descriptor)
        self.count = count if self.descriptor >= 0 else 0


def write(descriptor: int, waiting: list[memoryview]) -> None:
    """Write as much of ``waiting`` as a pipe takes (all of it, if it blocks, or is a file), and remove that from it.

    Raises:
        OSError: the other side has closed the pipe, or there is no memory left.
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
    """Return the size in bytes of a segment for a message of ``size`` bytes."""
    return -(-size // _STEP) * _STEP


class SegmentWriter:
    """Writer of segments, in the worker."""

    def __init__(self, segments: Segments):
        self._segments = segments
        self._sizes = [0] * segments.count
        self._free = list(range(segments.count))
        #: Size in bytes from which on a message is put into a segment.
        self.worth = min(_LARGE, _PIPE // max(1, segments.count))

    def release(self, numbers: Sequence[int]) -> None:
        """Mark segments as free after the trainer has released them."""
        self._free += numbers

    def take(self, size: int) -> int | None:
        """Take a free segment for a large message; return its number, None if it is small, or if all are in use."""
        if not self._free or size < self.worth:
            return None
        number = self._free[-1]  # the one released last, so that few segments, and little memory, are used
        descriptor = self._segments.descriptor
        if size > self._sizes[number]:
            needed = number * _REGION + _grown(size)
            if os.fstat(descriptor).st_size < needed:
                os.ftruncate(descriptor, needed)
            self._sizes[number] = _grown(size)
        self._free.remove(number)
        return number

    def write(self, message: Sequence[memoryview]) -> int | None:
        """Write a large message; return the number of its segment, None if it has none."""
        number = None
        try:
            number = self.take(sum(part.nbytes for part in message))
            if number is not None:
                os.lseek(self._segments.descriptor, number * _REGION, os.SEEK_SET)
                write(self._segments.descriptor, list(message))
        except OSError:  # no memory for it; the pipe is slower, but needs none
            self._free += [] if number is None else [number]
            return None
        return number


class MappedSegment:
    """Segment as the trainer process has it mapped, for code that copies from there in a way of its own.

    It is deleted when the segment is closed, or mapped anew because it has grown; only then is the memory unmapped. So
    a :class:`weakref.finalize` of it runs while the memory is still there.

    Attributes:
        memory: the map.
        address, size: its place in this process, in bytes.
    """

    __slots__ = ("__weakref__", "address", "memory", "size")

    def __init__(self, memory: mmap.mmap):
        self.memory = memory
        self.size = len(memory)
        self.address = np.frombuffer(memory, dtype=np.uint8).ctypes.data
        _mapped[self.address] = self


_mapped: weakref.WeakValueDictionary[int, MappedSegment] = weakref.WeakValueDictionary()


def mapped_at(address: int) -> MappedSegment | None:
    """Return the segment that has an address of this process; None: the address is not in a segment."""
    found = (one() for one in _mapped.valuerefs())
    return next((one for one in found if one is not None and 0 <= address - one.address < one.size), None)


class SegmentReader:
    """Reader of segments, in the trainer process."""

    def __init__(self, segments: Segments):
        self._segments = segments
        self._maps: dict[int, MappedSegment] = {}
        #: Segments without references. Finalizers fill it, so only operations that cannot be interrupted are used.
        self._released: list[int] = []

    def view(self, number: int, size: int) -> memoryview:
        """Return a message in a segment. The segment is released when this view, and all its users, are deleted."""
        memory = np.frombuffer(self.mapped(number, size).memory, dtype=np.uint8, count=size)
        weakref.finalize(memory, self._released.append, number).atexit = False
        return memoryview(memory)  # type: ignore[arg-type]

    def mapped(self, number: int, size: int) -> MappedSegment:
        """Return a segment of ``size`` bytes or more, mapped into this process."""
        mapped = self._maps.get(number)
        if mapped is None or mapped.size < size:
            mapped = MappedSegment(mmap.mmap(self._segments.descriptor, _grown(size), offset=number * _REGION))
            self._maps[number] = mapped
        return mapped

    def take_released(self) -> list[int]:
        """Return and clear the numbers of the segments to be given back to the worker."""
        released: list[int] = []
        while self._released:
            released.append(self._released.pop())
        return released

    def close(self) -> None:
        """Forget the segments; objects that refer to them keep their memory."""
        self._maps.clear()
        self._segments.close()


# A worker that was killed cannot report anything, and a worker that hangs in foreign code cannot be asked in Python. So
# both are written to memory that the trainer process reads: the next step (only if a job is run again after a worker
# died in it, because it costs a system call for each step), and the stacks of all threads, which a signal handler of
# Python's ``faulthandler`` writes.

#: Seconds that a worker has to write its stacks.
_PATIENCE = 1.0
#: Seconds between two checks for the stacks.
_LOOK = 0.01
#: Size of a note in bytes.
_NOTE = 512
#: Bytes of the stacks that are shown, at most.
_STACK = 16 << 10


class WorkerCrashLog:
    """Memory that a worker writes and the trainer reads. On systems without ``memfd`` no notes are written.

    As an observer of a runner it notes each step of each sample.
    """

    sees_samples = True

    def __init__(self) -> None:
        self._stacks = MemoryFile()
        self._steps = MemoryFile()
        self._is_possible = self._steps.descriptor >= 0

    def close(self) -> None:
        """Release the memory in this process."""
        self._stacks.close()
        self._steps.close()

    # -- in the worker --------------------------------------------------------------------------------------------

    def install(self) -> None:
        """Install the handler of SIGUSR1, which writes the stacks of all threads."""
        if not self._is_possible:
            return
        faulthandler.register(signal.SIGUSR1, file=self._stacks.descriptor, all_threads=True, chain=False)
        os.pwrite(self._steps.descriptor, struct.pack("<d", time.monotonic()), _NOTE)

    def begin(self) -> None:
        self._note("")

    def step(self, stage: str, leaf: str, key: str) -> None:
        self._note(f"{stage} of {key}" + ("" if leaf == "*" else f" of {leaf}"))

    def end(self, addresses: Sequence[Address | None]) -> None:
        pass

    def _note(self, step: str) -> None:
        if self._is_possible:
            os.pwrite(self._steps.descriptor, step.encode("utf-8", "replace")[:_NOTE].ljust(_NOTE, b"\0"), 0)

    # -- in the trainer -------------------------------------------------------------------------------------------

    def began(self) -> float | None:
        """Return the time at which the worker was ready, by the monotonic clock; None: it is still being started."""
        if not self._is_possible:
            return 0.0
        written = os.pread(self._steps.descriptor, 8, _NOTE)
        return struct.unpack("<d", written)[0] if len(written) == 8 else None

    def last_step(self) -> str:
        """Return the step that was noted last; "" if there is none."""
        if not self._is_possible or not self._steps.close.alive:
            return ""
        return os.pread(self._steps.descriptor, _NOTE, 0).rstrip(b"\0").decode("utf-8", "replace")

    def stacks(self, worker: Any) -> str:
        """Return the stacks of the threads of a worker's process, or the reason why there are none."""
        if not self._is_possible:
            return "(its stack cannot be shown on this system)"
        if self.began() is None:
            return "(it has not begun to work: it is still being started)"
        stacks = self._stacks.descriptor
        # Both processes share the file offset, so this lets the worker write from the beginning, too.
        os.ftruncate(stacks, 0)
        os.lseek(stacks, 0, os.SEEK_SET)
        with contextlib.suppress(ProcessLookupError):
            os.kill(worker.pid, signal.SIGUSR1)
        size = 0
        deadline = time.monotonic() + _PATIENCE
        while time.monotonic() < deadline:
            time.sleep(_LOOK)
            before = size
            size = os.fstat(stacks).st_size
            if size and size == before:
                return os.pread(stacks, _STACK, 0).decode("utf-8", "replace").rstrip()
        return "(it does not answer: it is stopped, or waits for the system)"
