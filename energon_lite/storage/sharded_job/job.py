"""One job over many units: this rank's share, what is known already, and, on rank 0, the results of all ranks."""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Hashable, Iterable, Sequence
from contextlib import closing
from functools import partial
from typing import Generic, TypeVar

from energon_lite.errors import DatasetError, EnergonLiteError, UsageError, listed
from energon_lite.storage.sharded_job.helpers import Outcome, run_units
from energon_lite.storage.sharded_job.ranks import Ranks
from energon_lite.storage.sharded_job.work import Table, Work

__all__ = ["Progress", "Runner", "ShardedJob"]

U = TypeVar("U", bound=Hashable)
R = TypeVar("R")

#: Does units, and writes their result files; yields each with what came of it.
Runner = Callable[[Sequence[U]], Generator[tuple[U, Outcome], None, None]]


#: Called with how much is done, of how much, and a few words.
Progress = Callable[[int, int, str], object]

#: Called with a unit that is done, the table of its result (None: it could not be done), and how many are done, of how
#: many.
Tick = Callable[[U, Table | None, int, int], object]


class ShardedJob(Generic[U, R]):
    """Units of work that ranks do together, each ``world_size``-th one by one rank.

    There is no process that aggregates while the work goes on, so nothing is in the way of the others, and nobody's
    results are lost when somebody dies.

    Args:
        work: what is done with a unit.
        units: all of them, the same on all ranks.
        ranks: who works on it; None: this process alone.
        workers: processes of this rank; None: one per core.
        alone: seconds of work that are not worth starting helpers for.
        run: does units; None: helpers do, see :func:`~energon_lite.storage.sharded_job.helpers.run_units`.
        known: units whose results the caller has from elsewhere.
        again: whether a result is to be had, but worth another try.
        what: what units are called in messages, in the plural.
        where: what the work is about, in messages.
        tick: called in this thread for each unit that is done, on this rank or (on rank 0) on any.

    Attributes:
        done: for each unit that is done and needs no more work, the table of its result; {} if it was ``known``.
        made: units that were done here, and now.
        errors: why units could not be done here.
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
        self.work, self.units, self.ranks = work, units, ranks or Ranks()
        self.done: dict[U, Table] = {}
        self.made: list[U] = []
        self.errors: dict[U, EnergonLiteError] = {}
        self._run = run or partial(run_units, work, workers=self.ranks.workers(workers), alone=alone)
        self._known, self._again = frozenset(known), again
        self._what, self._where, self._tick = what, where, tick
        self._told, self._seen = 0, len(self.ranks.seen(units))

    def run(self) -> None:
        """Do the job: this rank's share, and then, on rank 0, have all results. In a group all end together.

        Raises:
            DatasetError: the others made no progress for ``ranks.timeout`` seconds, or one of the group failed.
        """
        with self.ranks.together():
            self.do_share()
        with self.ranks.together():
            if not self.ranks.rank:
                self.gather()

    def do_share(self) -> None:
        """Do this rank's units, as far as there is no result of theirs."""
        share = self.ranks.share(self.units)
        found = self._find(share)
        self._take({unit: table for unit, table in found.items() if table is not None and not self._again(table)})
        self._do([unit for unit in share if unit not in self.done])
        if self.ranks.rank and not self.ranks.grouped:
            for unit in self.errors:
                self.work.write_failure(unit)

    def gather(self) -> None:
        """On rank 0: have a result of each unit, or its error.

        Ranks of a group have met before (:meth:`Ranks.together`). Otherwise this waits for the results of the others.
        A unit of which they left none, because they could not do it or have died, is done here; so errors are known
        first-hand.

        Raises:
            DatasetError: the others made no progress for ``ranks.timeout`` seconds.
        """
        waiting = {unit for unit in self.units if unit not in self.done and unit not in self.errors}

        def all_came() -> bool:
            found = self._find(waiting)
            self._take({unit: table for unit, table in found.items() if table is not None})
            waiting.difference_update(found)
            return not waiting

        if not (all_came() or self.ranks.grouped or self.ranks.wait(all_came, lambda: len(waiting))):
            raise self._too_slow(waiting)
        self._do([unit for unit in self.units if unit not in self.done and unit not in self.errors])

    def read(self, unit: U) -> R:
        """The result of a unit that is done, from its file."""
        return self.work.read(unit)

    def _find(self, units: Iterable[U]) -> dict[U, Table | None]:
        """The tables of those that have a result; None: they could not be done."""
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
        self.work.make_folder()  # now, not after the first unit: if it cannot be written, that is told at once
        with closing(self._run(units)) as outcomes:
            for unit, outcome in outcomes:
                if isinstance(outcome, UsageError):  # what is wrong is the call, so it is wrong with all of them
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
            kind: of the error, if there are several.
            cannot: what could not be done, such as "be indexed".
            fix: what to do where the first error does not say it.
        """
        found = [(unit, self.errors[unit]) for unit in self.units if unit in self.errors]
        if len(found) == 1:
            raise found[0][1]
        if not found:
            return
        reasons = "".join(f"\n    {self.work.name(unit)}: {error.what}" for unit, error in found)
        what = f"{len(found)} of {len(self.units)} {self._what} cannot {cannot}:{reasons}"
        raise kind(what, where=self._where, fix=found[0][1].fix or fix)
