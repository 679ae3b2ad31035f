"""Walking through a sequence of micro-batches that is planned: what comes next for this rank, and keeping it coming."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Sequence

from energon_lite.errors import StateError
from energon_lite.loading.jobs.pipeline import Address, Job, Result
from energon_lite.loading.walks.cursor import Cursor, from_state, to_state
from energon_lite.loading.walks.dataset import PlannedDataset
from energon_lite.loading.walks.rebase_entry import check_rebase
from energon_lite.loading.walks.walk import PlanWalk, State, no_such_step
from energon_lite.loading.workers.executor import Executor
from energon_lite.order.permutation import MAX_LENGTH

__all__ = ["PlannedWalk"]

#: Batches whose addresses are looked up at once, and samples in them at most.
_LOOK_AHEAD_BATCHES, _LOOK_AHEAD_SAMPLES = 64, 1 << 14


class PlannedWalk(PlanWalk[Cursor]):
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
        super().__init__(Cursor(), dataset.worker_config.world_size, skip)
        self.dataset: PlannedDataset = dataset
        self._unchanged, self._executor, self._ahead = dataset, executor, ahead
        self.feed: Feed | None = None

    def take(self) -> Result | None:
        if self.is_over():
            return None
        if not self.dataset.worker_config.reads:
            return Result(None)
        if self.feed is None:
            self.feed = Feed(self.dataset, self._executor(), ahead=self._ahead, is_skipped=self._is_skipped)
        return self.feed.take(self.cursor, following=self._behind_skipped(self._after(self.cursor)))

    def state(self) -> State:
        ranks = self.dataset.limit_ranks(self.cursor.ranks)
        return to_state(self.cursor, self.dataset.identity, self.dataset.rebase, ranks=ranks)

    def restore(self, state: State | None) -> None:
        dataset = self._unchanged.at(state)
        cursor = Cursor() if state is None else from_state(state, dataset.identity)
        position = cursor.position * dataset.plan.rows
        if position >= MAX_LENGTH:
            raise StateError(f"the state is damaged: position is {cursor.position}", fix="use another checkpoint")
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

    def close(self) -> None:
        if self.feed is not None:
            self.feed.close()
            self.feed = None

    def _go_to(self, dataset: PlannedDataset, cursor: Cursor) -> None:
        if self.feed is not None and dataset.rebase != self.dataset.rebase:
            self.feed.follow(dataset)
        self.dataset, self.cursor = dataset, cursor


class Feed:
    """Keeps an executor supplied with the jobs that come next for this rank.

    Args:
        dataset: where jobs come from.
        executor: who runs them.
        ahead: jobs submitted before their turn.
        is_skipped: ``(pass, position at which a step begins) -> it is passed over``.
    """

    def __init__(
        self, dataset: PlannedDataset, executor: Executor, *, ahead: int, is_skipped: Callable[[int, int], bool]
    ):
        self._dataset = dataset
        self._executor = executor
        self._is_skipped = is_skipped
        self._ahead = ahead
        self._at: Cursor | None = None  # the cursor at which the first of _tickets will be asked for
        self._tickets: deque[int] = deque()
        self._planned: deque[Job] = deque()
        self._next_number = 0  # the first micro-batch of this rank that is not planned yet

    def take(self, cursor: Cursor, following: Cursor) -> Result:
        """The result for this rank at ``cursor``. Quick if that was ``following`` last time; else starts over there.

        Args:
            following: where the next result will be asked for, as far as one knows.
        """
        if self._at is None or (self._at.pass_number, self._at.position) != (cursor.pass_number, cursor.position):
            self._restart(cursor)
        ahead = self._executor.ahead(self._ahead)
        while len(self._tickets) <= ahead and (job := self._next_job(cursor)) is not None:
            self._tickets.append(self._executor.submit(job))
        self._at = None  # until the result is there: after an error the next call starts over
        result = self._executor.result(self._tickets.popleft())
        self._at = following
        return result

    def follow(self, dataset: PlannedDataset) -> None:
        """Take jobs from another data set from now on."""
        self._dataset, self._at = dataset, None

    def close(self) -> None:
        self._executor.close()

    def _restart(self, cursor: Cursor) -> None:
        self._executor.cancel()
        self._tickets.clear()
        self._planned.clear()
        self._next_number = cursor.position + self._dataset.worker_config.rank

    def _next_job(self, cursor: Cursor) -> Job | None:
        if not self._planned:
            self._plan(cursor)
        return self._planned.popleft() if self._planned else None

    def _plan(self, cursor: Cursor) -> None:
        """Look up the addresses of the next few micro-batches of this rank that are not passed over."""
        while not self._planned and self._plan_some(cursor):
            pass

    def _plan_some(self, cursor: Cursor) -> bool:
        """Look up a few addresses in one go. False: the pass has no more of them."""
        world, rank = self._dataset.worker_config.world_size, self._dataset.worker_config.rank
        number_of_jobs = max(1, min(_LOOK_AHEAD_BATCHES, _LOOK_AHEAD_SAMPLES // self._dataset.plan.rows))
        stop = self._next_number + number_of_jobs * world
        end = self._dataset.end(cursor)
        if end is not None:
            # The last step begins below the end; ranks that find nothing left there get an empty batch.
            last_step = cursor.position + -(-(end - cursor.position) // world) * world
            stop = min(stop, last_step + rank)
        numbers = range(self._next_number, stop, world)
        wanted = [number for number in numbers if not self._is_skipped(cursor.pass_number, number - rank)]
        self._planned.extend(self._dataset.jobs(cursor.pass_number, wanted, end))
        self._next_number = numbers[-1] + world if len(numbers) else self._next_number
        return len(numbers) > 0
