"""A job over many units: this rank's share, known results, and, on rank 0, the results of all ranks."""

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
from collections.abc import Callable, Collection, Generator, Hashable, Iterable, Sequence
from contextlib import closing, suppress
from functools import partial
from typing import Any, Generic, TypeVar

from energon_lite.entry_points import load, unit_runners
from energon_lite.errors import DatasetError, EnergonLiteError, UsageError, WorkerError, listed
from energon_lite.storage.sharded_job.ranks import Ranks
from energon_lite.storage.sharded_job.work import Table, Work

U = TypeVar("U", bound=Hashable)
R = TypeVar("R")

#: The outcome of a unit: the table of its result, which is in its file, or the error.
Outcome = Table | EnergonLiteError

#: Does units, and writes their result files; yields each with its outcome.
Runner = Callable[[Sequence[U]], Generator[tuple[U, Outcome], None, None]]

#: False: leave all units to helpers, for tests.
_WORK_HERE = True
#: Program of a helper.
_BOOT = "import sys; sys.path[:] = sys.argv[1:]; from energon_lite.storage.sharded_job.job import serve; serve()"

#: Called with the amount that is done, the whole amount, and a few words.
Progress = Callable[[int, int, str], object]

#: Called with a finished unit, the table of its result (None: it failed), the number of finished units, and that of
#: all.
Tick = Callable[[U, Table | None, int, int], object]


class ShardedJob(Generic[U, R]):
    """Units of work that ranks share: each rank does every ``world_size``-th unit.

    No process aggregates results during the work, so ranks do not wait for one, and no results are lost when a rank
    dies.

    Args:
        work: the work on a unit.
        units: all units, the same on all ranks.
        ranks: the ranks that share the work; None: this process alone.
        workers: processes of this rank; None: one per core.
        alone: seconds of work up to which no helpers are started.
        run: does units; None: helpers do, see :func:`~energon_lite.storage.sharded_job.job.run_units`. It can be
            pickled if ``ranks.elsewhere`` is given.
        known: units whose results the caller has from elsewhere.
        again: returns True for a result that should be computed again.
        what: plural name of the units in messages.
        where: the data that the job works on, for messages.
        tick: called in this thread for each finished unit, of this rank or (on rank 0) of any.

    Attributes:
        done: the table of the result for each finished unit; {} if it was ``known``.
        made: units that were done by this job on this rank.
        errors: the errors of units that failed here.
    """

    def __init__(
        self,
        work: Work[U, R],
        units: Sequence[U],
        *,
        ranks: Ranks | None = None,
        workers: int | None = None,
        alone: float = 0.0,
        run: Runner[U] | None = None,
        known: Collection[U] = (),
        again: Callable[[Table], bool] = lambda table: False,
        what: str = "shards",
        where: str = "",
        tick: Tick[U] | None = None,
    ):
        self.work = work
        self.units = units
        self.ranks = ranks or Ranks()
        self.done: dict[U, Table] = {}
        self.made: list[U] = []
        self.errors: dict[U, EnergonLiteError] = {}
        self._run = run or partial(run_units, work, workers=self.ranks.workers(workers), alone=alone)
        if self.ranks.elsewhere is not None:
            option, value = self.ranks.elsewhere
            self._run = partial(load(unit_runners()[option].target), self._run, value)
        self._known = frozenset(known)
        self._again = again
        self._what = what
        self._where = where
        self._tick = tick
        self._told, self._seen = 0, len(self.ranks.seen(units))

    def run(self) -> None:
        """Do this rank's share; then, on rank 0, collect all results. The ranks of a group end together.

        Raises:
            DatasetError: the others made no progress for ``ranks.timeout`` seconds, or a rank of the group failed.
        """
        with self.ranks.together():
            self.do_share()
        with self.ranks.together():
            if not self.ranks.rank:
                self.gather()

    def do_share(self) -> None:
        """Do the units of this rank that have no result yet."""
        share = self.ranks.share(self.units)
        tables = self._find(share)
        self._take({unit: table for unit, table in tables.items() if table is not None and not self._again(table)})
        self._do([unit for unit in share if unit not in self.done])
        if self.ranks.rank and not self.ranks.grouped:
            for unit in self.errors:
                self.work.write_failure(unit)

    def gather(self) -> None:
        """On rank 0: collect a result or an error of each unit.

        Ranks of a group have already waited for each other (:meth:`Ranks.together`). Otherwise this waits for the
        results of the others. A unit without a result, because its rank failed or died, is done here, so that rank 0
        has the original error.

        Raises:
            DatasetError: the others made no progress for ``ranks.timeout`` seconds.
        """
        waiting = {unit for unit in self.units if unit not in self.done and unit not in self.errors}

        def all_came() -> bool:
            tables = self._find(waiting)
            self._take({unit: table for unit, table in tables.items() if table is not None})
            waiting.difference_update(tables)
            return not waiting

        if not (all_came() or self.ranks.grouped or self.ranks.wait(all_came, lambda: len(waiting))):
            raise self._too_slow(waiting)
        self._do([unit for unit in self.units if unit not in self.done and unit not in self.errors])

    def read(self, unit: U) -> R:
        """Read the result of a finished unit from its file."""
        return self.work.read(unit)

    def _find(self, units: Iterable[U]) -> dict[U, Table | None]:
        """The tables of the units that have a result; None: they could not be done."""
        known: dict[U, Table | None] = {unit: {} for unit in units if unit in self._known}
        return known | self.work.find(unit for unit in units if unit not in known)

    def _take(self, found: dict[U, Table]) -> None:
        self.done |= found
        for unit, table in found.items():
            self._tell(unit, table)

    def _tell(self, unit: U, table: Table | None) -> None:
        if self._tick:
            self._told += 1
            self._tick(unit, table, self._told, self._seen)

    def _do(self, units: Sequence[U]) -> None:
        if not units:
            return
        self.work.make_folder()  # before the first unit, so that a folder that cannot be written is reported at once
        with closing(self._run(units)) as outcomes:
            for unit, outcome in outcomes:
                if isinstance(outcome, UsageError):  # the call is wrong, so all units would fail
                    raise outcome
                if isinstance(outcome, EnergonLiteError):
                    self.errors[unit] = outcome
                    self._tell(unit, None)
                else:
                    self.made.append(unit)
                    self._take({unit: outcome})

    def _too_slow(self, waiting: Collection[U]) -> DatasetError:
        by_rank: dict[int, list[str]] = {}
        for number, unit in enumerate(self.units):
            if unit in waiting:
                by_rank.setdefault(number % self.ranks.world_size, []).append(self.work.name(unit))
        texts = [f"rank {rank}: {listed(names, most=3)}" for rank, names in sorted(by_rank.items())]
        return DatasetError(
            f"no result for {len(waiting)} of {len(self.units)} {self._what} after {self.ranks.timeout:g} s without "
            f"progress ({'; '.join(texts)})",
            where=self._where,
            fix="see why these ranks are slow or gone, or if they see this folder; run again, what is done is kept",
        )

    def raise_errors(self, kind: type[EnergonLiteError], cannot: str, fix: str) -> None:
        """Raise all errors as one, in the order of the units, if there are any.

        Args:
            kind: class of the error if there are several.
            cannot: the action that failed, such as "be indexed".
            fix: advice, if the first error has none.
        """
        failed = [(unit, self.errors[unit]) for unit in self.units if unit in self.errors]
        if len(failed) == 1:
            raise failed[0][1]
        if not failed:
            return
        reasons = "".join(f"\n    {self.work.name(unit)}: {error.what}" for unit, error in failed)
        what = f"{len(failed)} of {len(self.units)} {self._what} cannot {cannot}:{reasons}"
        raise kind(what, where=self._where, fix=failed[0][1].fix or fix)


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
