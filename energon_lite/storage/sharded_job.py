"""Jobs that consist of units of work, shared by ranks and processes, and resumed after a kill.

    units --ranks--> this rank's share --helper processes--> a result file for each --> rank 0 has all results

``prepare``, ``measure`` and ``tokenize`` are such jobs. Each defines its units, the work on a unit
(:class:`~energon_lite.storage.sharded_work.Work`), and the use of the results. Ranks and processes share nothing
but the folder of the result files.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Generic, TypeVar

from energon_lite.entry_points import load, unit_runners
from energon_lite.errors import DatasetError, EnergonLiteError, UsageError, listed
from energon_lite.storage.sharded_work import Outcome, R, Table, U, Work, run_units
from energon_lite.topology import cores_per_rank, launched_place

T = TypeVar("T")

#: Seconds between two checks of the results of other ranks.
_LOOK = 0.2

#: Does units, and writes their result files; yields each with its outcome.
Runner = Callable[[Sequence[U]], Generator[tuple[U, Outcome], None, None]]

#: Called with the amount that is done, the whole amount, and a few words.
Progress = Callable[[int, int, str], object]

#: Called with a finished unit, the table of its result (None: it failed), the number of finished units, and that of
#: all.
Tick = Callable[[U, Table | None, int, int], object]


@dataclass(frozen=True)
class Ranks:
    """The rank of this process among those that work together.

    Args:
        rank: 0 .. world_size - 1.
        world_size: number of processes; each does its share, and rank 0 combines the results.
        timeout: seconds that rank 0 waits without any progress of the others.
        elsewhere: option of a :class:`~energon_lite.entry_points.UnitRunner`, and its value, by which this rank's
            share is done elsewhere, not in processes here.

    Example:
        >>> Ranks(rank=1, world_size=3).share(["a", "b", "c", "d", "e"])
        ['b', 'e']
    """

    rank: int = 0
    world_size: int = 1
    timeout: float = 600.0
    elsewhere: tuple[str, str] | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world_size:
            raise UsageError(
                f"rank {self.rank} of {self.world_size} does not exist", fix="ranks are 0 .. world size - 1"
            )

    @classmethod
    def from_environment(cls) -> Ranks:
        """Read rank and world size from the variables of a launcher, such as ``torchrun``; by default one process."""
        place = launched_place()
        return cls() if place is None else cls(place.rank, place.world_size)

    def share(self, items: Sequence[T]) -> list[T]:
        """Return this rank's share: every ``world_size``-th item."""
        return list(items[self.rank :: self.world_size])

    def seen(self, items: Sequence[T]) -> list[T]:
        """Return the items that this rank reports on: its share; on rank 0 all items."""
        return self.share(items) if self.rank else list(items)

    def workers(self, asked: int | None) -> int:
        """Return the processes of this rank: ``asked``; if None, an equal share of the machine's cores. It is 0, which
        stands for the process that runs a unit, if units are done elsewhere."""
        if self.elsewhere is not None:
            return 0
        if asked is not None:
            return asked
        return cores_per_rank() if self.world_size > 1 else os.cpu_count() or 1

    def wait(self, is_done: Callable[[], bool], progress: Callable[[], object] = lambda: None) -> bool:
        """Wait for other ranks; return False if ``progress`` returns the same value for ``timeout`` seconds."""
        last, seen = time.monotonic(), progress()
        while not is_done():
            if progress() != seen:
                last, seen = time.monotonic(), progress()
            if time.monotonic() - last > self.timeout:
                return False
            time.sleep(_LOOK)
        return True

    @property
    def grouped(self) -> bool:
        """True if these ranks are a group of ``torch.distributed``, which detects finished and dead ranks."""
        # Without an imported torch there is no group, and importing it takes longer than most preparations.
        torch = sys.modules.get("torch")
        if self.world_size == 1 or torch is None or not torch.distributed.is_available():
            return False
        dist = torch.distributed
        return bool(dist.is_initialized() and (dist.get_rank(), dist.get_world_size()) == (self.rank, self.world_size))

    @contextmanager
    def together(self) -> Iterator[None]:
        """Run the block as a common step of all ranks of a group: all wait for the last one, and if one fails, all
        fail. Without a group no rank waits.

        Raises:
            DatasetError: another rank failed.
        """
        failure: BaseException | None = None
        try:
            yield
        except BaseException as error:
            failure = error
            raise
        finally:
            if self.grouped and (failure is None or isinstance(failure, Exception)):
                self._meet(failure)

    def _meet(self, failure: BaseException | None) -> None:
        words: list[str | None] = [None] * self.world_size
        sys.modules["torch"].distributed.all_gather_object(words, None if failure is None else str(failure))
        failed = {rank: text for rank, text in enumerate(words) if text is not None}
        if failed and failure is None:
            rank, text = min(failed.items())
            raise DatasetError(f"rank {rank} could not do its part: {text}")


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
        run: does units; None: helpers do, see :func:`~energon_lite.storage.sharded_work.run_units`. It can be
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
        size = self.ranks.world_size
        lacks = ([self.work.name(unit) for unit in self.units[rank::size] if unit in waiting] for rank in range(size))
        texts = [f"rank {rank}: {listed(names, most=3)}" for rank, names in enumerate(lacks) if names]
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
