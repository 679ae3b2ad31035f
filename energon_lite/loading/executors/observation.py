"""What a worker was doing when it died, and what it is doing while it hangs.

A worker that is killed cannot say anything any more, and one that hangs in foreign code cannot be asked in Python. So
both is written to memory that the trainer sees: the step that is about to be taken (only when a job is run again after
a worker died in it, since it costs a system call for each step), and, by the handler of a signal that Python's
``faulthandler`` installs, the stacks of all threads.
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

__all__ = ["Notes"]

#: Seconds that a worker has to write its stack, and between two looks at whether it has.
_PATIENCE, _LOOK = 1.0, 0.01
#: Bytes of a note, and of a stack that are shown.
_NOTE, _STACK = 512, 16 << 10


class Notes:
    """Memory that a worker writes and the trainer reads. On systems without ``memfd`` there is none, and no notes.

    As an observer of a pipeline it notes each step, sample by sample.
    """

    sees_samples = times_samples = True

    def __init__(self) -> None:
        self._stacks, self._steps = MemoryFile(), MemoryFile()
        self._is_possible = self._steps.descriptor >= 0

    def close(self) -> None:
        """In this process."""
        self._stacks.close()
        self._steps.close()

    # -- in the worker --------------------------------------------------------------------------------------------

    def install(self) -> None:
        """From now on a SIGUSR1 has the stacks of all threads written down."""
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
        """When the worker began to work, by the monotonic clock; None: it is being started."""
        if not self._is_possible:
            return 0.0
        written = os.pread(self._steps.descriptor, 8, _NOTE)
        return struct.unpack("<d", written)[0] if len(written) == 8 else None

    def last_step(self) -> str:
        """What was about to be done when it was last noted; "" if nothing was."""
        if not self._is_possible or not self._steps.close.alive:
            return ""
        return os.pread(self._steps.descriptor, _NOTE, 0).rstrip(b"\0").decode("utf-8", "replace")

    def stacks(self, worker: Any) -> str:
        """The stacks of the threads of a worker's process, or why there are none."""
        if not self._is_possible:
            return "(its stack cannot be shown on this system)"
        if self.began() is None:
            return "(it has not begun to work: it is still being started)"
        stacks = self._stacks.descriptor
        # The offset is shared by both processes, so the worker writes at the beginning, too.
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
