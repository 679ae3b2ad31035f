"""Iteration over planned micro-batches: the next job of this rank, and its prefetching."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from functools import cached_property
from typing import TYPE_CHECKING

from energon_lite.batching.plan import Place
from energon_lite.errors import UsageError
from energon_lite.loading.iterators.dataset import SavableDataset
from energon_lite.loading.iterators.iterator import DatasetIterator
from energon_lite.loading.iterators.planned_dataset import PlanCursor, PlannedDataset
from energon_lite.loading.makers.batch_runner import Job
from energon_lite.loading.makers.outcomes import Address, Result

if TYPE_CHECKING:
    from energon_lite.batching.micro_batches import Counts

logger = logging.getLogger(__name__)


class PlannedIterator(DatasetIterator):
    """Iterator of one rank over the plan. Every rank knows the whole plan, so ranks need not communicate."""

    knows_end = True
    cursor: PlanCursor
    _results: Iterator[Result] = iter(())
    _in_line: PlanCursor | None = None  # the cursor that the next result belongs to
    _stepped: tuple[PlanCursor, PlanCursor | None] | None = None

    @cached_property
    def counts(self) -> Counts:
        """Counts of what the plan has left out so far."""
        from energon_lite.batching.micro_batches import Counts  # plans by tokens have imported it

        return Counts()

    @cached_property
    def _by_tokens(self) -> bool:
        return self.dataset.plan.rows is None

    def start_loop(self) -> None:
        if self._following() is not None or self.dataset.once:
            return
        at_end = self.cursor
        if self.dataset.is_endless:
            self._move(replace(at_end, loop_start=at_end.position))
        else:
            self.cursor = PlanCursor(self.dataset.plan.start, pass_number=at_end.pass_number + 1)

    def rewind(self) -> None:
        self._go_to(self.dataset.start())

    def is_over(self) -> bool:
        if self._skip:
            self._pass_over()
        return self._following() is None

    def take(self) -> Result | None:
        while (result := self._take()) is not None and self.dataset.once and self._reads and not _has_samples(result):
            self._report.add(result.outcomes, batches=0)
            self.advance()
        return result

    def _take(self) -> Result | None:
        if self._in_line is None and self._reads:
            self._workers.executor()  # before any planning: a forked worker should not inherit a busy thread
        if self._skip:
            self._pass_over()
        cursor = self.cursor
        after = self._following()
        if after is None:
            return None
        if self._by_tokens:
            self._count_left_out(after)
        if not self._reads:
            return Result(None)
        in_line = self._in_line
        self._in_line = None  # if anything raises from here on, the next call restarts at the cursor
        if in_line is not cursor:
            executor = self._workers.executor()
            executor.cancel()
            self._results = executor.results(self._jobs_from(cursor), self._prefetch_factor * self._config.num_workers)
        result = next(self._results)
        self._in_line = after
        return result

    def advance(self) -> None:
        assert self._stepped is not None  # set by the check that the loop is not over
        before, after = self._stepped
        assert before is self.cursor and after is not None
        self.cursor = after

    def addresses_at(self, pass_number: int | None, step: int, ranks: Sequence[int]) -> list[Sequence[Address]]:
        near = self.cursor
        dataset = self.dataset
        number = near.pass_number if pass_number is None else pass_number
        if number != near.pass_number:
            near = PlanCursor(dataset.plan.start, pass_number=number)
        # After a restore from another world size, steps may begin between the multiples of this one.
        between = 0 if dataset.step(self.cursor) is None else near.position % self._world
        if min(number, step) >= 0 and not (dataset.is_endless and number):
            wanted = step * self._world + between - near.position
            place, moved = dataset.plan.ahead(number, near.place, wanted)
            at = replace(near, place=place, position=near.position + moved)
            if moved == wanted and dataset.step(at) is not None:
                places = [dataset.place(at, rank) for rank in ranks]
                return [job.addresses for job in dataset.jobs(number, places)]
        raise UsageError(
            f"there is no step {step} in pass {number}",
            fix="steps are counted from 0 in each pass; an endless stream has pass 0 only",
        )

    def loop_steps(self) -> int | None:
        dataset = self.dataset
        cursor = self.cursor
        if not self._by_tokens or dataset.is_endless:
            return None
        return int(dataset.loop_steps(cursor.pass_number + (dataset.step(cursor) is None)))

    def planned_counts(self) -> dict[str, int] | None:
        return asdict(self.counts) if self._by_tokens else None

    def _go_to(self, cursor: PlanCursor) -> None:
        self.cursor = cursor
        self._counted = cursor.pass_number, cursor.place[0]  # pass, and its first chunk that is not in `counts`

    def close(self) -> None:
        self._in_line = None

    def _jobs_from(self, cursor: PlanCursor) -> Iterator[Job]:
        """The jobs of this rank from a cursor to the end of its pass."""
        dataset = self.dataset
        following = self.dataset.step(cursor)
        while following is not None:
            places: list[Place] = []
            while following is not None and len(places) < dataset.plan.together:
                skipped = bool(self._skip) and self._is_skipped(cursor.pass_number, cursor.position)
                if not skipped and dataset.takes(cursor, following, self._config.rank):
                    places.append(dataset.place(cursor, self._config.rank))
                cursor = following
                following = dataset.step(following)
            yield from dataset.jobs(cursor.pass_number, places)

    def _pass_over(self) -> None:
        """Go to the next step that is not skipped, or to the end of a pass."""
        cursor: PlanCursor | None = self.cursor
        while cursor is not None and self._is_skipped(cursor.pass_number, cursor.position):
            if (cursor := self.dataset.step(cursor)) is not None:
                self._move(cursor)

    def _following(self) -> PlanCursor | None:
        """Return the cursor after the next step, which is kept for :meth:`advance`; None: the loop is over."""
        length = self.dataset.loop_length
        cursor = self.cursor
        if length and cursor.position - cursor.loop_start >= length * self._world:
            return None
        if self._stepped is None or self._stepped[0] is not cursor:
            after = self.dataset.step(cursor)
            if after is not None and not self.dataset.takes(cursor, after, self._config.rank):
                self._move(after)  # the last samples belong to other ranks
                cursor = after
                after = None
            self._stepped = cursor, after
        return self._stepped[1]

    def _move(self, cursor: PlanCursor) -> None:
        """Go to a cursor; the next result, if it was for the old cursor, belongs to the new one."""
        in_line = self._in_line is self.cursor
        self.cursor = cursor
        self._in_line = cursor if in_line else None

    def _count_left_out(self, after: PlanCursor) -> None:
        """Count the samples that the plan left out in the chunks up to a step, each chunk once; plan the next chunk.

        Args:
            after: the cursor after the step.
        """
        pass_number = after.pass_number
        chunk, *inside = after.place
        first = self._counted[1] if self._counted[0] == pass_number else 0
        stop = chunk + any(inside)
        if stop > first:
            left_out = self.dataset.plan.left_out(pass_number, first, stop)
            if left_out.words() and not self.counts.words():
                logger.warning(
                    "some samples do not fit into a batch: %s (logged once, all counted)", "; ".join(left_out.words())
                )
            self.counts += left_out
            self._counted = (pass_number, stop)


def _has_samples(result: Result) -> bool:
    return any(isinstance(outcome, int) for outcome in result.outcomes)


def iterator_class(dataset: SavableDataset) -> Callable[..., DatasetIterator]:
    """Return the class of the iterators of a data set; the modules of other kinds are not imported."""
    kind: type[DatasetIterator] = PlannedIterator
    if not isinstance(dataset, PlannedDataset):
        from energon_lite.loading.iterators.lane_iterator import LaneIterator

        kind = LaneIterator
    return kind if dataset.loops is None else dataset.loops(kind)
