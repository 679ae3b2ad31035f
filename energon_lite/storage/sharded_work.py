"""Units of work, with a file for the result of each, so that no unit is done twice.

A result file is replaced atomically when its unit is done. It is used only if its checksum is right and its inputs are
the current ones. So it needs no flush to the disk: a file that a power failure has damaged counts as missing. Ranks
send their results, and failures of units, to rank 0 by these files.

It is an array file (:mod:`energon_lite.storage.files.array_file`) with the arrays of the result, the unit's name, its
inputs, and the plain data of the result. The work is done by helper processes, which import this module only.
"""

from __future__ import annotations

import hashlib
import os
import pickle
import queue
import shutil
import signal
import subprocess
import sys
import threading
import time
import traceback
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Generator, Hashable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Generic, TypeVar

from numpy.typing import NDArray

from energon_lite.errors import DataIndexError, DatasetError, EnergonLiteError, WorkerError
from energon_lite.storage.files.array_file import FileKind, read_arrays, write_arrays

U = TypeVar("U", bound=Hashable)
R = TypeVar("R")
Table = Mapping[str, Any]
Arrays = Mapping[str, NDArray[Any]]
#: The outcome of a unit: the table of its result, which is in its file, or the error.
Outcome = Table | EnergonLiteError

#: False: leave all units to helpers, for tests.
_WORK_HERE = True
#: Program of a helper.
_BOOT = "import sys; sys.path[:] = sys.argv[1:]; from energon_lite.storage.sharded_work import serve; serve()"

_RESULT_FILE = FileKind(b"ENRGLRES", 2, "result of a unit of work", "remove the file, and run again")


class Work(ABC, Generic[U, R]):
    """The work on each unit of a job, the inputs of its result, and the files in which results are kept.

    Units are hashable; they and the work itself can be pickled.

    Args:
        folder: the folder of the result files.

    Example:
        >>> work.write("a.tar", work.inputs("a.tar"), work.do("a.tar"))
        >>> work.read("a.tar")
        ShardScan(name='a.tar', ...)
    """

    def __init__(self, folder: str):
        self.folder = folder
        self._names: dict[U, str] = {}

    # -- units ------------------------------------------------------------------------------------------------------

    @abstractmethod
    def name(self, unit: U) -> str:
        """Return the name of a unit in messages; it is unique."""

    @abstractmethod
    def inputs(self, unit: U) -> Any:
        """Return the current inputs of a unit's result as plain data; if they change, the unit is done again."""

    def belongs(self, unit: U, inputs: Any) -> bool:
        """Return True if a result of these inputs is still valid."""
        return bool(inputs == self.inputs(unit))

    def where(self, unit: U) -> str:
        """Return the place that an error of the unit names."""
        return self.name(unit)

    def do(self, unit: U) -> R:
        """Compute the result of a unit. Not called if the job is given a runner of units."""
        raise NotImplementedError

    @abstractmethod
    def pack(self, result: R) -> tuple[dict[str, Any], Arrays]:
        """Divide a result into plain data, which is kept in memory for each unit, and arrays, which are not."""

    @abstractmethod
    def unpack(self, table: Table, arrays: Arrays) -> R:
        """Make the result of its packed form."""

    # -- results ----------------------------------------------------------------------------------------------------

    def path(self, unit: U) -> str:
        """Return the result file of a unit: its name is a readable beginning and a hash of the unit's name."""
        if unit not in self._names:
            name = self.name(unit)
            digest = hashlib.sha256(name.encode("utf-8", "surrogateescape")).hexdigest()[:16]
            self._names[unit] = f"{os.path.basename(name)[:60]}-{digest}.result"
        return os.path.join(self.folder, self._names[unit])

    def make_folder(self) -> None:
        """Make the folder. Files in it are written and removed, so a link to another user's folder, which may have come
        with the data, is removed first."""
        if os.path.islink(self.folder):
            os.unlink(self.folder)
        os.makedirs(self.folder, exist_ok=True)

    def write(self, unit: U, inputs: Any, result: R) -> Table:
        """Keep a result of these inputs; return its table."""
        table, arrays = self.pack(result)
        self._write(unit, inputs, table, arrays)
        return table

    def write_failure(self, unit: U) -> None:
        """Report to other ranks that the unit cannot be done with its current inputs."""
        self._write(unit, self.inputs(unit), None, {})

    def find(self, units: Iterable[U]) -> dict[U, Table | None]:
        """Return the tables of the units that have a result of the current inputs; None: they could not be done."""
        try:
            there = set(os.listdir(self.folder))
        except (FileNotFoundError, NotADirectoryError):
            return {}
        wanted = (unit for unit in units if os.path.basename(self.path(unit)) in there)
        contents = {unit: self._read(unit) for unit in wanted}
        return {unit: head["result"] for unit, (head, _) in contents.items() if head}

    def read(self, unit: U) -> R:
        """Return the result of a unit that :meth:`find` has returned.

        Raises:
            DataIndexError: the file has been damaged or removed since.
        """
        head, arrays = self._read(unit)
        if not head or head["result"] is None:
            raise DataIndexError(
                f"the result of {self.name(unit)} was damaged or removed since it was written",
                where=self.path(unit),
                fix="run again: what is done otherwise is kept",
            )
        return self.unpack(head["result"], arrays)

    def remove(self) -> None:
        """Remove all result files, with the folder."""
        if os.path.islink(self.folder):
            os.unlink(self.folder)
        shutil.rmtree(self.folder, ignore_errors=True)

    def _write(self, unit: U, inputs: Any, table: Table | None, arrays: Arrays) -> None:
        head = {"unit": self.name(unit), "inputs": inputs, "result": table}
        self.make_folder()
        write_arrays(self.path(unit), _RESULT_FILE, arrays, head, flush=False)

    def _read(self, unit: U) -> tuple[Table, Arrays]:
        """The contents of a unit's file; empty if it is missing, damaged, or of other inputs."""
        try:
            arrays, head = read_arrays(self.path(unit), _RESULT_FILE)
        except (FileNotFoundError, NotADirectoryError, DataIndexError):
            return {}, {}
        is_ours = head["unit"] == self.name(unit) and self.belongs(unit, head["inputs"])
        return (head, arrays) if is_ours else ({}, {})


# -- helper processes ------------------------------------------------------------------------------------------------
#
# The helpers are plain child processes that exchange pickles over pipes, not a ``multiprocessing`` pool, for three
# reasons. The caller is neither forked nor imported again, so a script without ``if __name__ == "__main__"`` and a
# process with threads or a GPU may call this. Helpers import only the modules that a unit needs (not torch), so they
# start in a tenth of a second. When the caller dies, even by SIGKILL, their standard input ends and they exit.


def run_units(
    work: Work[U, Any], units: Sequence[U], *, workers: int, alone: float = 0.0
) -> Generator[tuple[U, Outcome], None, None]:
    """Do units and write their result files; a failed unit does not stop the others.

    Args:
        work: the work on a unit.
        units: the units to do.
        workers: processes at most, this one included: it works while its helpers start; 0: as 1.
        alone: seconds of work up to which no helpers are started.

    Yields:
        Each unit, when it is done, with its outcome.
    """
    left, start = deque(units), time.monotonic()
    count, last = 0, 0.0
    while left and (workers < 2 or len(left) == 1 or _is_little(count, last, len(left), start, alone)):
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
    return pickle.load(helper.stdout)


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
