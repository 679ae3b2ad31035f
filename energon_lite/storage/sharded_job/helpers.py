"""Helper processes that do units of work in parallel, on all cores.

The helpers are plain child processes that exchange pickles over pipes, not a ``multiprocessing`` pool, for three
reasons. The caller is neither forked nor imported again, so a script without ``if __name__ == "__main__"`` and a
process with threads or a GPU may call this. Helpers import only the modules that a unit needs (not torch), so they
start in a tenth of a second. When the caller dies, even by SIGKILL, their standard input ends and they exit.
"""

from __future__ import annotations

import os
import pickle
import queue
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Generator, Hashable, Sequence
from contextlib import suppress
from typing import Any, Generic, TypeVar

from energon_lite.errors import DatasetError, EnergonLiteError, WorkerError
from energon_lite.storage.sharded_job.work import Table, Work

__all__ = ["Outcome", "run_units"]

U = TypeVar("U", bound=Hashable)

#: The outcome of a unit: the table of its result, which is in its file, or the error.
Outcome = Table | EnergonLiteError

#: False: leave all units to helpers, for tests.
_WORK_HERE = True

_BOOT = "import sys; sys.path[:] = sys.argv[1:]; from energon_lite.storage.sharded_job.helpers import serve; serve()"


def run_units(
    work: Work[U, Any], units: Sequence[U], *, workers: int, alone: float = 0.0
) -> Generator[tuple[U, Outcome], None, None]:
    """Do units and write their result files; a failed unit does not stop the others.

    Args:
        work: the work on a unit.
        units: the units to do.
        workers: processes at most, this one included: it works while its helpers start.
        alone: seconds of work up to which no helpers are started.

    Yields:
        Each unit, when it is done, with its outcome.
    """
    left, start = deque(units), time.monotonic()
    count, last = 0, 0.0
    while left and (workers == 1 or len(left) == 1 or _is_little(count, last, len(left), start, alone)):
        begin, unit = time.monotonic(), left.popleft()
        yield unit, _perform(work, unit)
        count, last = count + 1, time.monotonic() - begin
    if not left:
        return
    waiting = len(left)
    pool = _Helpers(work, left, min(workers, waiting) - _WORK_HERE)
    try:
        for _ in range(waiting):
            mine = _take(left) if _WORK_HERE and pool.results.empty() else None
            yield pool.results.get() if mine is None else (mine, _perform(work, mine))
    finally:
        pool.close()


def _take(left: deque[U]) -> U | None:
    """The next unit; None if other threads have taken the last ones."""
    try:
        return left.popleft()
    except IndexError:
        return None


def _is_little(done: int, last: float, left: int, start: float, alone: float) -> bool:
    """Return True if the rest takes less time than starting helpers. The first unit is slower than the others."""
    return _WORK_HERE and (time.monotonic() - start < alone if done < 2 else last * left < alone)


def _perform(work: Work[U, Any], unit: U) -> Outcome:
    """Do a unit in this process, and write its result."""
    try:
        return work.write(unit, work.inputs(unit), work.do(unit))
    except EnergonLiteError as error:
        return error
    except OSError as error:
        where = error.filename or work.where(unit)
        return DatasetError(f"{error.strerror or error}", where=where, fix="check permissions and free space")
    except Exception as error:
        what = f"the work on {work.name(unit)} failed: {type(error).__name__}: {error}"
        return WorkerError(f"{what}\n{traceback.format_exc()}", where=work.where(unit), fix="see the traceback")


class _Helpers(Generic[U]):
    """Processes, each controlled by a thread, that take units from ``left`` until none is left."""

    def __init__(self, work: Work[U, Any], left: deque[U], count: int):
        self.results: queue.SimpleQueue[tuple[U, Outcome]] = queue.SimpleQueue()
        self._work = work
        self._left = left
        self._task = pickle.dumps(work)
        self._processes: list[subprocess.Popen[bytes]] = []
        self._closed = False
        self._threads = [threading.Thread(target=self._drive, daemon=True) for _ in range(count)]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """End all processes, busy ones included."""
        self._closed = True
        self._left.clear()
        for process in self._processes:
            process.kill()
        for thread in self._threads:
            thread.join()

    def _drive(self) -> None:
        """Send one unit after the other to a helper; replace the helper if it dies. This is the body of a thread."""
        helper: subprocess.Popen[bytes] | None = None
        while (unit := _take(self._left)) is not None:
            try:
                helper = helper or self._start()
                self.results.put((unit, _ask(helper, unit)))
            except Exception as error:  # an answer may be corrupt in any way, and the caller waits for a result
                code, helper = _stop(helper), None
                self.results.put((unit, self._died(unit, code, error)))
        _stop(helper)

    def _start(self) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-c", _BOOT, *sys.path]
        helper = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._processes.append(helper)
        if self._closed:  # it started after close() had killed the others
            helper.kill()
        assert helper.stdin is not None  # it was asked for as a pipe
        helper.stdin.write(self._task)
        return helper

    def _died(self, unit: U, code: int | None, error: Exception) -> WorkerError:
        how = "could not be started" if code is None else f"died (exit code {code})" if code else "gave no answer"
        why = "" if isinstance(error, (EOFError, BrokenPipeError)) else f": {error}"
        return WorkerError(
            f"the process that worked on {self._work.name(unit)} {how}{why}",
            where=self._work.where(unit),
            fix="run again: what is done is kept; use a smaller --num-workers if memory was short",
        )


def _ask(helper: subprocess.Popen[bytes], unit: object) -> Outcome:
    assert helper.stdin is not None and helper.stdout is not None  # both were asked for as pipes
    pickle.dump(unit, helper.stdin)
    helper.stdin.flush()
    outcome: Outcome = pickle.load(helper.stdout)
    return outcome


def _stop(helper: subprocess.Popen[bytes] | None) -> int | None:
    """Close the input of a helper, and wait for its exit."""
    if helper is None:
        return None
    with suppress(OSError), helper:  # flushing to a helper that is dead already
        pass
    return helper.wait()


def serve() -> None:
    """Do the units that arrive on standard input until it ends: the main function of a helper process."""
    # Ctrl+C goes to all processes of the terminal; the caller deals with it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # accidental prints must not mix with the replies
    try:
        work = pickle.load(sys.stdin.buffer)
        while True:
            pickle.dump(_perform(work, pickle.load(sys.stdin.buffer)), replies)
            replies.flush()
    except (EOFError, BrokenPipeError):  # the caller has gone
        return
