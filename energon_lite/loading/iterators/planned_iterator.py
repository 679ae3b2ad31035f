"""Walking through a sequence of micro-batches that is planned: what comes next for this rank, and keeping it coming."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence

from energon_lite.loading.executors.executor import Executor
from energon_lite.loading.iterators.cursor import Cursor, check_reach, from_state, to_state
from energon_lite.loading.iterators.dataset import PlannedDataset
from energon_lite.loading.iterators.iterator import PlanIterator, State, no_such_step
from energon_lite.loading.iterators.rebase_entry import check_rebase
from energon_lite.loading.makers.pipeline import Address, Job

__all__ = ["PlannedIterator"]

#: Batches whose addresses are looked up at once, and samples in them at most.
_LOOK_AHEAD_BATCHES, _LOOK_AHEAD_SAMPLES = 64, 1 << 14


class PlannedIterator(PlanIterator[Cursor]):
    """The way of one rank through the plan.

    Args:
        dataset: what is planned.
        executor: makes the executor, at the first batch.
        ahead: jobs submitted before their turn.
        skip: ``(pass, step)`` of steps that are passed over.
    """

    def __init__(
        self,
        dataset: PlannedDataset,
        executor: Callable[[], Executor],
        *,
        ahead: int,
        skip: Collection[tuple[int, int]] = (),
    ):
        super().__init__(Cursor(), dataset.worker_config, executor, ahead=ahead, skip=skip)
        self.dataset: PlannedDataset = dataset
        self._unchanged = dataset

    def state(self, cursor: Cursor | None = None) -> State:
        cursor = cursor or self.cursor
        ranks = self.dataset.limit_ranks(cursor.ranks)
        return to_state(cursor, self.dataset.identity, self.dataset.rebase, ranks=ranks)

    def restore(self, state: State | None) -> None:
        dataset = self._unchanged.at(state)
        cursor = Cursor() if state is None else from_state(state, dataset.identity)
        position = cursor.position * dataset.plan.rows
        check_reach(dataset.plan.order, cursor.pass_number, position)
        check_rebase(dataset.rebase, leaves=len(dataset.leaves), position=position, ends=not dataset.is_endless)
        self._go_to(dataset, cursor)

    def addresses_at(self, pass_number: int | None, step: int, ranks: Sequence[int]) -> list[Sequence[Address]]:
        cursor, dataset = self.cursor, self.dataset
        number = cursor.pass_number if pass_number is None else pass_number
        count = dataset.end(cursor) if number == cursor.pass_number else dataset.count(number)
        # After a restore from other ranks, steps may begin between the multiples of the world size.
        running = number == cursor.pass_number and cursor.position != count
        first = step * self._world + (cursor.position % self._world if running else 0)
        if min(number, step) < 0 or (first >= count if count is not None else number > 0):
            raise no_such_step(number, step)
        return [job.addresses for rank in ranks for job in dataset.jobs(number, [first + rank], count)]

    def _jobs_from(self, cursor: Cursor) -> Iterator[Job]:
        dataset, world, rank = self.dataset, self._world, self.dataset.worker_config.rank
        number, end, stop = cursor.position + rank, dataset.end(cursor), None
        if end is not None:
            # The last step begins below the end; ranks that find nothing left there get an empty batch.
            stop = number + -(-(end - cursor.position) // world) * world
        at_once = max(1, min(_LOOK_AHEAD_BATCHES, _LOOK_AHEAD_SAMPLES // dataset.plan.rows)) * world
        while stop is None or number < stop:
            following = number + at_once if stop is None else min(number + at_once, stop)
            numbers = range(number, following, world)
            wanted = [one for one in numbers if not self._is_skipped(cursor.pass_number, one - rank)]
            yield from dataset.jobs(cursor.pass_number, wanted, end)
            number = following
