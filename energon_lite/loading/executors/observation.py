"""Observation of workers: the last step before a worker died, and the stacks of a worker that hangs.

A worker that was killed cannot report anything, and a worker that hangs in foreign code cannot be asked in Python. So
both are written to memory that the trainer process reads: the next step (only if a job is run again after a worker died
in it, because it costs a system call for each step), and the stacks of all threads, which a signal handler of Python's
``faulthandler`` writes.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import struct
import time
from collections.abc import Sequence
from typing import Any

from energon_lite.loading.executors.segments import MemoryFile
from energon_lite.loading.makers.outcomes import Address

__all__ = ["WorkerCrashLog"]

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

    sees_samples = times_samples = True

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
